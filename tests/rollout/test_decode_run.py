"""Decode runs with padding, look-ahead and replayed steps give what the synchronous engine gives."""

import random
from itertools import pairwise

import pytest
import torch
from hash_runner import (
    GraphedEngine,
    assert_same,
    make_engine,
    random_prompts,
)

from qerl.rollout.core import NonFiniteLogitsError, SamplingParams
from qerl.rollout.decode_step import bucket_sizes
from qerl.rollout.engine import EngineConfig
from qerl.rollout.graphs import MAX_KINDS, StepGraphs
from qerl.rollout.kv_cache import blocks_for_tokens


class FarAhead(GraphedEngine):
    look_ahead = 3


@pytest.mark.parametrize("kind", [GraphedEngine, FarAhead])
@pytest.mark.parametrize("seed", range(25))
def test_random_mixes_match_the_naive_generator(seed: int, kind: type[GraphedEngine]) -> None:
    rng = random.Random(1000 + seed)
    block_size, longest = rng.randint(1, 16), rng.choice([3, 20, 60])
    temperature = rng.choice([0.0, 0.7, 1.0])
    sampling = SamplingParams(
        n=rng.randint(1, 5) if temperature else 1,
        max_tokens=rng.choice([1, 2, 25, 70]),
        temperature=temperature,
        seed=seed,
        ignore_eos=rng.random() < 0.3,
        stop_token_ids=rng.choice([(), (4,), (4, 9)]),
    )
    smallest = blocks_for_tokens(longest + sampling.max_tokens - 1, block_size)
    engine = make_engine(
        kind,
        block_size=block_size,
        num_blocks=rng.choice([None, smallest, smallest + 2, 3 * smallest]),
        max_num_seqs=rng.randint(1, 12),
        max_batch_tokens=rng.choice([5, 16, 4096]),
    )
    prompts = random_prompts(rng, rng.randint(1, 10), longest)
    assert_same(engine, prompts, sampling, step=seed % 3)
    assert_same(engine, prompts[::-1], sampling, step=5)


def test_steps_are_launched_before_the_tokens_of_the_step_before_are_read() -> None:
    engine = make_engine(GraphedEngine)
    ahead = []
    engine.generate(
        [[1, 2, 3]],
        SamplingParams(max_tokens=12, ignore_eos=True),
        progress=lambda finished, total, generated: ahead.append(engine.runner.forwards - generated),
    )
    # The prompt's step is synchronous; then one step runs ahead until the length tells that no more is needed.
    assert ahead == [0] + [1] * 10 + [0]
    assert engine.stats.steps == engine.runner.forwards == 12
    assert engine.stats.decode_steps == 11


def test_discarded_tokens_are_counted_and_their_blocks_come_back() -> None:
    prompts, sampling = random_prompts(random.Random(0), 30, 9), SamplingParams(max_tokens=60)
    graphed, plain = make_engine(GraphedEngine, block_size=4), make_engine(block_size=4)
    assert graphed.generate(prompts, sampling) == plain.generate(prompts, sampling)
    stopped = sum(o.finish_reason == "stop" for [o] in plain.generate(prompts, sampling))
    assert stopped > 20
    extra = graphed.stats.computed_tokens - plain.stats.computed_tokens
    assert 0 < extra <= stopped


def test_batches_are_padded_to_buckets_and_shrink_as_samples_finish() -> None:
    engine = make_engine(GraphedEngine, max_num_seqs=40)
    sizes: list[int] = []
    forward = engine.runner.forward

    def recording(batch, kv):  # type: ignore[no-untyped-def]
        sizes.append(batch.token_ids.shape[0])
        return forward(batch, kv)

    engine.runner.forward = recording
    assert_same(engine, random_prompts(random.Random(3), 37, 5), SamplingParams(max_tokens=80))
    decode = sizes[1:]
    assert decode == sorted(decode, reverse=True)
    assert decode[0] == 40 and set(decode) <= set(bucket_sizes(40))
    assert len(set(decode)) > 5
    assert engine.runner.padded_rows > 0


@pytest.mark.parametrize(
    ("max_rows", "expected"),
    [(1, (1,)), (5, (1, 2, 4, 5)), (64, (1, 2, 4, 8, 16, 24, 32, 48, 64)), (256, None), (500, None)],
)
def test_bucket_sizes_end_at_the_largest_batch(max_rows: int, expected: tuple[int, ...] | None) -> None:
    sizes = bucket_sizes(max_rows)
    assert sizes[-1] == max_rows
    assert sizes == tuple(sorted(set(sizes)))
    assert expected is None or sizes == expected
    assert all(b - a <= 64 for a, b in pairwise(sizes))


def test_graphs_are_kept_between_calls_and_void_when_an_address_changes() -> None:
    engine = make_engine(GraphedEngine, num_blocks=60, max_num_seqs=8)
    prompts, sampling = random_prompts(random.Random(1), 8, 9), SamplingParams(max_tokens=20, ignore_eos=True)
    assert_same(engine, prompts, sampling)
    assert (engine.stats.graph_captures, engine.stats.graph_replays) == (1, engine.stats.decode_steps - 1)
    assert engine.runner.independent_forwards == engine.stats.decode_steps
    pool = engine.kv
    assert_same(engine, prompts, sampling)
    assert (engine.stats.graph_captures, engine.stats.graph_replays) == (0, engine.stats.decode_steps)
    assert engine.kv is pool
    assert_same(engine, prompts, SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.7))
    assert engine.stats.graph_captures == 1
    engine.runner.key += 1
    assert_same(engine, prompts, sampling)
    assert engine.stats.graph_captures == 1
    engine.reset()
    assert_same(engine, prompts, sampling)
    assert engine.stats.graph_captures == 1


