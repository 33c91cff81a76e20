"""Decoding with drafts gives the tokens of decoding without, whatever was guessed and wherever a sample ends."""

import random
from collections.abc import Iterator

import pytest
from hash_runner import GraphedEngine, assert_same, make_engine, naive_generate, random_prompts
from test_session import Streams, assert_request, drain, play, random_sampling

from qerl.rollout import speculation
from qerl.rollout.core import NonFiniteLogitsError, SamplingParams
from qerl.rollout.drafts import Draft, DraftIndex
from qerl.rollout.engine import RolloutEngine
from qerl.rollout.kv_cache import blocks_for_tokens
from qerl.rollout.speculation import Speculation
from qerl.rollout.speculative_run import SpeculativeRun

KINDS = [RolloutEngine, GraphedEngine]


@pytest.fixture
def eager_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draft is fed and no verdict ends drafting: this is about what comes out, not about what pays."""
    monkeypatch.setattr(Speculation, "_best_count", lambda self, samples, gains: len(gains))
    monkeypatch.setattr(speculation, "_WINDOW", 1 << 60)


@pytest.fixture
def any_drafts(monkeypatch: pytest.MonkeyPatch, eager_drafts: None) -> Iterator[random.Random]:
    """Guesses of any length that are right up to a random place (those that history knows), then noise."""
    rng, propose = random.Random(0), DraftIndex.propose

    def spoiled(index: DraftIndex, number: int, count: int) -> Draft:
        draft = propose(index, number, count)
        token_ids = [token if rng.random() < 0.8 else rng.randrange(23) for token in draft.token_ids]
        token_ids = token_ids or [rng.randrange(23) for _ in range(rng.randint(0, max(0, count)))]
        return Draft(token_ids[: rng.randint(0, max(0, count))], max(1, draft.match))

    monkeypatch.setattr(DraftIndex, "propose", spoiled)
    yield rng


def mix(rng: random.Random) -> tuple[list[list[int]], SamplingParams, dict[str, int | None]]:
    """Prompts, parameters and limits of an engine that drafts."""
    block_size, longest = rng.randint(1, 16), rng.choice([3, 20, 60])
    temperature = rng.choice([0.0, 0.7, 1.0])
    sampling = SamplingParams(
        n=rng.randint(1, 5) if temperature else 1,
        max_tokens=rng.choice([1, 2, 25, 70]),
        temperature=temperature,
        seed=rng.randrange(100),
        ignore_eos=rng.random() < 0.3,
        stop_token_ids=rng.choice([(), (4,), (4, 9)]),
    )
    smallest = blocks_for_tokens(longest + sampling.max_tokens - 1, block_size)
    limits = {
        "block_size": block_size,
        "num_blocks": rng.choice([None, smallest, smallest + 2, 3 * smallest]),
        "max_num_seqs": rng.randint(1, 12),
        "max_batch_tokens": rng.choice([5, 16, 4096]),
        "speculative_tokens": rng.randint(1, 6),
        "speculative_max_batch": rng.choice([1, 3, 8, 40]),
        "speculative_history": rng.choice([0, 40, 100_000]),
    }
    return random_prompts(rng, rng.randint(1, 10), longest), sampling, limits


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(25))
def test_random_mixes_match_the_naive_generator(
    seed: int, kind: type[RolloutEngine], any_drafts: random.Random
) -> None:
    prompts, sampling, limits = mix(random.Random(2000 + seed))
    engine = make_engine(kind, **limits)
    assert_same(engine, prompts, sampling, step=seed % 3)
    # Again, when history knows what comes, and in another order.
    assert_same(engine, prompts, sampling, step=seed % 3)
    assert_same(engine, prompts[::-1], sampling, step=5)
    assert engine.history.num_tokens <= limits["speculative_history"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(8))
def test_requests_that_come_and_go_get_their_own_tokens(
    seed: int, kind: type[RolloutEngine], any_drafts: random.Random
) -> None:
    rng = random.Random(seed)
    engine = make_engine(
        kind,
        block_size=4,
        num_blocks=rng.choice([25, 60, 400]),
        max_num_seqs=rng.randint(1, 12),
        max_batch_tokens=32,
        speculative_tokens=rng.randint(1, 5),
        speculative_history=10_000,
    )
    todo = [(prompt, random_sampling(rng, (0.0, 0.7, 1.0))) for prompt in random_prompts(rng, 25, 30)]
    for _ in range(2):
        play(engine, rng, todo)
    # The second time what finished the first time is known.
    assert engine.stats.drafted_tokens > engine.stats.accepted_tokens > 0


@pytest.mark.parametrize("kind", KINDS)
def test_preemption_with_drafts_in_the_last_blocks(kind: type[RolloutEngine], any_drafts: random.Random) -> None:
    prompts, sampling = random_prompts(random.Random(1), 12, 30), SamplingParams(n=3, max_tokens=20, seed=4)
    engine = make_engine(
        kind, block_size=4, num_blocks=14, speculative_tokens=5, speculative_history=10_000, max_batch_tokens=11
    )
    for _ in range(2):
        assert_same(engine, prompts, sampling)
        assert engine.stats.preemptions > 0
        assert engine.stats.drafted_tokens > engine.stats.accepted_tokens > 0


def test_a_known_completion_is_taken_in_few_steps_and_ends_where_it_should(eager_drafts: None) -> None:
    """EOS, stop tokens and the length limit all fall inside drafts that are right."""
    ends = set()
    for max_tokens in range(8, 15):
        sampling = SamplingParams(n=2, max_tokens=max_tokens, seed=max_tokens, stop_token_ids=(4, 9))
        prompts = random_prompts(random.Random(max_tokens), 6, 9)
        engine = make_engine(block_size=4, speculative_tokens=6, speculative_max_batch=12, speculative_history=10_000)
        for _ in range(2):
            assert_same(engine, prompts, sampling)
        stats = engine.stats
        # All prompts are one step; then the 7 tokens of a step that is right.
        assert stats.decode_steps <= 4 < max_tokens - 1
        assert stats.accepted_tokens > stats.generated_tokens / 3 and stats.acceptance > 0.6
        fed = stats.prompt_tokens + stats.generated_tokens - stats.num_samples
        assert stats.computed_tokens >= fed + stats.drafted_tokens - stats.accepted_tokens
        ends |= {reason for group in naive_generate(prompts, sampling) for _, _, reason in group}
    assert ends == {"stop", "length"}


def test_block_tables_are_as_many_as_samples_run_at_once() -> None:
    engine = make_engine(max_num_seqs=3, speculative_tokens=60, speculative_max_batch=8)
    engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
    assert engine.decoder.buffers.max_rows == 3 * 61
    assert engine.decoder.buffers.table.shape[0] == 3 + 1


def test_between_steps_blocks_are_those_of_plain_decoding(any_drafts: random.Random) -> None:
    engine = make_engine(block_size=2, num_blocks=200, speculative_tokens=6)
    held: list[tuple[int, int]] = []

    def look(finished: int, total: int, generated: int) -> None:
        engine.scheduler.check_integrity()
        for sample in engine.scheduler.running:
            held.append((len(sample.blocks), blocks_for_tokens(len(sample.token_ids) - 1, 2)))

    engine.generate([[1, 2, 3]], SamplingParams(n=3, max_tokens=30, ignore_eos=True), progress=look)
    # The first look is after the prompt's step, before its last block is copied.
    assert len(held) > 20
    assert all(have == wanted for have, wanted in held)
    assert engine.stats.peak_blocks <= 3 * blocks_for_tokens(3 + 30 - 1, 2)


def test_samples_that_draw_differently_share_a_step(any_drafts: random.Random) -> None:
    ways = [
        SamplingParams(max_tokens=15, ignore_eos=True, seed=3),
        SamplingParams(max_tokens=9, temperature=0.0),
        SamplingParams(max_tokens=15, n=3, top_k=4),
        SamplingParams(max_tokens=12, temperature=0.7, stop_token_ids=(4,)),
        SamplingParams(max_tokens=12, n=2, top_p=0.8),
    ]
    prompts = random_prompts(random.Random(1), len(ways), 9)
    plain, drafting = make_engine(), make_engine(GraphedEngine, speculative_tokens=3, speculative_history=5_000)
    for _ in range(2):
        with drafting.open_session() as session:
            for prompt, way in zip(prompts, ways, strict=True):
                session.add(prompt, way)
            streams = drain(session)
        assert drafting.stats.speculative_steps > 3
        for request, (prompt, way) in enumerate(zip(prompts, ways, strict=True)):
            for number, expected in enumerate(plain.generate([prompt], way)[0]):
                outputs = streams[request, number]
                assert [output.token_id for output in outputs] == expected.token_ids
                assert [output.logprob for output in outputs] == expected.logprobs
                assert [output.temperature_logprob for output in outputs] == expected.temperature_logprobs


def test_a_long_call_drafts_once_few_samples_are_left(eager_drafts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[int] = []
    enter = SpeculativeRun.enter

    def recording(run: SpeculativeRun, step: object) -> None:
        batches.append(len(step.chunks))
        enter(run, step)

    monkeypatch.setattr(SpeculativeRun, "enter", recording)
    limits = {"max_num_seqs": 40, "speculative_tokens": 4, "speculative_max_batch": 4, "speculative_history": 5_000}
    engine = make_engine(GraphedEngine, **limits)
    for call in range(1, 3):
        assert_same(engine, random_prompts(random.Random(3), 37, 5), SamplingParams(max_tokens=80))
        assert batches == [4] * call
    assert 0 < engine.stats.speculative_steps < engine.stats.decode_steps


def test_nan_in_a_row_is_named_and_the_engine_stays_usable(eager_drafts: None) -> None:
    engine = make_engine(speculative_tokens=4, speculative_history=1_000)
    prompts, sampling = [[1, 2], [3]], SamplingParams(max_tokens=12, ignore_eos=True)
    assert_same(engine, prompts, sampling)
    engine.runner.poison_at = engine.runner.forwards + 2
    with pytest.raises(NonFiniteLogitsError, match=r"1 of \d+ rows"):
        engine.generate(prompts, sampling)
    assert_same(engine, prompts, sampling)


def test_an_aborted_request_leaves_the_others_and_no_block(any_drafts: random.Random) -> None:
    engine = make_engine(block_size=4, num_blocks=60, speculative_tokens=5)
    with engine.open_session() as session:
        prompt, sampling = [1, 2, 3], SamplingParams(max_tokens=20, ignore_eos=True)
        kept = session.add(prompt, sampling)
        dropped = session.add([4] * 9, SamplingParams(n=3, max_tokens=20, ignore_eos=True))
        streams: Streams = {}
        for _ in range(3):
            for output in session.step():
                streams.setdefault((output.request_id, output.sample_index), []).append(output)
        session.abort(dropped)
        engine.scheduler.check_integrity()
        assert_request(drain(session, streams), kept, prompt, sampling)
        assert engine.scheduler.allocator.num_used == 0
    assert engine.stats.speculative_steps > 0
