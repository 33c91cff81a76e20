"""A group whose buffer holds tiles: same bytes, same values, rows wherever it is read from outside."""

import copy
import dataclasses
import itertools
import pickle

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import qerl.nn.group
from qerl.formats.base import PackedTensor, get_format
from qerl.nn.group import WeightGroup
from qerl.nn.linear import QuantLinear, _QuantLoraMatmul

SEGMENTS, K = (48, 16, 32), 128


def make_group() -> tuple[WeightGroup, list[PackedTensor]]:
    packed = get_format("nvfp4").quantize([torch.randn(rows, K).bfloat16() for rows in SEGMENTS])
    group = WeightGroup("nvfp4", SEGMENTS, K, torch.float32)
    for index, member in enumerate(packed):
        group.load_segment(index, member)
    return group, packed


def assert_holds(group: WeightGroup, packed: list[PackedTensor]) -> None:
    for index, member in enumerate(packed):
        found = group.packed_tensor(index)
        assert torch.equal(found.codes, member.codes)
        assert torch.equal(found.block_scale.view(torch.uint8), member.block_scale.view(torch.uint8))
        assert torch.equal(found.global_scale, member.global_scale)


def test_tiles_and_back_in_the_same_buffer() -> None:
    group, packed = make_group()
    rows, address = group.packed.clone(), group.packed.data_ptr()
    group._to_tiles()
    assert group.layout == "tiles" and group.group_weight().layout == "tiles"
    assert group.packed.data_ptr() == address and not torch.equal(group.packed, rows)
    assert_holds(group, packed)
    group._to_rows()
    assert group.layout == "rows" and torch.equal(group.packed, rows)


def test_products_and_segments_are_those_of_the_rows() -> None:
    group, _ = make_group()
    x = torch.randn(3, K)
    expected = group.matmul(x), [QuantLinear(group, index)(x) for index in range(3)], group.dense().clone()
    group._to_tiles()
    assert torch.equal(group.matmul(x), expected[0]) and torch.equal(group.dense(), expected[2])
    for index, y in enumerate(expected[1]):
        assert torch.equal(QuantLinear(group, index)(x), y)
        segment = group.segment_weight(index)
        assert segment.layout == "tiles" and segment.out_features == SEGMENTS[index]


def test_a_state_dict_knows_no_layout() -> None:
    group, packed = make_group()
    group._to_tiles()
    handle = QuantLinear(group, 1)
    state = handle.state_dict()
    assert torch.equal(state["weight_packed"], packed[1].codes)
    other, _ = make_group()
    other._to_tiles()
    QuantLinear(other, 1).load_state_dict(dict(state))
    assert other.layout == "tiles"
    assert torch.equal(other.packed_tensor(1).codes, packed[1].codes)


def test_a_move_to_a_device_without_the_kernels_brings_rows_back() -> None:
    group, packed = make_group()
    rows = group.packed.clone()
    group._to_tiles()
    group.to("cpu")
    assert group.layout == "rows" and torch.equal(group.packed, rows)
    assert_holds(group, packed)


def test_copies_and_pickles_carry_the_packed_bytes_only() -> None:
    group, packed = make_group()
    group._to_tiles()
    group.dense()
    for copied in (copy.deepcopy(group), pickle.loads(pickle.dumps(group))):
        assert copied._dense is None and copied._views is None and group._dense is not None
        assert copied.layout == "tiles" and copied.packed.data_ptr() != group.packed.data_ptr()
        assert_holds(copied, packed)
    assert len(pickle.dumps(group)) < 2 * group.resident_bytes + 4096


def test_a_capture_is_void_once_a_value_it_holds_changes() -> None:
    """Graphs hold the scale of a group by value: other weights in the same buffer must not be read with the old one."""
    group, packed = make_group()
    key = group.capture_key()
    assert key == group.capture_key()
    group._to_tiles()
    assert group.capture_key() != key
    key = group.capture_key()
    for index, member in enumerate(packed):
        group.load_segment(index, dataclasses.replace(member, global_scale=2 * member.global_scale))
    assert group.capture_key()[:2] == key[:2] and group.capture_key() != key


def test_a_segment_has_its_own_scale_without_asking_the_device() -> None:
    group, packed = make_group()
    group.load_segment(1, dataclasses.replace(packed[1], global_scale=2 * packed[1].global_scale))
    assert group.group_weight().uniform_scale is None
    for index, member in enumerate(packed):
        factor = 2.0 if index == 1 else 1.0
        assert group.segment_weight(index).uniform_scale == 1.0 / (factor * float(member.global_scale))


