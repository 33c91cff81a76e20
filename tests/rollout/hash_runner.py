"""A fake model whose logits hash what the KV cache really holds, and a naive generator over the same hash.

A wrong block table, slot, position, stale key or a shared block that was overwritten changes the hash, hence the
tokens.
"""

import math
import random
from collections.abc import Sequence

import pytest
import torch

from qerl.kernels.paged_attention.rotary import newest_places
from qerl.rollout.core import ForwardBatch, SamplingParams
from qerl.rollout.decode_step import DecodeBuffers, bucket_sizes
from qerl.rollout.decoder import Decoder
from qerl.rollout.engine import EngineConfig, RolloutEngine
from qerl.rollout.graphs import StepGraphs
from qerl.rollout.kv_cache import KVCache
from qerl.rollout.sampler import keys_tensor, sequence_key, uniforms

VOCAB, EOS = 23, (21, 22)
MODULUS = 1_000_003


def token_hash(token: int, position: int) -> int:
    """Contribution of one cached token; depends on both in a way that no swap leaves unchanged."""
    return (token * 7919 + position * 104_729 + (token + 3) * (position + 5) * 31 + 17) % MODULUS


def history_logits(total: torch.Tensor) -> torch.Tensor:
    """float32 [R, V] from the sums int64 [R] of the hashes of the histories."""
    columns = torch.arange(1, VOCAB + 1)
    mixed = (total % MODULUS)[:, None] * columns * 40_503 % 65_521
    return (mixed % 512).float() / 100


class HashRunner:
    """Keeps (token, position) as K and V; logits are a hash of the whole cached history of each wanted row."""

    num_layers, num_kv_heads, head_dim, vocab_size = 1, 1, 1, VOCAB
    dtype, device, max_position = torch.float64, torch.device("cpu"), 200

    def __init__(self) -> None:
        self.engine: RolloutEngine | None = None
        self.forwards = 0
        self.independent_forwards = 0
        self.padded_rows = 0
        self.key = 0
        self.poison_at: int | None = None

    def forward(self, batch: ForwardBatch, kv: KVCache) -> torch.Tensor:
        self._check(batch, kv.block_size)
        kv.write(0, batch.token_ids[:, None, None], batch.positions[:, None, None], batch.slot_mapping)
        lens = batch.cu_seqlens_q.diff().long()
        sequence = batch.wanted(torch.repeat_interleave(torch.arange(len(lens)), lens))
        tokens = kv.k[0, batch.block_table[sequence].long()].flatten(1).long()
        positions = kv.v[0, batch.block_table[sequence].long()].flatten(1).long()
        seen = torch.arange(tokens.shape[1]) <= batch.wanted(batch.positions)[:, None]
        assert torch.equal(positions[seen], torch.arange(tokens.shape[1]).expand_as(seen)[seen])
        total = (token_hash(tokens, positions) * seen).sum(-1)
        logits = history_logits(total)
        if self.forwards == self.poison_at:
            logits[-1, 3] = math.nan
        self.forwards += 1
        return logits

    def capture_key(self) -> int:
        """Changed by tests to void captured graphs."""
        return self.key

    def _check(self, batch: ForwardBatch, block_size: int) -> None:
        tokens, sequences = batch.token_ids.shape[0], batch.context_lens.shape[0]
        lens = batch.cu_seqlens_q.diff()
        assert batch.cu_seqlens_q[0] == 0 and batch.cu_seqlens_q[-1] == tokens
        assert batch.positions.shape == batch.slot_mapping.shape == (tokens,)
        assert batch.block_table.shape[0] == sequences == len(lens)
        assert batch.max_q_len == lens.max() and batch.max_context_len >= batch.context_lens.max()
        assert torch.equal(batch.positions[(batch.cu_seqlens_q[1:] - 1).long()] + 1, batch.context_lens.long())
        # Rows that pad a decode step write to the null block.
        slots = batch.slot_mapping[batch.slot_mapping >= block_size]
        self.padded_rows += tokens - len(slots)
        assert slots.unique().numel() == len(slots)
        if batch.independent_rows:
            assert tokens == sequences
            places = newest_places(batch.block_table, batch.context_lens, block_size)
            assert torch.equal(torch.stack(places), torch.stack((batch.positions, batch.slot_mapping)))
            held = torch.arange(batch.block_table.shape[1]) * block_size < batch.context_lens[:, None]
            written = batch.slot_mapping // block_size
            reads = ((batch.block_table[:, None] == written[:, None]) & held[:, None]).any(-1)  # [reader, writer]
            assert not (reads & (written > 0)).fill_diagonal_(False).any()
            self.independent_forwards += 1
        for name in ("token_ids", "positions", "slot_mapping"):
            assert getattr(batch, name).dtype == torch.int64
        assert batch.logits_index is None or batch.logits_index.dtype == torch.int64
        for name in ("cu_seqlens_q", "context_lens", "block_table"):
            assert getattr(batch, name).dtype == torch.int32
        if self.engine is not None:
            scheduler = self.engine.scheduler
            scheduler.check_integrity()
            written = slots.div(block_size, rounding_mode="floor").tolist()
            assert all(scheduler.allocator.ref_count(block) == 1 for block in written)


