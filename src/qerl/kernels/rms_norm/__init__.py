"""RMSNorm with a noise slot: ``y = (weight + noise) * x / rms(x)`` in fp32, rounded once.

The result has the dtype of x, or that of the weight where x is fp32: the residual stream may be wider than what the
matmuls take.

The noise is AQN's (arXiv 2510.11696, section 3.3). It stays fp32 and apart from the weight: added into a
bf16 weight of about 1, a sigma of 5e-4 would vanish in the rounding. Trainer (`rms_norm`, differentiable)
and engine (`rms_norm` and `add_rms_norm`) run the same kernel on CUDA and the same torch code on the CPU:
equal inputs give equal bits on a device, whatever the number of rows around them.
"""

from typing import Any

import torch

from qerl.kernels.device import launch_on
from qerl.kernels.rms_norm import reference
from qerl.kernels.rows import aligned_rows

__all__ = ["add_rms_norm", "rms_norm"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MAXIMUM_WIDTH = 1 << 15


def rms_norm(x: torch.Tensor, weight: torch.Tensor, noise: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Normalize the last dimension; differentiable in `x` and `weight`.

    Args:
        x: bf16, fp16 or fp32 ``[..., H]``, any strides.
        weight: floating ``[H]`` on the device of `x`.
        noise: fp32 ``[H]`` added to the weight, or None. Gets no gradient.
        eps: added to the mean square.

    Returns:
        ``[..., H]`` in the dtype of `x`, or of `weight` where `x` is fp32.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; on CUDA, H above 32768.
        UnsupportedGPUError: a GPU below sm_80.
    """
    _check(x, weight, noise)
    if not x.is_cuda:
        return reference.rms_norm(x, weight, noise, eps)
    y, _, _ = _forward_op(x.reshape(-1, x.shape[-1]), None, weight, noise, eps)
    return y.view(x.shape)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, noise: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(rms_norm(s), s)`` with ``s = x + residual`` rounded to the dtype of `residual` first, in one pass.
    Inference only.

    Args:
        x: as in `rms_norm`; no gradient may be wanted.
        residual: shape of `x`, dtype of `x` or fp32. Not modified.
        weight, noise, eps: as in `rms_norm`. On a Hopper GPU the launch before this one must not write weight or noise,
            which are read while it ends (`rms_norm` takes them from any launch).

    Raises:
        ValueError: as `rms_norm`; or a gradient is wanted.
    """
    _check(x, weight, noise)
    if residual.shape != x.shape or residual.dtype not in (x.dtype, torch.float32):
        raise ValueError(
            f"residual must be {x.dtype} (or fp32) {list(x.shape)} like x, got {residual.dtype} {list(residual.shape)}"
        )
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x, residual, weight)):
        raise ValueError("add_rms_norm has no backward; use rms_norm(x + residual, ...) where gradients are wanted")
    if not x.is_cuda:
        total = x + residual
        return reference.rms_norm(total, weight, noise, eps), total
    width = x.shape[-1]
    y, total, _ = _forward_op(x.reshape(-1, width), residual.reshape(-1, width), weight, noise, eps)
    return y.view(x.shape), total.view(x.shape)


def _check(x: torch.Tensor, weight: torch.Tensor, noise: torch.Tensor | None) -> None:
    if x.dtype not in _DTYPES:
        raise ValueError(f"rms_norm takes bf16, fp16 or fp32, got {x.dtype}")
    if x.ndim == 0 or weight.shape != x.shape[-1:]:
        raise ValueError(f"weight {list(weight.shape)} does not match the last dimension of x {list(x.shape)}")
    if noise is not None and (noise.shape != weight.shape or noise.dtype != torch.float32):
        raise ValueError(
            f"noise must be float32 {list(weight.shape)} like the weight, got {noise.dtype} {list(noise.shape)}"
        )
    for name, tensor in (("weight", weight), ("noise", noise)):
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"x is on {x.device}, {name} on {tensor.device}")
    if x.is_cuda and x.shape[-1] > _MAXIMUM_WIDTH:
        raise ValueError(f"rows of {x.shape[-1]} do not fit one program; the kernel takes up to {_MAXIMUM_WIDTH}")


@torch.library.custom_op("qerl::rms_norm_forward", mutates_args=())
def _forward_op(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    noise: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from qerl.kernels.rms_norm import launch  # Triton comes only with CUDA builds of torch.

    # A copy that is made here would be the launch before.
    settled = residual is not None and weight.is_contiguous() and (noise is None or noise.is_contiguous())
    residual = None if residual is None else aligned_rows(residual)
    noise = None if noise is None else noise.contiguous()
    with launch_on(x.device):
        return launch.forward(aligned_rows(x), residual, weight.contiguous(), noise, eps, settled)


@_forward_op.register_fake
def _(x, residual, weight, noise, eps):  # type: ignore[no-untyped-def]
    stream = x if residual is None else residual
    new_residual = x.new_empty(0) if residual is None else residual.new_empty(x.shape)
    y = x.new_empty(x.shape, dtype=reference.output_dtype(stream, weight))
    return y, new_residual, x.new_empty(x.shape[0], dtype=torch.float32)


@torch.library.custom_op("qerl::rms_norm_backward", mutates_args=())
def _backward_op(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    noise: torch.Tensor | None,
    rstd: torch.Tensor,
    needs_dweight: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    from qerl.kernels.rms_norm import launch  # Triton comes only with CUDA builds of torch.

    noise = None if noise is None else noise.contiguous()
    with launch_on(x.device):
        return launch.backward(aligned_rows(dy), aligned_rows(x), weight.contiguous(), noise, rstd, needs_dweight)


@_backward_op.register_fake
def _(dy, x, weight, noise, rstd, needs_dweight):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape), torch.empty_like(weight) if needs_dweight else weight.new_empty(0)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, _, weight, noise, _ = inputs
    ctx.mark_non_differentiable(output[1], output[2])
    ctx.save_for_backward(x, weight, noise, output[2])


def _backward(ctx: Any, dy: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
    x, weight, noise, rstd = ctx.saved_tensors
    dx, dweight = _backward_op(dy, x, weight, noise, rstd, ctx.needs_input_grad[2])
    return dx, None, dweight if ctx.needs_input_grad[2] else None, None, None


_forward_op.register_autograd(_backward, setup_context=_save_for_backward)
