"""Triton kernels of ``y = silu(g) * u``, with s = sigmoid(g): dg = dy u s (1 + g (1 - s)), du = dy g s."""

import triton
import triton.language as tl

from qerl.kernels.triton import round_to, start_after_predecessor


@triton.jit
def silu_mul_forward_kernel(gate_up, y, I, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """y [T, I] of gate_up [T, 2 I]."""
    start_after_predecessor(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < I
    gate = tl.load(gate_up + row * 2 * I + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * I + I + column, mask=mask, other=0.0).to(tl.float32)
    result = gate * tl.sigmoid(gate) * up
    tl.store(y + row * I + column, round_to(result, y.dtype.element_ty), mask=mask)


@triton.jit
def silu_mul_backward_kernel(gate_up, dy, dgate_up, I, BLOCK: tl.constexpr):
    """dgate_up [T, 2 I] of dy [T, I]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < I
    offset = row * 2 * I + column
    gate = tl.load(gate_up + offset, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + offset + I, mask=mask, other=0.0).to(tl.float32)
    gradient = tl.load(dy + row * I + column, mask=mask, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    dgate = gradient * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    dtype: tl.constexpr = dgate_up.dtype.element_ty
    tl.store(dgate_up + offset, round_to(dgate, dtype), mask=mask)
    tl.store(dgate_up + offset + I, round_to(gradient * gate * sigmoid, dtype), mask=mask)
