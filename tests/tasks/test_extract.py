"""The order in which the final answer of a completion is found."""

import time

import pytest

from qerl.tasks.extract import extract, extract_answer, last_number
from qerl.tasks.questions import without_questions
from qerl.tasks.rewards import LastNumberReward

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


@pytest.mark.parametrize(
    "completion",
    [
        "Could the answer be 42?",
        "Is the answer 42?",
        "The answer is 42?",
        "The final answer is $42$?",
        "Is it $42$?",
        "Is it 4.2 or 5?",
        "(Is it 42?)",
        'The question: "could it be 42?".',
        "What if the answer is 42?",
        "What if it is 42",
        "Suppose the answer is 42.",
        "Let's say it is 42.",
        "If the answer were 42, all would fit.",
        "We are to check whether it is 42.",
        r"Could the answer be \left( 3, \frac{\pi}{2} \right)?",
        "Perhaps 42?",
        "是42吗？",
    ],
)
def test_a_question_or_a_supposition_is_no_answer(completion):
    assert extract_answer(completion) is None
    assert LastNumberReward()([None], [completion], answer=["42"]) == [0.0]


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("How many apples are left? 12", "12"),
        ("She has 12 left. Is that right? Yes.", "12"),
        ("5 + 7 = ? = 12", "12"),
        ("If we add 5 and 7, we get 12.", "12"),
        ("If 4 cost $4.00 and she needs 4 then it will cost her 4*4 = $16.00", "$16.00"),
        ("Suppose each costs 5, so 3 cost 15.", "15"),
        ("The answer is 12 if n is 7.", "12"),
        ("It costs $5? No, $7.", "$7"),
        ("$x = ?$ so $x=2$ holds here", "x=2"),
        (r"the value is $f(x) = 1 \text{ if } x > 0$ here", r"f(x) = 1 \text{ if } x > 0"),
        ("Is it 13?\nThe answer is 12.", "12"),
        ("是13吗？12。", "12"),
        # what is marked as the answer is one
        (r"Is it \boxed{42}?", "42"),
        ("<answer>42</answer> Right?", "42"),
        ("#### 42?", "42?"),
    ],
)
def test_statements_beside_questions(completion, answer):
    assert extract_answer(completion) == answer


@pytest.mark.parametrize(
    "piece", ["?", "!", "if ", "suppose ", "is it 5? ", "if a, b. ", '?""', "$", "$5 ", "x\n", r"\[", r"\(", r"\text{"]
)
def test_questions_are_found_in_linear_time(piece):
    text = piece * 20_000 + "x"
    started = time.perf_counter()
    assert len(without_questions(text)) == len(text)
    assert time.perf_counter() - started < 2.0


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
