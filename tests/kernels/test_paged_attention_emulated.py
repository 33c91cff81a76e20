"""The CUDA C++ decode attention as it is written, on a CPU: its threads as fibers, its instructions emulated."""

import ctypes
from pathlib import Path

import pytest
import torch
from attention_cases import PagedCase, make_case
from emulation import EMULATED, build
from kernel_cases import rms_ratio
from rotary_decode_cases import NewRows, make_new_rows

from qerl.kernels.paged_attention import hopper
from qerl.kernels.rotary import reference as rotary_reference

_KERNELS = Path(hopper.__file__).parent / "cuda"
_FP8 = torch.float8_e4m3fn
# Every cluster and block size, head size and dtype; groups, block sizes and lengths that leave something over.
_CASES = [
    ((1, 4), (7, 1, 128, 16), (100, 0, 17)),
    ((1, 4), (1, 1, 64, 16), (2300,)),
    ((1, 8), (7, 1, 128, 16), (260, 0, 17)),
    ((1, 8), (16, 2, 64, 32), (1300,)),
    ((2, 8), (14, 2, 128, 32), (331, 33)),
    ((2, 8), (9, 1, 64, 16), (733,)),
    ((4, 8), (9, 3, 64, 16), (200, 1)),
    ((4, 8), (16, 1, 128, 16), (1030,)),
    ((8, 8), (16, 1, 64, 128), (900, 15)),
    ((8, 8), (7, 1, 128, 16), (0, 65)),
    ((8, 8), (16, 1, 128, 16), (2100,)),
    ((8, 8), (3, 1, 64, 32), (40,)),
]


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("emulated")
    kernels = (_KERNELS / name for name in ("decode.cuh", "steps.cuh", "rotate.cuh"))
    sources = (*kernels, EMULATED / "ptx.cuh", EMULATED / "decode.cpp")
    library = build(folder, sources, ["decode.cpp"])
    library.emulate.restype = ctypes.c_char_p
    return library


def _emulate(
    emulator: ctypes.CDLL,
    case: PagedCase,
    shape: tuple[int, int],
    eager: bool = False,
    rotation: ctypes.Structure | None = None,
) -> torch.Tensor:
    q, k_cache = case.q, case.k_cache
    out = torch.full(q.shape, float("nan"), dtype=q.dtype)
    params = hopper.parameters(*case.inputs, out, case.scale, hints=True)
    shared = hopper.shared_bytes(q.shape[2], k_cache.element_size(), *shape)
    is_fp8 = k_cache.dtype == _FP8
    rotate = None if rotation is None else ctypes.byref(rotation)
    # Threads take turns in another order when copies are early.
    rest = (ctypes.byref(params), rotate, q.shape[0], shared, eager, eager)
    assert emulator.emulate(q.shape[2], is_fp8, *shape, *rest) is None
    return out


