"""Paged decode attention: reference on the CPU, kernels on a GPU."""

import itertools
import math

import pytest
import torch
from attention_cases import make_case

from qerl.kernels.paged_attention import hopper, paged_attention_decode
from qerl.kernels.quant_matmul import tiles_supported

CACHES = pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn], ids=["bf16", "fp8"])


@pytest.mark.parametrize("heads, kv_heads, head_dim", [(4, 2, 64), (7, 1, 128), (3, 3, 20)])
def test_reference_against_fp64(heads: int, kv_heads: int, head_dim: int) -> None:
    case = make_case((1, 40, 0, 16), heads, kv_heads, head_dim)
    out = paged_attention_decode(*case.inputs, case.scale)
    assert case.worst_ratio(out) < 1e-6
    assert (out[2] == 0).all()


def test_reference_of_a_float8_cache() -> None:
    case = make_case((1, 40, 0), 4, 2, 64, cache_dtype=torch.float8_e4m3fn)
    assert case.worst_ratio(paged_attention_decode(*case.inputs, case.scale)) < 1e-6


def test_the_worst_sequence_may_be_any_one() -> None:
    case = make_case((1, 40, 0, 16), 4, 2, 64)
    out = paged_attention_decode(*case.inputs, case.scale)
    for index in (0, 1, 3):
        off = out.clone()
        off[index] *= 1.25
        assert case.worst_ratio(off) == pytest.approx(0.25, rel=1e-3)
        off[index, 0, 0] = float("nan")
        assert math.isnan(case.worst_ratio(off))


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


@pytest.mark.parametrize("sms", [132, 78])
def test_clusters_are_the_largest_that_leave_room_and_keep_parts_long(sms: int) -> None:
    def fits(cluster: int) -> bool:
        return sequences * kv_heads * cluster <= 0.75 * sms and longest >= 128 * cluster

    for sequences, kv_heads, longest in itertools.product((1, 2, 8, 31, 64, 256), (1, 4, 8), (16, 100, 1280, 32768)):
        cluster, warps = hopper.decode_shape(sequences, kv_heads, longest, sms)
        assert (cluster, warps) in hopper.SHAPES and (cluster == 1 or fits(cluster))
        assert cluster == 8 or not fits(2 * cluster)
        assert warps == (8 if sequences * kv_heads * cluster <= sms else 4)


@pytest.mark.parametrize("sequences, longest, shape", [
    (1, 1280, (8, 8)), (1, 640, (4, 8)), (1, 63, (1, 8)), (4, 1280, (4, 8)), (4, 300, (2, 8)), (8, 1280, (2, 8)),
    (16, 1280, (1, 8)), (33, 1280, (1, 8)), (34, 1280, (1, 4)), (256, 1280, (1, 4)),
])  # fmt: skip
def test_shape_on_an_h200(sequences: int, longest: int, shape: tuple[int, int]) -> None:
    assert hopper.decode_shape(sequences, 4, longest, 132) == shape


def test_shared_memory_of_a_multiprocessor_suffices() -> None:
    """228 KB, 1 KB of it taken by each block: for one large block, two small ones, three of short rows."""
    for head_dim, element_size, shape in itertools.product(hopper.HEAD_DIMS, (1, 2), hopper.SHAPES):
        blocks = 1 if shape[1] == 8 else 3 if head_dim * element_size <= 128 else 2
        taken = hopper.shared_bytes(head_dim, element_size, *shape) + 1024
        assert blocks * taken <= 228 * 1024, (head_dim, element_size, shape)


