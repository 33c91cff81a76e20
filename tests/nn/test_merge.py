"""Merging an adapter: bit for bit bf16(base + s B A) of the model that was trained, loadable by stock transformers."""

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny
from transformers import AutoModelForCausalLM, AutoTokenizer

from qerl.formats.base import get_format
from qerl.formats.checkpoint import CheckpointReader
from qerl.formats.quantizer import quantize
from qerl.nn.loading import ModelLoadError, load_model
from qerl.nn.lora import AdapterError, lora_layers, prepare_lora_config
from qerl.nn.merge import export_adapter, merge_adapter

IDS = torch.arange(5, 29)[None]


def trained(base: Path, folder: Path, weights: str, head: str = "auto", **options: object) -> PeftModel:
    """A model with a random adapter, saved in ``folder``."""
    model = load_model(base, weights=weights, head=head, dtype="float32", device="cpu")
    settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **options}
    model = get_peft_model(model, prepare_lora_config(LoraConfig(**settings), model)).eval()
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bases")
    plain = save_tiny(root / "bf16", "qwen2")
    packed = {name: root / name for name in ("nvfp4", "nf4", "mxfp4")}
    for name, folder in packed.items():
        quantize(plain, folder, format=name)
    return {"bf16": plain, **packed}


@pytest.mark.parametrize(
    ("stored", "weights"),
    [
        *((stored, "auto") for stored in ("nvfp4", "nf4", "mxfp4", "bf16")),
        *(("bf16", w) for w in ("nvfp4", "nf4", "mxfp4")),
    ],
)
def test_weights_are_the_trained_models_rounded_once(
    stored: str, weights: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    model = trained(bases[stored], tmp_path / "adapter", weights)
    report = merge_adapter(bases[stored], tmp_path / "adapter", tmp_path / "out", weights=weights)
    merged = load_file(tmp_path / "out" / "model.safetensors")
    layers = lora_layers(model)
    assert len(layers) == len(report.merged) == 14
    for name, layer in layers.items():
        module = name.removeprefix("base_model.model.")
        resident = layer.base_layer.group.packed_tensor(layer.base_layer.segment)
        base = resident if isinstance(resident, torch.Tensor) else get_format(resident.format).dequantize(resident)
        expected = (base.float() + layer.get_delta_weight("default")).to(torch.bfloat16)
        assert torch.equal(merged.pop(f"{module}.weight"), expected), module
    source = CheckpointReader(bases[stored])
    assert merged.keys() == {n for n in source.plain_names() if n.removesuffix(".weight") not in report.merged}
    assert all(torch.equal(tensor, source.load(name)) for name, tensor in merged.items())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        difference = (loaded(IDS).logits - model(IDS).logits).norm() / model(IDS).logits.norm()
    # one rounding of the weights to bf16 (2^-9 each) through two layers
    assert difference < 1e-2
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and "quantization_config" not in config
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) > 256


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_packed_head_is_merged_as_it_decodes(tied: bool, tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", "qwen2", tied=tied)
    model = trained(base, tmp_path / "adapter", "nvfp4", head="nvfp4")
    merge_adapter(base, tmp_path / "adapter", tmp_path / "out", weights="nvfp4", head="nvfp4")
    merged = load_file(tmp_path / "out" / "model.safetensors")
    head = get_format("nvfp4").dequantize(model.get_base_model().lm_head.group.packed_tensor(0))
    assert torch.equal(merged["lm_head.weight"], head.to(torch.bfloat16))
    assert torch.equal(merged["model.embed_tokens.weight"], CheckpointReader(base).load("model.embed_tokens.weight"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        assert (loaded(IDS).logits - model(IDS).logits).norm() / model(IDS).logits.norm() < 1e-2


def test_patterns_and_rslora_scale_as_peft_scales(bases: dict[str, Path], tmp_path: Path) -> None:
    options = {"rank_pattern": {"q_proj": 2, "layers.1.mlp.down_proj": 8}, "alpha_pattern": {"o_proj": 32}}
    model = trained(bases["bf16"], tmp_path / "adapter", "bf16", use_rslora=True, **options)
    merge_adapter(bases["bf16"], tmp_path / "adapter", tmp_path / "out")
    merged, source = load_file(tmp_path / "out" / "model.safetensors"), load_file(bases["bf16"] / "model.safetensors")
    for name, layer in lora_layers(model).items():
        module = name.removeprefix("base_model.model.")
        expected = source[f"{module}.weight"].float() + layer.get_delta_weight("default")
        assert torch.equal(merged[f"{module}.weight"], expected.to(torch.bfloat16)), module


def test_shards_stream(bases: dict[str, Path], tmp_path: Path) -> None:
    trained(bases["nvfp4"], tmp_path / "adapter", "auto")
    merge_adapter(bases["nvfp4"], tmp_path / "adapter", tmp_path / "one")
    merge_adapter(bases["nvfp4"], tmp_path / "adapter", tmp_path / "many", max_shard_bytes=20_000)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    one, many = CheckpointReader(tmp_path / "one"), CheckpointReader(tmp_path / "many")
    assert set(one.names()) == set(many.names())
    assert all(torch.equal(one.load(name), many.load(name)) for name in one.names())


def test_the_adapter_alone_works_on_stock_transformers(bases: dict[str, Path], tmp_path: Path) -> None:
    model = trained(bases["bf16"], tmp_path / "adapter", "bf16")
    export_adapter(tmp_path / "adapter", tmp_path / "out", base="org/base")
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "org/base"
    stock = AutoModelForCausalLM.from_pretrained(bases["bf16"], dtype=torch.float32)
    with torch.no_grad():
        found, expected = PeftModel.from_pretrained(stock, tmp_path / "out")(IDS).logits, model(IDS).logits
    assert (found - expected).norm() / expected.norm() < 1e-5


def test_what_is_there_is_kept(bases: dict[str, Path], tmp_path: Path) -> None:
    trained(bases["bf16"], tmp_path / "adapter", "bf16")
    export_adapter(tmp_path / "adapter", tmp_path / "a")
    with pytest.raises(FileExistsError, match="use --force"):
        export_adapter(tmp_path / "adapter", tmp_path / "a")
    export_adapter(tmp_path / "adapter", tmp_path / "a", force=True)
    with pytest.raises(FileExistsError, match="is no adapter folder"):
        export_adapter(tmp_path / "adapter", bases["bf16"], force=True)
    merge_adapter(bases["bf16"], tmp_path / "adapter", tmp_path / "m")
    with pytest.raises(FileExistsError, match="use --force"):
        merge_adapter(bases["bf16"], tmp_path / "adapter", tmp_path / "m")
    merge_adapter(bases["bf16"], tmp_path / "adapter", tmp_path / "m", force=True)
    assert {p.name for p in tmp_path.iterdir()} == {"adapter", "a", "m"}


def test_adapters_that_do_not_fit(bases: dict[str, Path], tmp_path: Path) -> None:
    trained(bases["bf16"], tmp_path / "adapter", "bf16")
    other = save_tiny(tmp_path / "wider", "qwen2", intermediate_size=192)
    with pytest.raises(AdapterError, match=r"is \[\d+, \d+\] in .*was it trained on another model"):
        merge_adapter(other, tmp_path / "adapter", tmp_path / "out")
    shallow = save_tiny(tmp_path / "shallow", "qwen2", num_hidden_layers=1)
    with pytest.raises(AdapterError, match="7 of 14 adapted modules are not in"):
        merge_adapter(shallow, tmp_path / "adapter", tmp_path / "out")
    with pytest.raises(ModelLoadError, match="holds nvfp4 weights, but weights='nf4'"):
        merge_adapter(bases["nvfp4"], tmp_path / "adapter", tmp_path / "out", weights="nf4")
    with pytest.raises(AdapterError, match=r"adapter_config\.json is missing"):
        merge_adapter(bases["bf16"], bases["bf16"], tmp_path / "out")
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    tensors.pop(next(name for name in tensors if "lora_B" in name))
    save_file(tensors, tmp_path / "adapter" / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match="no pairs of LoRA matrices"):
        merge_adapter(bases["bf16"], tmp_path / "adapter", tmp_path / "out")
    assert not (tmp_path / "out").exists()
