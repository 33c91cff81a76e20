"""``qerl task check``: counts, prompts, and who gets paid."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_tokenizer
from typer.testing import CliRunner

from qerl.cli.main import app
from qerl.evaluation.task_probes import asked_format, census, probes, run_probes, spread
from qerl.sandbox.core import Execution, Limits, Program, Status
from qerl.tasks.answers import AnswerTask
from qerl.tasks.base import Example, Outcome, Score, Task
from qerl.tasks.exact import exact_number
from qerl.tasks.prompts import prompt_template
from qerl.tasks.registry import load_task

runner = CliRunner()
Rule = Callable[[str, str], float]


class RuleTask(Task):
    """Scores by ``rule(gold, completion)``."""

    def __init__(
        self, rule: Rule, prompt: str = "boxed", golds: Sequence[str] = ("4", "-7", "1/2"), **kwargs: Any
    ) -> None:
        test = [Example(f"t{i}", f"question {i}", gold) for i, gold in enumerate(golds)]
        super().__init__("ruled", [], test, prompt_template(prompt), **kwargs)
        self.rule = rule

    def score(self, example: Example, completion: str) -> Score:
        return Score(self.rule(example.answer, completion), None, "by rule")

    def job(self, example: Example, completion: str) -> tuple[Callable[..., Outcome], tuple[Any, ...]]:
        return (lambda: Outcome.of(self.score(example, completion))), ()


class InlinePool:
    """Stands in for ``RewardPool``."""

    def __enter__(self) -> "InlinePool":
        return self

    def __exit__(self, *_: object) -> None: ...

    def outcomes(self, jobs: Sequence[Any], ids: Sequence[str] | None = None) -> list[Any]:
        return [function(*arguments) for function, arguments in jobs]


class NoProgramPasses:
    """An executor whose programs all print nothing."""

    name, limits = "none", Limits()

    def run(self, program: Program) -> Execution:
        return Execution(Status.OK, 0, "", "", 0.0)


def strict(gold: str, completion: str) -> float:
    """The bare gold, or the gold in the last box."""
    answer = completion.rsplit("\\boxed{", 1)[-1].removesuffix("}") if "\\boxed{" in completion else completion
    return float(answer.strip() == gold)


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs the command on a task, with options."""
    monkeypatch.setattr("qerl.cli.progress.quiet_libraries", lambda: None)

    def run(task: Task, *options: str) -> Any:
        monkeypatch.setattr("qerl.tasks.registry.load_task", lambda name, **_: task)
        monkeypatch.setattr("qerl.tasks.workers.RewardPool", InlinePool)
        return runner.invoke(app, ["task", "check", "ruled", *options])

    return run


def problems_in(result: Any) -> list[str]:
    """Names of the probes that the command complains about."""
    return [line.split(": ")[1] for line in result.output.splitlines() if line.startswith("problem: ")]


def test_a_sound_task_passes(check) -> None:
    result = check(RuleTask(strict), "--prompts", "2")
    assert result.exit_code == 0, result.output
    assert "answer format asked for: boxed" in result.output
    assert "examples: 0 train, 3 test" in result.output
    assert "--- prompt of t0\n[user]\nquestion 0\n\nReason step by step" in result.output
    assert "--- gold: 4" in result.output
    assert "--- prompt of t1" in result.output and "--- prompt of t2" not in result.output
    assert "ok: right answers are paid, and nothing else" in result.output


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (
            lambda gold, text: float(gold in text),
            [
                "all answers listed, as asked",
                "all answers listed, bare",
                "gold in a question",
                "right, then replaced",
            ],
        ),
        (
            lambda gold, text: float("\\boxed" in text),
            [
                "right, bare",
                "wrong, as asked",
                "all answers listed, as asked",
                "a calculation, as asked",
                "right, then replaced",
                "format without an answer",
                "filler in the format",
            ],
        ),
        (lambda gold, text: 0.0, ["right, as asked", "right, bare"]),
        (lambda gold, text: max(strict(gold, text), float(not text.strip())), ["empty", "white space"]),
        (lambda gold, text: 0.9 * strict(gold, text), ["right, as asked", "right, bare"]),
    ],
    ids=["contains-gold", "pays-the-format", "never-pays", "pays-silence", "never-in-full"],
)
def test_each_flaw_is_found_and_named(check, rule: Rule, expected: list[str]) -> None:
    result = check(RuleTask(rule, golds=("41", "-73", "1/29")))
    assert result.exit_code == 1
    assert problems_in(result) == expected
    assert "first t0 (gold '41'" in result.output


