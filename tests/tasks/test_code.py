"""Programming tasks: finding the program in a completion, scores, rewards, files. Nothing is run here: the sandbox
itself is tested in tests/sandbox, and the two together in tests/sandbox/test_code_task.py."""

import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from qerl.sandbox.bubblewrap import Bubblewrap
from qerl.sandbox.cases import AssertCase, StdioCase
from qerl.sandbox.core import Execution, Limits, Program, Status
from qerl.tasks.base import Outcome, Score, to_dataset
from qerl.tasks.code import CodeReward, Scoring, code_task_from_file, extract_code

ROWS = [
    {"id": "double", "question": "Double it.", "input": ["1", "2"], "output": ["2", "4"], "rating": 800},
    {"id": "echo", "question": "Repeat it.", "input": ["1", "2"], "output": ["1", "2"], "solution": "print(input())"},
]


@dataclass
class Pretend:
    """An executor for programs of one word: ``double``, ``echo``, or the name of a status."""

    name: str = "pretend"
    limits: Limits = field(default_factory=Limits)

    def run(self, program: Program) -> Execution:
        word = program.source.strip()
        if word in ("double", "echo"):
            return Execution(Status.OK, 0, str(int(program.stdin) * (1 + (word == "double"))), "", 0.0)
        return Execution(Status(word), None, "", "", 0.0)


def fenced(code: str, mark: str = "python") -> str:
    return f"Here:\n```{mark}\n{code}\n```\nDone."


@pytest.fixture
def write(tmp_path: Path) -> Callable[[list[dict]], Path]:
    def write_rows(rows: list[dict]) -> Path:
        path = tmp_path / "tasks.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write_rows


class TestExtraction:
    @pytest.mark.parametrize(
        ("completion", "code"),
        [
            (fenced("a"), "a\n"),
            (fenced("a") + fenced("b"), "b\n"),
            (fenced("a", "Python3"), "a\n"),
            (fenced("a", "py title=x"), "a\n"),
            (fenced("a", ""), "a\n"),
            # the marked block wins over a later one without a mark (sample output, usually)
            (fenced("a") + fenced("1 2 3", ""), "a\n"),
            (fenced("a", "cpp"), None),
            (fenced("a", "cpp") + fenced("b", ""), "b\n"),
            (fenced("a") + "```python\nb", "a\n"),
            ("```python\na", None),
            ("print(1)", None),
            ("", None),
            ("`print(1)`", None),
            (fenced("  \n"), None),
            (fenced("a") + fenced("", "python"), "a\n"),
            ("~~~python\na\n~~~", "a\n"),
            ("````python\na\n```\nb\n````", "a\n```\nb\n"),
            ("- x:\n  ```python\n  if a:\n      b\n  ```", "if a:\n    b\n"),
            ("```python\r\na\r\nb\r\n```\r\n", "a\nb\n"),
            ("<think>" + fenced("a") + "</think>" + fenced("b"), "b\n"),
            ("<think>" + fenced("a"), None),
            ("<think>" + fenced("a") + "</think>no program", None),
        ],
    )
    def test_order(self, completion, code):
        assert extract_code(completion) == code

    def test_thinking_opened_by_the_template(self):
        assert extract_code(fenced("a"), think_opened=True) is None
        assert extract_code("x</think>" + fenced("a"), think_opened=True) == "a\n"


class TestFiles:
    def test_input_and_output(self, write):
        task = code_task_from_file(write(ROWS))
        assert [example.id for example in task.train] == ["double", "echo"]
        assert task.cases["double"] == (StdioCase("1", "2"), StdioCase("2", "4"))
        assert (task.train[0].answer, task.train[0].metadata) == ("", {"rating": 800})
        # the gold program is not carried along
        assert task.train[1].metadata == {}
        prompt = task.messages(task.train[0])[0]["content"]
        assert prompt.startswith("Double it.\n\n")
        assert "standard input" in prompt
        assert task.executor == Bubblewrap()

    def test_assertions(self, write):
        row = {"task_id": 11, "text": "Square.", "test_list": ["assert f(2) == 4", "assert f(3) == 9"], "code": "gold"}
        task = code_task_from_file(write([row]), split="test")
        assert (task.train, task.test[0].id) == ([], "11")
        assert task.cases["11"] == (AssertCase("assert f(2) == 4"), AssertCase("assert f(3) == 9"))
        prompt = task.messages(task.test[0])[0]["content"]
        assert "Square.\n\nThe code must pass:\nassert f(2) == 4\n\n" in prompt
        assert "f(3)" not in prompt
        assert "standard input" not in prompt
        assert "gold" not in str(task.test[0])

    def test_options(self, write):
        task = code_task_from_file(
            write([{"body": "B", "output": "0.5"}]), question="body", prompt="Q: {question}", system="S",
            tolerance=0.1, max_cases=1,
        )  # fmt: skip
        assert task.messages(task.train[0]) == [{"role": "system", "content": "S"}, {"role": "user", "content": "Q: B"}]
        assert task.cases["tasks-000001"] == (StdioCase("", "0.5", 0.1),)

    def test_rows_without_cases_are_left_out_and_named(self, write, caplog):
        rows = [
            *ROWS,
            {"id": "none", "question": "No cases."},
            {"id": "uneven", "question": "Q", "input": [], "output": ["1"]},
        ]
        task = code_task_from_file(write(rows))
        assert task.report.excluded == (("none", "no test cases"), ("uneven", "0 of input but 1 of output"))
        assert "2 of 4 rows left out (none: no test cases; uneven: 0 of input but 1 of output)" in caplog.text

    def test_repeated_questions_are_dropped(self, write):
        task = code_task_from_file(write([*ROWS, dict(ROWS[0], id="again")]))
        assert task.report.duplicates == ("again",)
        assert len(task.train) == 2

    @pytest.mark.parametrize(
        ("rows", "options", "message"),
        [
            ([{"question": "Q"}], {}, "any of its 1 rows"),
            ([ROWS[0], ROWS[0]], {"split": "test"}, "occurs twice"),
            ([ROWS[0], {"question": "Q", "tests": "assert f()"}], {}, "split the file"),
            (ROWS, {"split": "dev"}, "split='dev'"),
            (ROWS, {"max_cases": 0}, "max_cases=0"),
            (ROWS, {"scoring": "any"}, "scoring rule 'any'"),
            (ROWS, {"max_timeouts": 0}, "max_timeouts=0"),
        ],
    )
    def test_refusals(self, write, rows, options, message):
        with pytest.raises(ValueError, match=message):
            code_task_from_file(write(rows), **options)


