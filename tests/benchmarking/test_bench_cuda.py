"""The benches and the server on a GPU, at sizes that take seconds."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model
from typer.testing import CliRunner

from qerl.cli.main import app

pytestmark = pytest.mark.gpu
runner = CliRunner()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Heads of 64, which the decode kernel takes."""
    sizes = {"vocab_size": 272, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}
    path = tmp_path_factory.mktemp("config") / "small.json"
    path.write_text(json.dumps(tiny_model("qwen2", tied=False, **sizes).config.to_dict(), default=str))
    yield path
    torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def _keep_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qerl.cli.progress.quiet_libraries", lambda: None)


@pytest.mark.parametrize(("kv_dtype", "head"), [("auto", "auto"), ("fp8", "auto"), ("auto", "nvfp4")])
def test_rollouts_replay_graphs_and_agree_with_transformers(
    config: Path, tmp_path: Path, kv_dtype: str, head: str
) -> None:
    out = tmp_path / "r.json"
    arguments = ["--config-json", str(config), "--batch", "1,5", "--prompt", "33", "--new", "64", "--out", str(out)]
    arguments += ["--weights", "nvfp4,nf4,bf16", "--lora-rank", "0,8", "--kv-dtype", kv_dtype, "--prefill", "4x65"]
    arguments += ["--head-dtype", head]
    result = runner.invoke(app, ["bench", "rollout", *arguments])
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 12
    for row in rows:
        assert row["graph_replays"] >= 50, row
        assert row["parity"] < 0.1 and 0 < row["roofline_share"] < 1


def test_long_tailed_rollouts(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    arguments = ["--config-json", str(config), "--lengths", "lognormal", "--mean-new", "40", "--max-new", "300"]
    arguments += ["--samples", "24", "--batch", "8", "--prompt", "16", "--out", str(out)]
    result = runner.invoke(app, ["bench", "rollout", *arguments])
    assert result.exit_code == 0, result.output
    (row,) = json.loads(out.read_text())["long_tailed"]
    # Not their times, which on so small a model are the host's: other processes can take three quarters of them.
    assert 0 < row["steps"] < row["static_steps"]


@pytest.mark.parametrize(("format", "rank"), [("nvfp4", 0), ("nvfp4", 32), ("nf4", 0)])
def test_kernels(config: Path, tmp_path: Path, format: str, rank: int) -> None:
    out = tmp_path / "k.json"
    arguments = ["--config-json", str(config), "--format", format, "--rows", "1,16,64,65,2048", "--out", str(out)]
    arguments += ["--lora-rank", str(rank), "--quantizer-layers", "1"]
    result = runner.invoke(app, ["bench", "kernels", *arguments])
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    assert len(written["rows"]) == 25
    assert all(0 < row["us"] < 1e5 for row in written["rows"])
    assert {row["kv_dtype"] for row in written["attention"]} == {"auto", "fp8"}
