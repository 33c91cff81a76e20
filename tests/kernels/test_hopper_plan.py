"""The choice between Hopper's kernels, and that each of them can be compiled; no GPU needed."""

import dataclasses
import importlib.util
import itertools
import re
import subprocess
from pathlib import Path

import pytest
import torch

from qerl.kernels import paged_attention
from qerl.kernels.quant_matmul import hopper
from qerl.kernels.quant_matmul.hopper_grad_plan import GRAD_ROWS, InputGradPlan, all_input_grad_plans, input_grad_plan
from qerl.kernels.quant_matmul.hopper_plan import (
    COUNTERS,
    FEW_ROWS,
    LORA_BYTES,
    LORA_CHUNKS_FEW,
    LORA_COUNTERS,
    LORA_WARPS_FEW,
    MANY_ROWS,
    SHARED_BYTES,
    SLICES_AT_ONCE,
    FewRowsPlan,
    ManyRowsPlan,
    all_many_rows_plans,
    few_rows_plan,
    many_rows_plan,
    resident_clusters,
    shrink_plan,
    silu_plan,
    workspace_bytes,
)
from qerl.kernels.quant_matmul.tensor_map import TensorMapError

SOURCES = Path(hopper.__file__).parent / "cuda"
SHAPES = [
    (4608, 3584), (37888, 3584), (3584, 18944), (7168, 5120), (55296, 5120), (5120, 27648), (960, 576), (576, 1536),
    (16, 64), (57344, 8192), (8192, 28672),
    # Output heads.
    (152064, 3584), (152064, 5120), (151936, 2048), (128256, 8192), (49152, 576), (262144, 5376),
]  # fmt: skip
SMS = [132, 114, 78]


def entry_points(source: str) -> set[str]:
    """Names that the instantiating macros of a ``.cu`` file make, of the list in it or in its header."""
    text = (SOURCES / source).read_text()
    header = SOURCES / (re.search(r'#include "(\w+\.cuh)"', text).group(1))
    lists = text + header.read_text()
    names = set()
    for macro, pattern in re.findall(
        r"#define (\w+)\(.*?__ \w.*?((?:few_rows|many_rows|input_grad)_##[\w#]+)\(", text, re.S
    ):
        parameters = re.search(rf"#define {macro}\((.*?)\)", text).group(1).split(", ")
        for values in re.findall(rf"\b{macro}\((\d+(?:, \d+)+)\)", lists):
            name = pattern
            for parameter, value in zip(parameters, values.split(", "), strict=True):
                name = name.replace(f"##{parameter}", value)
            names.add(name.replace("##", ""))
    return names


