"""``qerl eval`` with a fake engine."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from qerl.cli.evaluate import folder_name, parse_options
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
    arguments += ["--head", "nvfp4"]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "95 % interval" in result.output
    assert f"results: {out}\nreport:  {out / 'report.html'}\n" in result.output
    assert "<h2>Evaluations</h2>" in (out / "report.html").read_text()
    options = {"weights": "nvfp4", "head": "nvfp4", "adapter": str(tmp_path), "device": "auto", "max_model_len": None}
    assert build.calls == [("some/model", options)]
    assert (build.engine.sampling.max_tokens, build.engine.sampling.seed) == (512, 3)
    [folder] = [path for path in out.iterdir() if path.is_dir()]
    stored = json.loads((folder / "result.json").read_text())
    assert stored["problems"] == 2
    assert stored["settings"]["weights"] == stored["settings"]["head"] == "nvfp4"
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


def test_top_p_reaches_the_engine_and_the_settings(build, questions: Path, tmp_path: Path) -> None:
    arguments = ["eval", "m", "--tasks", str(questions), "--out", str(tmp_path / "r"), "--temperature", "0.7"]
    result = runner.invoke(app, [*arguments, "--top-p", "0.9"])
    assert result.exit_code == 0, result.output
    assert (build.engine.sampling.temperature, build.engine.sampling.top_p) == (0.7, 0.9)
    [stored] = (tmp_path / "r").glob("*/settings.json")
    assert json.loads(stored.read_text())["top_p"] == 0.9
    other = runner.invoke(app, arguments)
    assert other.exit_code == 2
    assert "top_p: 0.9 there, 1.0 here" in other.output


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A local AMC 23 and a local GSM8K of one problem each."""
    for name in ("amc23", "gsm8k_test"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"question": "1+1?", "answer": "2"}) + "\n")
    monkeypatch.setenv("QERL_DATA", str(tmp_path))
    return tmp_path


def test_a_preset_sets_what_is_not_given(build, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "r"
    build.engine.max_model_len = 8192 + 2048
    result = runner.invoke(app, ["eval", "m", "--preset", "amc23,gsm8k", "--n", "1", "--out", str(out)])
    assert result.exit_code == 0, result.output
    stored = {path.parent.name: json.loads(path.read_text()) for path in out.glob("*/settings.json")}
    wanted = ("n", "temperature", "top_p", "max_new_tokens")
    assert [stored["amc23"][name] for name in wanted] == [1, 0.6, 0.95, 8192]
    assert [stored["gsm8k"][name] for name in wanted] == [1, 0.0, 1.0, 4096]
    assert "Therefore, the final answer is" in stored["amc23"]["first_prompt"]
    # the longest completion of the presets after the longest prompt
    assert build.calls[0][1]["max_model_len"] == 8192 + 2048


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either --tasks or --preset"),
        (["--tasks", "gsm8k", "--preset", "gsm8k"], "give either --tasks or --preset"),
        (["--preset", "gsm"], "no preset 'gsm'; known: gsm8k, math500"),
        (["--preset", "amc23", "--temperature", "0"], "preset amc23: --n 32 at temperature 0 makes 32 equal samples"),
        (["--tasks", "gsm8k", "--top-p", "0.5"], "--top-p 0.5 has no effect at temperature 0"),
        (["--tasks", "gsm8kk"], "did you mean 'gsm8k'?"),
        (["--tasks", " , "], "names no task"),
        (["--tasks", "gsm8k", "--n", "4"], "4 equal samples"),
        (["--tasks", "gsm8k", "--task-option", "size"], "'size' is not KEY=VALUE"),
        (["--tasks", "reasoning_gym:chain_sum", "--task-option", "sise=3"], "sise"),
    ],
)
def test_mistakes_cost_no_model_loading(build, data: Path, arguments: list[str], message: str) -> None:
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


def test_models_of_the_same_last_part_have_folders_of_their_own(
    build, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``runs/a/adapter`` and ``runs/b/adapter`` wrote to one folder."""
    monkeypatch.chdir(tmp_path)
    folders = [folder_name("runs/a/model", None), folder_name("runs/b/model", None)]
    folders += [folder_name("m", Path("runs/a/adapter")), folder_name("m", Path("runs/b/adapter"))]
    assert len(set(folders)) == 4
    assert [name.rpartition("-")[0] for name in folders] == ["model", "model", "m+adapter", "m+adapter"]
    # the same folder however it is written, so that a second call continues
    assert folder_name(str(tmp_path / "runs" / "a" / "model"), None) == folders[0]
    assert folder_name("./runs/../runs/a/model/", None) == folders[0]
    for model in ("runs/a/model", "runs/b/model", "runs/a/model"):
        result = runner.invoke(app, ["eval", model, "--tasks", str(questions)])
        assert result.exit_code == 0, result.output
    assert sorted(path.name for path in (tmp_path / "evals").iterdir()) == sorted(folders[:2])
