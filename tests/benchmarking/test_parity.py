"""``qerl bench parity``: engine, trainer and fp32 forward on the same tokens."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from qerl.benchmarking import parity
from qerl.cli.main import app
from qerl.nn.fp32_copy import fp32_copy
from qerl.nn.loading import load_model
from qerl.nn.random_weights import add_random_adapter
from qerl.nn.surgery import quant_groups

runner = CliRunner()


@pytest.fixture(autouse=True)
def _keep_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qerl.cli.progress.quiet_libraries", lambda: None)


def measured(out: Path, *arguments: str) -> tuple[dict, str]:
    command = ["bench", "parity", *arguments, "--new", "12", "--batch", "8", "--device", "cpu", "--out", str(out)]
    result = runner.invoke(app, command)
    assert result.exit_code == 0, result.output
    return json.loads(out.read_text())["parity"][-1], result.output


def test_fp32_on_the_cpu_has_one_policy(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    arguments = [str(tiny_checkpoints["qwen2"]), "--weights", "nvfp4", "--lora-rank", "4", "--tokens", "120"]
    row, output = measured(tmp_path / "p.json", *arguments)
    assert row["tokens"] >= 120 and row["samples"] % 8 == 0
    assert (row["weights"], row["dtype"], row["adapter"]) == ("nvfp4", "fp32", "random, rank 4, scale 0.1")
    for key in ("engine_trainer", "engine_fp32", "trainer_fp32"):
        part = row[key]
        assert abs(part["signed_mean"]) <= part["mean"] <= part["p99"] <= part["max"] < 2e-5
    assert row["ratio"]["min"] <= row["ratio"]["mean"] <= row["ratio"]["max"] < 1 + 2e-5
    assert row["ess"] == pytest.approx(1.0, abs=1e-6)
    assert "effective sample size 1.00000" in output


def test_bf16_is_told_apart_from_fp32(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    arguments = [str(tiny_checkpoints["llama"]), "--weights", "nvfp4", "--lora-rank", "8", "--tokens", "120"]
    row, _ = measured(tmp_path / "p.json", *arguments, "--dtype", "bfloat16")
    assert row["dtype"] == "bf16"
    # Roundings of both sides show against fp32; engine and trainer share most of them.
    for key in ("engine_trainer", "engine_fp32", "trainer_fp32"):
        assert 1e-4 < row[key]["mean"] < 0.1
    assert 0.9 < row["ess"] < 1


def test_a_biased_engine_shows_on_its_side(tiny_checkpoints: dict[str, Path], tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    drawn = parity.draw_tokens

    def biased(*arguments):  # type: ignore[no-untyped-def]
        rows = drawn(*arguments)
        for _, output in rows:
            output.temperature_logprobs = [value - 0.25 for value in output.temperature_logprobs]
        return rows

    monkeypatch.setattr(parity, "draw_tokens", biased)
    row, _ = measured(tmp_path / "p.json", str(tiny_checkpoints["qwen2"]), "--lora-rank", "0", "--tokens", "40")
    assert row["adapter"] == "none"
    assert row["engine_trainer"]["mean"] == pytest.approx(0.25, abs=1e-4)
    assert row["engine_fp32"]["signed_mean"] == pytest.approx(-0.25, abs=1e-4)
    assert row["trainer_fp32"]["max"] < 2e-5
    assert row["ratio"]["mean"] == pytest.approx(1.284, abs=1e-3)


def test_prompts_come_from_a_file_or_a_task(tiny_checkpoints: dict[str, Path], tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    plans = []
    monkeypatch.setattr(parity, "run_parity", lambda plan, say: plans.append(plan))
    (tmp_path / "p.txt").write_text("one\ntwo\n")
    (tmp_path / "t.jsonl").write_text('{"question": "1 + 1 =", "answer": "2"}\n')
    command = ["bench", "parity", str(tiny_checkpoints["llama"])]
    file, task = ["--prompts", str(tmp_path / "p.txt")], ["--task", str(tmp_path / "t.jsonl")]
    for more in (file, [*task, "--task-option", "prompt=plain"], []):
        result = runner.invoke(app, [*command, *more])
        assert result.exit_code == 0, result.output
    assert [[chat[-1]["content"] for chat in plan.chats] for plan in plans[:2]] == [["one", "two"], ["1 + 1 ="]]
    assert len(plans[2].chats) == 64
    for more, words in ((file + task, "use one of them"), (["--task-option", "size=3"], "goes with --task")):
        refused = runner.invoke(app, [*command, *more])
        assert refused.exit_code == 2 and words in refused.output
    missing = runner.invoke(app, ["bench", "parity", str(tmp_path)])
    assert missing.exit_code == 2 and "holds no model" in missing.output


def test_greedy_is_refused(tiny_checkpoints: dict[str, Path]) -> None:
    result = runner.invoke(app, ["bench", "parity", str(tiny_checkpoints["llama"]), "--temperature", "0"])
    assert result.exit_code == 2 and "draws nothing" in result.output


@pytest.mark.parametrize("head", ["bf16", "nvfp4"])
def test_the_copy_computes_in_fp32_with_the_same_weights(tiny_checkpoints: dict[str, Path], head: str) -> None:
    model = load_model(tiny_checkpoints["qwen3"], weights="nvfp4", head=head, dtype="bfloat16", device="cpu")
    model = add_random_adapter(model, 4)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    made = fp32_copy(model)
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    for (name, own), other in zip(quant_groups(model).items(), quant_groups(made).values(), strict=True):
        assert own.format == "nvfp4" and other.format == "bf16", name
        assert other.packed.dtype == torch.float32 and torch.equal(other.packed, own.dense())
    plain = load_model(tiny_checkpoints["qwen3"], weights="nvfp4", head=head, dtype="float32", device="cpu")
    plain = add_random_adapter(plain, 4)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(made(ids).logits, plain(ids).logits)
        assert not torch.equal(made(ids).logits, model(ids).logits.float())