def test_partial_credit_can_be_accepted(check) -> None:
    task = RuleTask(lambda gold, text: max(strict(gold, text), 0.05 * bool(text.strip())))
    refused = check(task)
    assert refused.exit_code == 1
    assert "an answer that deserves nothing gets 0.05 in 3 problems" in refused.output
    assert "--allow-partial" in refused.output
    assert check(task, "--allow-partial", "0.05").exit_code == 0
    assert check(task, "--allow-partial", "0.04").exit_code == 1
    impossible = check(task, "--allow-partial", "1")
    assert impossible.exit_code == 2
    assert "below 1, the score of a right answer" in impossible.output


def test_unparsable_gold_is_a_right_answer_without_score() -> None:
    task = RuleTask(strict)
    task.job = lambda example, completion: ((lambda: Outcome(None, "unparsable_gold", "gold: no digit")), ())  # type: ignore[method-assign]
    wrong = [result for result in run_probes(task, task.test, InlinePool()) if result.problem]
    assert {result.probe.name for result in wrong} == {"right, as asked", "right, bare"}
    assert wrong[0].problem == "a right answer gets no score"


def test_program_tasks_have_no_right_answer_to_try(check) -> None:
    task = RuleTask(lambda gold, text: 0.0, prompt="{question} in one ```python block", golds=["", ""])
    assert asked_format(task) == "code block"
    completions = {probe.name: probe.completion for probe in probes(task, task.test[0])}
    assert completions["ends before it answers"] == "```python\nraise SystemExit(0)\n```"
    assert completions["wrong, as asked"] == "```python\nprint(7919)\n```"
    result = check(task)
    assert result.exit_code == 0, result.output
    assert "without a gold answer, scored by the task's own rule: 2" in result.output
    assert "no right answer could be made up (no golds), so none was tried" in result.output


def test_made_up_answers_are_what_they_say() -> None:
    golds = ["20", "-3", "3/4", "0.5", "$1,200", "1e3", "Yes", "\\frac{1}{3}", "7919", "(1, 2)"]
    task = RuleTask(strict, golds=golds)
    for example in task.test:
        made = {probe.name: probe for probe in probes(task, example, task.test)}
        assert [name for name, probe in made.items() if probe.pays] == ["right, as asked", "right, bare"]
        wrong, number = made["wrong, bare"].completion, exact_number(example.answer)
        assert wrong != example.answer
        assert number is None or exact_number(wrong) == number + 1
        listed = made["all answers listed, bare"].completion
        assert example.answer in listed
        assert not listed.endswith(f", {example.answer}")
        assert made["format without an answer"].completion == "\\boxed{}"


def test_opened_thinking_is_closed_in_every_probe_but_one() -> None:
    task = RuleTask(strict, think_opened=True)
    made = {probe.name: probe.completion for probe in probes(task, task.test[0])}
    assert made.pop("right, thinking not closed") == "\\boxed{4}"
    assert all(completion.startswith("Let me think.\n</think>") for completion in made.values())


def test_without_an_asked_format_nothing_is_tried_twice() -> None:
    task = RuleTask(strict, prompt="plain")
    assert asked_format(task) == "none"
    completions = [probe.completion for probe in probes(task, task.test[0])]
    assert len(completions) == len(set(completions))


