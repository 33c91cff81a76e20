"""An answer must state the number: repeating the question's calculation is not an answer.

Found by reading a run's report: rewarded for the last number, SmolLM2 learned to answer "3 + 2 =" with "3 + 2".
"""

import pytest

from qerl.tasks.registry import load_task
from qerl.tasks.verify import verify


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("5", "3 + 2"),
        ("5", "\\boxed{3+2}"),
        ("-4", "5 - 9"),
        ("21", "7 \\cdot 3"),
        ("21", "7 * 3"),
        ("6", "1 + 2 + 3"),
        ("5", "\\frac{3+2}{1}"),
        ("0.5", "0.25 + 0.25"),
        ("5", "The answer is 3 + 2"),
        ("1/2", "1/4 + 1/4"),
        ("5", "(3 + 2)"),
    ],
)
def test_a_calculation_is_no_answer(gold: str, answer: str) -> None:
    verdict = verify(gold, answer)
    assert not verdict.equal, verdict.reason


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("5", "3 + 2 = 5"),
        ("5", "\\boxed{5}"),
        ("-4", "-4"),
        ("1.5", "1 1/2"),
        ("3/2", "1\\frac{1}{2}"),
        ("300000", "3 \\times 10^5"),
        ("1024", "2^{10}"),
        ("0.5", "\\frac{1}{2}"),
        ("5", "10/2"),
        ("x+1", "1 + x"),
        ("2\\sqrt{3}", "\\sqrt{12}"),
        ("\\frac{1}{4} + \\frac{1}{4}", "1/4 + 1/4"),
    ],
)
def test_numbers_in_other_forms_still_count(gold: str, answer: str) -> None:
    verdict = verify(gold, answer)
    assert verdict.equal, verdict.reason


def test_reasoning_gym_pays_no_echo() -> None:
    task = load_task("reasoning_gym:chain_sum", size=20, test_size=20, min_digits=1, max_digits=1, prompt="plain")
    for example in task.train:
        calculation = example.question.split(":")[-1].strip().removesuffix("=").strip()
        assert task.score(example, calculation).correct == 0.0, calculation
        assert task.score(example, f"{calculation} = {example.answer}").correct == 1.0
        assert task.score(example, example.answer).correct == 1.0
        assert task.score(example, f"\\frac{{{2 * int(example.answer)}}}{{2}}").correct == 0.0