@pytest.mark.parametrize("sms", SMS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_plans_fit_the_gpu_and_name_a_kernel(shape: tuple[int, int], sms: int) -> None:
    n, k = shape
    for m in range(1, FEW_ROWS + 1):
        plan = few_rows_plan(m, n, k, sms)
        if plan is not None:
            assert plan.name in entry_points("few_rows.cu")
            assert plan.shared_bytes(m, n, k, sms) <= SHARED_BYTES
            group = plan.group(n, sms)
            assert 0 < group * plan.slices <= sms
            assert group % 2 == 0 if plan.pair else group <= n // 16  # a block without tiles waits for x only in pairs
            assert plan.slices * (n // 16) * 512 <= workspace_bytes(sms) and n // 16 <= COUNTERS
    for m in (FEW_ROWS + 1, 16, 17, 33, 64, 65, 128, 129, 300, 1000, MANY_ROWS):
        plan = many_rows_plan(m, n, k, sms)
        assert plan.name in entry_points("many_rows.cu") and plan.shared_bytes <= SHARED_BYTES
        grid, units = plan.grid(m, n, k, sms), -(-(k // 64) // plan.unit)
        assert 0 < grid <= sms
        # Divisions in the kernel are unsigned 32 bit.
        assert plan.tiles(m, n) * units * grid < 2**32
        assert plan.whole or plan.tiles(m, n) * plan.groups * 4 <= COUNTERS
        assert m <= plan.tokens * -(-m // plan.tokens) and plan.tokens < max(2 * m, 17)


@pytest.mark.parametrize("sms", SMS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_plans_of_the_gradient_fit_the_gpu(shape: tuple[int, int], sms: int) -> None:
    n, k = shape
    for m in (1, 17, 64, 65, 129, 300, 1000, GRAD_ROWS):
        plan = input_grad_plan(m, n, k, sms)
        assert plan is not None and plan.tokens < max(2 * m, 65)
        grid, steps, tiles = plan.grid(m, n, k, sms), -(-n // 64), plan.tiles(m, k)
        assert 0 < grid <= sms and tiles * steps * grid < 2**32
        assert plan.whole or tiles * plan.groups <= COUNTERS
        assert tiles * plan.tokens * plan.groups * 64 >= m * k
    assert input_grad_plan(GRAD_ROWS + 1, n, k, sms) is None


@pytest.mark.parametrize("plan", all_input_grad_plans(), ids=lambda plan: f"{plan.name}-{plan.whole}")
def test_the_gradients_memory_is_what_the_kernel_lays_out(plan: InputGradPlan) -> None:
    text = (SOURCES / "input_grad.cuh").read_text()
    tokens, pitch = (int(re.search(rf"{name} = (\d+);", text).group(1)) for name in ("STAGED_TOKENS", "STAGED_PITCH"))
    ring = plan.stages * (plan.tokens * 128 + 4 * plan.groups * 576)
    barriers_and_flags = 16 * plan.stages + 4 * plan.groups
    needed = 1024 + ring + plan.groups * tokens * pitch + barriers_and_flags  # 1024: to align the ring
    assert needed <= plan.shared_bytes <= SHARED_BYTES
    assert plan.tokens % tokens == 0 and plan.partial_bytes(132) <= workspace_bytes(132)


@pytest.mark.parametrize("sms", SMS)
@pytest.mark.parametrize("ranks", [8, 96, 192, 512, 768])
@pytest.mark.parametrize("k", [64, 3584, 8192, 18944, 28672])
def test_the_shrink_stays_inside_its_workspace(k: int, ranks: int, sms: int) -> None:
    for m in (1, 8, 9, 32, 33, 200, hopper.MAX_SHRINK_ROWS):
        blocks, slices = shrink_plan(m, ranks, k, sms)
        places = -(-ranks // 16) * -(-m // (8 * blocks)) * blocks
        assert f"KERNEL({blocks}, " in (SOURCES / "lora_shrink.cu").read_text()
        assert 1 <= slices <= k // 32 and places <= COUNTERS
        assert slices == 1 or slices * places * 512 <= workspace_bytes(sms)


def test_the_shrink_of_usual_shapes_is_cut_as_measured() -> None:
    assert shrink_plan(8, 96, 3584, 132) == (1, 4)
    assert shrink_plan(64, 32, 18944, 132) == (8, 62)
    assert shrink_plan(256, 512, 28672, 132)[1] < 94  # where the whole cut would not fit


@pytest.mark.parametrize("m", [9, 64, 500, MANY_ROWS])
def test_rows_as_many_as_a_vocabulary_can_be_counted(m: int) -> None:
    assert many_rows_plan(m, 262144, 8192, 132).fits(m, 262144, 8192, 132)


@pytest.mark.parametrize("ranks", [8, 32, 96, 192, 40000])
@pytest.mark.parametrize("k", [64, 3584, 8192, 18944, 28672])
def test_slices_of_u_inside_a_product_stay_inside_the_workspace(k: int, ranks: int) -> None:
    tiles, few = -(-ranks // 16), FewRowsPlan(8)
    for m, blocks in itertools.product((1, 8), (1, 60, 132)):
        slices = few.lora_slices(m, ranks, k, blocks)
        assert (slices is None) == (tiles + 2 > LORA_COUNTERS)
        if slices is not None:
            assert 1 <= slices <= k // 32 and slices * tiles * 512 <= LORA_BYTES
    for plan in all_many_rows_plans():
        for m, n, sms in itertools.product((9, 64, 200, 513, MANY_ROWS), (272, 4608), (13, 132)):
            if not plan.fits(m, n, k, sms):
                continue
            cut = plan.lora_cut(m, ranks, n, k, sms)
            slices = cut.slices
            assert cut.us > 0 and cut.sharers in (1, plan.lora_warps)
            if slices is not None:
                assert tiles + 2 <= LORA_COUNTERS and slices * tiles * -(-m // 8) * 512 <= LORA_BYTES
                assert 1 <= slices <= -(-k // 128)  # no part is empty
                parts = slices * -(-m // plan.tokens) * -(-ranks // (64 * plan.groups))
                assert parts <= plan.grid(m, n, k, sms)


def test_warps_that_make_u_as_the_kernels_have_them() -> None:
    assert f"SHRINKERS = {LORA_WARPS_FEW}, " in (SOURCES / "few_rows.cuh").read_text()
    assert f"SHRINK_BARRIER, {LORA_CHUNKS_FEW}>" in (SOURCES / "few_rows.cuh").read_text()
    assert FewRowsPlan(8).lora_slices(8, 96, 3584, 132) == 7 and FewRowsPlan(8).lora_slices(8, 32, 18944, 132) == 16
    assert f"SLICES_AT_ONCE = {SLICES_AT_ONCE};" in (SOURCES / "shrink.cuh").read_text()
    text = " ".join((SOURCES / "many_rows.cuh").read_text().split())
    assert "GROUPS_BESIDE = TOKENS < 256 && GROUPS == 2 ? 2 : 1;" in text
    assert "SUMMERS = 4 * GROUPS_BESIDE - 1;" in text and "SUM_BYTES = SUMMERS * 512 + 16;" in text
    for plan in all_many_rows_plans():
        beside = 2 if plan.tokens < 256 and plan.groups == 2 else 1
        assert plan.threads == 128 * (plan.groups + beside) and plan.lora_warps == 4 * beside - 1


@pytest.mark.parametrize(
    "plan, m, ranks, n, k, cut",
    [
        (ManyRowsPlan(128, 2, whole=True, cluster=3), 128, 96, 4608, 3584, (28, 7)),
        (ManyRowsPlan(64, 3, whole=False), 64, 64, 37888, 3584, (28, 3)),
        (ManyRowsPlan(128, 2, whole=True), 2048, 96, 4608, 3584, (7, 1)),
        (ManyRowsPlan(256, 2, whole=True), 2048, 32, 3584, 18944, (None, 1)),  # longer than a kernel before
        (ManyRowsPlan(64, 2, whole=True), 2048, 512, 1024, 3584, (None, 1)),  # more parts than blocks
    ],
)
def test_how_u_is_cut(plan: ManyRowsPlan, m: int, ranks: int, n: int, k: int, cut: tuple[int | None, int]) -> None:
    """Slices, and the warps that share a sum; pinned, so that a change of a constant is seen."""
    found = plan.lora_cut(m, ranks, n, k, 132)
    assert (found.slices, found.sharers) == cut


def test_what_making_u_of_few_rows_takes_besides() -> None:
    """Sums of 3 of 4 warps, then rows of u 8 columns apart."""
    plan = FewRowsPlan(8)
    assert plan.shared_bytes(8, 4608, 3584, 132, 96) - plan.shared_bytes(8, 4608, 3584, 132) == 1536 + 16 * 104


def test_a_missing_library_means_the_other_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """cuda.bindings raises a RuntimeError of its own where NVRTC cannot be loaded."""

    def missing(source: Path, index: int, macro: str) -> object:
        raise RuntimeError("libnvrtc.so was not found")

    monkeypatch.setattr(hopper, "load_module", missing)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.delenv(hopper.DISABLE_VARIABLE, raising=False)
    assert not hopper._is_supported.__wrapped__(0)
    assert "libnvrtc.so was not found" in caplog.text


def test_a_driver_that_refuses_a_tensor_map_means_the_other_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*shape: int) -> object:
        raise TensorMapError("no tensor map for BFLOAT16")

    monkeypatch.setattr(hopper, "load_module", lambda source, index, macro: None)
    monkeypatch.setattr(hopper, "_workspace", lambda device: (torch.empty(1),))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.delenv(hopper.DISABLE_VARIABLE, raising=False)
    monkeypatch.setattr(hopper, "bf16_windows_map", lambda *shape: None)
    assert hopper._is_supported.__wrapped__(0) and not caplog.text
    monkeypatch.setattr(hopper, "bf16_windows_map", refused)
    assert not hopper._is_supported.__wrapped__(0)
    assert "no tensor map for BFLOAT16" in caplog.text


def test_every_shape_of_tile_is_compiled() -> None:
    assert {plan.name for plan in all_many_rows_plans()} == entry_points("many_rows.cu")
    assert {plan.name for plan in all_input_grad_plans()} == entry_points("input_grad.cu")
    for source, result in itertools.product(("few_rows", "many_rows"), ("wide", "silu")):  # the same with other results
        assert {f"{name}_{result}" for name in entry_points(f"{source}.cu")} == entry_points(f"{source}_{result}.cu")
    for plan in all_many_rows_plans():
        assert plan.shared_bytes <= SHARED_BYTES
        if plan.cluster == 1:
            assert plan.shared_bytes < dataclasses.replace(plan, silu=True).shared_bytes <= SHARED_BYTES


@pytest.mark.parametrize("sms", SMS)
@pytest.mark.parametrize("n, k", [(37888, 3584), (55296, 5120), (57344, 8192), (3072, 576), (32, 64)])
def test_plans_of_gate_and_up(n: int, k: int, sms: int) -> None:
    """They are those of the product, as far as a block can hold a tile of gate and one of up."""
    for m in (1, 2, 7, 8, 9, 16, 100, 256, 2048):
        plan, plain = silu_plan(m, n, k, sms), few_rows_plan(m, n, k, sms) if m <= FEW_ROWS else None
        if plain is None:
            assert plan == dataclasses.replace(many_rows_plan(m, n, k, sms, clusters=False), silu=True)
        elif plan is None:  # k is cut, or whole pairs are one tile too many for shared memory
            unlike = dataclasses.replace(plain, silu=True)
            assert plain.slices > 1 or unlike.shared_bytes(m, n, k, sms) > SHARED_BYTES
        else:
            assert plan == dataclasses.replace(plain, silu=True) and plan.slices == 1
            assert plan.shared_bytes(m, n, k, sms) <= SHARED_BYTES
            blocks = plan.group(n, sms)
            assert blocks % 2 == 0 if plan.pair else blocks <= n // 32
            assert plan.tiles(n, sms) == 2 * -(-n // 32 // blocks)
    assert silu_plan(8, 37888, 3584, 132).name == few_rows_plan(8, 37888, 3584, 132).name


def test_what_pairs_of_warps_exchange_fits_where_the_kernel_puts_it() -> None:
    """2 GIVEN blocks of 256 bytes for each of WARPS / 2 pairs, behind the sums of u."""
    text = " ".join((SOURCES / "silu.cuh").read_text().split())
    assert "GIVEN = TOKENS == 256 ? 2 : TOKENS == 128 ? 4 : TOKENS / 16;" in text
    for plan in (plan for plan in all_many_rows_plans() if plan.cluster == 1):
        given = {256: 2, 128: 4}.get(plan.tokens, plan.tokens // 16)
        taken = dataclasses.replace(plan, silu=True).shared_bytes - plan.shared_bytes
        assert taken == plan.groups * 4 // 2 * 2 * given * 256


@pytest.mark.parametrize(
    "m, k, by_kernel", [(256, 8192, True), (256, 8224, False), (257, 64, False), (76, 27648, False)]
)
def test_u_of_many_numbers_comes_from_cublas(m: int, k: int, by_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    monkeypatch.setattr(hopper, "kernel_launch", lambda source, name, *_: lambda *_: launched.append(source))
    monkeypatch.setattr(hopper, "_workspace", lambda device: (torch.empty(1),) * 3)
    monkeypatch.setattr(hopper, "multiprocessor_count", lambda index: 132)
    x, a, u = torch.ones(m, k).bfloat16(), torch.ones(16, k).bfloat16(), torch.zeros(m, 16).bfloat16()
    hopper.shrink_into(x, a, u)
    assert launched == (["lora_shrink"] if by_kernel else [])
    assert (u == (0 if by_kernel else k)).all()


@pytest.mark.parametrize("cluster, multiprocessors, most", [(2, 132, 66), (3, 132, 38), (4, 132, 29), (4, 14, 0)])
def test_clusters_that_run_at_once(cluster: int, multiprocessors: int, most: int) -> None:
    """Eight parts of the chip may each leave two multiprocessors over where pairs do not fill them."""
    assert resident_clusters(cluster, multiprocessors) == most
    plan = ManyRowsPlan(64, 2, whole=True, cluster=cluster)
    assert most == 0 or plan.fits(64, 128 * most, 3584, multiprocessors)
    assert not plan.fits(64, 128 * (most + 1), 3584, multiprocessors)
    assert not plan.fits(64, 128, 256 * (cluster - 1), 132)  # a block would have nothing to multiply
    assert plan.grid(64, 1280, 3584, multiprocessors) == 10 * cluster and plan.partial_bytes(132) == 0


def test_the_choice_on_an_h200() -> None:
    """Pinned, so that a change of a constant is seen: what the sweep found best."""
    assert few_rows_plan(1, 37888, 3584, 132).name == "few_rows_16_2"
    assert few_rows_plan(8, 4608, 3584, 132).name == "few_rows_8_2_pair"
    assert few_rows_plan(8, 3584, 18944, 132).slices == 4
    # A little less to multiply is not worth seven sums of slices a warp (54.7 us instead of 44.2).
    assert few_rows_plan(8, 55296, 5120, 132) == FewRowsPlan(16) and silu_plan(8, 55296, 5120, 132).silu
    assert many_rows_plan(16, 37888, 3584, 132).name == "many_rows_16_3_4_5"
    assert many_rows_plan(64, 4608, 3584, 132) == ManyRowsPlan(64, 2, whole=True, cluster=3)
    assert many_rows_plan(128, 4608, 3584, 132) == ManyRowsPlan(128, 2, whole=True, cluster=3)
    # With LoRA, a plan that waits less for u.
    assert many_rows_plan(64, 4608, 3584, 132, ranks=96) == ManyRowsPlan(64, 2, whole=True, cluster=2)
    assert many_rows_plan(256, 18944, 3584, 132).cluster == 1  # more tiles than clusters run at once
    assert many_rows_plan(512, 37888, 3584, 132) == ManyRowsPlan(128, 3, whole=True)
    assert many_rows_plan(1024, 3584, 3584, 132).tokens == 256


ATTENTION = Path(paged_attention.hopper.__file__).parent / "cuda"
ATTENTIONS = ("decode", "decode_fp8", "rotary_decode", "rotary_decode_fp8")
RESULTS = ("", "_wide", "_silu")
PRODUCTS = [f"{rows}_rows{result}" for rows in ("few", "many") for result in RESULTS]
PRODUCTS += ["input_grad", "dequantize", "lora_shrink"]


def machine_code(source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, only: str | None = None) -> bytes:
    """What NVRTC makes of a source; skips where it is missing."""
    if importlib.util.find_spec("cuda.bindings") is None:
        pytest.skip("cuda-bindings is not installed")
    from qerl.kernels.cuda import compile_cubin

    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    try:
        return compile_cubin(source, only)
    except RuntimeError as error:  # ours, or cuda.bindings' where the library is missing
        if "cannot compile" in str(error):
            raise
        pytest.skip(f"NVRTC is not installed: {error}")


@pytest.mark.parametrize(
    "source",
    [*(SOURCES / f"{name}.cu" for name in PRODUCTS), *(ATTENTION / f"{name}.cu" for name in ATTENTIONS)],
    ids=lambda source: source.stem,
)
def test_nvrtc_compiles_without_a_gpu(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cubin = machine_code(source, tmp_path, monkeypatch)
    assert cubin[:4] == b"\x7fELF"
    if source.parent == SOURCES:
        names = entry_points(source.name)
    else:
        shapes = itertools.product(paged_attention.hopper.HEAD_DIMS, paged_attention.hopper.SHAPES)
        names = {f"{source.stem}_{dim}_{cluster}_{warps}" for dim, (cluster, warps) in shapes}
    assert all(name.encode() in cubin for name in names or {source.stem})
    (cached,) = (tmp_path / "qerl" / "kernels").iterdir()
    assert cached.read_bytes() == cubin == machine_code(source, tmp_path, monkeypatch)


def _single_kernels() -> list[tuple[Path, str, str]]:
    """(source, name, macro) of one kernel of every kind, as the launches ask for it."""
    found = [
        (SOURCES / f"{source}{result}.cu", plan.name + result, plan.macro)
        for source, plan in (
            ("few_rows", FewRowsPlan(8, pair=True)),
            ("few_rows", FewRowsPlan(16)),
            ("many_rows", all_many_rows_plans()[0]),
        )
        for result in RESULTS
    ]
    grad = all_input_grad_plans()[0]
    found.append((SOURCES / "input_grad.cu", grad.name, grad.macro))
    for dtype, rotary in itertools.product((torch.bfloat16, torch.float8_e4m3fn), (False, True)):
        entry = paged_attention.hopper._entry(dtype, rotary, 64, (2, 8))
        found.append((paged_attention.hopper._source(dtype, rotary), *entry))
    return found


@pytest.mark.parametrize("source, name, macro", _single_kernels(), ids=[name for _, name, _ in _single_kernels()])
def test_one_kernel_alone(source: Path, name: str, macro: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a macro call makes is the entry point that is looked up, and nothing else."""
    cubin = machine_code(source, tmp_path, monkeypatch, macro)
    assert set(re.findall(rb"\.text\.(\w+)", cubin)) == {name.encode()}


@pytest.mark.parametrize("source", ["many_rows", "many_rows_silu"])
def test_what_is_uniform_is_seen_to_be(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that hides from the compiler that a producer's addresses are the same in all lanes costs a move for every
    operand, and 10 to 20 % of the product's time (docs/log.md). Where products seem to lie on a divergent path, a wait
    follows each of them."""
    triton = importlib.util.find_spec("triton")
    tool = triton and Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not (tool and tool.is_file()):
        pytest.skip("needs the cuobjdump that comes with triton")
    cubin = tmp_path / "many_rows.cubin"
    cubin.write_bytes(machine_code(SOURCES / f"{source}.cu", tmp_path / "cache", monkeypatch))
    dumped = subprocess.run([tool, "--dump-sass", cubin], capture_output=True, text=True, check=True).stdout
    functions = dumped.split("Function : ")[1:]
    assert len(functions) == len(entry_points(f"{source}.cu"))
    for function in functions:
        name, *lines = function.splitlines()
        copies = [index for index, line in enumerate(lines) if "UTMALDG" in line]
        moves = sum("R2UR" in line for line in lines[copies[0] : copies[-1]])
        # Of weights, with a hint or without, early (perhaps unrolled) and in the loop; of x, for u too; of u.
        assert len(copies) >= (12 if "silu" in name else 7), f"{name}: {len(copies)} copies"
        assert moves < 7, f"{name}: {moves} moves among {len(copies)} copies"
        products, waits = (sum(word in line for line in lines) for word in ("HGMMA", "WARPGROUP.DEPBAR"))
        assert 0 < waits < products / 2, f"{name}: {waits} waits for {products} products"
