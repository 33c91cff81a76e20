"""Frozen group linears: exact against the dequantized weight, gradients included; one storage, many handles."""

import copy

import pytest
import torch

from qerl.formats.base import get_format
from qerl.formats.mxfp4_as_nvfp4 import as_nvfp4
from qerl.nn.group import WeightGroup
from qerl.nn.linear import QuantLinear

SEGMENTS = (48, 16, 32)
K = 64


def packed_group(format: str, separate_scales: bool = False) -> tuple[WeightGroup, list[torch.Tensor]]:
    weights = [torch.randn(n, K).to(torch.bfloat16) * (i + 1) for i, n in enumerate(SEGMENTS)]
    fmt = get_format(format)
    packed = [fmt.quantize([w])[0] for w in weights] if separate_scales else fmt.quantize(weights)
    held = packed
    if format == "mxfp4":
        held = [as_nvfp4([p])[0] for p in packed] if separate_scales else as_nvfp4(packed)
    group = WeightGroup(held[0].format, SEGMENTS, K, torch.float32)
    for i, p in enumerate(held):
        group.load_segment(i, p)
    return group, [fmt.dequantize(p, torch.float32) for p in packed]


def handles(group: WeightGroup) -> list[QuantLinear]:
    return [QuantLinear(group, i) for i in range(len(SEGMENTS))]


@pytest.mark.parametrize("format", ["nvfp4", "nf4", "mxfp4"])
@pytest.mark.parametrize("separate", [False, True], ids=["one global scale", "differing global scales"])
def test_forward_and_gradient_are_those_of_the_dequantized_weight(format: str, separate: bool) -> None:
    group, dense = packed_group(format, separate)
    for handle, w in zip(handles(group), dense, strict=True):
        x = torch.randn(2, 5, K, requires_grad=True)
        y = handle(x)
        grad = torch.randn_like(y)
        y.backward(grad)
        expected, expected_grad = x.detach() @ w.T, grad @ w
        assert (y - expected).norm() / expected.norm() < 1e-6
        assert (x.grad - expected_grad).norm() / expected_grad.norm() < 1e-6


@pytest.mark.parametrize("format", ["nvfp4", "nf4", "mxfp4"])
def test_group_matmul_equals_its_members(format: str) -> None:
    group, _ = packed_group(format, separate_scales=format != "nf4")
    x = torch.randn(7, K)
    whole = group.matmul(x)
    for handle, part in zip(handles(group), whole.split(SEGMENTS, dim=1), strict=True):
        assert torch.equal(handle(x), part)


def test_bf16_on_the_cpu_rounds_once() -> None:
    group, dense = packed_group("nvfp4")
    x = torch.randn(9, K).to(torch.bfloat16)
    y = handles(group)[0](x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, (x.float() @ dense[0].T).to(torch.bfloat16))


def test_bytes_are_counted_and_stored_once() -> None:
    group, _ = packed_group("nvfp4")
    model = torch.nn.ModuleDict({"weights": group, **dict(zip("qkv", handles(group), strict=True))})
    n = sum(SEGMENTS)
    assert group.resident_bytes == n * K // 2 + n * K // 16 + 16  # codes, scales, three global scales (aligned)
    assert [name for name, _ in model.named_parameters()] == ["weights.packed"]
    assert not group.packed.requires_grad


@pytest.mark.parametrize("format", ["nvfp4", "nf4"])
def test_state_dict_has_disk_names_and_loads_back(format: str) -> None:
    group, _ = packed_group(format, separate_scales=format == "nvfp4")
    model = torch.nn.ModuleDict({"weights": group, **dict(zip("qkv", handles(group), strict=True))})
    names = {
        "nvfp4": {"weight_packed", "weight_scale", "weight_global_scale"},
        "nf4": {"weight_packed", "weight_absmax"},
    }
    state = model.state_dict()
    assert set(state) == {f"{m}.{n}" for m in "qkv" for n in names[format]}
    other = WeightGroup(format, SEGMENTS, K, torch.float32)
    copy_ = torch.nn.ModuleDict({"weights": other, **dict(zip("qkv", handles(other), strict=True))})
    copy_.load_state_dict({k: v.clone() for k, v in state.items()})
    assert torch.equal(other.packed, group.packed)
    with pytest.raises(RuntimeError, match="Missing key"):
        copy_.load_state_dict({k: v for k, v in state.items() if not k.startswith("k.")})


def test_handles_survive_moves_casts_and_deepcopy() -> None:
    group, dense = packed_group("nvfp4")
    model = torch.nn.ModuleDict({"weights": group, **dict(zip("qkv", handles(group), strict=True))})
    before = group.packed.clone()
    model.to(torch.bfloat16).float()
    assert torch.equal(group.packed, before)
    twin = copy.deepcopy(model)
    assert twin["q"].group is twin["weights"]
    twin["weights"].packed.data[: sum(SEGMENTS) * K // 2] = 0  # the codes
    twin["weights"].drop_caches()
    x = torch.randn(3, K)
    assert not twin["q"](x).any()
    assert (model["q"](x) - x @ dense[0].T).abs().max() < 1e-4


def test_wrong_segment_is_refused() -> None:
    group, _ = packed_group("nvfp4")
    other = get_format("nvfp4").quantize([torch.randn(16, K, dtype=torch.bfloat16)])[0]
    with pytest.raises(
        ValueError, match=r"segment 0 holds nvfp4 weights of shape \(48, 64\), got nvfp4 of shape \(16, 64\)"
    ):
        group.load_segment(0, other)
    with pytest.raises(ValueError, match="got bf16"):
        group.load_segment(1, torch.randn(16, K))
    with pytest.raises(ValueError, match="bf16, nvfp4 or nf4 weights, not 'mxfp4'"):
        WeightGroup("mxfp4", (48,), K)
