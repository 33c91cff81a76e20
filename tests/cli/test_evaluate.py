"""``qerl eval`` with a fake engine."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from qerl.cli.evaluate import parse_options
from qerl.cli.main import app

runner = CliRunner()


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """Two questions; the echo engine answers the last number of the prompt, here the second one rightly."""
    path = tmp_path / "own.jsonl"
    rows = [{"question": "2+2", "answer": "4"}, {"question": "say 7", "answer": "70"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_own_file(build, questions: Path, tmp_path: Path) -> None:
    out = tmp_path / "results"
    arguments = ["eval", "some/model", "--tasks", str(questions), "--task-option", "prompt=plain"]
    arguments += ["--out", str(out), "--weights", "nvfp4", "--adapter", str(tmp_path), "--seed", "3"]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "95 % interval" in result.output
    assert f"results: {out}" in result.output
    options = {"weights": "nvfp4", "adapter": str(tmp_path), "device": "auto", "max_model_len": None}
    assert build.calls == [("some/model", options)]
    assert (build.engine.sampling.max_tokens, build.engine.sampling.seed) == (512, 3)
    [folder] = out.iterdir()
    stored = json.loads((folder / "result.json").read_text())
    assert stored["problems"] == 2
    assert stored["settings"]["weights"] == "nvfp4"
    assert stored["settings"]["first_prompt"] == "[user]2+2[assistant]"


def test_second_call_reads_the_result_and_fresh_repeats(build, questions: Path, tmp_path: Path) -> None:
    arguments = ["eval", "m", "--tasks", str(questions), "--out", str(tmp_path / "r")]
    first = runner.invoke(app, arguments)
    build.engine.sampling = None
    second = runner.invoke(app, arguments)
    assert (first.exit_code, second.exit_code) == (0, 0)
    assert second.output == first.output
    assert build.engine.sampling is None
    assert runner.invoke(app, [*arguments, "--fresh"]).exit_code == 0
    assert build.engine.sampling is not None
    other = runner.invoke(app, [*arguments, "--max-new-tokens", "9"])
    assert other.exit_code == 2
    assert "max_new_tokens: 512 there, 9 here" in other.output
    assert "--fresh" in other.output


def test_several_samples_print_pass_at_k(build, questions: Path, tmp_path: Path) -> None:
    arguments = ["eval", "m", "--tasks", str(questions), "--out", str(tmp_path / "r")]
    result = runner.invoke(app, [*arguments, "--n", "2", "--temperature", "1"])
    assert result.exit_code == 0, result.output
    assert "pass@2" in result.output
    assert "maj@2" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "gsm8kk"], "did you mean 'gsm8k'?"),
        (["--tasks", " , "], "names no task"),
        (["--tasks", "gsm8k", "--n", "4"], "4 equal samples"),
        (["--tasks", "gsm8k", "--task-option", "size"], "'size' is not KEY=VALUE"),
        (["--tasks", "reasoning_gym:chain_sum", "--task-option", "sise=3"], "sise"),
    ],
)
def test_mistakes_cost_no_model_loading(build, arguments: list[str], message: str) -> None:
    result = runner.invoke(app, ["eval", "m", *arguments])
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output
    assert build.calls == []


def test_options_are_typed() -> None:
    assert parse_options(["size=64", "prompt=number", "p = 0.5", "ops=[+, '-']", "eq=a=b"]) == {
        "size": 64,
        "prompt": "number",
        "p": 0.5,
        "ops": ["+", "-"],
        "eq": "a=b",
    }
