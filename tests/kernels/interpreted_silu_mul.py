"""The SiLU-mul kernels in Triton's interpreter (started by test_interpreter.py)."""

import pytest
import torch
from kernel_cases import rms_ratio, rounded_once

from qerl.kernels.silu_mul import _forward_op

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("rows, width", [(1, 1), (3, 65), (2, 1500)])
def test_forward_and_gradient(rows: int, width: int, dtype: torch.dtype) -> None:
    gate_up = (2 * torch.randn(rows, 2 * width)).to(dtype).requires_grad_()
    dy = torch.randn(rows, width).to(dtype)
    y = _forward_op(gate_up)
    (gradient,) = torch.autograd.grad(y, gate_up, dy)

    exact = gate_up.detach().double().requires_grad_()
    gate, up = exact.chunk(2, -1)
    expected = torch.nn.functional.silu(gate) * up
    (gradient64,) = torch.autograd.grad(expected, exact, dy.double())
    assert rms_ratio(y, expected) <= rounded_once(expected, dtype)
    assert rms_ratio(gradient, gradient64) <= rounded_once(gradient64, dtype)