def test_problems_are_taken_from_all_over() -> None:
    examples = [Example(str(i), "", "") for i in range(10)]
    assert [example.id for example in spread(examples, 3)] == ["0", "3", "6"]
    assert spread(examples, 20) == examples
    assert spread(examples, 0) == []


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A local gsm8k: a repeated training question, one that is in the test set, one whose gold is no answer."""
    train = [("1 + 1?", "2"), ("1+1?", "2"), ("2 + 2?", "4"), ("3 + 3?", "6"), ("4 + 4?", "..."), ("5 + 5?", "10")]
    test = [("2 + 2?", "4"), ("6 + 6?", "12"), ("6 + 6?", "12")]
    for side, rows in (("train", train), ("test", test)):
        lines = [json.dumps({"question": question, "answer": answer}) + "\n" for question, answer in rows]
        (tmp_path / f"gsm8k_{side}.jsonl").write_text("".join(lines))
    return tmp_path


def test_a_real_task_with_its_worker_processes(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qerl.cli.progress.quiet_libraries", lambda: None)
    result = runner.invoke(app, ["task", "check", "gsm8k", "--task-option", f"data_dir={data}", "--problems", "2"])
    lines = result.output.splitlines()
    assert "examples: 3 train, 3 test" in lines
    at = lines.index("excluded, answers cannot be checked: 1")
    assert lines[at + 1] == "  gsm8k-train-000005: no letter and no digit"
    assert "dropped, question repeated in train: 1 (gsm8k-train-000002)" in lines
    assert "dropped from train, question is in test: 1 (gsm8k-train-000003)" in lines
    assert "still repeated: 0 in train, 1 in test, 0 in both" in lines
    # what loading found is told once
    assert "left out" not in result.output
    assert problems_in(result) == []
    assert result.exit_code == 0
    assert "ok: right answers are paid, and nothing else" in lines


@pytest.mark.parametrize("name", ["gsm8k", "math500", "reasoning_gym:chain_sum"])
def test_real_tasks_are_sound(name: str, shared_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qerl.cli.progress.quiet_libraries", lambda: None)
    monkeypatch.setenv("QERL_DATA", str(shared_dir / "data"))
    result = runner.invoke(app, ["task", "check", name, "--problems", "20"])
    assert (result.exit_code, problems_in(result)) == (0, []), result.output


def test_a_data_folder_with_one_side(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qerl.cli.progress.quiet_libraries", lambda: None)
    (data / "gsm8k_train.jsonl").unlink()
    result = runner.invoke(app, ["task", "check", "gsm8k", "--task-option", f"data_dir={data}"])
    assert result.exit_code == 0, result.output
    assert "examples: 0 train, 3 test\nnot in the data folder: gsm8k_train.jsonl\n" in result.output


def test_programs_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qerl.cli.progress.quiet_libraries", lambda: None)
    monkeypatch.setattr("qerl.tasks.workers.RewardPool", InlinePool)
    monkeypatch.setattr("qerl.tasks.code.Bubblewrap", NoProgramPasses)
    path = tmp_path / "sums.jsonl"
    rows = [{"id": "a", "question": "Add.", "input": ["1 2"], "output": ["3"]}, {"id": "b", "question": "No cases."}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = runner.invoke(app, ["task", "check", f"code:{path}"])
    assert result.exit_code == 0, result.output
    assert "answer format asked for: code block" in result.output
    assert "excluded, answers cannot be checked: 1\n  b: no test cases\n" in result.output


def test_census_sees_what_loading_left() -> None:
    train = [Example("a", "1 + 1?", "2"), Example("b", "1+1?", "2"), Example("c", "2+2?", "")]
    test = [Example("d", "2 + 2?", "4")]
    counts = census(AnswerTask("t", train, test, prompt_template("plain")))
    assert (counts.train, counts.test, counts.repeated, counts.shared, counts.without_gold) == (3, 1, (1, 0), 1, 1)


def test_every_sound_probe_of_reasoning_gym_is_scored_rightly() -> None:
    task = load_task("reasoning_gym:chain_sum", size=4, test_size=4)
    results = run_probes(task, task.test, InlinePool())
    assert [result for result in results if result.problem] == []
    asked = [result.outcome.score for result in results if result.probe.name == "gold in a question"]
    assert asked == [0.0] * 4


def test_prompts_through_a_tokenizer(check, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path / "plain")
    result = check(RuleTask(strict), "--tokenizer", str(tmp_path / "plain"))
    assert result.exit_code == 0, result.output
    assert "<|im_start|>user\nquestion 0\n\nReason" in result.output
    ids = tokenizer.apply_chat_template(
        RuleTask(strict).messages(RuleTask(strict).test[0]), tokenize=True, add_generation_prompt=True
    )["input_ids"]
    assert f"--- prompt of t0, {len(ids)} tokens" in result.output
    tokenizer.chat_template = tokenizer.chat_template.replace("assistant\n", "assistant\n<think>\n")
    tokenizer.save_pretrained(tmp_path / "thinking")
    mismatch = check(RuleTask(strict), "--tokenizer", str(tmp_path / "thinking"))
    assert mismatch.exit_code == 1
    assert "the chat template opens <think>; load the task with think_opened=True" in mismatch.output
    absent = check(RuleTask(strict), "--tokenizer", str(tmp_path / "absent"))
    assert absent.exit_code == 2
    assert "give the model's local folder with --tokenizer" in absent.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gsm8kk"], "did you mean 'gsm8k'?"),
        (["gsm8k", "--task-option", "x"], "'x' is not KEY=VALUE"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qerl.cli.progress.quiet_libraries", lambda: None)
    result = runner.invoke(app, ["task", "check", *arguments])
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


def test_help_lists_the_subcommand() -> None:
    result = runner.invoke(app, ["task", "--help"])
    assert result.exit_code == 0
    assert "check" in result.output
    assert "Exit code 1" in runner.invoke(app, ["task", "check", "--help"]).output
