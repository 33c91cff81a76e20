"""The order in which the final answer of a completion is found."""

import pytest

from qerl.tasks.extract import extract, extract_answer, last_number

CASES = [
    (r"first \boxed{1}, then \boxed{2}", "2"),
    (r"\boxed{\frac{1}{2}} of \text{it}", r"\frac{1}{2}"),
    (r"#### 3 <answer>4</answer> \boxed{5}", "5"),
    ("#### 3 <answer>4</answer>", "4"),
    ("<answer>1</answer> no, <answer> 2 </answer>", "2"),
    ("The answer is 7.\n#### 42", "42"),
    ("The answer is 7. No: the answer is 8.", "8"),
    ("Final answer: $\\frac{1}{2}$.", r"\frac{1}{2}"),
    ("The final answer is 12,000,023. I hope it is correct.", "12,000,023"),
    (r"\boxed{255}. Final Answer: The final answer is $10,455$.", "10,455"),
    (r"\boxed{255}. The answer is not 7.", "255"),
    (r"\boxed{80}. Rounding before the final answer is a common mistake.", "80"),
    ("Answer: 18.0", "18.0"),
    ("**Answer:** 18", "18"),
    ("The largest $n$ is 34.", "34"),
    ("First 5 apples, then 7 more, so 12 apples in all.", "12"),
    ("It is 15", "15"),
    ("5 apples", "5 apples"),
    ("That costs $1,200 in total", "$1,200"),
    ("so $x = 3$ and we are done with it all", "x = 3"),
    ("(1, 2)", "(1, 2)"),
    (r"\boxed{(1, 2)}, \boxed{(2, 1)}", "(1, 2), (2, 1)"),
    (r"\boxed{1} no no no no no \boxed{2}", "2"),
    (r"\boxed 7", "7"),
    (r"\boxed{2} and \boxed{3", "2"),
    ("<think>\\boxed{1}</think> \\boxed{2}", "2"),
    ("<think>I guess 1</think>The answer is 2", "2"),
    ("reasoning 1 </think> 2", "2"),
]


@pytest.mark.parametrize(("completion", "answer"), CASES)
def test_order(completion, answer):
    assert extract_answer(completion) == answer


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "   ",
        "<think>1 + 1 = 2",
        "<think>a</think><think>\\boxed{2}",
        "\\boxed{}",
        "<answer></answer>",
        "#### ",
        "\\boxed{3",
        "???",
    ],
)
def test_no_answer(completion):
    assert extract_answer(completion) is None


def test_thinking_opened_by_the_template():
    assert extract_answer("so far 12", think_opened=True) is None
    assert extract_answer("12 </think> 13", think_opened=True) == "13"
    assert extract_answer("so far 12") == "12"


def test_kinds():
    kinds = [extract(text).kind for text in (r"\boxed{1}", "<answer>1</answer>", "#### 1", "The answer is 1", "1")]
    assert kinds == ["boxed", "answer tag", "hashes", "phrase", "bare"]
    assert extract("some words about $x$ here").kind == "formula"
    assert extract("three words and then 1").kind == "number"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("a 5, b 6.", "6"),
        ("from 3-5", "5"),
        ("x = -5", "-5"),
        ("1/2 of it", "1/2"),
        ("50 % now", "50 %"),
        ("x2", None),
    ],
)
def test_last_number(text, number):
    assert last_number(text) == number
