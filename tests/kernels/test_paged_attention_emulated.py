"""The CUDA C++ decode attention as it is written, on a CPU: its threads as fibers, its instructions emulated."""

import ctypes
from pathlib import Path

import pytest
import torch
from attention_cases import PagedCase, make_case
from emulation import EMULATED, build
from kernel_cases import rms_ratio

from qerl.kernels.paged_attention import hopper

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
    sources = (_KERNELS / "decode.cuh", _KERNELS / "steps.cuh", EMULATED / "ptx.cuh", EMULATED / "decode.cpp")
    library = build(folder, sources, ["decode.cpp"])
    library.emulate.restype = ctypes.c_char_p
    return library


def _emulate(emulator: ctypes.CDLL, case: PagedCase, shape: tuple[int, int], eager: bool = False) -> torch.Tensor:
    q, k_cache = case.q, case.k_cache
    out = torch.full_like(q, float("nan"))
    params = hopper.parameters(*case.inputs, out, case.scale, hints=True)
    shared = hopper.shared_bytes(q.shape[2], k_cache.element_size(), *shape)
    is_fp8 = k_cache.dtype == _FP8
    # Threads take turns in another order when copies are early.
    rest = (ctypes.byref(params), q.shape[0], shared, eager, eager)
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
    assert rms_ratio(out, case.expected) < 4e-3
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
