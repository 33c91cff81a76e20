"""Paged decode attention: reference on the CPU, kernels on a GPU."""

import pytest
import torch
from attention_cases import make_case
from kernel_cases import rms_ratio

from qerl.kernels.paged_attention import paged_attention_decode


@pytest.mark.parametrize("heads, kv_heads, head_dim", [(4, 2, 64), (7, 1, 128), (3, 3, 20)])
def test_reference_against_fp64(heads: int, kv_heads: int, head_dim: int) -> None:
    case = make_case((1, 40, 0, 16), heads, kv_heads, head_dim)
    out = paged_attention_decode(*case.inputs, case.scale)
    assert rms_ratio(out, case.expected) < 1e-6
    assert (out[2] == 0).all()


def test_reference_of_a_float8_cache() -> None:
    case = make_case((1, 40, 0), 4, 2, 64, cache_dtype=torch.float8_e4m3fn)
    assert rms_ratio(paged_attention_decode(*case.inputs, case.scale), case.expected) < 1e-6


def test_misuse_is_named() -> None:
    case = make_case((5, 3), 4, 2, 64)
    q, k_cache, v_cache, table, lens = case.inputs
    with pytest.raises(ValueError, match="must be int32"):
        paged_attention_decode(q, k_cache, v_cache, table.long(), lens, 1.0)
    with pytest.raises(ValueError, match="multiple of KV heads"):
        paged_attention_decode(q[:, :3], k_cache, v_cache, table, lens, 1.0)
    with pytest.raises(ValueError, match="2 queries need"):
        paged_attention_decode(q, k_cache, v_cache, table, lens[:1], 1.0)
    with pytest.raises(ValueError, match="share bf16, fp16 or fp32"):
        paged_attention_decode(q.bfloat16(), k_cache, v_cache, table, lens, 1.0)


def test_op_is_well_formed() -> None:
    case = make_case((5, 3), 4, 2, 64)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.qerl.paged_attention_decode, (*case.inputs, case.scale), test_utils=checks)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, bound", [(torch.bfloat16, 4e-3), (torch.float32, 2e-6)], ids=["bf16", "fp32"])
@pytest.mark.parametrize(
    "lengths", [(1,), (0, 63, 64, 65), (2000, 1, 700), (5,) * 200], ids=["one", "edges", "long", "many"]
)
@pytest.mark.parametrize(
    "heads, kv_heads, head_dim, block_size", [(28, 4, 128, 16), (9, 3, 64, 32), (4, 4, 80, 16), (16, 1, 96, 128)]
)
@pytest.mark.usefixtures("poisoned_memory")
def test_gpu_against_fp64(
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    lengths: tuple[int, ...],
    dtype: torch.dtype,
    bound: float,
) -> None:
    case = make_case(lengths, heads, kv_heads, head_dim, block_size, dtype, "cuda")
    out = paged_attention_decode(*case.inputs, case.scale)
    assert rms_ratio(out, case.expected) < bound
    assert (out[case.context_lens == 0] == 0).all()
    assert torch.equal(out, paged_attention_decode(*case.inputs, case.scale))


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [(1, 0, 65), (2000, 1, 700), (5,) * 200], ids=["edges", "long", "many"])
@pytest.mark.parametrize("heads, kv_heads, head_dim, block_size", [(28, 4, 128, 16), (4, 4, 80, 16)])
def test_gpu_float8_cache(heads: int, kv_heads: int, head_dim: int, block_size: int, lengths: tuple[int, ...]) -> None:
    fp8 = torch.float8_e4m3fn
    case = make_case(lengths, heads, kv_heads, head_dim, block_size, torch.bfloat16, "cuda", fp8)
    out = paged_attention_decode(*case.inputs, case.scale)
    assert rms_ratio(out, case.expected) < 4e-3
    assert torch.equal(out, paged_attention_decode(*case.inputs, case.scale))


@pytest.mark.gpu
def test_gpu_cuda_graph_follows_growing_contexts() -> None:
    case = make_case((900, 30), 28, 4, 128, 16, torch.bfloat16, "cuda")
    q, k_cache, v_cache, table, lens = case.inputs
    full = lens.clone()
    lens.fill_(10)
    paged_attention_decode(*case.inputs, case.scale)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_attention_decode(*case.inputs, case.scale)
    lens.copy_(full)
    graph.replay()
    assert torch.equal(out, paged_attention_decode(q, k_cache, v_cache, table, lens, case.scale))
    assert rms_ratio(out, case.expected) < 4e-3
