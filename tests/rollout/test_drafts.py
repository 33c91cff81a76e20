"""What is guessed, what is kept for it and what it may cost."""

import random

import pytest
from hash_runner import HashRunner, assert_same, make_engine, random_prompts

from qerl.rollout import drafts
from qerl.rollout.core import SamplingParams
from qerl.rollout.drafts import Draft, DraftIndex
from qerl.rollout.engine import EngineConfig
from qerl.rollout.history import CompletionHistory
from qerl.rollout.scheduler import Prefix, Sample
from qerl.rollout.speculation import Speculation


def index_of(*texts: list[int], max_keys: int = 1 << 12) -> DraftIndex:
    index = DraftIndex(max_keys)
    for text in texts:
        index.add(text, 0)
    return index


def test_the_longest_match_wins_over_later_and_more_frequent_ones() -> None:
    index = index_of([9, 1, 2, 3, 4, 50, 51], [8, 2, 3, 4, 60], [7, 2, 3, 4, 60], [9, 1, 2, 3, 4])
    assert index.propose(3, 2) == Draft([50, 51], 5)
    assert index.propose(3, 9).token_ids == [50, 51], "another text is copied to its end and no further"


def test_among_equal_matches_the_most_frequent_token_wins_then_the_latest_place() -> None:
    index = index_of([1, 2, 3, 40, 41], [1, 2, 3, 50, 51], [1, 2, 3, 50, 52], [1, 2, 3])
    assert index.propose(3, 2) == Draft([50, 52], 3)
    assert index_of([1, 2, 3, 40], [1, 2, 3, 50], [1, 2, 3]).propose(2, 1).token_ids == [50]


def test_a_repetition_in_the_text_itself_is_continued() -> None:
    index = index_of([5, 1, 2, 3, 1, 2, 3, 1, 2, 3])
    assert index.propose(0, 7).token_ids == [1, 2, 3, 1, 2, 3, 1]
    assert index_of([6] * 9).propose(0, 4) == Draft([6, 6, 6, 6], 8)


@pytest.mark.parametrize("text", [[], [1], [1, 2], [1, 2, 3], [1, 2, 3, 4, 5, 6]])
def test_nothing_is_guessed_where_nothing_matches(text: list[int]) -> None:
    assert index_of(text, [7, 8, 9]).propose(0, 4).token_ids == []
    assert index_of(text, text).propose(0, 0).token_ids == []


def test_short_matches_are_taken_where_there_is_no_longer_one() -> None:
    texts = [4, 1, 2, 3, 50], [5, 2, 3, 60], [6, 3, 70]
    assert index_of(*texts, [1, 2, 3]).propose(3, 1) == Draft([50], 3)
    assert index_of(*texts, [8, 2, 3]).propose(3, 1) == Draft([60], 2)
    assert index_of(*texts, [2, 8, 3]).propose(3, 1) == Draft([70], 1)
    assert index_of(*texts, [3]).propose(3, 1) == Draft([70], 1)


def test_a_growing_text_is_read_as_it_grows() -> None:
    text = [1, 2, 3, 4]
    index = index_of(text, [1, 2, 3])
    assert index.propose(1, 3).token_ids == [4]
    text += [5, 6]
    assert index.propose(1, 3).token_ids == [4, 5, 6], "texts are not copied"
    text += [1, 2, 3, 7]
    index.extend(0)
    assert index.propose(1, 1).token_ids == [7]


@pytest.mark.parametrize("seed", range(20))
def test_proposals_follow_a_longest_suffix_found_by_search(seed: int) -> None:
    """Against a search over everything, where the places of a key are too few for any to be dropped."""
    rng = random.Random(seed)
    texts = [[rng.randrange(6) for _ in range(rng.randint(0, 12))] for _ in range(4)]
    drafts_kept, drafts._PLACES = drafts._PLACES, 100
    try:
        index = index_of(*texts)
    finally:
        drafts._PLACES = drafts_kept
    for number, text in enumerate(texts):
        matches = {}
        for other, source in enumerate(texts):
            for position in range(len(source)):
                length = 0
                while length < min(position, len(text)) and source[position - 1 - length] == text[-1 - length]:
                    length += 1
                matches[other, position] = length
        longest = max(matches.values(), default=0)
        draft = index.propose(number, 1)
        if longest == 0:
            assert draft.token_ids == []
            continue
        following = [texts[other][at] for (other, at), length in matches.items() if length == longest]
        assert draft.match == longest
        assert following.count(draft.token_ids[0]) == max(map(following.count, following))


