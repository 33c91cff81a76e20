"""Decode attention that takes qkv as its matmul leaves it: two launches on the CPU, one on a Hopper GPU."""

import pytest
import torch
from rotary_decode_cases import NewRows, make_new_rows

from qerl.kernels.paged_attention import hopper, paged_attention_decode
from qerl.kernels.paged_attention.rotary import newest_places, rotary_decode, serves_rotary_decode
from qerl.kernels.quant_matmul import tiles_supported
from qerl.kernels.rotary import rotary_kv_write

_FP8 = torch.float8_e4m3fn
_GEOMETRIES = [(28, 4, 128, 16), (9, 3, 64, 32), (16, 1, 128, 128), (9, 1, 64, 16)]
_LENGTHS = [(1, 0, 15, 16, 17, 63, 65), (2000, 1, 700), (5, 20) * 70]
CACHES = pytest.mark.parametrize("cache_dtype", [None, _FP8], ids=["same", "fp8"])
NORMS = pytest.mark.parametrize("norm_dtype", [None, torch.bfloat16], ids=["plain", "norm"])


def _two_launches(rows: NewRows, shape: tuple[int, int] | None = None) -> torch.Tensor:
    """Mutates qkv and the caches of `rows`."""
    rotary_kv_write(*rows.rotary_inputs)
    if shape is None:
        return paged_attention_decode(*rows.attention_inputs, rows.scale)
    return hopper.decode(*rows.attention_inputs, rows.scale, shape)


def test_places_are_those_of_the_block_table() -> None:
    table = torch.tensor([[7, 3, 1 << 30], [5, 1 << 30, 1 << 30], [1 << 30] * 3], dtype=torch.int32)
    positions, slots = newest_places(table, torch.tensor([18, 16, 0], dtype=torch.int32), 16)
    assert positions.tolist() == [17, 15, 0]
    assert slots.tolist() == [3 * 16 + 1, 5 * 16 + 15, -1]


@CACHES
@pytest.mark.parametrize("with_norm", [False, True], ids=["plain", "norm"])
def test_cpu_is_the_two_references(cache_dtype: torch.dtype | None, with_norm: bool) -> None:
    norm_dtype = torch.float32 if with_norm else None
    rows = make_new_rows((5, 0, 16, 33), (6, 2, 20, 16), torch.float32, cache_dtype, norm_dtype, whole=False)
    one, two = rows.to("cpu"), rows.to("cpu")
    out = rotary_decode(*one.inputs)
    assert torch.equal(out, _two_launches(two)) and one.caches_equal(two)
    assert out.isfinite().all() and (out[1] == 0).all()
    before, after = (case.v_cache.view(torch.uint8).flatten(0, 1).flatten(1) for case in (rows, one))
    written = (before != after).any(1).nonzero()[:, 0]
    slots = rows.rotary_inputs[5]
    assert sorted(written.tolist()) == sorted(slots[slots >= 0].tolist())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_no_rows_are_no_results(device: str) -> None:
    rows = make_new_rows((5, 3), (4, 2, 64, 16), torch.bfloat16).to(device)
    rows.qkv, rows.block_table, rows.context_lens = rows.qkv[:0], rows.block_table[:0], rows.context_lens[:0]
    before = rows.to(device)
    assert rotary_decode(*rows.inputs).shape == (0, 4, 64)
    assert [heads.shape[:2] for heads in rotary_kv_write(*rows.rotary_inputs)] == [(0, 4), (0, 2), (0, 2)]
    assert rows.caches_equal(before)


def test_misuse_is_named() -> None:
    rows = make_new_rows((5, 3), (4, 2, 64, 16), torch.float32, norm_dtype=torch.float32)
    qkv, rope, k_cache, v_cache, table, lens, scale, q_norm, _, _ = rows.inputs
    with pytest.raises(ValueError, match="511 columns of qkv"):
        rotary_decode(qkv[:, 1:].contiguous(), rope, k_cache, v_cache, table, lens, scale)
    with pytest.raises(ValueError, match=r"rope must be float32 \[P, 64\]"):
        rotary_decode(qkv, rope[:, :8], k_cache, v_cache, table, lens, scale)
    with pytest.raises(ValueError, match="given together"):
        rotary_decode(qkv, rope, k_cache, v_cache, table, lens, scale, q_norm)
    with pytest.raises(ValueError, match=r"q_norm must be contiguous, got strides \(2,\)"):
        rotary_decode(qkv, rope, k_cache, v_cache, table, lens, scale, torch.rand(64, 2)[:, 0], torch.rand(64))
    with pytest.raises(ValueError, match="context_lens must be contiguous"):
        rotary_decode(qkv, rope, k_cache, v_cache, table, lens.repeat_interleave(2)[::2], scale)
    with pytest.raises(ValueError, match="2 queries need"):
        rotary_decode(qkv, rope, k_cache, v_cache, table, lens[:1], scale)
    with pytest.raises(ValueError, match="must be int32"):
        rotary_decode(qkv, rope, k_cache, v_cache, table.long(), lens, scale)


