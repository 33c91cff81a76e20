"""SiLU-mul: formula and gradient on the CPU, kernels on a GPU."""

import pytest
import torch
from kernel_cases import rms_ratio, rounded_once

from qerl.kernels.silu_mul import silu_mul

DTYPES = [torch.bfloat16, torch.float32]


def _check(gate_up: torch.Tensor) -> None:
    gate_up = gate_up.detach().requires_grad_()
    y = silu_mul(gate_up)
    dy = torch.randn_like(y)
    (gradient,) = torch.autograd.grad(y, gate_up, dy)
    exact = gate_up.detach().double().requires_grad_()
    gate, up = exact.chunk(2, -1)
    expected = torch.nn.functional.silu(gate) * up
    (gradient64,) = torch.autograd.grad(expected, exact, dy.double())
    assert rms_ratio(y, expected) <= rounded_once(expected, gate_up.dtype)
    assert rms_ratio(gradient, gradient64) <= rounded_once(gradient64, gate_up.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp32"])
def test_formula_and_gradient_on_the_cpu(dtype: torch.dtype) -> None:
    _check(2 * torch.randn(2, 3, 130).to(dtype))


def test_large_gates_saturate_without_nan() -> None:
    gate_up = torch.tensor([[-1e4, -88.0, 0.0, 88.0, 1e4, 1.0, 1.0, 1.0, 1.0, 1.0]])
    expected = torch.tensor([[0.0, 0.0, 0.0, 88.0, 1e4]])
    assert torch.allclose(silu_mul(gate_up), expected, rtol=0, atol=1e-30)


def test_misuse_is_named() -> None:
    with pytest.raises(ValueError, match="even last dimension"):
        silu_mul(torch.randn(2, 7))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp32"])
@pytest.mark.parametrize("rows, width", [(1, 1), (0, 8), (3, 65), (700, 18944)])
@pytest.mark.usefixtures("poisoned_memory")
def test_gpu_against_fp64(rows: int, width: int, dtype: torch.dtype) -> None:
    gate_up = 2 * torch.randn(rows, 2 * width, device="cuda").to(dtype)
    if rows == 0:
        assert silu_mul(gate_up).shape == (0, width)
        return
    _check(gate_up)
    assert torch.equal(silu_mul(gate_up), silu_mul(gate_up))
    assert torch.equal(silu_mul(gate_up[-1:]), silu_mul(gate_up)[-1:])
