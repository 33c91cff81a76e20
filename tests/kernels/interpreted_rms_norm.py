"""The RMSNorm kernels in Triton's interpreter (started by test_interpreter.py)."""

import pytest
import torch
from kernel_cases import rms_ratio, rounded_once

from qerl.kernels.rms_norm import _forward_op, launch, reference

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SHAPES = [(1, 1), (3, 63), (5, 128), (7, 576)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("with_noise", [False, True], ids=["clean", "noise"])
def test_forward_and_gradients(shape: tuple[int, int], dtype: torch.dtype, with_noise: bool) -> None:
    x = torch.randn(shape).to(dtype).requires_grad_()
    weight = (1 + 0.1 * torch.randn(shape[1])).to(dtype).requires_grad_()
    noise = 0.01 * torch.randn(shape[1]) if with_noise else None
    dy = torch.randn(shape).to(dtype)
    y, _, _ = _forward_op(x, None, weight, noise, 1e-6)
    dx, dweight = torch.autograd.grad(y, (x, weight), dy)

    x64, weight64 = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    scale = weight64 if noise is None else weight64 + noise.double()
    expected = scale * x64 * torch.rsqrt(x64.square().mean(-1, keepdim=True) + 1e-6)
    dx64, dweight64 = torch.autograd.grad(expected, (x64, weight64), dy.double())
    assert dx.dtype == x.dtype and dweight.dtype == weight.dtype
    assert rms_ratio(y, expected) <= rounded_once(expected, dtype)
    # A single column normalizes to +-1 whatever x is: its exact gradient is eps-sized, and cancellation leaves noise.
    if shape[1] > 1:
        assert rms_ratio(dx, dx64) <= rounded_once(dx64, dtype)
    assert rms_ratio(dweight, dweight64) <= rounded_once(dweight64, dtype)


def test_frozen_weight_gets_no_gradient_and_x_still_does() -> None:
    x, weight = torch.randn(4, 96, requires_grad=True), torch.ones(96)
    y, _, _ = _forward_op(x, None, weight, None, 1e-6)
    y.backward(torch.randn(4, 96))
    assert weight.grad is None
    assert torch.isfinite(x.grad).all() and x.grad.abs().max() > 0


def test_weight_and_noise_may_be_columns() -> None:
    x, columns = torch.randn(4, 96), torch.rand(96, 2)
    leaf = x.clone().requires_grad_()
    y, _, _ = _forward_op(leaf, None, columns[:, 0], columns[:, 1], 1e-6)
    expected = reference.rms_norm(x, columns[:, 0], columns[:, 1], 1e-6)
    assert rms_ratio(y, expected) < 1e-6
    dy, exact = torch.randn(4, 96), x.clone().requires_grad_()
    (expected_dx,) = torch.autograd.grad(reference.rms_norm(exact, columns[:, 0], columns[:, 1], 1e-6), exact, dy)
    assert rms_ratio(torch.autograd.grad(y, leaf, dy)[0], expected_dx) < 1e-5


def test_residual_is_rounded_first_and_the_bits_are_those_of_the_plain_norm() -> None:
    x, residual = torch.randn(5, 576).bfloat16(), torch.randn(5, 576).bfloat16()
    weight, noise = torch.rand(576).bfloat16(), 0.01 * torch.randn(576)
    y, total, _ = launch.forward(x, residual, weight, noise, 1e-6, settled=True)
    assert torch.equal(total, x + residual)
    plain, _, _ = launch.forward(x + residual, None, weight, noise, 1e-6)
    assert torch.equal(y, plain)
    assert rms_ratio(y, reference.rms_norm((x + residual).float(), weight, noise, 1e-6)) < 2e-3
