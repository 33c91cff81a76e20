"""The choice between Hopper's kernels, and that each of them can be compiled; no GPU needed."""

import importlib.util
import re
from pathlib import Path

import pytest

from qerl.kernels.quant_matmul import hopper, hopper_plan
from qerl.kernels.quant_matmul.hopper_plan import (
    FEW_ROWS,
    MANY_ROWS,
    SHARED_BYTES,
    SUM_COUNTERS,
    all_many_rows_plans,
    few_rows_plan,
    many_rows_plan,
    partial_workspace_bytes,
)

SOURCES = Path(hopper.__file__).parent / "cuda"
SHAPES = [
    (4608, 3584), (37888, 3584), (3584, 18944), (7168, 5120), (55296, 5120), (5120, 27648), (960, 576), (576, 1536),
    (16, 64), (57344, 8192), (8192, 28672),
    # Output heads.
    (152064, 3584), (152064, 5120), (151936, 2048), (128256, 8192), (49152, 576), (262144, 5376),
]  # fmt: skip
SMS = [132, 114, 78]


def entry_points(source: str) -> set[str]:
    """Names that the instantiating macros of a ``.cu`` file make."""
    text = (SOURCES / source).read_text()
    names = set()
    for macro, pattern in re.findall(r"#define (\w+)\(.*?__ \w.*?((?:few|many)_rows_##[\w#]+)\(", text, re.S):
        parameters = re.search(rf"#define {macro}\((.*?)\)", text).group(1).split(", ")
        for values in re.findall(rf"^{macro}\((\d+(?:, \d+)+)\)", text, re.M):
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
            assert 0 < plan.group(sms) * plan.slices <= sms and (not plan.pair or plan.group(sms) % 2 == 0)
            if plan.slices > 1:
                assert plan.slices * (n // 16) * 512 <= partial_workspace_bytes(sms) and n // 16 <= SUM_COUNTERS
    for m in (FEW_ROWS + 1, 16, 17, 33, 64, 65, 128, 129, 300, 1000, MANY_ROWS):
        plan = many_rows_plan(m, n, k, sms)
        assert plan.name in entry_points("many_rows.cu") and plan.shared_bytes <= SHARED_BYTES
        grid, units = plan.grid(m, n, k, sms), -(-(k // 64) // plan.unit)
        assert 0 < grid <= sms
        # Divisions in the kernel are unsigned 32 bit.
        assert plan.whole or plan.tiles(m, n) * units * grid < 2**32
        assert plan.whole or plan.tiles(m, n) * plan.groups * 4 <= SUM_COUNTERS
        assert m <= plan.tokens * -(-m // plan.tokens) and plan.tokens < max(2 * m, 17)


def test_what_does_not_fit_is_not_chosen() -> None:
    """A head's tiles: sums of many slices outgrow shared memory and the workspace, shared tiles the counters."""
    n, k = 152064, 3584
    assert hopper_plan.FewRowsPlan(16).fits(8, n, k, 132) and not hopper_plan.FewRowsPlan(16, 8).fits(8, n, k, 132)
    assert 8 * n // 16 * 512 > partial_workspace_bytes(132)
    shared, whole = (hopper_plan.ManyRowsPlan(16, 2, whole) for whole in (False, True))
    assert shared.fits(200, n, k, 132) and not shared.fits(2048, n, k, 132) and whole.fits(2048, n, k, 132)


def test_every_shape_of_tile_is_compiled() -> None:
    assert {plan.name for plan in all_many_rows_plans()} == entry_points("many_rows.cu")
    for source in ("few_rows", "many_rows"):  # the same kernels with an fp32 result
        assert {f"{name}_wide" for name in entry_points(f"{source}.cu")} == entry_points(f"{source}_wide.cu")
    assert all(plan.shared_bytes <= SHARED_BYTES for plan in all_many_rows_plans())


def test_the_choice_on_an_h200() -> None:
    """Pinned, so that a change of a constant is seen: what the sweep found best."""
    assert few_rows_plan(1, 37888, 3584, 132).name == "few_rows_16_2"
    assert few_rows_plan(8, 4608, 3584, 132).name == "few_rows_8_2_pair"
    assert few_rows_plan(8, 3584, 18944, 132).slices == 4
    assert few_rows_plan(1, 152064, 3584, 132) == hopper_plan.FewRowsPlan(16)
    assert many_rows_plan(16, 37888, 3584, 132).name == "many_rows_16_3_4_5"
    assert many_rows_plan(64, 3584, 3584, 132).name == "many_rows_64_2_4_4"
    assert many_rows_plan(512, 37888, 3584, 132) == hopper_plan.ManyRowsPlan(128, 3, whole=True)
    assert many_rows_plan(2048, 37888, 3584, 132).tokens == 256


@pytest.mark.parametrize(
    "source", ["few_rows", "many_rows", "few_rows_wide", "many_rows_wide", "dequantize", "lora_shrink"]
)
def test_nvrtc_compiles_without_a_gpu(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("cuda.bindings") is None:
        pytest.skip("cuda-bindings is not installed")
    from qerl.kernels.cuda import KernelBuildError, compile_cubin

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    try:
        cubin = compile_cubin(SOURCES / f"{source}.cu")
    except KernelBuildError as error:
        if "cannot compile" in str(error):
            raise
        pytest.skip(f"NVRTC is not installed: {error}")
    assert cubin[:4] == b"\x7fELF"
    assert all(name.encode() in cubin for name in entry_points(f"{source}.cu") or {source})
    (cached,) = (tmp_path / "qerl" / "kernels").iterdir()
    assert cached.read_bytes() == cubin == compile_cubin(SOURCES / f"{source}.cu")
