"""Triton kernels of RMSNorm, one row a program (forward) or every P-th row a program (backward).

With h = x * r, r = rsqrt(mean(x^2) + eps), w = weight + noise and y = w h:

    dx = r (w dy - h mean(w dy h)),    dweight = sum over rows of dy h
"""

import triton
import triton.language as tl

from qerl.kernels.triton import let_successor_start, round_to, wait_for_predecessor


@triton.jit
def rms_norm_forward_kernel(
    x, residual, weight, noise, y, new_residual, rstd, H, eps,
    HAS_RESIDUAL: tl.constexpr, HAS_NOISE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr, SETTLED: tl.constexpr,
):  # fmt: skip
    """y [T, H] and rstd fp32 [T] of x, or of x + residual rounded to the dtype of new_residual (and written to it).

    SETTLED: the launch before this one writes neither weight nor noise. They stream through the cache between two
    norms, so that they come from memory: then while that launch ends.
    """
    let_successor_start(PDL)
    if not SETTLED:
        wait_for_predecessor(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < H
    scale = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    if HAS_NOISE:
        scale += tl.load(noise + column, mask=mask, other=0.0)
    if SETTLED:
        wait_for_predecessor(PDL)
    value = tl.load(x + row * H + column, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        value += tl.load(residual + row * H + column, mask=mask, other=0.0).to(tl.float32)
        rounded = round_to(value, new_residual.dtype.element_ty)
        tl.store(new_residual + row * H + column, rounded, mask=mask)
        value = rounded.to(tl.float32)
    inverse = 1.0 / tl.sqrt_rn(tl.sum(value * value, 0) / H + eps)
    tl.store(rstd + row, inverse)
    tl.store(y + row * H + column, round_to(scale * (value * inverse), y.dtype.element_ty), mask=mask)


@triton.jit
def rms_norm_backward_kernel(
    x, weight, noise, rstd, dy, dx, dweight, T, H, programs,
    HAS_NOISE: tl.constexpr, NEEDS_DWEIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx [T, H], and the partial sums dweight fp32 [programs, H] over the rows of each program."""
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    mask = column < H
    scale = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    if HAS_NOISE:
        scale += tl.load(noise + column, mask=mask, other=0.0)
    total = tl.zeros((BLOCK,), tl.float32)
    offset = program.to(tl.int64) * H + column
    for row in range(program, T, programs):
        inverse = tl.load(rstd + row)
        normalized = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32) * inverse
        gradient = tl.load(dy + offset, mask=mask, other=0.0).to(tl.float32)
        if NEEDS_DWEIGHT:
            total += gradient * normalized
        gradient *= scale
        mean = tl.sum(gradient * normalized, 0) / H
        result = inverse * (gradient - normalized * mean)
        tl.store(dx + offset, round_to(result, dx.dtype.element_ty), mask=mask)
        offset += programs * H
    if NEEDS_DWEIGHT:
        tl.store(dweight + program.to(tl.int64) * H + column, total, mask=mask)