@pytest.mark.parametrize("cache_dtype", [None, _FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("shape, geometry, lengths", _CASES, ids=str)
def test_emulated_against_fp64(
    emulator: ctypes.CDLL,
    shape: tuple[int, int],
    geometry: tuple[int, int, int, int],
    lengths: tuple[int, ...],
    cache_dtype: torch.dtype | None,
) -> None:
    case = make_case(lengths, *geometry, torch.bfloat16, "cpu", cache_dtype)
    out = _emulate(emulator, case, shape)
    assert case.worst_ratio(out) < 4e-3
    assert (out[case.context_lens == 0] == 0).all()
    assert torch.equal(out, _emulate(emulator, case, shape, eager=True))


@pytest.mark.parametrize("power", [100, 20, -20, -100])
def test_queries_beyond_fp16(emulator: ctypes.CDLL, power: int) -> None:
    """Queries of any magnitude a bf16 has: rows are brought into the range of fp16, each by its own power of two."""
    case = make_case((50,), 7, 1, 128, 16, torch.bfloat16, "cpu", _FP8)
    case.q[0, 1] *= 2.0**-5
    expected = _emulate(emulator, case, (1, 4))
    case.q *= 2.0**power
    case.scale *= 2.0**-power
    assert torch.equal(_emulate(emulator, case, (1, 4)), expected)


def test_not_a_number_is_seen(emulator: ctypes.CDLL) -> None:
    """A NaN key of the context reaches the rows of its KV head, and none else."""
    case = make_case((50, 50), 4, 2, 64, 16, torch.bfloat16, "cpu", _FP8)
    block = int(case.block_table[1, 1])
    case.k_cache.view(torch.uint8)[block, 3, 1, 5] = 0x7F
    out = _emulate(emulator, case, (2, 8))
    assert out[1, 2:].isnan().all()
    assert rms_ratio(out[0], case.expected[0]) < 4e-3 and rms_ratio(out[1, :2], case.expected[1, :2]) < 4e-3


# Groups from 1 to 16; newest tokens at the edges of steps and blocks, for every warp and block of a cluster, and behind
# more steps than a ring or a vector of table entries has.
_ROTARY_CASES = [
    ((1, 4), (7, 1, 128, 16), (1, 0, 16, 17, 33, 64)),
    ((1, 4), (1, 1, 64, 16), (2300, 48)),
    ((1, 8), (7, 1, 128, 16), (1, 0, 16, 113, 128, 129)),
    ((2, 8), (14, 2, 128, 32), (331, 33, 32)),
    ((2, 8), (9, 1, 64, 16), (256, 273, 2)),
    ((4, 8), (9, 3, 64, 16), (200, 1)),
    ((4, 8), (16, 1, 128, 16), (1030, 0)),
    ((8, 8), (16, 1, 64, 128), (900, 15, 129)),
    ((8, 8), (7, 1, 128, 16), (0, 65, 1024)),
    ((8, 8), (5, 1, 128, 16), (2100,)),
]


def _in_two_launches(rows: NewRows) -> NewRows:
    """With the queries and caches that the reference of ``kernels.rotary`` leaves."""
    two = rows.to("cpu")
    rotary_reference.rotary_kv_write(*two.rotary_inputs)
    return two


def _attend(
    emulator: ctypes.CDLL,
    rows: NewRows,
    shape: tuple[int, int],
    eager: bool = False,
    rotation: ctypes.Structure | None = None,
) -> torch.Tensor:
    case = PagedCase(*rows.attention_inputs, rows.scale, torch.empty(0))
    return _emulate(emulator, case, shape, eager, rotation)


def _in_one_launch(
    emulator: ctypes.CDLL, rows: NewRows, shape: tuple[int, int], eager: bool
) -> tuple[NewRows, torch.Tensor]:
    one = rows.to("cpu")
    rotation = hopper.rotation(one.rope, one.q_norm, one.k_norm, one.eps)
    out = _attend(emulator, one, shape, eager, rotation)
    assert torch.equal(one.qkv, rows.qkv)
    return one, out


@pytest.mark.parametrize("norm_dtype", [None, torch.bfloat16, torch.float32], ids=["plain", "norm", "norm32"])
@pytest.mark.parametrize("cache_dtype", [None, _FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("shape, geometry, lengths", _ROTARY_CASES, ids=str)
def test_rotation_and_write_change_no_bit(
    emulator: ctypes.CDLL,
    shape: tuple[int, int],
    geometry: tuple[int, int, int, int],
    lengths: tuple[int, ...],
    cache_dtype: torch.dtype | None,
    norm_dtype: torch.dtype | None,
) -> None:
    rows = make_new_rows(lengths, geometry, cache_dtype=cache_dtype, norm_dtype=norm_dtype)
    two = _in_two_launches(rows)
    expected = _attend(emulator, two, shape)
    assert expected.isfinite().all()
    for eager in (False, True):
        one, out = _in_one_launch(emulator, rows, shape, eager)
        assert torch.equal(out, expected)
        assert one.caches_equal(two)


@pytest.mark.parametrize("geometry", [(7, 1, 128, 16), (9, 3, 64, 16)], ids=str)
def test_norms_of_any_rows(emulator: ctypes.CDLL, geometry: tuple[int, int, int, int]) -> None:
    """A norm sums its squares in an order of its own: a number near the middle of two bf16 may fall to the other."""
    rows = make_new_rows((40, 1, 100), geometry, norm_dtype=torch.bfloat16, whole=False)
    two = _in_two_launches(rows)
    one, out = _in_one_launch(emulator, rows, (2, 8), eager=False)
    assert rms_ratio(out, _attend(emulator, two, (2, 8))) < 1e-3
    slots = rows.rotary_inputs[5]
    assert rms_ratio(*(case.k_cache.flatten(0, 1)[slots] for case in (one, two))) < 2e-4
    assert torch.equal(one.v_cache.flatten(0, 1)[slots], two.v_cache.flatten(0, 1)[slots])
