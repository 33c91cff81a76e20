"""The paged attention kernels in Triton's interpreter (started by test_interpreter.py)."""

import pytest
import torch
from attention_cases import make_case

from qerl.kernels.arrival import TooManyCountersError, arrival_counters
from qerl.kernels.paged_attention import launch, reference

pytestmark = pytest.mark.usefixtures("poisoned_memory")

CASES = {
    "gqa7-d128": ((1, 65, 0, 33), 7, 1, 128, 16),
    "gqa3-d64-block32": ((1030, 17), 9, 3, 64, 32),
    "mha-d80": ((64, 5), 2, 2, 80, 16),
    "gqa2-d96": ((200,), 4, 2, 96, 64),
}


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-6), (torch.bfloat16, 5e-3)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("slices", [1, 3, 16], ids=["whole", "split", "many"])
@pytest.mark.parametrize("name", CASES)
def test_decode(name: str, slices: int, dtype: torch.dtype, bound: float) -> None:
    lengths, heads, kv_heads, head_dim, block_size = CASES[name]
    case = make_case(lengths, heads, kv_heads, head_dim, block_size, dtype)
    out = launch.decode(*case.inputs, case.scale, slices)
    assert case.worst_ratio(out) < bound
    empty = case.context_lens == 0
    assert (out[empty] == 0).all()


@pytest.mark.parametrize("slices", [1, 4], ids=["whole", "split"])
@pytest.mark.parametrize("name", ["gqa7-d128", "mha-d80"])
def test_float8_cache(name: str, slices: int) -> None:
    lengths, heads, kv_heads, head_dim, block_size = CASES[name]
    case = make_case(lengths, heads, kv_heads, head_dim, block_size, torch.float32, cache_dtype=torch.float8_e4m3fn)
    out = launch.decode(*case.inputs, case.scale, slices)
    # Probabilities are rounded to fp16.
    assert case.worst_ratio(out) < 5e-4
    exact = reference.paged_attention_decode(*case.inputs, case.scale)
    assert case.worst_ratio(exact) < 1e-6


def test_queries_are_read_out_of_a_fused_row() -> None:
    case = make_case((65, 3), 4, 2, 64)
    rows = torch.full((2, 8 * 64), float("nan"))
    rows[:, : 4 * 64] = case.q.flatten(1)
    case.q = rows.view(2, 8, 64)[:, :4]
    assert case.worst_ratio(launch.decode(*case.inputs, case.scale, 2)) < 1e-6


def test_counters_are_left_at_zero() -> None:
    case = make_case((700, 1, 0), 4, 2, 64)
    launch.decode(*case.inputs, case.scale, 8)
    assert not arrival_counters(6, case.q.device).any()
    with pytest.raises(TooManyCountersError, match="16385 counters"):
        arrival_counters((1 << 14) + 1, case.q.device)


def test_number_of_slices_follows_from_shapes() -> None:
    assert launch.num_slices(256, 4, 4096, 132) == 1
    assert launch.num_slices(8, 4, 1280, 132) == 16
    assert launch.num_slices(1, 4, 128, 132) == 2
    assert launch.num_slices(1, 1, 1 << 20, 132) == 32