@pytest.fixture(params=["triton", "cuda"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which implementation a test runs; CUDA C++ only where there is a Hopper GPU."""
    if request.param == "triton":
        monkeypatch.setattr(hopper, "serves", lambda q, k_cache, v_cache, rotary=False: False)
    elif not tiles_supported(torch.device("cuda", 0)):
        pytest.skip("needs a Hopper GPU and NVRTC")
    return request.param


@pytest.fixture
def hopper_gpu() -> None:
    if not tiles_supported(torch.device("cuda", 0)):
        pytest.skip("needs a Hopper GPU and NVRTC")


@pytest.mark.gpu
@CACHES
@pytest.mark.parametrize("shape", hopper.SHAPES, ids=str)
@pytest.mark.parametrize(
    "heads, kv_heads, head_dim, block_size", [(28, 4, 128, 16), (9, 3, 64, 32), (16, 1, 128, 128), (9, 1, 64, 16)]
)
@pytest.mark.parametrize(
    "lengths", [(1,), (0, 15, 16, 17, 63, 65), (2000, 1, 700), (5,) * 200], ids=["one", "edges", "long", "many"]
)
@pytest.mark.usefixtures("poisoned_memory", "hopper_gpu")
def test_gpu_every_shape(
    lengths: tuple[int, ...],
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    shape: tuple[int, int],
    cache_dtype: torch.dtype | None,
) -> None:
    case = make_case(lengths, heads, kv_heads, head_dim, block_size, torch.bfloat16, "cuda", cache_dtype)
    out = hopper.decode(*case.inputs, case.scale, shape)
    assert case.worst_ratio(out) < 4e-3
    assert (out[case.context_lens == 0] == 0).all()
    assert torch.equal(out, hopper.decode(*case.inputs, case.scale, shape))


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu")
@pytest.mark.parametrize("power", [20, -20])
def test_gpu_float8_cache_and_queries_beyond_fp16(power: int) -> None:
    case = make_case((300, 40), 28, 4, 128, 16, torch.bfloat16, "cuda", torch.float8_e4m3fn)
    expected = paged_attention_decode(*case.inputs, case.scale)
    case.q *= 2.0**power
    assert torch.equal(paged_attention_decode(*case.inputs, case.scale * 2.0**-power), expected)


@pytest.mark.gpu
@CACHES
@pytest.mark.usefixtures("hopper_gpu")
def test_gpu_chain_of_steps_sees_every_write(cache_dtype: torch.dtype | None) -> None:
    """Lengths, tables and keys change right before each of many launches: nothing read early may be used."""
    case = make_case((200, 90), 28, 4, 128, 16, torch.bfloat16, "cuda", cache_dtype)
    q, k_cache, v_cache, table, lens = case.inputs
    tables, lengths = [table.clone(), table.flip(0).contiguous()], [lens.clone(), lens.flip(0).contiguous()]
    expected = [paged_attention_decode(q, k_cache, v_cache, tables[i], lengths[i], case.scale) for i in range(2)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = []
        for step in range(40):
            torch.add(tables[step % 2], 0, out=table)  # kernels: copies would not overlap with what follows
            torch.add(lengths[step % 2], 0, out=lens)
            outs.append(paged_attention_decode(*case.inputs, case.scale))
    for _ in range(3):
        graph.replay()
        assert all(torch.equal(out, expected[step % 2]) for step, out in enumerate(outs))


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
    path: str,
) -> None:
    case = make_case(lengths, heads, kv_heads, head_dim, block_size, dtype, "cuda")
    out = paged_attention_decode(*case.inputs, case.scale)
    assert case.worst_ratio(out) < bound
    assert (out[case.context_lens == 0] == 0).all()
    assert torch.equal(out, paged_attention_decode(*case.inputs, case.scale))


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [(1, 0, 65), (2000, 1, 700), (5,) * 200], ids=["edges", "long", "many"])
@pytest.mark.parametrize("heads, kv_heads, head_dim, block_size", [(28, 4, 128, 16), (4, 4, 80, 16)])
@pytest.mark.usefixtures("path")
def test_gpu_float8_cache(heads: int, kv_heads: int, head_dim: int, block_size: int, lengths: tuple[int, ...]) -> None:
    fp8 = torch.float8_e4m3fn
    case = make_case(lengths, heads, kv_heads, head_dim, block_size, torch.bfloat16, "cuda", fp8)
    out = paged_attention_decode(*case.inputs, case.scale)
    assert case.worst_ratio(out) < 4e-3
    assert torch.equal(out, paged_attention_decode(*case.inputs, case.scale))


@pytest.mark.gpu
@CACHES
@pytest.mark.usefixtures("path")
def test_gpu_cuda_graph_follows_growing_contexts(cache_dtype: torch.dtype | None) -> None:
    case = make_case((900, 30), 28, 4, 128, 16, torch.bfloat16, "cuda", cache_dtype)
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
    assert case.worst_ratio(out) < 4e-3