def test_the_index_is_bounded_and_forgets_the_oldest() -> None:
    text = list(range(10_000))
    index = DraftIndex(200)
    index.add(text, 0)
    assert 100 <= index.num_keys <= 200
    assert index.propose(index.add([9_990, 9_991, 9_992], 0), 2).token_ids == [9_993, 9_994]
    assert index.propose(index.add([50, 51, 9_000, 52], 0), 2).token_ids == []
    periodic = DraftIndex(200)
    periodic.add([1, 2, 3, 4] * 5_000, 0)
    assert periodic.num_keys == 3 * 4
    assert all(len(places) <= drafts._PLACES for places in periodic._newer.values())


class CountedList(list[int]):
    """Counts how often it is read."""

    reads = 0

    def __getitem__(self, at):  # type: ignore[no-untyped-def]
        self.reads += 1
        return super().__getitem__(at)


def test_the_work_of_a_token_and_of_a_proposal_does_not_grow_with_the_text() -> None:
    rng, text = random.Random(0), CountedList()
    index = DraftIndex(1 << 16)
    index.add(text, 0)
    most = 0
    for _ in range(10_000):
        text.append(rng.randrange(12))
        before = text.reads
        index.extend(0)
        index.propose(0, 5)
        most = max(most, text.reads - before)
    # Keys of both; the places of a key in both halves, compared token by token and then counted, chosen and copied.
    assert 6 < most <= 6 + 2 * drafts._PLACES * (2 * drafts.MAX_MATCH + 2) + 1


def test_an_index_whose_limit_shrinks_keeps_what_is_newest() -> None:
    text = list(range(10_000))
    index = index_of(text, max_keys=30_000)
    index.limit_keys(300)
    assert 0 < index.num_keys <= 300
    assert index.propose(index.add([9_990, 9_991, 9_992], 0), 2).token_ids == [9_993, 9_994]
    assert index.propose(index.add([50, 51, 52], 0), 2).token_ids == []
    index.extend_by_last(index.add(text, len(text)), 0)
    text += range(20_000, 20_500)
    assert index.num_unfiled(0) == 500
    index.extend_by_last(0, 20)
    assert index.num_unfiled(0) == 0 and index.num_keys <= 300
    assert index.propose(index.add([20_490, 20_491], 0), 1).token_ids == [20_492]
    assert index.propose(index.add([20_450, 20_451], 0), 1).token_ids == []


def test_history_is_bounded_and_drops_the_prompt_met_longest_ago() -> None:
    history = CompletionHistory(100)
    history.add([1, 2], [7] * 30)
    history.add([3, 4], [8] * 30)
    history.add([1, 2], [9] * 20)
    assert history.num_tokens == 84
    history.add([5], [6] * 20)
    assert history.of([3, 4], 99) == [] and history.of([1, 2], 99) == [[7] * 30, [9] * 20]
    assert history.num_tokens == 73
    assert history.of([1, 2], 49) == [[9] * 20], "the latest first where not all are wanted"
    history.add([6], [1] * 101)
    assert history.num_tokens == 0 and history.of([6], 999) == []
    history.add([5], [6] * 20)
    history.clear()
    assert history.num_tokens == 0 and history.of([5], 99) == []
    nothing = CompletionHistory(0)
    nothing.add([1], [2, 3])
    assert nothing.num_tokens == 0 and nothing.of([1], 9) == []


def test_history_lives_across_calls_until_it_is_dropped() -> None:
    engine = make_engine(speculative_tokens=4, speculative_history=500)
    prompts, sampling = random_prompts(random.Random(0), 4, 9), SamplingParams(n=2, max_tokens=30, ignore_eos=True)
    assert_same(engine, prompts, sampling)
    first = engine.stats.decode_steps
    assert engine.history.num_tokens > 200
    assert_same(engine, prompts, sampling)
    assert engine.stats.decode_steps < first / 2 and engine.stats.acceptance > 0.9
    engine.forget_completions()
    assert_same(engine, prompts, sampling)
    assert engine.stats.decode_steps > first / 2
    for seed in range(20):
        engine.generate(random_prompts(random.Random(seed), 3, 9), SamplingParams(n=2, max_tokens=30, seed=seed))
        assert engine.history.num_tokens <= 500