def test_a_damaged_scale_stays_in_rows_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    group, _ = make_group()
    group._sections()[1].view(torch.uint8)[0, 0] = 255
    group._to_tiles()
    assert group.layout == "rows" and "NaN or negative" in caplog.text


def test_lora_is_added_before_rounding_only_where_a_kernel_can(monkeypatch: pytest.MonkeyPatch) -> None:
    group, _ = make_group()
    assert not group.adds_lora(torch.bfloat16, [8])
    group._to_tiles()
    assert group.adds_lora(torch.bfloat16, [8, 32])
    assert not group.adds_lora(torch.bfloat16, [8, 4]) and not group.adds_lora(torch.float32, [8])
    monkeypatch.setattr(qerl.nn.group, "tiles_supported", lambda device: True)
    group.settle_layout()
    assert group.layout == "rows"  # the CPU never keeps tiles


@pytest.mark.parametrize("wants", list(itertools.product((False, True), repeat=3))[1:], ids=str)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradients_of_the_fused_function(wants: tuple[bool, bool, bool], checkpointed: bool) -> None:
    """Exactly the wanted gradients of x, a and b, in their dtype; the formulas, which are the same on every device."""
    group, _ = make_group()
    dense = group.dense()[48:64].double()
    group._to_tiles()
    weight, bias = group.segment_weight(1), torch.randn(16)
    values = torch.randn(2, 3, K), torch.randn(8, K) / 10, torch.randn(16, 8)
    inputs = [value.clone().requires_grad_(want) for value, want in zip(values, wants, strict=True)]
    call = lambda x, a, b: _QuantLoraMatmul.apply(x, weight, bias, a, b)  # noqa: E731
    y = checkpoint(call, *inputs, use_reentrant=False) if checkpointed else call(*inputs)
    dy = torch.randn(3, 2, 16).transpose(0, 1)  # not contiguous
    y.backward(dy)
    x, a, b = (value.double().requires_grad_() for value in values)
    expected = x @ dense.t() + (x @ a.t()) @ b.t() + bias
    expected.backward(dy.double())
    assert torch.allclose(y.double(), expected, atol=1e-4)
    for found, wanted, want in zip(inputs, (x, a, b), wants, strict=True):
        assert (found.grad is not None) == want
        assert not want or torch.allclose(found.grad.double(), wanted.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_on_a_hopper_gpu_a_loaded_group_settles_in_tiles() -> None:
    group, packed = make_group()
    group.to("cuda")
    if not qerl.nn.group.tiles_supported(torch.device("cuda", 0)):
        pytest.skip("needs a Hopper GPU and NVRTC")
    assert group.layout == "tiles"
    for index, member in enumerate(packed):
        assert torch.equal(group.packed_tensor(index).codes.cpu(), member.codes)
    group.to("cpu")
    assert group.layout == "rows"
    assert_holds(group, packed)


@pytest.mark.gpu
def test_gradients_through_the_fused_lora() -> None:
    if not qerl.nn.group.tiles_supported(torch.device("cuda", 0)):
        pytest.skip("needs a Hopper GPU and NVRTC")
    group, _ = make_group()
    dense = group.dense()[48:64].double().cuda()
    handle = QuantLinear(group.to("cuda"), 1)
    for tokens in (5, 100, 2500):
        x = torch.randn(tokens, K, device="cuda").bfloat16().requires_grad_()
        a = (torch.randn(16, K, device="cuda") / 10).bfloat16().requires_grad_()
        b = torch.randn(16, 16, device="cuda").bfloat16().requires_grad_()
        dy = torch.randn(tokens, 16, device="cuda").bfloat16()
        handle.forward_with_lora(x, a, b).backward(dy)
        xd, ad, bd = (t.detach().double().requires_grad_() for t in (x, a, b))
        expected = xd @ dense.t() + (xd @ ad.t()) @ bd.t()
        expected.backward(dy.double())
        for found, wanted in ((x, xd), (a, ad), (b, bd)):
            error = (found.grad.double() - wanted.grad).norm() / wanted.grad.norm()
            assert error < 0.006, (tokens, tuple(found.shape), float(error))