class TestScores:
    @pytest.mark.parametrize(
        ("scoring", "completion", "score"),
        [
            ("all", fenced("double"), Score(1.0, "double\n", "2 of 2 cases passed")),
            ("all", fenced("echo"), Score(0.0, "echo\n", "0 of 2 cases passed; case 1: wrong_answer")),
            ("all", "nothing", Score(0.0, None, "no program found")),
            ("fraction", fenced("timeout"), Score(0.0, "timeout\n", "0 of 2 cases passed; case 1: timeout")),
        ],
    )
    def test_score(self, write, scoring, completion, score):
        task = code_task_from_file(write(ROWS), scoring=scoring, executor=Pretend())
        assert task.score(task.train[0], completion) == score

    def test_partial_credit(self, write):
        row = {"id": "x", "question": "Q", "input": ["0", "1", "0", "0"], "output": ["0", "2", "0", "0"]}
        completion = fenced("echo")
        for scoring, score in (("all", 0.0), ("fraction", 0.75)):
            task = code_task_from_file(write([row]), scoring=scoring, executor=Pretend())
            assert task.score(task.train[0], completion).correct == score

    @pytest.mark.parametrize(
        ("completion", "counter"),
        [(fenced("timeout"), "timeout"), (fenced("memory"), "exhausted"), (fenced("echo"), ""), ("", "no_answer")],
    )
    def test_job_for_the_pool(self, write, completion, counter):
        task = code_task_from_file(write(ROWS), executor=Pretend())
        function, arguments = pickle.loads(pickle.dumps(task.job(task.train[0], completion)))
        outcome = function(*arguments)
        assert isinstance(outcome, Outcome)
        assert (outcome.score, outcome.counter) == (0.0, counter)

    def test_scoring_rules(self):
        assert Scoring().options() == {"stop_at_failure": True, "max_timeouts": 1}
        assert Scoring("fraction", 2).options() == {"stop_at_failure": False, "max_timeouts": 2}


class TestReward:
    def test_order_counts_and_metrics(self, write):
        task = code_task_from_file(write(ROWS), executor=Pretend(), scoring="fraction")
        reward = CodeReward(task, workers=3)
        metrics: dict[str, float] = {}
        words = ["double", "echo", "timeout", None, "compile_error", "memory", "double", "runtime_error"]
        completions = [[{"role": "assistant", "content": fenced(word) if word else "none"}] for word in words]
        ids = ["double"] * 6 + ["echo", "echo"]
        scores = reward([None] * 8, completions, id=ids, answer=[""] * 8, log_metric=metrics.__setitem__)
        assert scores == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
        assert metrics == {
            "code/no_code": 1.0, "code/passed": 1.0, "code/wrong_answer": 2.0, "code/compile_error": 1.0,
            "code/runtime_error": 1.0, "code/timeout": 1.0, "code/memory": 1.0, "code/output_limit": 0.0,
            "code/passed_cases": 1 / 8,
        }  # fmt: skip
        assert reward.last.judgements[3] is None
        assert reward.last.judgements[0].passed == 2

    def test_columns_of_the_data_set(self, write):
        task = code_task_from_file(write(ROWS), executor=Pretend())
        rows = to_dataset(task.train, task)
        assert CodeReward(task)(rows["prompt"], [fenced("double"), fenced("echo")], id=rows["id"]) == [1.0, 1.0]
        assert CodeReward(task)([], [], id=[]) == []

    def test_without_ids(self, write):
        task = code_task_from_file(write(ROWS), executor=Pretend())
        with pytest.raises(ValueError, match="no 'id' column"):
            CodeReward(task)([None], ["x"])
        with pytest.raises(KeyError, match="no example with id 'other'"):
            CodeReward(task)([None], [fenced("echo")], id=["other"])