class LoopingRunner(HashRunner):
    """Text that repeats itself with a period of 7 whatever was fed."""

    def forward(self, batch, kv):  # type: ignore[no-untyped-def]
        logits = super().forward(batch, kv) * 0
        wanted = batch.wanted(batch.positions) % 7 + 1
        logits[range(len(wanted)), wanted] = 20.0
        return logits


@pytest.mark.parametrize("temperature, n", [(0.0, 1), (1.0, 2)])
def test_repetitive_text_is_accepted(temperature: float, n: int) -> None:
    sampling = SamplingParams(n=n, max_tokens=60, temperature=temperature)
    engine = make_engine(speculative_tokens=4)
    engine.runner.__class__ = LoopingRunner
    outputs = engine.generate([[1, 2, 3]], sampling)
    plain = make_engine()
    plain.runner.__class__ = LoopingRunner
    assert outputs == plain.generate([[1, 2, 3]], sampling)
    assert engine.stats.acceptance > 0.9
    assert engine.stats.decode_steps < plain.stats.decode_steps / 2


def test_drafting_switches_itself_off_where_nothing_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HashRunner, "max_position", 2_000)
    sampling = SamplingParams(n=16, max_tokens=400, ignore_eos=True, temperature=5.0)
    plain, drafting = make_engine(), make_engine(speculative_tokens=4, speculative_max_batch=16)
    expected = plain.generate([[1, 2, 3]], sampling)
    for _ in range(2):
        assert drafting.generate([[1, 2, 3]], sampling) == expected
    stats = drafting.stats
    assert 0 < stats.drafted_tokens < 0.15 * stats.generated_tokens
    assert stats.speculative_steps < 0.12 * stats.decode_steps


def test_what_drafts_have_brought_is_logged_rarely_and_in_all(caplog: pytest.LogCaptureFixture) -> None:
    """The first call was logged alone: of a bench its warm-up."""
    engine = make_engine(speculative_tokens=4)
    engine.runner.__class__ = LoopingRunner
    accepted = drafted = drafting = steps = 0
    totals = []
    with caplog.at_level("INFO", "qerl"):
        for max_tokens in (20, *[60] * 20):
            engine.generate([[1, 2, 3]], SamplingParams(max_tokens=max_tokens, temperature=0.0))
            accepted += engine.stats.accepted_tokens
            drafted += engine.stats.drafted_tokens
            drafting += engine.stats.speculative_steps
            steps += engine.stats.decode_steps
            totals.append(f"{accepted} of {drafted} drafted tokens accepted in {drafting} of {steps} decode steps")
    told = [record.message for record in caplog.records if "drafted tokens accepted" in record.message]
    assert totals[0] in told[0] and len(told) == 3
    assert all(any(message.endswith(f"so far: {total}") for total in totals) for message in told)


def policy(size_of=lambda rows: rows, **limits: int) -> Speculation:  # type: ignore[no-untyped-def]
    config = EngineConfig(**{"speculative_tokens": 4, **limits})
    return Speculation(config, True, size_of, CompletionHistory(0))


def group_of(samples: int, text: list[int], max_tokens: int = 99) -> list[Sample]:
    group = Prefix(0, text[:1], SamplingParams(n=samples, max_tokens=max_tokens))
    group.samples = [Sample(group, number, (0, 0), list(text)) for number in range(samples)]
    return group.samples


def planned(speculation: Speculation, samples: list[Sample]) -> list[int]:
    speculation.follow(samples)
    return [len(draft.token_ids) for draft in speculation.plan(samples)]


