"""Noise injection: seeded, counted, restored bit for bit, visible in bf16."""

import pytest
import torch
from torch import nn

from qerl.nn.norm import RMSNorm, aqn_norms
from qerl.rl.aqn import AQNError, NoiseInjector


class Layer(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(nn.Parameter(torch.ones(64, dtype=dtype)), 1e-6)
        self.post_attention_layernorm = RMSNorm(nn.Parameter(torch.ones(64, dtype=dtype)), 1e-6)


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(dtype) for _ in range(3)])
        self.norm = RMSNorm(nn.Parameter(torch.ones(64, dtype=dtype)), 1e-6)


def test_targets_are_the_two_norms_of_every_layer_and_not_the_final_one() -> None:
    names = list(aqn_norms(Model()))
    assert len(names) == 6
    assert "norm" not in names


def test_same_seed_and_update_give_the_same_noise_and_every_norm_its_own() -> None:
    first, second = aqn_norms(Model()), aqn_norms(Model())
    assert NoiseInjector(first, seed=7).fill(1e-2, update=3) == 6
    NoiseInjector(second, seed=7).fill(1e-2, update=3)
    for name in first:
        assert torch.equal(first[name].noise, second[name].noise)
    values = [norm.noise for norm in first.values()]
    assert all(not torch.equal(values[0], other) for other in values[1:])
    NoiseInjector(second, seed=7).fill(1e-2, update=4)
    assert not torch.equal(first["layers.0.input_layernorm"].noise, second["layers.0.input_layernorm"].noise)
    NoiseInjector(second, seed=8).fill(1e-2, update=3)
    assert not torch.equal(first["layers.0.input_layernorm"].noise, second["layers.0.input_layernorm"].noise)


def test_standard_deviation_is_sigma() -> None:
    norms = {str(i): RMSNorm(nn.Parameter(torch.ones(4096)), 1e-6) for i in range(8)}
    NoiseInjector(norms, seed=0).fill(5e-4, update=1)
    values = torch.cat([n.noise for n in norms.values()])
    assert values.std().item() == pytest.approx(5e-4, rel=0.03)
    assert abs(values.mean().item()) < 4 * 5e-4 / 32768**0.5


def test_clean_weights_come_back_bit_for_bit_and_never_moved() -> None:
    """Case 34: the reference adds noise in place with no restore, a random walk."""
    model = Model(torch.bfloat16)
    norms = aqn_norms(model)
    x = torch.randn(5, 64, dtype=torch.bfloat16)
    before = [norm(x) for norm in norms.values()]
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    injector = NoiseInjector(norms, seed=0)
    for update in range(1, 20):
        injector.fill(1e-2, update)
        assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())
    injector.clear()
    assert all(torch.equal(norm(x), out) for norm, out in zip(norms.values(), before))
    assert injector.active_sigma == 0.0


def test_state_dict_never_holds_noise() -> None:
    model = Model()
    NoiseInjector(aqn_norms(model), seed=0).fill(1e-2, update=1)
    assert not [name for name in model.state_dict() if "noise" in name]


def test_smallest_sigma_acts_in_bf16() -> None:
    """Added into a bf16 weight of 1, a sigma of 5e-4 gives one value (1.0); in the slot it gives many outputs."""
    norm = RMSNorm(nn.Parameter(torch.ones(4096, dtype=torch.bfloat16)), 1e-6)
    NoiseInjector({"n": norm}, seed=0).fill(5e-4, update=1)
    in_place = norm.weight + norm.noise.to(torch.bfloat16)
    assert len(in_place.unique()) == 1
    effective = norm.weight.float() + norm.noise
    assert len(effective.unique()) > 3500
    x = torch.randn(16, 4096, dtype=torch.bfloat16)
    noisy = norm(x)
    norm.noise.zero_()
    changed = (noisy != norm(x)).float().mean().item()
    assert 0.05 < changed < 0.5  # an expected |noise| of 4e-4 against a bf16 spacing of 4e-3 to 8e-3


def test_moving_to_bf16_keeps_the_noise_in_fp32() -> None:
    norm = RMSNorm(nn.Parameter(torch.ones(64)), 1e-6)
    NoiseInjector({"n": norm}, seed=0).fill(5e-4, update=1)
    noise = norm.noise.clone()
    norm.to(torch.bfloat16)
    assert norm.weight.dtype == torch.bfloat16
    assert norm.noise.dtype == torch.float32
    assert torch.equal(norm.noise, noise)


def test_suspended_is_clean_inside_and_restores_the_same_noise() -> None:
    norms = aqn_norms(Model())
    injector = NoiseInjector(norms, seed=0)
    injector.fill(1e-2, update=1)
    noise = {k: n.noise.clone() for k, n in norms.items()}
    with injector.suspended():
        assert all(not n.noise.any() for n in norms.values())
        assert injector.active_sigma == 0.0
    assert all(torch.equal(n.noise, noise[k]) for k, n in norms.items())
    assert injector.active_sigma == 1e-2


def test_no_norm_to_touch_is_an_error() -> None:
    """Case 33: noise that touches no module."""
    with pytest.raises(AQNError, match="no RMSNorm"):
        NoiseInjector(aqn_norms(nn.Linear(2, 2)), seed=0)
