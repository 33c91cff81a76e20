"""The engine against a naive generator, over a fake model whose logits hash what the KV cache really holds."""

import random

import numpy as np
import pytest
import torch
from hash_runner import EOS, VOCAB, HashRunner, assert_same, make_engine, random_prompts

from qerl.rollout.core import NonFiniteLogitsError, NotTokenIdsError, RequestTooLongError, SamplingParams
from qerl.rollout.engine import EngineConfig, RolloutEngine
from qerl.rollout.graphs import StepGraphs
from qerl.rollout.kv_cache import blocks_for_tokens


@pytest.mark.parametrize("seed", range(40))
def test_random_mixes_match_the_naive_generator(seed: int) -> None:
    rng = random.Random(seed)
    block_size, longest = rng.randint(1, 16), rng.choice([3, 20, 60])
    temperature = rng.choice([0.0, 0.7, 1.0, 1.5])
    sampling = SamplingParams(
        n=rng.randint(1, 5) if temperature else 1,
        max_tokens=rng.randint(1, 25),
        temperature=temperature,
        seed=seed,
        ignore_eos=rng.random() < 0.3,
        stop_token_ids=rng.choice([(), (4,), (4, 9)]),
    )
    smallest = blocks_for_tokens(longest + sampling.max_tokens - 1, block_size)
    engine = make_engine(
        block_size=block_size,
        num_blocks=rng.choice([None, smallest, smallest + 2, 3 * smallest]),
        max_num_seqs=rng.randint(1, 12),
        max_batch_tokens=rng.choice([1, 5, 16, 4096]),
    )
    prompts = random_prompts(rng, rng.randint(1, 10), longest)
    assert_same(engine, prompts, sampling, step=seed % 3)
    # A second call over the same, now dirty, pool.
    assert_same(engine, prompts[::-1], sampling, step=5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_many_requests_with_preemption(temperature: float) -> None:
    rng = random.Random(7)
    engine = make_engine(block_size=4, num_blocks=150, max_num_seqs=64, max_batch_tokens=256)
    prompts = random_prompts(rng, 300, 24)
    n = 4 if temperature else 1
    prompts *= 4 // n
    sampling = SamplingParams(n=n, max_tokens=24, temperature=temperature, ignore_eos=True)
    engine.runner.engine = None  # checked step by step in the smaller mixes above
    assert_same(engine, prompts, sampling)
    assert engine.stats.preemptions > 20
    assert engine.stats.num_samples == 1200


def test_graphs_are_cleared_before_the_decoder_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clearing waits for replays in flight; dropping alone would not."""
    engine, cleared = make_engine(block_size=4), []
    monkeypatch.setattr(StepGraphs, "clear", lambda graphs: cleared.append(graphs))
    for drop in (engine.reset, lambda: engine.generate([[1] * 40], SamplingParams(n=3, max_tokens=20))):
        engine.generate([[1, 2]], SamplingParams(max_tokens=2))
        graphs = engine.decoder.graphs
        drop()
        assert cleared.pop() is graphs and not cleared
        assert engine.decoder is None or engine.decoder.graphs is not graphs


def test_the_cache_size_changes_no_result() -> None:
    prompts = random_prompts(random.Random(1), 12, 30)
    sampling = SamplingParams(n=3, max_tokens=20, seed=4)
    roomy = make_engine(block_size=4)
    tight = make_engine(block_size=4, num_blocks=14, max_batch_tokens=11)
    assert roomy.generate(prompts, sampling) == tight.generate(prompts, sampling)
    assert roomy.stats.preemptions == 0 < tight.stats.preemptions
    assert tight.stats.computed_tokens > roomy.stats.computed_tokens


def test_results_do_not_depend_on_how_prompts_are_batched() -> None:
    prompts = random_prompts(random.Random(2), 6, 20)
    sampling = SamplingParams(n=2, max_tokens=15, seed=9)
    together = make_engine().generate(prompts, sampling, step=3, prompt_ids=[10, 11, 12, 13, 14, 15])
    for index, prompt in enumerate(prompts):
        [alone] = make_engine().generate([prompt], sampling, step=3, prompt_ids=[10 + index])
        assert [output.token_ids for output in alone] == [output.token_ids for output in together[index]]
        assert [output.logprobs for output in alone] == [output.logprobs for output in together[index]]


def test_seed_step_prompt_id_and_sample_each_give_other_tokens() -> None:
    engine = make_engine()
    prompt, params = [1, 2, 3], SamplingParams(n=2, max_tokens=30, ignore_eos=True)
    [[first, second]] = engine.generate([prompt], params)
    other_seed = SamplingParams(n=2, max_tokens=30, ignore_eos=True, seed=1)
    streams = {tuple(first.token_ids), tuple(second.token_ids)}
    streams.add(tuple(engine.generate([prompt], other_seed)[0][0].token_ids))
    streams.add(tuple(engine.generate([prompt], params, step=1)[0][0].token_ids))
    streams.add(tuple(engine.generate([prompt], params, prompt_ids=[7])[0][0].token_ids))
    assert len(streams) == 5
    assert engine.generate([prompt], params)[0][0] == first


def test_equal_prompts_are_separate_groups() -> None:
    assert_same(make_engine(), [[5, 6, 7]] * 4, SamplingParams(n=2, max_tokens=12))


def test_every_eos_of_the_model_ends_a_sample_and_is_kept() -> None:
    outputs = make_engine().generate(random_prompts(random.Random(0), 60, 9), SamplingParams(max_tokens=60))
    ends = {group[0].token_ids[-1] for group in outputs if group[0].finish_reason == "stop"}
    assert ends == set(EOS)
    for [output] in outputs:
        assert not set(output.token_ids[:-1]) & set(EOS)
        assert len(output.token_ids) == len(output.logprobs) == len(output.temperature_logprobs)
        if output.finish_reason == "length":
            assert len(output.token_ids) == 60 and output.token_ids[-1] not in EOS


def test_eos_as_the_last_allowed_token_is_a_stop() -> None:
    outputs = make_engine().generate(random_prompts(random.Random(0), 80, 9), SamplingParams(max_tokens=1))
    for [output] in outputs:
        assert output.finish_reason == ("stop" if output.token_ids[0] in EOS else "length")
    assert {output.finish_reason for [output] in outputs} == {"stop", "length"}


def test_ignore_eos_runs_to_the_limit_and_stop_ids_still_end() -> None:
    prompts = random_prompts(random.Random(3), 30, 9)
    outputs = make_engine().generate(prompts, SamplingParams(max_tokens=40, ignore_eos=True))
    assert {len(output.token_ids) for [output] in outputs} == {40}
    assert any(set(output.token_ids) & set(EOS) for [output] in outputs)
    stopped = make_engine().generate(prompts, SamplingParams(max_tokens=40, ignore_eos=True, stop_token_ids=(4,)))
    for [long], [short] in zip(outputs, stopped, strict=True):
        cut = long.token_ids.index(4) + 1 if 4 in long.token_ids else 40
        assert short.token_ids == long.token_ids[:cut]
        assert short.finish_reason == ("stop" if 4 in long.token_ids else "length")


def test_truncation_reports_both_logprobs() -> None:
    [group] = make_engine().generate([[1, 2]], SamplingParams(n=4, max_tokens=30, top_k=3, ignore_eos=True))
    for output in group:
        assert all(p > t for p, t in zip(output.logprobs, output.temperature_logprobs, strict=True))


def test_prompt_is_prefilled_once_per_group() -> None:
    engine = make_engine(block_size=4)
    engine.generate([[1] * 50], SamplingParams(n=8, max_tokens=5, ignore_eos=True))
    assert engine.stats.computed_tokens == 50 + 8 * 4
    assert engine.stats.steps == 5
    # 12 full prompt blocks once, the partial one and one more for each sample.
    assert engine.stats.peak_blocks == 12 + 8 * 2


def test_no_prompts_give_no_groups() -> None:
    engine = make_engine()
    assert engine.generate([], SamplingParams()) == []
    assert engine.stats.steps == 0
    assert engine.kv is None


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([[1], [], [2], []], {}, r"2 of 4 prompts are empty \(indices 1, 3\)"),
        ([[1], [2, VOCAB]], {}, rf"1 prompts \(indices 1\) .* vocabulary of {VOCAB}"),
        ([[-1]], {}, "outside the model's vocabulary"),
        ([[1], [2]], {"prompt_ids": [3]}, "1 prompt_ids for 2 prompts"),
        ([[1], [2], [1]], {"prompt_ids": [3, 4, 3]}, "3 prompt_ids hold only 2 distinct values"),
    ],
)
def test_bad_prompts_are_named(prompts: list[list[int]], options: dict[str, list[int]], message: str) -> None:
    engine = make_engine()
    with pytest.raises(ValueError, match=message):
        engine.generate(prompts, SamplingParams(max_tokens=4), **options)
    assert engine.runner.forwards == 0


@pytest.mark.parametrize(
    ("prompts", "found"),
    [
        (["some text"], "prompt 0 is a str"),
        ("some text", "a str was given for the list of them"),
        ([1, 2], "prompt 0 is a int"),
        ([[1], torch.tensor([1, 2])], "prompt 1 is a Tensor"),
        (torch.tensor([[1, 2]]), "a Tensor was given"),
        ([list(torch.tensor([1, 2]))], "prompt 0 holds a Tensor"),
        (np.array([[1, 2]]), "a ndarray was given"),
        ([["1", "2"]], "prompt 0 holds a str"),
        ([[1, 2.0]], "prompt 0 holds a float"),
        ([[True]], "prompt 0 holds a bool"),
        ({"input_ids": [[1]]}, "a dict was given"),
    ],
)
def test_prompts_that_are_no_token_ids_are_refused_first(prompts: object, found: str) -> None:
    """A text ended in a TypeError that compared a str with an int."""
    engine = make_engine()
    with pytest.raises(NotTokenIdsError, match=rf"lists of token ids, but {found}.*apply_chat_template"):
        engine.generate(prompts, SamplingParams(max_tokens=4), prompt_ids=[7, 7])
    assert engine.runner.forwards == 0


def test_numpy_integers_and_tuples_are_token_ids() -> None:
    sampling = SamplingParams(max_tokens=4)
    assert make_engine().generate([tuple(np.array([1, 2]))], sampling) == make_engine().generate([[1, 2]], sampling)


def test_too_long_for_the_model_is_refused_before_anything_runs() -> None:
    engine = make_engine(max_model_len=40)
    message = r"2 of 3 prompts \(indices 1, 2\).*36 tokens and max_tokens=10, 46 together, over the limit of 40"
    with pytest.raises(RequestTooLongError, match=message):
        engine.generate([[1] * 30, [1] * 31, [1] * 36], SamplingParams(max_tokens=10))
    assert engine.runner.forwards == 0
    assert_same(engine, [[1] * 30], SamplingParams(max_tokens=10))


def test_too_long_for_the_cache_is_refused_before_anything_runs() -> None:
    engine = make_engine(block_size=4, num_blocks=6)
    message = r"1 of 2 prompts \(indices 1\).*max_tokens=5 the largest needs 7 blocks of 4.*cache has 6"
    with pytest.raises(RequestTooLongError, match=message):
        engine.generate([[1] * 20, [1] * 21], SamplingParams(max_tokens=5))
    assert engine.runner.forwards == 0
    assert_same(engine, [[1] * 20] * 3, SamplingParams(n=2, max_tokens=5))


def test_pool_is_sized_by_blocks_by_bytes_or_by_the_work() -> None:
    prompts, sampling = [[1] * 10], SamplingParams(max_tokens=6)
    fixed = make_engine(block_size=4, num_blocks=9)
    fixed.generate(prompts, sampling)
    assert fixed.stats.num_blocks == 9
    block_bytes = 2 * 4 * 8
    sized = make_engine(block_size=4, memory_bytes=12 * block_bytes + 5)
    sized.generate(prompts, sampling)
    assert (sized.stats.num_blocks, sized.stats.kv_bytes) == (11, 12 * block_bytes)
    auto = make_engine(block_size=4)
    auto.generate(prompts, sampling)
    assert auto.stats.num_blocks == 3 + 2
    pool = auto.kv
    auto.generate(prompts, SamplingParams(max_tokens=2))
    assert auto.kv is pool, "a smaller call keeps the memory"
    auto.generate(prompts, SamplingParams(max_tokens=30))
    assert auto.kv is not pool
    auto.reset()
    assert auto.kv is None


def test_work_larger_than_the_automatic_bound_still_finishes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qerl.rollout.pool.AUTO_CPU_BYTES", 16 * 2 * 4 * 8)
    engine = make_engine(block_size=4)
    assert_same(engine, random_prompts(random.Random(5), 10, 20), SamplingParams(n=3, max_tokens=20, ignore_eos=True))
    assert engine.stats.num_blocks == 15


def test_memory_that_shrinks_while_a_call_starts_does_not_shrink_its_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool was planned once to check the request and again to be made, by then for less than one sequence."""
    engine, asked = make_engine(block_size=4), []

    def available() -> int:
        asked.append(len(asked))
        return (1 << 20) >> (8 * len(asked))

    monkeypatch.setattr("qerl.rollout.pool.available_bytes", available)
    assert_same(engine, [[1] * 9], SamplingParams(n=2, max_tokens=40, ignore_eos=True))
    assert asked == [0]
    # Needs more than there is room for, which is nothing by now: what is held is taken as it is.
    longer = SamplingParams(n=3, max_tokens=40, ignore_eos=True)
    assert_same(engine, [[1] * 9], longer)
    assert asked == [0, 1]
    with engine.open_session() as session:
        session.add([1, 2], longer)
    assert asked == [0, 1, 2]


def test_the_pool_knows_what_a_call_has_used() -> None:
    engine = make_engine(block_size=4)
    for n in (5, 2):
        engine.generate([[1, 2]], SamplingParams(n=n, max_tokens=30, ignore_eos=True))
        assert engine.pool._most_used >= 5 * 30 // 4
    assert engine.stats.peak_blocks < engine.pool._most_used <= engine.kv.num_blocks
    engine.reset()
    assert engine.pool._most_used == 0


def test_progress_reports_every_step_up_to_the_end() -> None:
    engine = make_engine(max_num_seqs=3)
    calls: list[tuple[int, int, int]] = []
    outputs = engine.generate(
        random_prompts(random.Random(4), 5, 9),
        SamplingParams(n=2, max_tokens=12),
        progress=lambda *counts: calls.append(counts),
    )
    assert len(calls) == engine.stats.steps
    assert calls == sorted(calls)
    assert calls[-1] == (10, 10, sum(len(output.token_ids) for group in outputs for output in group))


def test_engine_stays_usable_after_its_caller_stops_it() -> None:
    engine = make_engine(block_size=4)

    def stop(finished: int, total: int, generated: int) -> None:
        if generated > 20:
            raise KeyboardInterrupt

    prompts, sampling = random_prompts(random.Random(4), 5, 9), SamplingParams(n=2, max_tokens=12)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(prompts, sampling, progress=stop)
    assert engine.kv is None and engine.scheduler is None
    assert engine.stats.steps > 0
    assert_same(engine, prompts, sampling)


def test_nan_logits_are_named_and_leave_nothing_behind() -> None:
    engine = make_engine()
    engine.runner.poison_at = 3
    with pytest.raises(NonFiniteLogitsError, match="NaN"):
        engine.generate([[1, 2], [3]], SamplingParams(max_tokens=12, ignore_eos=True))
    assert engine.kv is None
    assert_same(engine, [[1, 2], [3]], SamplingParams(max_tokens=12))


def test_engine_is_not_reentrant() -> None:
    engine = make_engine()
    with pytest.raises(RuntimeError, match="generate was called while generate runs"):
        engine.generate(
            [[1]], SamplingParams(max_tokens=4), progress=lambda *_: engine.generate([[1]], SamplingParams())
        )
    with pytest.raises(RuntimeError, match="reset was called while generate runs"):
        engine.generate([[1]], SamplingParams(max_tokens=4), progress=lambda *_: engine.reset())


def test_prompts_of_the_caller_are_left_as_they_were() -> None:
    prompts = [[1, 2, 3], [4]]
    make_engine().generate(prompts, SamplingParams(n=2, max_tokens=5))
    assert prompts == [[1, 2, 3], [4]]


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"block_size": 0}, "block_size must be at least 1, got 0"),
        ({"max_batch_tokens": -4}, "max_batch_tokens .* -4"),
        ({"speculative_tokens": -1}, "speculative_tokens must be at least 0, got -1"),
        ({"speculative_max_batch": 0}, "speculative_max_batch must be at least 1, got 0"),
        ({"speculative_history": -5}, "speculative_history must be at least 0, got -5"),
        ({"speculative_tokens": 65}, "speculative_tokens must be at most 64, got 65"),
        ({"speculative_history": 5}, "speculative_history=5 keeps .* speculative_tokens=0 guesses nothing: set"),
        ({"kv_dtype": "int4"}, "kv_dtype must be auto or fp8, got 'int4'"),
        ({"num_blocks": 5, "memory_bytes": 10_000}, "num_blocks=5 and memory_bytes=10000"),
    ],
)
def test_impossible_limits_are_named(limits: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**limits)


def test_limits_beyond_the_model_are_named() -> None:
    with pytest.raises(ValueError, match="max_model_len=201 exceeds the model's 200"):
        make_engine(max_model_len=201)
    with pytest.raises(ValueError, match="speculative_tokens=40 must be smaller than the 40 tokens"):
        make_engine(max_model_len=40, speculative_tokens=40)
    with pytest.raises(ValueError, match=rf"EOS ids \[99\] .* {VOCAB}"):
        RolloutEngine(HashRunner(), [1, 99])