def test_rows_are_spent_where_they_pay() -> None:
    text = [6] * 9
    assert planned(policy(), group_of(1, text)) == [4], "rows up to 8 cost nothing"
    many = planned(policy(speculative_max_batch=64), group_of(48, text))
    assert 0 < sum(many) < 48 * 2, "at many samples a row must bring more than the average one"
    refuted = policy()
    few = group_of(8, text)
    refuted.follow(few)
    for _ in range(40):
        for sample in few:
            refuted.observe(sample, Draft([1, 2, 3, 4], 8), 0, refuted=True)
    assert planned(refuted, few) == [0] * 8
    assert (refuted.drafted, refuted.accepted) == (40 * 8 * 4, 0)
    # A padded step of 16 rows is paid for anyway.
    assert sum(planned(policy(lambda rows: -(-rows // 16) * 16), group_of(9, text))) >= 7


@pytest.mark.parametrize("max_batch", [1, 8, 256])
def test_the_index_is_sized_by_the_groups_that_run(max_batch: int) -> None:
    """It was divided by speculative_max_batch: with 256 it forgot what was 200 tokens ago, and nothing was guessed."""
    text = random.Random(0).sample(range(40_000), 2_000)
    assert planned(policy(speculative_max_batch=max_batch), group_of(1, [*text, *text[:40]])) == [4]


def test_an_index_shrinks_as_groups_come_and_has_room_for_some_text_in_any_case() -> None:
    speculation, rng = policy(speculative_max_batch=512), random.Random(0)
    first = group_of(1, rng.sample(range(40_000), 30_000))
    speculation.follow(first)
    assert speculation._indexes[first[0].prefix][0].num_keys > 80_000
    others = [sample for _ in range(511) for sample in group_of(1, [1, 2, 3])]
    speculation.follow([*first, *others])
    assert speculation._indexes[first[0].prefix][0].num_keys <= 4_096
    text = rng.sample(range(40_000), 600)
    [last] = group_of(1, [*text, *text[:40]])
    assert planned(speculation, [*first, *others[1:], last])[-1] > 0


def test_what_is_read_as_drafting_begins_is_bounded_and_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long groups were read whole, for seconds in which nothing was decoded."""
    rng, filed, file = random.Random(0), [], DraftIndex._file

    def counting(index: DraftIndex, key: int, place: tuple[int, int]) -> None:
        filed.append(place)
        file(index, key, place)

    monkeypatch.setattr(DraftIndex, "_file", counting)
    speculation = policy()
    runs = []
    for _ in range(4):
        samples = group_of(8, [0])
        for sample in samples:
            sample.token_ids += rng.choices(range(40_000), k=2_500)
        samples[2].token_ids += samples[5].token_ids[-30:-10]
        runs.append(samples[2])
    speculation.follow(runs)
    assert 0.9 * (1 << 18) / 2 < len(filed) <= (1 << 18) / 2
    assert {number for number, _ in filed} == set(range(1, 9)), "siblings too"
    for draft, sample in zip(speculation.plan(runs), runs, strict=True):
        assert draft.token_ids == sample.prefix.samples[5].token_ids[-10:][: len(draft.token_ids)] != []
    # So is what they have grown by meanwhile.
    filed.clear()
    for sample in runs:
        sample.token_ids += rng.choices(range(40_000), k=20_000)
    speculation.follow(runs)
    assert len(filed) == 4 * 3 * ((1 << 16) // 6)


def test_the_token_that_reaches_the_limit_is_not_guessed() -> None:
    text = [6] * 9
    for left in range(1, 7):
        [sample] = group_of(1, text, max_tokens=left)
        assert planned(policy(), [sample]) == [min(4, left - 1)]


def test_pauses_double_until_drafts_pay() -> None:
    speculation = policy()
    pauses = []
    for _ in range(8):
        while speculation.wanted(2):
            speculation.count_step(samples=2, rows=4, tokens=2)
        plain = 0
        while not speculation.wanted(2):
            speculation.count_plain_step()
            plain += 1
        pauses.append(plain)
    assert pauses == [32, 64, 128, 256, 512, 1024, 1024, 1024]
    for _ in range(32 * 6):
        speculation.count_step(samples=2, rows=4, tokens=4)
        assert speculation.wanted(2)
    assert not speculation.wanted(9) and not speculation.wanted(0)
    while speculation.wanted(2):
        speculation.count_step(samples=2, rows=2, tokens=2)
    for _ in range(32):
        assert not speculation.wanted(2)
        speculation.count_plain_step()
    assert speculation.wanted(2)