def test_graphs_of_the_least_recent_distributions_are_dropped() -> None:
    ran: list[tuple[str, int]] = []
    graphs = StepGraphs(lambda step: lambda: ran.append(("replay", step())))
    for kind in range(MAX_KINDS + 1):
        for _ in range(3):
            graphs.run(kind, 4, lambda kind=kind: ran.append(("eager", kind)))
    assert graphs.captures == MAX_KINDS + 1
    assert graphs.replays == 2 * graphs.captures
    before = graphs.captures
    for kind in (1, 0):
        graphs.run(kind, 4, lambda: None)
        graphs.run(kind, 4, lambda: None)
    assert graphs.captures == before + 1, "1 was kept, 0 was not"


def test_truncated_and_mixed_sampling_leaves_the_graph_and_stays_right() -> None:
    prompts, truncated = random_prompts(random.Random(1), 8, 9), SamplingParams(max_tokens=20, n=2, top_k=5, top_p=0.9)
    graphed, plain = make_engine(GraphedEngine), make_engine()
    for _ in range(2):
        assert graphed.generate(prompts, truncated) == plain.generate(prompts, truncated)
    assert graphed.stats.graph_replays == graphed.stats.decode_steps
    ways = [
        SamplingParams(max_tokens=15, ignore_eos=True, seed=3),
        SamplingParams(max_tokens=9, temperature=0.0),
        SamplingParams(max_tokens=15, n=3, top_k=4),
        SamplingParams(max_tokens=12, temperature=0.7, stop_token_ids=(4,)),
    ]
    alone = [plain.generate([prompts[i]], way) for i, way in enumerate(ways)]
    with graphed.open_session() as session:
        # Interleaved, so that rows that draw alike do not arrive together.
        ids = [session.add(prompts[i], way) for _ in range(2) for i, way in enumerate(ways)]
        tokens: dict[tuple[int, int], list[int]] = {}
        while session.has_unfinished:
            for output in session.step():
                tokens.setdefault((output.request_id, output.sample_index), []).append(output.token_id)
    assert graphed.stats.graph_replays > 0
    for request, (way, [samples]) in zip(ids, [*zip(ways, alone, strict=True)] * 2, strict=True):
        assert [tokens[request, i] for i in range(way.n)] == [sample.token_ids for sample in samples]


def test_nan_in_a_step_in_flight_is_named() -> None:
    engine = make_engine(GraphedEngine)
    engine.runner.poison_at = 6
    with pytest.raises(NonFiniteLogitsError, match="1 of 2 rows"):
        engine.generate([[1, 2], [3]], SamplingParams(max_tokens=12, ignore_eos=True))
    assert_same(engine, [[1, 2], [3]], SamplingParams(max_tokens=12))


def test_stopping_a_call_with_steps_in_flight_leaves_the_engine_usable() -> None:
    engine = make_engine(GraphedEngine, block_size=4, num_blocks=200)

    def stop(finished: int, total: int, generated: int) -> None:
        if generated > 20:
            raise KeyboardInterrupt

    prompts, sampling = random_prompts(random.Random(4), 5, 9), SamplingParams(n=2, max_tokens=12)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(prompts, sampling, progress=stop)
    assert_same(engine, prompts, sampling)


def test_memory_and_buffers_stay_over_many_steps() -> None:
    engine = make_engine(GraphedEngine, max_num_seqs=8, num_blocks=120)
    engine.generate([[1]], SamplingParams(max_tokens=2, ignore_eos=True))
    buffers, pool = engine.decoder.buffers, engine.kv

    def addresses() -> dict[str, int]:
        tensors = {"k": pool.k, "v": pool.v} | {k: v for k, v in vars(buffers).items() if isinstance(v, torch.Tensor)}
        return {name: tensor.data_ptr() for name, tensor in tensors.items()}

    before = addresses()
    assert before.keys() > {"inputs", "table", "tokens", "results", "block_table", "keys"}
    for call in range(4):
        assert_same(engine, random_prompts(random.Random(call), 6, 9), SamplingParams(max_tokens=60, ignore_eos=True))
        assert engine.stats.decode_steps >= 55
    assert engine.decoder.buffers is buffers and engine.kv is pool
    assert addresses() == before


class CountingRunner:
    """No model: a row's logits prefer a token that depends on its input and position."""

    num_layers, num_kv_heads, head_dim, vocab_size = 1, 1, 1, 16
    dtype, device, max_position = torch.float32, torch.device("cpu"), 4096

    def forward(self, batch, kv):  # type: ignore[no-untyped-def]
        wanted = batch.wanted(batch.token_ids * 5 + batch.positions * 3 + 1) % self.vocab_size
        return torch.nn.functional.one_hot(wanted, self.vocab_size).float() * 4

    def capture_key(self) -> int:
        return 0


def test_ten_thousand_requests_in_one_call() -> None:
    rng = random.Random(0)
    prompts = [[rng.randrange(16) for _ in range(rng.randint(1, 12))] for _ in range(10_000)]
    sampling = SamplingParams(max_tokens=8, temperature=0)
    outputs = {}
    for kind in (GraphedEngine, type(make_engine())):
        engine = kind(CountingRunner(), [0], EngineConfig(block_size=4, num_blocks=900, max_batch_tokens=2048))
        outputs[kind] = engine.generate(prompts, sampling)
        assert engine.stats.num_samples == 10_000
    assert len({repr(result) for result in outputs.values()}) == 1
    assert {o.finish_reason for [o] in outputs[GraphedEngine]} == {"stop", "length"}
