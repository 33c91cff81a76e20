"""Launches of the SiLU-mul kernels on contiguous rows."""

import torch

from qerl.kernels.device import dependent_launch
from qerl.kernels.silu_mul import triton as kernels

_BLOCK = 1024


def forward(gate_up: torch.Tensor) -> torch.Tensor:
    """[T, 2 I] -> [T, I]."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    y = gate_up.new_empty(rows, width)
    if rows:
        grid = (rows, -(-width // _BLOCK))
        pdl = dependent_launch(gate_up.device)
        kernels.silu_mul_forward_kernel[grid](gate_up, y, width, BLOCK=_BLOCK, PDL=pdl, num_warps=4, launch_pdl=pdl)
    return y


def backward(dy: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """[T, I], [T, 2 I] -> [T, 2 I]."""
    dgate_up = torch.empty_like(gate_up)
    if len(dy):
        grid = (dy.shape[0], -(-dy.shape[1] // _BLOCK))
        kernels.silu_mul_backward_kernel[grid](gate_up, dy, dgate_up, dy.shape[1], BLOCK=_BLOCK, num_warps=4)
    return dgate_up