def test_op_is_well_formed() -> None:
    rows = make_new_rows((5, 3), (4, 2, 64, 16), torch.float32, norm_dtype=torch.float32)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.qerl.rotary_decode, rows.inputs, test_utils=checks)


def test_cpu_is_never_one_launch() -> None:
    rows = make_new_rows((5, 3), (4, 2, 64, 16))
    assert not serves_rotary_decode(rows.qkv, rows.rope, rows.k_cache, rows.v_cache)


@pytest.fixture
def hopper_gpu() -> None:
    if not tiles_supported(torch.device("cuda", 0)):
        pytest.skip("needs a Hopper GPU and NVRTC")


@pytest.mark.gpu
@CACHES
@NORMS
@pytest.mark.parametrize("shape", hopper.SHAPES, ids=str)
@pytest.mark.parametrize("geometry", _GEOMETRIES, ids=str)
@pytest.mark.parametrize("lengths", _LENGTHS, ids=["edges", "long", "many"])
@pytest.mark.usefixtures("poisoned_memory", "hopper_gpu")
def test_gpu_one_launch_changes_no_bit(
    lengths: tuple[int, ...],
    geometry: tuple[int, int, int, int],
    shape: tuple[int, int],
    norm_dtype: torch.dtype | None,
    cache_dtype: torch.dtype | None,
) -> None:
    rows = make_new_rows(lengths, geometry, torch.bfloat16, cache_dtype, norm_dtype)
    one, two = rows.to("cuda"), rows.to("cuda")
    rotation = hopper.rotation(one.rope, one.q_norm, one.k_norm, one.eps)
    out = hopper.decode(*one.attention_inputs, one.scale, shape, rotation)
    assert torch.equal(out, _two_launches(two, shape)) and out.isfinite().all()
    assert one.caches_equal(two)
    assert torch.equal(one.qkv.cpu(), rows.qkv)


@pytest.mark.gpu
@CACHES
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("geometry", [(28, 4, 128, 16), (4, 4, 80, 16)], ids=str)
def test_gpu_op(geometry: tuple[int, int, int, int], dtype: torch.dtype, cache_dtype: torch.dtype | None) -> None:
    rows = make_new_rows((300, 0, 17, 1), geometry, dtype, cache_dtype)
    one, two = rows.to("cuda"), rows.to("cuda")
    assert torch.equal(rotary_decode(*one.inputs), _two_launches(two))
    assert one.caches_equal(two)
    fused = serves_rotary_decode(one.qkv, one.rope, one.k_cache, one.v_cache)
    assert fused == (tiles_supported(torch.device("cuda", 0)) and geometry[2] == 128 and dtype == torch.bfloat16)
    assert torch.equal(one.qkv, rows.to("cuda").qkv) == fused


@pytest.mark.gpu
@CACHES
@pytest.mark.usefixtures("hopper_gpu")
def test_gpu_replayed_steps_build_their_contexts(cache_dtype: torch.dtype | None) -> None:
    """A graph of four steps, each of which reads what those before it wrote right before; replayed as contexts grow."""
    rows = make_new_rows((1, 30, 500), (28, 4, 128, 16), torch.bfloat16, cache_dtype)
    blocks = torch.randperm(3 * 64).view(3, 64).int()
    shape = (3 * 64, 16, 4, 128)
    rows.k_cache, rows.v_cache = (torch.randn(shape).to(rows.k_cache.dtype) for _ in range(2))
    rows.block_table, rows.rope = blocks, rows.rope.repeat(2, 1)
    one, two = rows.to("cuda"), rows.to("cuda")
    steps = 3 * torch.randn(4, *rows.qkv.shape, device="cuda").bfloat16()
    rotary_decode(*one.to("cuda").inputs)  # compiles
    graph, outs = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for step in steps:
            torch.add(step, 0, out=one.qkv)  # kernels: copies would not overlap with what follows
            outs.append(rotary_decode(*one.inputs))
            one.context_lens.add_(1)
    for replay in range(12):
        graph.replay()
        for index, step in enumerate(steps):
            two.qkv.copy_(step)
            assert torch.equal(_two_launches(two), outs[index]), (replay, index)
            two.context_lens += 1
        assert one.caches_equal(two)
