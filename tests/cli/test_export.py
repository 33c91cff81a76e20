"""``qerl export``: where the adapter, its base and its weights are found."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from typer.testing import CliRunner

from qerl.cli.main import app
from qerl.evaluation.folders import find_adapter
from qerl.nn.loading import load_model
from qerl.nn.lora import prepare_lora_config

runner = CliRunner()


@pytest.fixture
def run(tiny_checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder with a checkpoint and a final adapter, trained on NVFP4 made while loading."""
    monkeypatch.setattr("qerl.cli.progress.quiet_libraries", lambda: None)
    model = load_model(tiny_checkpoints["llama"], weights="nvfp4", dtype="float32", device="cpu")
    config = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, prepare_lora_config(config, model))
    folder = tmp_path / "run"
    for name in ("checkpoint-5", "adapter"):
        for parameter in (p for n, p in model.named_parameters() if "lora_B" in n):
            parameter.data.add_(0.01)
        model.save_pretrained(folder / name)
    (folder / "checkpoint-5" / "trainer_state.json").write_text("{}")
    settings = {"model": str(tiny_checkpoints["llama"]), "weights": "nvfp4"}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    return folder


def test_merged_takes_model_and_weights_from_the_run(run: Path, tmp_path: Path) -> None:
    result = runner.invoke(app, ["export", str(run), str(tmp_path / "merged")])
    assert result.exit_code == 0, result.output
    assert "(nvfp4 weights): 14 modules" in result.output
    forced = runner.invoke(app, ["export", str(run), str(tmp_path / "plain"), "--weights", "bf16"])
    assert "(bf16 weights)" in forced.output
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("merged", "plain")]
    name = "model.layers.0.self_attn.q_proj.weight"
    assert files[0].keys() == files[1].keys()
    assert not torch.equal(files[0][name], files[1][name])
    again = runner.invoke(app, ["export", str(run), str(tmp_path / "merged")])
    assert again.exit_code == 2 and "use --force" in again.output
    assert runner.invoke(app, ["export", str(run), str(tmp_path / "merged"), "--force"]).exit_code == 0


def test_adapter(run: Path, tmp_path: Path) -> None:
    result = runner.invoke(app, ["export", str(run / "checkpoint-5"), str(tmp_path / "out"), "--format", "adapter"])
    assert result.exit_code == 0, result.output
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"].endswith("llama")


def test_where_the_adapter_is_found(run: Path) -> None:
    assert find_adapter(run) == run / "adapter"
    assert find_adapter(run / "checkpoint-5") == run / "checkpoint-5"
    shutil.rmtree(run / "adapter")
    assert find_adapter(run) == run / "checkpoint-5"
    (run / "checkpoint-5" / "trainer_state.json").unlink()
    with pytest.raises(FileNotFoundError, match="holds no adapter"):
        find_adapter(run)


def test_mistakes(run: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    for arguments, message in (
        ([str(run), out, "--format", "gguf"], "choose from adapter, merged"),
        ([str(tmp_path / "absent"), out], "holds no adapter"),
        ([str(run), out, "--model", str(tmp_path / "absent")], "give its folder with --model"),
        ([str(run), out, "--weights", "int3"], "weights='int3' is unknown"),
    ):
        result = runner.invoke(app, ["export", *arguments])
        assert result.exit_code == 2, result.output
        assert message in " ".join(result.output.split())
    assert not Path(out).exists()
