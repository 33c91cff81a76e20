"""Paged attention against a dense softmax of the whole sequence, however the batch is cut up."""

import math
import random

import pytest
import torch

from qerl.rollout.attention import paged_attention
from qerl.rollout.batch import MAX_PADDING_RATIO, build_batch, plan_segments
from qerl.rollout.core import ForwardBatch, Segment
from qerl.rollout.kv_cache import KVCache, blocks_for_tokens
from qerl.rollout.scheduler import Chunk, Prefix

HEAD_DIM, SCALE = 8, 8**-0.5


def dense_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """q [Q, Hq, D] are the last queries of k, v [C, Hkv, D]; plain float64 softmax."""
    repeats = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(repeats, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,chd->hqc", q.double(), k) * scale
    hidden = torch.ones(q.shape[0], k.shape[0]).triu(1 + k.shape[0] - q.shape[0]).bool()
    return torch.einsum("hqc,chd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), v)


class Case:
    """Sequences with random K/V, stored up to their new tokens in a pool of shuffled, dirty blocks."""

    def __init__(
        self,
        shapes: list[tuple[int, int]],
        heads: int,
        kv_heads: int,
        block_size: int,
        seed: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """``shapes``: (cached tokens, new tokens) of every sequence."""
        generator = torch.Generator().manual_seed(seed)
        rng = random.Random(seed)
        self.block_size, self.heads = block_size, heads
        tables = [blocks_for_tokens(cached + new, block_size) for cached, new in shapes]
        free = list(range(1, sum(tables) + 4))
        rng.shuffle(free)
        self.kv = KVCache(2, sum(tables) + 3, block_size, kv_heads, HEAD_DIM, dtype, "cpu")
        # Whatever an earlier sequence left behind must not matter.
        for pool in (self.kv.k, self.kv.v):
            pool.copy_(torch.empty(pool.shape).uniform_(-50, 50, generator=generator))
        self.chunks = []
        self.history: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for index, ((cached, new), blocks) in enumerate(zip(shapes, tables, strict=True)):
            owner = Prefix(index, [0] * (cached + new), blocks=[free.pop() for _ in range(blocks)])
            k, v = torch.randn(2, cached + new, kv_heads, HEAD_DIM, generator=generator)
            slots = [owner.blocks[at // block_size] * block_size + at % block_size for at in range(cached)]
            self.kv.write(1, k[:cached], v[:cached], torch.tensor(slots, dtype=torch.int64))
            self.history[index] = (k, v)
            self.chunks.append(Chunk(owner, cached, new, True))

    def run(self, planned: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Result and expectation, both [T, Hq, D] in the order of the batch."""
        batch, ordered = build_batch(self.chunks, self.block_size, torch.device("cpu"))
        if not planned:
            batch.segments = ()
        q = torch.randn(batch.token_ids.shape[0], self.heads, HEAD_DIM)
        k = torch.cat([self.history[chunk.owner.index][0][chunk.start :] for chunk in ordered])
        v = torch.cat([self.history[chunk.owner.index][1][chunk.start :] for chunk in ordered])
        expected = [
            dense_attention(q[first : first + chunk.count], *self.history[chunk.owner.index], SCALE)
            for chunk, first in zip(ordered, batch.cu_seqlens_q.tolist()[:-1], strict=True)
        ]
        self.kv.write(1, k, v, batch.slot_mapping)
        return paged_attention(q, k, v, self.kv, 1, batch, SCALE), torch.cat(expected)


SHAPES = {
    "decode": [(4, 1), (17, 1), (1, 1), (33, 1)],
    "fresh": [(0, 7), (0, 2), (0, 12), (0, 31)],
    "chunk": [(3, 5), (16, 9), (29, 2)],
    "one token": [(0, 1)],
    "mixed": [(0, 9), (8, 1), (5, 3), (0, 1), (40, 6), (0, 33), (21, 1)],
}


@pytest.mark.parametrize("planned", [True, False], ids=["planned", "whole"])
@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES.keys())
def test_matches_dense_attention(
    shapes: list[tuple[int, int]], heads: int, kv_heads: int, block_size: int, planned: bool
) -> None:
    out, expected = Case(shapes, heads, kv_heads, block_size, seed=1).run(planned)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(20))
def test_matches_dense_attention_on_random_mixes(seed: int) -> None:
    rng = random.Random(seed)
    shapes = [
        (rng.choice([0, rng.randint(1, 60)]), rng.choice([1, rng.randint(2, 50)])) for _ in range(rng.randint(1, 12))
    ]
    out, expected = Case(shapes, 4, 2, rng.randint(1, 16), seed).run(planned=True)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_only_the_given_layer_and_slots_are_written() -> None:
    case = Case([(5, 2)], 2, 1, 4, seed=0)
    before_k, before_v = case.kv.k.clone(), case.kv.v.clone()
    case.run(planned=True)
    _, second = case.chunks[0].owner.blocks
    slots = [second * 4 + 1, second * 4 + 2]
    for pool, before, history in ((case.kv.k, before_k, 0), (case.kv.v, before_v, 1)):
        flat, old = pool.flatten(1, 2), before.flatten(1, 2)
        assert torch.equal(flat[1, slots], case.history[0][history][5:])
        flat[1, slots] = old[1, slots]
        assert torch.equal(flat, old)


def test_keeps_the_dtype_of_the_query_over_another_pool_dtype() -> None:
    kv = KVCache(1, 2, 4, 1, HEAD_DIM, torch.bfloat16, "cpu")
    batch = ForwardBatch(
        token_ids=torch.zeros(2, dtype=torch.int64),
        positions=torch.arange(2),
        slot_mapping=torch.tensor([4, 5]),
        cu_seqlens_q=torch.tensor([0, 2], dtype=torch.int32),
        context_lens=torch.tensor([2], dtype=torch.int32),
        block_table=torch.tensor([[1]], dtype=torch.int32),
        max_q_len=2,
        max_context_len=2,
        logits_index=torch.tensor([1]),
    )
    q, k, v = torch.randn(3, 2, 1, HEAD_DIM)
    kv.write(0, k, v, batch.slot_mapping)
    out = paged_attention(q, k, v, kv, 0, batch, SCALE)
    assert out.dtype == torch.float32
    rounded = dense_attention(q, k.bfloat16(), v.bfloat16(), SCALE)
    torch.testing.assert_close(out.double(), rounded, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES.keys())
def test_a_float8_pool_costs_three_bits(shapes: list[tuple[int, int]]) -> None:
    case = Case(shapes, 4, 2, 16, seed=1, dtype=torch.float8_e4m3fn)
    out, expected = case.run(planned=True)
    error = (out.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    # Keys and values keep 3 bits after the leading one: a relative error of at most 2^-4 each, 0.026 in the mean.
    assert error < 0.06


def test_float8_blocks_are_copied_and_saturate() -> None:
    kv = KVCache(1, 3, 2, 1, 2, torch.float8_e4m3fn, "cpu")
    kv.write(0, torch.tensor([[[1e4, -0.3]]]), torch.tensor([[[7.0, -1e4]]]), torch.tensor([2]))
    kv.copy_blocks([1], [3])
    assert kv.k[0, 3, 0, 0].float().tolist() == [448.0, -0.3125]
    assert kv.v[0, 3, 0, 0].float().tolist() == [7.0, -448.0]


def test_heads_that_cannot_be_grouped_are_refused() -> None:
    case = Case([(0, 2)], 3, 2, 4, seed=0)
    batch, _ = build_batch(case.chunks, 4, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"3 query heads .* 2 KV heads"):
        paged_attention(torch.randn(2, 3, 8), torch.randn(2, 2, 8), torch.randn(2, 2, 8), case.kv, 0, batch, 1.0)


def _chunks(shapes: list[tuple[int, int]]) -> list[Chunk]:
    return [Chunk(Prefix(i, [0] * (start + count)), start, count, True) for i, (start, count) in enumerate(shapes)]


def test_segments_cover_the_batch_in_order_with_the_right_kinds() -> None:
    segments, ordered = plan_segments(_chunks([(0, 8), (9, 1), (3, 4), (0, 1), (0, 7)]))
    assert [(chunk.start, chunk.count) for chunk in ordered] == [(9, 1), (0, 1), (3, 4), (0, 7), (0, 8)]
    assert segments == (
        Segment("decode", 0, 2, 0, 2, 1, 10),
        Segment("chunk", 2, 3, 2, 6, 4, 7),
        Segment("fresh", 3, 5, 6, 21, 8, 8),
    )


@pytest.mark.parametrize("start", [0, 5])
def test_padding_is_bounded(start: int) -> None:
    rng = random.Random(3)
    shapes = [(start, rng.choice([2, 3, 10, 100, 1000, 4000])) for _ in range(60)]
    segments, ordered = plan_segments(_chunks(shapes))
    assert sorted((chunk.start, chunk.count) for chunk in ordered) == sorted(shapes)
    assert len(segments) < 12
    for segment in segments:
        members = ordered[segment.seq_start : segment.seq_end]
        work = sum(chunk.count * chunk.end for chunk in members)
        padded = len(members) * segment.max_q_len * segment.max_context_len
        assert padded <= MAX_PADDING_RATIO * work
    assert [segment.seq_start for segment in segments[1:]] == [segment.seq_end for segment in segments[:-1]]
    assert segments[-1].token_end == sum(count for _, count in shapes)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 20])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES.keys())
def test_cuda_matches_the_cpu(shapes: list[tuple[int, int]], head_dim: int) -> None:
    generator = torch.Generator().manual_seed(0)
    heads, kv_heads, block_size = 8, 2, 16
    blocks = [blocks_for_tokens(cached + new, block_size) for cached, new in shapes]
    chunks, taken = [], 1
    for index, ((cached, new), count) in enumerate(zip(shapes, blocks, strict=True)):
        owner = Prefix(index, [0] * (cached + new), blocks=list(range(taken, taken + count)))
        chunks.append(Chunk(owner, cached, new, True))
        taken += count
    tokens = sum(new for _, new in shapes)
    q = torch.randn(tokens, heads, head_dim, generator=generator)
    k, v = torch.randn(2, tokens, kv_heads, head_dim, generator=generator)
    past = torch.randn(2, 1, taken, block_size, kv_heads, head_dim, generator=generator)
    results = []
    for device in ("cpu", "cuda"):
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        kv = KVCache(1, taken - 1, block_size, kv_heads, head_dim, dtype, device)
        # Both sides attend to the values that bf16 can hold.
        kv.k.copy_(past[0].bfloat16())
        kv.v.copy_(past[1].bfloat16())
        batch, _ = build_batch(chunks, block_size, torch.device(device))
        new = [x.bfloat16().to(device, dtype) for x in (q, k, v)]
        kv.write(0, *new[1:], batch.slot_mapping)
        results.append(paged_attention(*new, kv, 0, batch, head_dim**-0.5).float().cpu())
    # bf16 holds 8 bits: the output is rounded once and the softmax weights once.
    torch.testing.assert_close(results[1], results[0], rtol=2e-2, atol=2e-2)
