"""``qerl generate`` with a fake engine."""

import json

from typer.testing import CliRunner

from qerl.cli.main import app

runner = CliRunner()


def test_one_prompt_prints_the_bare_completion(build) -> None:
    result = runner.invoke(app, ["generate", "m", "--prompt", "hi", "--system", "be brief"])
    assert result.exit_code == 0, result.output
    assert result.output == "[system]be brief[user]hi[assistant]0\n"
    sampling = build.engine.sampling
    assert (sampling.n, sampling.temperature, sampling.max_tokens) == (1, 0.0, 256)


def test_raw_prompt_from_stdin(build) -> None:
    result = runner.invoke(app, ["generate", "m", "--raw", "--device", "cpu"], input="a\nb\n")
    assert result.output == "a\nb0\n"
    assert build.calls[0][1]["device"] == "cpu"


def test_several_completions_are_told_apart(build) -> None:
    arguments = ["generate", "m", "-p", "x", "-p", "y", "--raw", "--n", "2", "--temperature", "0.5"]
    result = runner.invoke(app, arguments)
    assert result.output.splitlines() == [
        "--- prompt 1, sample 1 (2 tokens, stop)",
        "x0",
        "--- prompt 1, sample 2 (2 tokens, stop)",
        "x1",
        "--- prompt 2, sample 1 (2 tokens, stop)",
        "y0",
        "--- prompt 2, sample 2 (2 tokens, stop)",
        "y1",
    ]


def test_json_lines(build) -> None:
    result = runner.invoke(app, ["generate", "m", "-p", "é", "--raw", "--json"])
    assert json.loads(result.output) == {
        "prompt": "é",
        "sample": 0,
        "completion": "é0",
        "finish_reason": "stop",
        "tokens": 2,
    }


def test_mistakes(build) -> None:
    for arguments, text, message in (
        (["--n", "3", "-p", "x"], None, "3 equal completions"),
        (["--raw", "--system", "s", "-p", "x"], None, "--system needs the chat template"),
        ([], " \n", "standard input is empty"),
        (["-p", "x", "--top-p", "2"], None, "top-p"),
    ):
        result = runner.invoke(app, ["generate", "m", *arguments], input=text)
        assert result.exit_code == 2, result.output
        assert message in result.output
    assert build.calls == []
