"""Reward functions in TRL's convention."""

import sys

import pytest

from qerl.tasks.rewards import CorrectnessReward, FormatReward, LastNumberReward, PooledReward
from qerl.tasks.workers import RewardError, RewardPool


def message(text):
    return [{"role": "assistant", "content": text}]


def test_correctness_from_an_answer_column():
    counters = {}
    reward = CorrectnessReward()
    values = reward(
        prompts=[None] * 4,
        completions=[message(r"\boxed{18}"), "19", "", "18"],
        completion_ids=[[1]] * 4,
        answer=["18", "18", "18", r"\foo{1}"],
        log_metric=counters.__setitem__,
        trainer_state=None,
    )
    assert values == [1.0, 0.0, 0.0, None]
    assert counters["correctness/no_answer"] == 1 and counters["correctness/unparsable_gold"] == 1
    assert reward.__name__ == "correctness"


def test_correctness_without_golds_is_refused():
    with pytest.raises(ValueError, match="no gold answers"):
        CorrectnessReward()([None], ["1"])


def test_correctness_counts_timeouts():
    counters = {}
    with RewardPool(1, deadline_s=1.5) as pool:
        reward = CorrectnessReward(pool=pool)
        stuck = r"\boxed{\sum_{k=1}^{9999} \binom{9999}{k} k^{9999}}"
        values = reward([None] * 2, [stuck, "3"], answer=[r"\sum_{k=1}^n k", "3"], log_metric=counters.__setitem__)
    assert values == [0.0, 1.0]
    assert counters["correctness/timeout"] == 1


def test_thinking_opened_by_the_template():
    reward = CorrectnessReward(think_opened=True)
    assert reward([None] * 2, ["18", "hm </think> 18"], answer=["18", "18"]) == [0.0, 1.0]


@pytest.mark.parametrize(
    ("style", "text", "pays"),
    [
        ("boxed", r"so \boxed{18}", 1.0),
        ("boxed", r"so \boxed{}", 0.0),
        ("boxed", r"so \boxed{ ... }", 0.0),
        ("boxed", r"so \boxed{\frac{1}{}", 0.0),
        ("boxed", "18", 0.0),
        ("answer_tags", "<answer>18</answer>", 1.0),
        ("answer_tags", r"<answer>\boxed{18}</answer>", 1.0),
        ("answer_tags", r"<answer>\boxed{}</answer>", 0.0),
        ("answer_tags", "<think></think><answer></answer>", 0.0),
        ("answer_tags", "<answer>your answer</answer>", 0.0),
        ("answer_tags", "<answer> ... </answer>", 0.0),
        ("answer_tags", "<answer>18", 0.0),
        ("think_answer_tags", "<think>9+9</think><answer>18</answer>", 1.0),
        ("think_answer_tags", "<think></think><answer>18</answer>", 0.0),
        ("think_answer_tags", "<think> \n </think><answer>18</answer>", 0.0),
        ("think_answer_tags", "<answer>18</answer>", 0.0),
        ("think_answer_tags", "<think>9+9<answer>18</answer>", 0.0),
        ("think_answer_tags", "<think></think><answer></answer>", 0.0),
    ],
)
def test_format_pays_only_beside_a_real_attempt(style, text, pays):
    assert FormatReward(style)([None], [message(text)]) == [pays]


def test_format_weight_and_unknown_style():
    assert FormatReward(weight=0.25)([None], [r"\boxed{1}"]) == [0.25]
    with pytest.raises(ValueError, match="known are boxed"):
        FormatReward("tags")


def test_last_number():
    reward = LastNumberReward()
    completions = ["5 and then 7", "7 of 5", "<think>7", "none"]
    assert reward([None] * 4, completions, answer=["7"] * 4) == [1.0, 0.0, 0.0, 0.0]
    assert reward([None], ["7"], answer=["seven"]) == [None]


def test_a_user_function_in_the_pool(tmp_path, monkeypatch, request):
    (tmp_path / "my_rewards.py").write_text(
        "def by_length(prompts, completions, bonus, **kwargs):\n"
        "    return [len(c) / bonus if c else None for c, bonus in zip(completions, bonus)]\n"
        "def as_text(prompts, completions, **kwargs):\n"
        "    return ['high']\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    request.addfinalizer(lambda: sys.modules.pop("my_rewards"))
    from my_rewards import as_text, by_length

    with RewardPool(1, deadline_s=10) as pool:
        reward = PooledReward(by_length, pool)
        assert reward.__name__ == "by_length"
        assert reward([None] * 2, ["abcd", ""], bonus=[2, 2], trainer_state=object()) == [2.0, None]
        with pytest.raises(RewardError, match=r"sample 'b', failed on ZeroDivisionError"):
            reward([None] * 2, ["x", "y"], bonus=[1, 0], id=["a", "b"])
        with pytest.raises(RewardError, match="finite number"):
            PooledReward(as_text, pool)([None], ["x"])
