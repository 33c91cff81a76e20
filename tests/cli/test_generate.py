"""``qerl generate`` with a fake engine."""

import json
from pathlib import Path

from typer.testing import CliRunner

from qerl.cli.main import app

runner = CliRunner()


def rows(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def test_one_prompt_prints_the_bare_completion(build) -> None:
    result = runner.invoke(app, ["generate", "m", "--prompt", "hi", "--system", "be brief"])
    assert result.exit_code == 0, result.output
    assert result.output == "[system]be brief[user]hi[assistant]0\n"
    sampling = build.engine.sampling
    assert (sampling.n, sampling.temperature, sampling.max_tokens) == (1, 0.0, 256)


def test_raw_prompt_from_stdin(build) -> None:
    result = runner.invoke(app, ["generate", "m", "--raw", "--device", "cpu", "--head", "nvfp4"], input="a\nb\n")
    assert result.output == "a\nb0\n"
    assert build.calls[0][1]["device"] == "cpu" and build.calls[0][1]["head"] == "nvfp4"


def test_drafts_reach_the_engine(build) -> None:
    arguments = ["generate", "m", "-p", "x", "--raw", "--speculative-tokens", "4", "--speculative-max-batch", "2"]
    assert runner.invoke(app, arguments).exit_code == 0
    options = build.calls[0][1]
    assert (options["speculative_tokens"], options["speculative_max_batch"]) == (4, 2)


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
        "index": 0,
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


def test_one_prompt_a_line(build, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("first\n\n  second \r\nthird")
    result = runner.invoke(app, ["generate", "m", "--raw", "--prompts", str(file), "--json"])
    assert [row["prompt"] for row in rows(result.output)] == ["first", "  second ", "third"]
    assert [row["index"] for row in rows(result.output)] == [0, 1, 2]
    piped = runner.invoke(app, ["generate", "m", "--raw", "--prompts", "-", "--json"], input=file.read_text())
    assert piped.output == result.output


def test_json_lines_with_texts_and_chats(build, tmp_path: Path) -> None:
    lines = [
        {"prompt": "a\nb", "id": "x1", "gold": 3},
        {"prompt": [{"role": "user", "content": "c"}]},
        {"messages": [{"role": "user", "content": "d"}, {"role": "assistant", "content": "e"}]},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    out = tmp_path / "deep" / "out.jsonl"
    arguments = ["generate", "m", "--prompts", "-", "--out", str(out), "--n", "2", "--temperature", "1"]
    result = runner.invoke(app, arguments, input=text)
    assert result.exit_code == 0, result.output
    written = rows(out.read_text())
    assert [(row["index"], row["sample"]) for row in written] == [(i, s) for i in range(3) for s in range(2)]
    assert written[0] == {
        "id": "x1",
        "gold": 3,
        "index": 0,
        "prompt": "a\nb",
        "sample": 0,
        "completion": "[user]a\nb[assistant]0",
        "finish_reason": "stop",
        "tokens": 21,
    }
    assert written[2]["completion"] == "[user]c[assistant]0"
    assert written[4]["completion"] == "[user]d[assistant]e[assistant]0"
    again = runner.invoke(app, arguments, input=text)
    assert again.exit_code == 2 and "add --force to replace it" in again.output
    assert runner.invoke(app, [*arguments, "--force"], input=text).exit_code == 0


def test_a_long_file_is_generated_in_batches_with_streams_of_its_own(build, monkeypatch) -> None:
    monkeypatch.setattr("qerl.cli.generate._BATCH", 2)
    calls, real = [], build.engine.generate
    build.engine.generate = lambda prompts, sampling, **options: (
        calls.append(options["prompt_ids"]),
        real(prompts, sampling, **options),
    )[1]
    result = runner.invoke(app, ["generate", "m", "--raw", "--prompts", "-"], input="a\nb\nc\n")
    assert calls == [[0, 1], [2]]
    assert [line for line in result.output.splitlines() if "---" not in line] == ["a0", "b0", "c0"]


def test_mistakes_in_prompt_files(build, tmp_path: Path) -> None:
    chat = json.dumps({"messages": [{"role": "system", "content": "s"}]})
    for options, text, message in (
        ([], '{"prompt": "a"}\n{"prompt": 3}\n', "line 2: prompt must be a text or a list of messages"),
        ([], '{"prompt": "a"}\n{"text": "a"}\n', "line 2 must have either 'prompt' or 'messages'; it has text"),
        ([], '{"prompt": "a"}\nb\n', "line 2 is no JSON: Expecting value, column 1"),
        ([], '{"messages": [{"role": "user"}]}', "texts 'role' and 'content', got"),
        ([], '{"messages": []}', "messages is empty"),
        ([], "\n \n", "holds no prompts"),
        (["-p", "x"], "a\n", "use one of them"),
        (["--raw"], chat, "is a list of messages; drop --raw"),
        (["--system", "s"], chat, "has a system message; drop one"),
        (["--max-new-tokens", "5000"], "a\n", "with --max-new-tokens 5000 exceeds 4096"),
    ):
        result = runner.invoke(app, ["generate", "m", "--prompts", "-", *options], input=text)
        assert result.exit_code == 2, result.output
        assert message in result.output
    missing = runner.invoke(app, ["generate", "m", "--prompts", str(tmp_path / "absent.txt")])
    assert missing.exit_code == 2 and "absent.txt" in missing.output
