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
from qerl.sandbox.e2b import E2B
from qerl.sandbox.piston import Piston
from qerl.tasks import registry
from qerl.tasks.base import Outcome, Score, to_dataset
from qerl.tasks.code import CodeReward, CodeTask, Scoring, code_task_from_file, extract_code
from qerl.tasks.registry import load_task

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


class TestLoading:
    """Through :func:`load_task`."""

    def test_a_file(self, write):
        path = write([dict(ROWS[0], id=f"r{i}", question=f"Q{i}") for i in range(6)])
        task = load_task(f"code:{path}", test_size=2, seed=5, scoring="fraction", executor=Pretend(), system="S")
        assert isinstance(task, CodeTask)
        assert (task.name, len(task.train), len(task.test)) == (f"code:{path}", 4, 2)
        assert {example.id for example in (*task.train, *task.test)} == {f"r{i}" for i in range(6)}
        again = load_task(f"code:{path}", test_size=2, seed=5)
        assert [example.id for example in again.test] == [example.id for example in task.test]
        assert task.scoring == Scoring("fraction")
        assert task.score(task.test[0], fenced("double")).correct == 1.0
        assert task.messages(task.test[0])[0] == {"role": "system", "content": "S"}
        assert load_task(f"code:{path}", split="test").train == []

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"show_test": 1}, r"unknown option 'show_test' \(did you mean 'show_tests'\?\)"),
            ({"answer": "a"}, "unknown option 'answer'"),
            ({"test_size": 2}, "test_size=2 must lie between 1 and 1"),
            ({"test_size": 1, "split": "test"}, "but there are 2 test rows already"),
            ({"split": "dev"}, "split='dev'"),
            ({"executor": "docker"}, "unknown executor 'docker'; known are bubblewrap, e2b and piston:URL"),
        ],
    )
    def test_refusals(self, write, options, message):
        with pytest.raises(ValueError, match=message):
            load_task(f"code:{write(ROWS)}", **options)

    def test_executors_by_name(self, write):
        path = write(ROWS)
        assert load_task(f"code:{path}", executor="bubblewrap").executor == Bubblewrap()
        assert load_task(f"code:{path}", executor="e2b").executor == E2B()
        url = "http://127.0.0.1:2000"
        assert load_task(f"code:{path}", executor=f"piston:{url}").executor == Piston(url)
        with pytest.raises(ValueError, match="must start with http"):
            load_task(f"code:{path}", executor="piston:host")

    def test_the_hub(self, monkeypatch):
        asked = []

        def read_hub(source, split):
            asked.append((source.id, source.config, split))
            return [dict(ROWS[split == "test"], id=split)]

        monkeypatch.delenv("QERL_DATA", raising=False)
        monkeypatch.setattr(registry, "read_hub", read_hub)
        monkeypatch.setattr(registry, "hub_splits", lambda source: ["train", "test"])
        for spec in ("code:someone/programs", "codeforces"):
            task = load_task(spec, max_cases=1)
            assert [example.id for example in (*task.train, *task.test)] == ["train", "test"]
            assert [len(cases) for cases in task.cases.values()] == [1, 1]
        assert asked[0] == ("someone/programs", None, "train")
        assert asked[2] == ("open-r1/codeforces", "verifiable", "train")

    def test_a_local_codeforces(self, tmp_path):
        row = {
            "id": "1/A", "title": "Square", "description": "Theatre Square is a rectangle.", "input_format": "n",
            "output_format": "One number.", "examples": [{"input": "6\n", "output": "4\n"}], "note": None,
            "official_tests": [{"input": "1\n", "output": "1\n"}], "input_mode": "stdio", "interaction_format": None,
            "generated_checker": None, "rating": 1000, "editorial": "gold", "time_limit": 1.0,
        }  # fmt: skip
        rows = [row, row | {"id": "2/A", "description": "Other.", "generated_checker": "import sys"}]
        (tmp_path / "codeforces_test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        task = load_task("codeforces", data_dir=tmp_path)
        [example] = task.test
        assert example.question == (
            "Theatre Square is a rectangle.\n\nInput\n\nn\n\nOutput\n\nOne number.\n\n"
            "Examples\n\nInput:\n6\n\nOutput:\n4"
        )
        # the sample is shown, not tested; the editorial stays out
        assert task.cases["1/A"] == (StdioCase("1\n", "1\n"),)
        names = {"title", "input_mode", "interaction_format", "generated_checker", "rating", "time_limit"}
        assert set(example.metadata) == names
        assert task.report.missing_files == ("codeforces_train.jsonl",)
        assert task.report.excluded[0].id == "2/A"
        assert "takes a checker program" in task.report.excluded[0].reason

    def test_what_is_recorded_is_the_program(self, write):
        task = code_task_from_file(write(ROWS))
        assert task.extract("The answer is 4.\n" + fenced("a")) == "a\n"
        assert task.extract("The answer is 4.") is None


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
