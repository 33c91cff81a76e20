"""Loading: packed and 16-bit checkpoints, on-the-fly quantization, refusals; values against transformers."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny, tiny_model
from transformers import AutoModelForCausalLM

from qerl.formats.base import FormatError, get_format
from qerl.formats.quantizer import quantize
from qerl.nn.linear import QuantLinear
from qerl.nn.loading import DeviceError, ModelLoadError, eos_token_ids, load_model, resolve_device
from qerl.nn.memory import model_memory
from qerl.nn.norm import RMSNorm, aqn_norms
from qerl.nn.surgery import install_norms, quant_groups

IDS = torch.arange(60).view(3, 20)


def load(folder: Path, **kwargs: object):  # type: ignore[no-untyped-def]
    return load_model(folder, dtype="float32", device="cpu", **kwargs)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_bf16_weights_give_the_logits_of_transformers(family: str, tiny_checkpoints: dict[str, Path]) -> None:
    folder = tiny_checkpoints[family]
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found, expected = load(folder)(IDS).logits, stock(IDS).logits
    assert (found - expected).norm() / expected.norm() < 1e-6


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("format", ["nvfp4", "nf4", "mxfp4"])
def test_packed_file_equals_quantizing_while_loading_equals_the_dequantized_model(
    family: str, format: str, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    folder = tiny_checkpoints[family]
    quantize(str(folder), str(tmp_path / "packed"), format=format)
    from_file, on_the_fly = load(tmp_path / "packed"), load(folder, weights=format)
    assert from_file.qerl_weights == on_the_fly.qerl_weights == format
    for (name, a), b in zip(quant_groups(from_file).items(), quant_groups(on_the_fly).values(), strict=True):
        assert torch.equal(a.packed, b.packed), name
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, module in from_file.named_modules():
        if isinstance(module, QuantLinear):
            stock.get_submodule(name).weight.data.copy_(module.dequantized())
    found, expected = from_file(IDS).logits, stock(IDS).logits
    assert (found - expected).norm() / expected.norm() < 1e-5


def test_the_packed_bytes_are_resident_once(tiny_checkpoints: dict[str, Path]) -> None:
    model = load(tiny_checkpoints["llama"], weights="nvfp4")
    memory = model_memory(model)
    linears = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 128  # two layers below
    expected = 2 * (linears // 2 + linears // 16 + 4 * 16)  # 4 groups a layer, aligned global scales
    assert memory.packed_weights == expected
    assert memory.dense_cache == 2 * linears * 4
    model(IDS)
    kept = [group._dense for group in quant_groups(model).values()]
    assert sum(t.numel() * t.element_size() for t in kept) == memory.dense_cache
    assert model_memory(load(tiny_checkpoints["llama"])).dense_cache == 0
    assert not any(p.requires_grad for p in model.parameters())


def test_tied_head_stays_tied_and_untied_stays_untied(tmp_path: Path, tiny_checkpoints: dict[str, Path]) -> None:
    tied = load(tiny_checkpoints["llama"])
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    untied = load(save_tiny(tmp_path / "untied", "llama", tied=False))
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight


def test_norms_get_slots_and_aqn_finds_two_a_layer(tiny_checkpoints: dict[str, Path]) -> None:
    model = load(tiny_checkpoints["qwen3"])
    assert len(aqn_norms(model)) == 4
    assert sum(isinstance(m, RMSNorm) for m in model.modules()) == 2 * 4 + 1  # with q_norm, k_norm and the last one
    assert not [n for n in aqn_norms(model) if "q_norm" in n or "k_norm" in n or n == "model.norm"]


def test_a_norm_of_another_formula_is_left_alone() -> None:
    """Gemma multiplies by 1 + weight; a slot of ours in its place would compute something else."""

    class OddRMSNorm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(8))
            self.eps = 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
            return x * (1 + self.weight)

    model = torch.nn.ModuleDict({"input_layernorm": OddRMSNorm()})
    assert install_norms(model) == []
    assert aqn_norms(model) == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", ["Gemma", "StableLm", "Olmo2", "Phi3"])
def test_other_architectures_compute_what_transformers_computes(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Scaled embeddings, norms with 1 + weight, layer norms, fused projections: left alone where ours would differ."""
    config = getattr(transformers, f"{family}Config")(
        vocab_size=100, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    getattr(transformers, f"{family}ForCausalLM")(config).to(torch.bfloat16).save_pretrained(tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    model = load_model(tmp_path, dtype=dtype, device="cpu")
    with torch.no_grad():
        found, expected = model(IDS).logits.float(), stock(IDS).logits
    assert (found - expected).norm() / expected.norm() < (1e-5 if dtype == torch.float32 else 3e-2)


def test_asking_a_packed_checkpoint_for_another_format(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    quantize(str(tiny_checkpoints["llama"]), str(tmp_path / "packed"))
    with pytest.raises(ModelLoadError, match="holds nvfp4 weights, but weights='bf16' was asked for"):
        load(tmp_path / "packed", weights="bf16")
    with pytest.raises(ModelLoadError, match="weights='nvfp5' is unknown"):
        load(tmp_path / "packed", weights="nvfp5")


def test_weights_of_another_model_and_missing_tensors(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_checkpoints["llama"], broken)
    state = load_file(broken / "model.safetensors")
    save_file({k: v for k, v in state.items() if k != "model.norm.weight"}, broken / "model.safetensors")
    with pytest.raises((ModelLoadError, FormatError), match=r"model\.norm\.weight"):
        load(broken)
    save_file(state, broken / "model.safetensors")
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "intermediate_size": 96}))
    with pytest.raises((ModelLoadError, FormatError), match=r"\(128, 64\)"):
        load(broken)


