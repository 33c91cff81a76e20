"""LoRA over frozen weights: gradients to fp32 masters, PEFT files, refusals by name."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from qerl.kernels.lora import padded_rank
from qerl.nn.linear import QuantLinear
from qerl.nn.loading import load_model
from qerl.nn.lora import AdapterError, LoraQuantLinear, lora_layers, lora_matmul, prepare_lora_config

IDS = torch.arange(40).view(2, 20)


def wrapped(folder: Path, **overrides: object) -> PeftModel:
    model = load_model(folder, weights="nvfp4", dtype="float32", device="cpu")
    values = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **overrides}
    return get_peft_model(model, prepare_lora_config(LoraConfig(**values), model))


def randomize(model: PeftModel, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1


def test_formula_and_all_gradients() -> None:
    y, x = torch.randn(2, 3, 8), torch.randn(2, 3, 16)
    a, b = torch.randn(4, 16), torch.randn(8, 4)
    inputs = [t.double().requires_grad_() for t in (y, x, a, b)]
    expected = inputs[0] + inputs[1] @ inputs[2].T @ inputs[3].T
    grad = torch.randn(2, 3, 8).double()
    expected_grads = torch.autograd.grad(expected, inputs, grad)
    found_inputs = [t.clone().requires_grad_() for t in (y, x, a, b)]
    found = lora_matmul(*found_inputs)
    found_grads = torch.autograd.grad(found, found_inputs, grad.float())
    assert (found - expected).norm() / expected.norm() < 1e-6
    for f, e in zip(found_grads, expected_grads, strict=True):
        assert (f - e).norm() / e.norm() < 1e-6


@pytest.mark.parametrize("rank", [1, 8, 12])
def test_the_product_that_rounds_once_gets_ranks_in_multiples_of_8(
    rank: int, tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the kernels' path in place of the CPU's (which has none): the same values, and gradients of the masters."""
    model = wrapped(tiny_checkpoints["llama"], r=rank)
    randomize(model)
    expected = model(IDS).logits
    grads = torch.autograd.grad(expected.square().sum(), [p for p in model.parameters() if p.requires_grad])
    ranks = set()

    def once(self, x, a, b):  # type: ignore[no-untyped-def]
        ranks.add((a.shape[0], b.shape[1]))
        return self(x) + x @ a.t() @ b.t()

    monkeypatch.setattr(QuantLinear, "forward_with_lora", once)
    found = model(IDS).logits
    assert ranks == {(padded_rank(rank),) * 2} and padded_rank(rank) == {1: 8, 8: 8, 12: 16}[rank]
    assert (found - expected).norm() / expected.norm() < 1e-5
    found_grads = torch.autograd.grad(found.square().sum(), [p for p in model.parameters() if p.requires_grad])
    for f, e in zip(found_grads, grads, strict=True):
        assert f.shape == e.shape and (f - e).norm() / e.norm() < 1e-4


def test_every_linear_is_wrapped_and_only_masters_train(tiny_checkpoints: dict[str, Path]) -> None:
    model = wrapped(tiny_checkpoints["qwen2"])
    assert len(lora_layers(model)) == 7 * 2
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert len(trainable) == 2 * 14
    assert all("lora_" in n and p.dtype == torch.float32 for n, p in trainable.items())
    randomize(model)
    model(IDS).logits.square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in trainable.values())


def test_equals_peft_on_the_dequantized_model(tiny_checkpoints: dict[str, Path]) -> None:
    """Same adapter on the same (dequantized) weights with PEFT's own layers."""
    ours = wrapped(tiny_checkpoints["llama"], rank_pattern={"q_proj": 2}, alpha_pattern={"down_proj": 32})
    randomize(ours)
    from transformers import AutoModelForCausalLM

    stock = AutoModelForCausalLM.from_pretrained(tiny_checkpoints["llama"], dtype=torch.float32)
    state = stock.state_dict()
    for name, layer in lora_layers(ours).items():
        state[name.removeprefix("base_model.model.") + ".weight"].copy_(layer.base_layer.dequantized())
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        rank_pattern={"q_proj": 2},
        alpha_pattern={"down_proj": 32},
    )
    theirs = get_peft_model(stock, config)
    theirs.load_state_dict({n: p for n, p in ours.state_dict().items() if "lora_" in n}, strict=False)
    found, expected = ours(IDS).logits, theirs(IDS).logits
    assert (found - expected).norm() / expected.norm() < 1e-5


def test_adapter_on_disk_is_plain_peft(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    model = wrapped(tiny_checkpoints["llama"])
    randomize(model)
    model.save_pretrained(tmp_path)
    from transformers import AutoModelForCausalLM

    stock = AutoModelForCausalLM.from_pretrained(tiny_checkpoints["llama"], dtype=torch.float32)
    loaded = PeftModel.from_pretrained(stock, tmp_path)
    mine = {n: p for n, p in model.named_parameters() if "lora_" in n}
    theirs = {n: p for n, p in loaded.named_parameters() if "lora_" in n}
    assert set(mine) == set(theirs)
    assert all(torch.equal(mine[n], theirs[n]) for n in mine)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"lora_dropout": 0.1}, "lora_dropout"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"target_modules": ["q_proj", "lm_head"]}, "lm_head"),
        ({"target_modules": ["q_porj"]}, "q_porj"),
        ({"init_lora_weights": "pissa"}, "pissa"),
    ],
)
def test_unsupported_options_are_refused_by_name(option: dict, words: str, tiny_checkpoints: dict[str, Path]) -> None:
    with pytest.raises(AdapterError, match=words):
        wrapped(tiny_checkpoints["llama"], **option)


def test_merging_is_refused(tiny_checkpoints: dict[str, Path]) -> None:
    """Case 29: merging LoRA into 4-bit weights."""
    model = wrapped(tiny_checkpoints["llama"])
    with pytest.raises(AdapterError, match="cannot be merged"):
        model.merge_adapter()


def test_delta_weight_for_export(tiny_checkpoints: dict[str, Path]) -> None:
    model = wrapped(tiny_checkpoints["llama"])
    randomize(model)
    layer: LoraQuantLinear = next(iter(lora_layers(model).values()))
    x = torch.randn(3, layer.in_features)
    delta = layer(x) - layer.base_layer(x)
    assert torch.allclose(delta, x @ layer.get_delta_weight("default").T, atol=1e-5)
