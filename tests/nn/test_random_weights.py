"""Models of random weights: geometry, spread, and that nothing random is left out."""

import pytest
import torch
from tiny_models import tiny_model

from qerl.formats.base import get_format
from qerl.nn.loading import ModelLoadError
from qerl.nn.lora import lora_layers
from qerl.nn.random_weights import STD, add_random_adapter, random_model, random_packed
from qerl.nn.surgery import quant_groups


@pytest.mark.parametrize("format", ["nvfp4", "nf4", "mxfp4"])
def test_packed_weights_have_the_spread_of_a_new_model(format: str) -> None:
    packed = random_packed(format, 96, 512, "cpu", torch.Generator().manual_seed(1))
    values = get_format(format).dequantize(packed)
    # 49,152 values of relative kurtosis below 4: the standard error of the deviation is below 1 %.
    assert float(values.std()) == pytest.approx(STD, rel=0.04)
    assert abs(float(values.mean())) < 0.05 * STD
    again = random_packed(format, 96, 512, "cpu", torch.Generator().manual_seed(1))
    assert torch.equal(packed.codes, again.codes)


@pytest.mark.parametrize("weights", ["bf16", "nvfp4", "nf4", "mxfp4"])
def test_every_linear_has_the_format_and_logits_are_finite(weights: str) -> None:
    model = random_model(tiny_model("qwen2", tied=False).config, weights=weights, device="cpu")
    groups = quant_groups(model)
    assert len(groups) == 8
    assert {group.format for group in groups.values()} == {"nvfp4" if weights == "mxfp4" else weights}
    assert model.qerl_weights == weights
    logits = model(torch.arange(12)[None]).logits
    assert bool(logits.isfinite().all())
    # Not one token in all positions: sampling from it means something.
    assert float(logits.std()) > 0.05
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_a_tied_head_is_the_embedding() -> None:
    model = random_model(tiny_model("llama", tied=True).config, device="cpu")
    assert model.get_output_embeddings().weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()


def test_a_width_off_the_block_stays_16_bit() -> None:
    config = tiny_model("llama", intermediate_size=120).config
    formats = {name.rsplit(".", 1)[-1]: group.format for name, group in quant_groups(random_model(config)).items()}
    assert formats["down_proj_weights"] == "bf16"
    assert formats["gate_proj_up_proj_weights"] == "nvfp4"


def test_an_adapter_changes_every_layer() -> None:
    config = tiny_model("llama").config
    plain = random_model(config, device="cpu")
    ids = torch.arange(12)[None]
    before = plain(ids).logits
    wrapped = add_random_adapter(plain, 4)
    assert len(lora_layers(wrapped)) == 14
    assert all(bool((layer.lora_B["default"].weight != 0).all()) for layer in lora_layers(wrapped).values())
    change = (wrapped(ids).logits - before).square().mean().sqrt() / before.square().mean().sqrt()
    assert 0.02 < float(change) < 1.0


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="int8"):
        random_model(tiny_model("llama").config, weights="int8")
