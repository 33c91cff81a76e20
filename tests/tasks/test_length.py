"""Length rewards, by hand."""

import pytest

from qerl.tasks.length import LengthPenalty, SoftOverlongPunishment
from qerl.tasks.rewards import CorrectnessReward


def ids(*lengths: int) -> list[list[int]]:
    return [[1] * length for length in lengths]


def test_soft_overlong_punishment_of_the_paper():
    # L_max = 20,480, L_cache = 4,096: free up to 16,384; half of the slope at 18,432
    reward = SoftOverlongPunishment(20_480, 4_096)
    lengths = (0, 1, 16_384, 16_385, 17_408, 18_432, 20_479, 20_480, 20_481, 40_000)
    expected = [0.0, 0.0, 0.0, -1 / 4096, -0.25, -0.5, -4095 / 4096, -1.0, -1.0, -1.0]
    metrics: dict[str, float] = {}
    made = reward([None] * 10, ["x"] * 10, completion_ids=ids(*lengths), log_metric=metrics.__setitem__, answer=["1"])
    assert made == expected
    assert metrics == {"soft_overlong/punished": 7.0}
    assert reward.__name__ == "soft_overlong"


def test_the_slope_may_be_all_of_it():
    assert SoftOverlongPunishment(10, 10)([None] * 3, [""] * 3, completion_ids=ids(0, 5, 10)) == [0.0, -0.5, -1.0]


@pytest.mark.parametrize("cache", [0, -1, 11])
def test_impossible_slopes(cache):
    with pytest.raises(ValueError, match=f"cache_tokens={cache} must lie between 1 and max_tokens=10"):
        SoftOverlongPunishment(10, cache)


def test_length_penalty_within_groups():
    reward = LengthPenalty(CorrectnessReward())
    made = reward(
        prompts=["a"] * 4 + ["b"] * 2,
        completions=["7", "7", "7", "8", "7", "7"],
        completion_ids=ids(10, 30, 20, 10, 5, 5),
        answer=["7"] * 6,
    )
    # the first group runs from 10 to 30 tokens; the short wrong answer would have had +1/2
    assert made == [0.5, -0.5, 0.0, 0.0, 0.0, 0.0]
    assert reward.__name__ == "length_penalty"


def test_a_long_wrong_answer_is_punished():
    reward = LengthPenalty(CorrectnessReward())
    assert reward(["a"] * 3, ["7", "8", "8"], completion_ids=ids(0, 4, 3), answer=["7"] * 3) == [0.5, -0.5, -0.25]


def test_samples_without_a_score_are_left_out():
    def correct(prompts, completions, **kwargs):
        return [1.0, None, 1.0]

    made = LengthPenalty(correct)(["a"] * 3, ["x"] * 3, completion_ids=ids(1, 100, 2))
    assert made == [0.5, None, -0.5]


def test_groups_by_id_where_prompts_repeat():
    # two rows of the data set with the same prompt
    prompt = [{"role": "user", "content": "?"}]
    made = LengthPenalty(CorrectnessReward())(
        [prompt] * 4, ["7"] * 4, completion_ids=ids(1, 2, 10, 20), answer=["7"] * 4, id=["r1", "r1", "r2", "r2"]
    )
    assert made == [0.5, -0.5, 0.5, -0.5]
    by_prompt = LengthPenalty(CorrectnessReward())(
        [prompt] * 2 + [[{"role": "user", "content": "!"}]] * 2, ["7"] * 4, completion_ids=ids(1, 2, 10, 20),
        answer=["7"] * 4,
    )  # fmt: skip
    assert by_prompt == made


def test_metrics_of_the_inner_reward_are_not_logged_twice():
    metrics: dict[str, float] = {}
    LengthPenalty(CorrectnessReward())(
        ["a"], ["7"], completion_ids=ids(1), answer=["7"], log_metric=metrics.__setitem__
    )
    assert metrics == {}


@pytest.mark.parametrize("reward", [SoftOverlongPunishment(10, 5), LengthPenalty(CorrectnessReward())])
def test_lengths_are_needed(reward):
    with pytest.raises(ValueError, match=f"{reward.__name__}: no completion_ids"):
        reward([None], ["7"], answer=["7"])