class GraphedEngine(RolloutEngine):
    """Decodes on the CPU as on CUDA: padded batches, look-ahead, and steps replayed with what they had captured."""

    look_ahead = 1

    def _make_decoder(self) -> Decoder:
        decoder = super()._make_decoder()
        sizes = bucket_sizes(self.config.max_rows)
        rows, width = decoder.buffers.table.shape
        depth = self.look_ahead + 1
        buffers = DecodeBuffers(self.config.max_rows, width, self.runner.device, depth=depth, seats=rows - 1)
        return Decoder(self.runner, buffers, StepGraphs(lambda step: step), sizes, self.look_ahead)


def make_engine(kind: type[RolloutEngine] = RolloutEngine, **limits: int | None) -> RolloutEngine:
    runner = HashRunner()
    runner.engine = kind(runner, EOS, EngineConfig(**limits))
    return runner.engine


Result = tuple[list[int], list[float], str]


def naive_generate(
    prompts: list[list[int]], sampling: SamplingParams, step: int = 0, prompt_ids: Sequence[int] | None = None
) -> list[list[Result]]:
    """One token of one sample at a time: float64 softmax, linear search in the cumulative sum."""
    ids = range(len(prompts)) if prompt_ids is None else prompt_ids
    return [
        [_naive_sample(prompt, sampling, sequence_key(sampling.seed, step, prompt_id, i)) for i in range(sampling.n)]
        for prompt, prompt_id in zip(prompts, ids, strict=True)
    ]


def _naive_sample(prompt: list[int], sampling: SamplingParams, key: tuple[int, int]) -> Result:
    stop = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(EOS))
    positions = torch.arange(len(prompt), len(prompt) + sampling.max_tokens)
    draws = uniforms(keys_tensor([key], torch.device("cpu")).expand(len(positions), 2), positions).tolist()
    total = sum(token_hash(token, at) for at, token in enumerate(prompt))
    tokens, logprobs = [], []
    for draw in draws:
        logits = history_logits(torch.tensor([total]))[0].double()
        log_softmax = (logits / (sampling.temperature or 1.0)).log_softmax(-1).tolist()
        if sampling.greedy:
            token = log_softmax.index(max(log_softmax))
        else:
            token, mass = 0, math.exp(log_softmax[0])
            while mass <= draw:
                token += 1
                mass += math.exp(log_softmax[token])
        total += token_hash(token, len(prompt) + len(tokens))
        tokens.append(token)
        logprobs.append(log_softmax[token])
        if token in stop:
            return tokens, logprobs, "stop"
    return tokens, logprobs, "length"


def assert_same(engine: RolloutEngine, prompts: list[list[int]], sampling: SamplingParams, **options: object) -> None:
    outputs = engine.generate(prompts, sampling, **options)
    expected = naive_generate(prompts, sampling, **options)
    assert len(outputs) == len(prompts)
    for prompt_index, (group, references) in enumerate(zip(outputs, expected, strict=True)):
        for sample_index, (output, (tokens, logprobs, reason)) in enumerate(zip(group, references, strict=True)):
            assert (output.prompt_index, output.sample_index) == (prompt_index, sample_index)
            assert output.token_ids == tokens
            assert output.finish_reason == reason
            assert output.logprobs == pytest.approx(logprobs, abs=1e-5)
            assert output.temperature_logprobs == output.logprobs
    stats = engine.stats
    assert stats.num_samples == len(prompts) * sampling.n
    assert stats.prompt_tokens == sum(map(len, prompts))
    assert stats.generated_tokens == sum(len(output.token_ids) for group in outputs for output in group)
    assert stats.peak_blocks <= stats.num_blocks


def random_prompts(rng: random.Random, count: int, longest: int) -> list[list[int]]:
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(1, longest))] for _ in range(count)]
