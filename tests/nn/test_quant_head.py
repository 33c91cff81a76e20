"""The packed output head: values and gradients against its dequantized weight, loading, state dicts, bytes."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny
from transformers import PreTrainedModel

from qerl.formats.base import get_format
from qerl.formats.checkpoint import CheckpointReader
from qerl.formats.disk_layout import to_disk
from qerl.formats.quantizer import quantize
from qerl.nn import head, loading
from qerl.nn.group import WeightGroup
from qerl.nn.head import chunked_logprobs, fp32_logits
from qerl.nn.loading import ModelLoadError, load_model
from qerl.nn.memory import model_memory
from qerl.nn.quant_head import QuantHead, head_weight
from qerl.nn.random_weights import random_model

HIDDEN = 64
IDS = torch.arange(60).view(3, 20)


def load(folder: Path, **kwargs: object) -> PreTrainedModel:
    return load_model(folder, **{"weights": "nvfp4", "head": "nvfp4", "dtype": "float32", "device": "cpu", **kwargs})


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("head") / "untied", "qwen2", tied=False)


@pytest.fixture(scope="module")
def stored(untied: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint on disk whose head is packed as its linears are."""
    folder = tmp_path_factory.mktemp("head") / "stored"
    return pack_stored_head(untied, folder, "nvfp4")