def test_fp16_is_refused(tiny_checkpoints: dict[str, Path]) -> None:
    """Case 27: fp16 activations with FP4 weights overflow."""
    with pytest.raises(ModelLoadError, match="float16"):
        load_model(tiny_checkpoints["llama"], dtype="float16", device="cpu")


def test_odd_width_stays_16_bit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Case 25: in_features that is no multiple of the block."""
    model = load(save_tiny(tmp_path / "odd", "llama", intermediate_size=120), weights="nvfp4")
    assert model.model.layers[0].mlp.down_proj.group.format == "bf16"
    assert model.model.layers[0].mlp.up_proj.group.format == "nvfp4"
    assert "in_features 120" in caplog.text
    assert torch.isfinite(model(IDS).logits).all()


def test_an_mxfp4_group_that_nvfp4_cannot_hold_stays_16_bit_with_its_values(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_tiny(tmp_path / "wide", "llama")
    state = load_file(folder / "model.safetensors")
    gate = state["model.layers.0.mlp.gate_proj.weight"]
    gate[3, :32] *= 1e-9  # a dead channel; NVFP4's quantizer makes it zeros
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    quantize(folder, tmp_path / "packed", format="mxfp4")
    for model in (load(folder, weights="mxfp4"), load(tmp_path / "packed")):
        mlp = model.model.layers[0].mlp
        assert model.qerl_weights == "mxfp4"
        assert {group.format for group in quant_groups(model).values()} == {"nvfp4", "bf16"}
        assert mlp.gate_proj.group.format == "bf16" and mlp.down_proj.group.format == "nvfp4"
        expected = get_format("mxfp4").dequantize(get_format("mxfp4").quantize([gate])[0])
        assert torch.equal(mlp.gate_proj.dequantized(), expected) and bool(expected[3, :32].any())
        assert torch.isfinite(model(IDS).logits).all()
    assert "model.layers.0.mlp.gate_proj, model.layers.0.mlp.up_proj: held in 16 bit instead of 4" in caplog.text
    assert "where NVFP4 holds 18" in caplog.text


def test_every_eos_id_counts() -> None:
    model = tiny_model()
    assert eos_token_ids(model, 7) == (model.config.eos_token_id, model.config.pad_token_id, 7)


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("gpu", "device 'gpu' is unknown: use auto, cpu, cuda"),
        ("mps", "device 'mps' is not supported"),
        ("cpu:1", "device 'cpu:1' is not supported: there is one CPU device; use cpu$"),
        ("cuda:99", r"'cuda:99' was asked for, but torch .* finds \d+ GPUs"),
    ],
)
def test_a_device_that_is_not_here_is_named(device: str, words: str, tiny_checkpoints: dict[str, Path]) -> None:
    with pytest.raises(DeviceError, match=words):
        load_model(tiny_checkpoints["llama"], device=device)
    assert resolve_device("cpu") == resolve_device(torch.device("cpu")) == torch.device("cpu")
