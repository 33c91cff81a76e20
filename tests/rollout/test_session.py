"""Sessions: requests that come and go give the tokens that a generate call of their own would give."""

import random
from collections import defaultdict

import pytest
from hash_runner import VOCAB, GraphedEngine, HashRunner, make_engine, naive_generate, random_prompts

from qerl.rollout.core import NonFiniteLogitsError, NotTokenIdsError, RequestTooLongError, SamplingParams
from qerl.rollout.engine import RolloutEngine
from qerl.rollout.session import EngineSession, StepOutput

Streams = dict[tuple[int, int], list[StepOutput]]


def drain(session: EngineSession, streams: Streams | None = None) -> Streams:
    """Step until nothing is left; outputs by (request, sample)."""
    streams = defaultdict(list) if streams is None else streams
    while session.has_unfinished:
        for output in session.step():
            streams[output.request_id, output.sample_index].append(output)
    return streams


def assert_request(streams: Streams, request_id: int, prompt: list[int], sampling: SamplingParams) -> None:
    for sample_index, (tokens, logprobs, reason) in enumerate(naive_generate([prompt], sampling)[0]):
        outputs = streams[request_id, sample_index]
        assert [output.token_id for output in outputs] == tokens
        assert [output.finish_reason for output in outputs] == [None] * (len(tokens) - 1) + [reason]
        assert [output.logprob for output in outputs] == pytest.approx(logprobs, abs=1e-5)
        assert [output.temperature_logprob for output in outputs] == [output.logprob for output in outputs]


def random_sampling(rng: random.Random, temperatures: tuple[float, ...]) -> SamplingParams:
    temperature = rng.choice(temperatures)
    return SamplingParams(
        n=rng.choice([1, 1, 1, 3]) if temperature else 1,
        max_tokens=rng.randint(1, 20),
        temperature=temperature,
        seed=rng.randrange(100),
        ignore_eos=rng.random() < 0.3,
        stop_token_ids=rng.choice([(), (4,), (4, 9)]),
    )


def play(engine: RolloutEngine, rng: random.Random, todo: list[tuple[list[int], SamplingParams]]) -> None:
    """Requests come, and some are aborted, at random times of one session; those that stayed get their own tokens."""
    waiting, requests, aborted = list(todo), {}, set()
    streams: Streams = defaultdict(list)
    with engine.open_session() as session:
        while waiting or session.has_unfinished:
            while waiting and rng.random() < 0.6:
                request = waiting.pop()
                requests[session.add(*request)] = request
            if requests and rng.random() < 0.1:
                victim = rng.choice(list(requests))
                session.abort(victim)
                aborted.add(victim)
            for output in session.step():
                assert output.request_id not in aborted
                streams[output.request_id, output.sample_index].append(output)
            engine.scheduler.check_integrity()
        assert engine.scheduler.allocator.num_used == 0
    assert engine.stats.generated_tokens == sum(map(len, streams.values()))
    assert sorted(requests) == list(range(len(todo)))
    for request_id, (prompt, sampling) in requests.items():
        if request_id not in aborted:
            assert_request(streams, request_id, prompt, sampling)


@pytest.mark.parametrize("kind", [RolloutEngine, GraphedEngine])
@pytest.mark.parametrize("temperatures", [(1.0,), (0.0, 0.7, 1.0)], ids=["uniform", "mixed"])
@pytest.mark.parametrize("seed", range(8))
def test_requests_that_come_and_go_get_their_own_tokens(
    seed: int, temperatures: tuple[float, ...], kind: type[RolloutEngine]
) -> None:
    rng = random.Random(seed)
    limits = {"num_blocks": rng.choice([25, 60, 400]), "max_num_seqs": rng.randint(1, 12), "max_batch_tokens": 32}
    engine = make_engine(kind, block_size=rng.choice([1, 4, 16]) if limits["num_blocks"] == 400 else 4, **limits)
    play(engine, rng, [(prompt, random_sampling(rng, temperatures)) for prompt in random_prompts(rng, 25, 30)])
    assert (engine.stats.graph_replays > 0) == (kind is GraphedEngine)


def test_generate_is_refused_while_a_session_is_open_and_works_after_it() -> None:
    engine = make_engine()
    session = engine.open_session()
    for refused in (
        lambda: engine.generate([[1]], SamplingParams()),
        engine.open_session,
        engine.reset,
    ):
        with pytest.raises(RuntimeError, match="while a session is open"):
            refused()
    session.close()
    session.close()
    assert len(engine.generate([[1]], SamplingParams(max_tokens=3))) == 1
    with pytest.raises(RuntimeError, match="session is closed"):
        session.step()
    assert not session.has_unfinished


def test_an_aborted_request_frees_its_blocks_and_unknown_ids_are_ignored() -> None:
    engine = make_engine(block_size=4, num_blocks=40)
    with engine.open_session() as session:
        kept = session.add([1, 2, 3], SamplingParams(max_tokens=20, ignore_eos=True))
        dropped = session.add([4] * 9, SamplingParams(n=3, max_tokens=20, ignore_eos=True))
        for _ in range(4):
            session.step()
        held = engine.scheduler.allocator.num_used
        session.abort(dropped)
        engine.scheduler.check_integrity()
        assert engine.scheduler.allocator.num_used < held
        session.abort(dropped)
        session.abort(99)
        streams = drain(session)
        assert set(streams) == {(kept, 0)}
        session.abort(kept)
        assert session.step() == []
        assert engine.scheduler.allocator.num_used == 0


def test_bad_requests_are_refused_and_disturb_nothing() -> None:
    with make_engine(block_size=4, num_blocks=6, max_model_len=40).open_session() as session:
        prompt, sampling = [1, 2, 3], SamplingParams(max_tokens=10)
        good = session.add(prompt, sampling)
        for prompt_of_another_kind in ("text", 3, [[1]]):
            with pytest.raises(NotTokenIdsError, match="lists of token ids"):
                session.add(prompt_of_another_kind, sampling)
        with pytest.raises(ValueError, match="are empty"):
            session.add([], sampling)
        with pytest.raises(ValueError, match=f"vocabulary of {VOCAB}"):
            session.add([VOCAB], sampling)
        with pytest.raises(RequestTooLongError, match="over the limit of 40"):
            session.add([1] * 31, sampling)
        with pytest.raises(RequestTooLongError, match="cache has 6"):
            session.add([1] * 21, sampling)
        assert_request(drain(session), good, prompt, sampling)


def test_nan_closes_the_session_and_leaves_the_engine_usable() -> None:
    engine = make_engine()
    engine.runner.poison_at = 2
    session = engine.open_session()
    session.add([1, 2], SamplingParams(max_tokens=9, ignore_eos=True))
    with pytest.raises(NonFiniteLogitsError):
        drain(session)
    assert isinstance(engine.runner, HashRunner)
    assert not session.has_unfinished
    assert len(engine.generate([[1]], SamplingParams(max_tokens=3))) == 1


def test_the_cache_of_a_session_holds_all_its_sequences_at_full_length_or_what_the_bound_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server's cache is no larger than its limits on sequences and lengths can use."""
    engine = make_engine(block_size=4, max_num_seqs=3, max_model_len=22)
    with engine.open_session():
        assert engine.kv.num_blocks == 3 * 6
    monkeypatch.setattr("qerl.rollout.pool.AUTO_CPU_BYTES", 10 * engine.pool.block_bytes)
    engine.reset()
    with engine.open_session():
        assert engine.kv.num_blocks == 10 - 1
