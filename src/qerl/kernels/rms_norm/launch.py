"""Launches of the RMSNorm kernels. Rows are contiguous and aligned; everything is checked by the caller."""

import torch

from qerl.kernels.device import dependent_launch
from qerl.kernels.rms_norm import triton as kernels
from qerl.kernels.rms_norm.reference import output_dtype

# Rows a backward program walks through are summed in registers: few programs keep the partial sums small.
_BACKWARD_PROGRAMS = 512


def _block(width: int) -> tuple[int, int]:
    """(power of two that covers a row, warps for it)."""
    block = 1 << (width - 1).bit_length()
    return block, min(16, max(1, block // 512))


def forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    noise: torch.Tensor | None,
    eps: float,
    settled: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(y [T, H], new residual [T, H] or an empty tensor, rstd fp32 [T]). ``settled``: the launch before this one writes
    neither weight nor noise."""
    rows, width = x.shape
    stream = x if residual is None else residual
    y = torch.empty_like(x, dtype=output_dtype(stream, weight))
    new_residual = x.new_empty(0) if residual is None else torch.empty_like(residual)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    block, warps = _block(width)
    pdl = dependent_launch(x.device)
    if rows:
        kernels.rms_norm_forward_kernel[(rows,)](
            x, residual, weight, noise, y, new_residual, rstd, width, eps,
            HAS_RESIDUAL=residual is not None, HAS_NOISE=noise is not None, BLOCK=block, PDL=pdl,
            SETTLED=settled, num_warps=warps, launch_pdl=pdl,
        )  # fmt: skip
    return y, new_residual, rstd


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    noise: torch.Tensor | None,
    rstd: torch.Tensor,
    needs_dweight: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dx [T, H], dweight [H] in the dtype of weight, or an empty tensor if not wanted)."""
    rows, width = x.shape
    dx = torch.empty_like(x)
    programs = min(rows, _BACKWARD_PROGRAMS)
    partial = torch.empty(programs if needs_dweight else 0, width, dtype=torch.float32, device=x.device)
    block, warps = _block(width)
    if rows:
        kernels.rms_norm_backward_kernel[(programs,)](
            x, weight, noise, rstd, dy, dx, partial, rows, width, programs,
            HAS_NOISE=noise is not None, NEEDS_DWEIGHT=needs_dweight, BLOCK=block, num_warps=warps,
        )  # fmt: skip
    dweight = partial.sum(0).to(weight.dtype) if needs_dweight else weight.new_empty(0)
    return dx, dweight