def pack_stored_head(untied: Path, folder: Path, weight_format: str) -> Path:
    quantize(str(untied), str(folder), format=weight_format)
    tensors = load_file(folder / "model.safetensors")
    (packed,) = get_format(weight_format).quantize([tensors.pop("lm_head.weight")])
    save_file(tensors | to_disk("lm_head", packed), folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["ignore"] = []
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def packed_head(vocab: int = 37) -> tuple[WeightGroup, torch.Tensor]:
    """A head of no whole number of tiles, and its weight in fp64."""
    (packed,) = get_format("nvfp4").quantize([torch.randn(vocab, HIDDEN) * 0.2])
    group = WeightGroup("nvfp4", (vocab,), HIDDEN, torch.float32)
    group.load_segment(0, packed)
    return group, get_format("nvfp4").dequantize(packed).double()


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_values_and_gradients_are_those_of_the_dequantized_head(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    group, dense = packed_head()
    monkeypatch.setattr(head, "CHUNK_BYTES", 4 * 37 * rows)
    hidden, labels = torch.randn(8, HIDDEN, requires_grad=True), torch.randint(0, 37, (8,))
    found = chunked_logprobs(hidden, group, labels, 0.7)
    exact = hidden.detach().double().requires_grad_()
    log_p = torch.log_softmax(exact @ dense.t() / 0.7, -1)
    expected = log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    weights = torch.randn(2, 8)
    for values, wanted in zip(found, expected, strict=True):
        assert (values - wanted).abs().max() < 1e-5
    (weights[0] * found[0] + weights[1] * found[1]).sum().backward()
    (weights[0] * expected[0] + weights[1] * expected[1]).sum().backward()
    assert (hidden.grad - exact.grad).norm() / exact.grad.norm() < 1e-5


def test_the_module_gives_fp32_logits_and_the_gradient_of_its_input() -> None:
    group, dense = packed_head()
    module = QuantHead(group)
    hidden = torch.randn(2, 5, HIDDEN).bfloat16().requires_grad_()
    logits = module(hidden)
    exact = hidden.detach().double()
    assert logits.dtype == torch.float32 and logits.shape == (2, 5, 37)
    assert (logits - exact @ dense.t()).abs().max() < 1e-5  # rounded to bf16, they would be off by 0.01
    assert torch.equal(logits, fp32_logits(hidden.detach().view(10, HIDDEN), group).view(2, 5, 37))
    grad = torch.randn(2, 5, 37).bfloat16().float()
    logits.backward(grad)
    expected = grad.double() @ dense
    assert hidden.grad.dtype == torch.bfloat16
    assert (hidden.grad.double() - expected).norm() / expected.norm() < 3e-3


def test_loading_quantizes_as_a_whole_whatever_the_parts(untied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_HEAD_ROWS", 100)
    model = load(untied)
    (expected,) = get_format("nvfp4").quantize([load_file(untied / "model.safetensors")["lm_head.weight"]])
    found = model.lm_head.group.packed_tensor(0)
    assert model.qerl_head == "nvfp4" and torch.equal(found.codes, expected.codes)
    assert torch.equal(found.block_scale.view(torch.uint8), expected.block_scale.view(torch.uint8))
    assert torch.equal(found.global_scale, expected.global_scale)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    plain = load(untied, head="auto")
    assert plain.qerl_head == "bf16" and type(plain.lm_head) is torch.nn.Linear
    plain.lm_head.weight.data = get_format("nvfp4").dequantize(expected)
    assert (model(IDS).logits - plain(IDS).logits).abs().max() < 1e-5


def test_a_head_that_is_stored_packed_is_loaded_as_such(stored: Path, untied: Path, tmp_path: Path) -> None:
    model = load(stored, weights="auto", head="auto")
    assert model.qerl_head == "nvfp4" and CheckpointReader(stored).is_packed("lm_head")
    assert torch.equal(model(IDS).logits, load(untied)(IDS).logits)
    with pytest.raises(ModelLoadError, match="holds its output head as nvfp4, but head='bf16'"):
        load(stored, weights="auto", head="bf16")


@pytest.mark.parametrize("dead_channel", [False, True])
def test_a_head_that_is_stored_in_mxfp4_keeps_its_values(tmp_path: Path, dead_channel: bool) -> None:
    """As NVFP4 where that holds it, else as an ordinary head."""
    plain = save_tiny(tmp_path / "plain", "qwen2", tied=False)
    tensors = load_file(plain / "model.safetensors")
    tensors["lm_head.weight"][0] *= 2.0**-40 if dead_channel else 1.0
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    model = load(pack_stored_head(plain, tmp_path / "stored", "mxfp4"), weights="auto", head="auto")
    assert model.qerl_head == "mxfp4" and isinstance(model.lm_head, QuantHead) != dead_channel
    (packed,) = get_format("mxfp4").quantize([tensors["lm_head.weight"]])
    exact, hidden = get_format("mxfp4").dequantize(packed), torch.randn(5, HIDDEN)
    assert torch.allclose(fp32_logits(hidden, head_weight(model)), hidden @ exact.t(), atol=1e-5)
    assert torch.isfinite(model(IDS).logits).all()


def test_a_state_dict_round_trip(untied: Path) -> None:
    model = load(untied)
    state = model.state_dict()
    assert {name for name in state if "lm_head" in name} == {
        "lm_head.weight_packed", "lm_head.weight_scale", "lm_head.weight_global_scale",
    }  # fmt: skip
    other = load(untied)
    shape = other.lm_head.out_features, HIDDEN
    other.lm_head.group.load_segment(0, get_format("nvfp4").quantize([torch.randn(shape)])[0])
    assert not torch.allclose(other(IDS).logits, model(IDS).logits, atol=0.1)
    other.load_state_dict(dict(state))
    assert torch.equal(other(IDS).logits, model(IDS).logits)


def test_a_tied_head_becomes_a_copy_and_says_so(
    tiny_checkpoints: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="qerl"):
        model = load(tiny_checkpoints["llama"])
    assert len([r for r in caplog.records if "copy of the tied embedding" in r.message]) == 1
    embedding = model.get_input_embeddings().weight
    (expected,) = get_format("nvfp4").quantize([embedding.bfloat16()])
    assert torch.equal(model.lm_head.group.packed_tensor(0).codes, expected.codes)
    assert embedding.dtype == torch.float32 and not model.config.tie_word_embeddings
    vocab = embedding.shape[0]
    before, after = model_memory(load(tiny_checkpoints["llama"], head="bf16")), model_memory(model)
    head_bytes = model.lm_head.group.resident_bytes
    assert vocab * HIDDEN * 9 // 16 <= head_bytes < vocab * HIDDEN * 9 // 16 + 48
    assert after.packed_weights - before.packed_weights == head_bytes
    assert after.dense_cache - before.dense_cache == 4 * vocab * HIDDEN
    assert after.other_frozen == before.other_frozen


def test_an_untied_head_leaves_the_16_bit_bytes(untied: Path) -> None:
    packed, plain = (model_memory(load(untied, head=head)) for head in ("nvfp4", "bf16"))
    vocab = load(untied).config.vocab_size
    assert plain.other_frozen - packed.other_frozen == 4 * vocab * HIDDEN


def test_random_models_take_a_packed_head(untied: Path) -> None:
    config = load(untied).config
    model = random_model(config, head="nvfp4", device="cpu")
    assert isinstance(head_weight(model), WeightGroup) and torch.isfinite(model(IDS).logits).all()


def test_refusals(untied: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="head='fp8' is unknown; choose from auto, bf16, nvfp4"):
        load(untied, head="fp8")
    odd = save_tiny(tmp_path / "odd", "llama", hidden_size=72)
    with pytest.raises(ModelLoadError, match="hidden size 72 is not a multiple of the nvfp4 block of 16"):
        load(odd, weights="bf16")
    broken = tmp_path / "broken"
    shutil.copytree(untied, broken)
    tensors = load_file(broken / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"has no lm_head\.weight"):
        load(broken)
