"""Products with frozen 4-bit weights: forward, gradient of the input, dequantization.

CPU tensors take the plain torch reference. On CUDA a few rows (up to `FEW_ROWS`) go through a Triton kernel
that keeps weights packed until registers; more rows dequantize into a reused workspace and multiply with
cuBLAS. Both multiply by the same bf16 weights, accumulate in fp32, apply the global scale to the accumulator
and round once.

The ops are registered with torch.library (torch.compile and CUDA graphs see opaque calls); autograd is the
caller's.
Same input, same bits: no path uses atomics.
"""

from collections.abc import Sequence

import torch

from qerl.kernels.device import launch_on
from qerl.kernels.quant_matmul import reference
from qerl.kernels.quant_matmul.config import FEW_ROWS
from qerl.kernels.quant_matmul.weight import GroupWeight
from qerl.kernels.quant_matmul.workspace import reserve_workspace, workspace_bytes
from qerl.kernels.rows import aligned_rows

__all__ = [
    "FEW_ROWS",
    "ActivationDtypeError",
    "GroupWeight",
    "dequantize",
    "quant_matmul",
    "quant_matmul_dx",
    "reserve_workspace",
    "workspace_bytes",
]

_DTYPES = (torch.bfloat16, torch.float32)


class ActivationDtypeError(ValueError):
    """Activations of a dtype in which the product is not safe."""


def quant_matmul(x: torch.Tensor, weight: GroupWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``y = x W^T + bias`` with packed W.

    Args:
        x: bf16 or fp32 ``[..., K]``, any strides.
        weight: packed ``[N, K]`` on the device of `x`.
        bias: ``[N]`` in the dtype of `x`, or None.

    Returns:
        ``[..., N]`` in the dtype of `x`: fp32 accumulation, global scale and bias in fp32, rounded once.
        fp32 `x` is multiplied by the weights in fp32.

    Raises:
        ActivationDtypeError: fp16. The product without the global scale reaches 2688 |x| per term and split-K
            libraries may round such partial sums to fp16, where they overflow (vllm#33972).
        ValueError: shapes or devices that do not fit.
        UnsupportedGPUError: a GPU below sm_80.
    """
    _check_activation("x", x, weight, weight.in_features)
    if bias is not None and (bias.shape != (weight.out_features,) or bias.dtype != x.dtype):
        raise ValueError(
            f"bias must be {x.dtype} [{weight.out_features}] like x and the weight's rows, "
            f"got {bias.dtype} {list(bias.shape)}"
        )
    y = _matmul_op(x.reshape(-1, x.shape[-1]), *_parts(weight), bias)
    return y.view(*x.shape[:-1], weight.out_features)


def quant_matmul_dx(dy: torch.Tensor, weight: GroupWeight) -> torch.Tensor:
    """``dx = dy W``: the gradient of the input of `quant_matmul`.

    Args:
        dy: bf16 or fp32 ``[..., N]``, any strides.
        weight: as in the forward.

    Returns:
        ``[..., K]`` in the dtype of `dy`; fp32 accumulation, rounded once.

    Raises:
        As `quant_matmul`.
    """
    _check_activation("dy", dy, weight, weight.out_features)
    dx = _matmul_dx_op(dy.reshape(-1, dy.shape[-1]), *_parts(weight))
    return dx.view(*dy.shape[:-1], weight.in_features)


def dequantize(
    weight: GroupWeight, out: torch.Tensor | None = None, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """The weight ``[N, K]`` without its global scale; exact in bf16 for nvfp4, rounded to bf16 for nf4.

    Args:
        weight: packed ``[N, K]``.
        out: contiguous ``[N, K]`` bf16 or fp32 to write (mutated), or None to allocate one of `dtype`.
        dtype: of the result where `out` is None; fp32 holds the same values as bf16.

    Raises:
        ValueError: `out` or `dtype` do not fit.
        UnsupportedGPUError: a GPU below sm_80.
    """
    shape = (weight.out_features, weight.in_features)
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=weight.device)
    if out.dtype not in _DTYPES or tuple(out.shape) != shape or not out.is_contiguous():
        raise ValueError(
            f"dequantize writes a contiguous bf16 or fp32 {list(shape)}, "
            f"got {out.dtype} {list(out.shape)} with strides {out.stride()}"
        )
    if out.device != weight.device:
        raise ValueError(f"out is on {out.device}, the weight on {weight.device}")
    _dequantize_op(out, *_parts(weight))
    return out


def _check_activation(name: str, tensor: torch.Tensor, weight: GroupWeight, width: int) -> None:
    if tensor.dtype == torch.float16:
        raise ActivationDtypeError(
            f"{name} is float16: products with {weight.format} weights can overflow fp16 partial sums "
            "(terms reach 2688 times the activation before the global scale). Use bfloat16 or float32"
        )
    if tensor.dtype not in _DTYPES:
        raise ActivationDtypeError(f"{name} must be bfloat16 or float32, got {tensor.dtype}")
    if tensor.ndim == 0 or tensor.shape[-1] != width:
        raise ValueError(
            f"last dimension of {name} must be {width} for a weight of {weight.out_features} rows and "
            f"{weight.in_features} columns, got shape {list(tensor.shape)}"
        )
    if tensor.device != weight.device:
        raise ValueError(f"{name} is on {tensor.device}, the weight on {weight.device}")


_Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, str, list[int], float | None]


def _parts(weight: GroupWeight) -> _Parts:
    """A weight as torch.library can pass it."""
    return (
        weight.codes,
        weight.block_scale,
        weight.global_scale,
        weight.format,
        list(weight.segments),
        weight.uniform_scale,
    )


def _weight(
    codes: torch.Tensor,
    block_scale: torch.Tensor,
    global_scale: torch.Tensor | None,
    weight_format: str,
    segments: Sequence[int],
    uniform_scale: float | None,
) -> GroupWeight:
    columns = 2 * codes.shape[1]
    return GroupWeight(weight_format, tuple(segments), columns, codes, block_scale, global_scale, uniform_scale)


@torch.library.custom_op("qerl::quant_matmul", mutates_args=())
def _matmul_op(
    x: torch.Tensor,
    codes: torch.Tensor,
    block_scale: torch.Tensor,
    global_scale: torch.Tensor | None,
    weight_format: str,
    segments: Sequence[int],
    uniform_scale: float | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    weight = _weight(codes, block_scale, global_scale, weight_format, segments, uniform_scale)
    if not x.is_cuda:
        return reference.quant_matmul(x, weight, bias)
    from qerl.kernels.quant_matmul import paths  # Triton comes only with CUDA builds of torch.

    with launch_on(x.device):
        return paths.matmul(aligned_rows(x), weight, bias)


@_matmul_op.register_fake
def _(x, codes, block_scale, global_scale, weight_format, segments, uniform_scale, bias):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape[0], codes.shape[0])


@torch.library.custom_op("qerl::quant_matmul_dx", mutates_args=())
def _matmul_dx_op(
    dy: torch.Tensor,
    codes: torch.Tensor,
    block_scale: torch.Tensor,
    global_scale: torch.Tensor | None,
    weight_format: str,
    segments: Sequence[int],
    uniform_scale: float | None,
) -> torch.Tensor:
    weight = _weight(codes, block_scale, global_scale, weight_format, segments, uniform_scale)
    if not dy.is_cuda:
        return reference.quant_matmul_dx(dy, weight)
    from qerl.kernels.quant_matmul import paths  # Triton comes only with CUDA builds of torch.

    with launch_on(dy.device):
        return paths.matmul_dx(aligned_rows(dy), weight)


@_matmul_dx_op.register_fake
def _(dy, codes, block_scale, global_scale, weight_format, segments, uniform_scale):  # type: ignore[no-untyped-def]
    return dy.new_empty(dy.shape[0], 2 * codes.shape[1])


@torch.library.custom_op("qerl::dequantize", mutates_args=("out",))
def _dequantize_op(
    out: torch.Tensor,
    codes: torch.Tensor,
    block_scale: torch.Tensor,
    global_scale: torch.Tensor | None,
    weight_format: str,
    segments: Sequence[int],
    uniform_scale: float | None,
) -> None:
    weight = _weight(codes, block_scale, global_scale, weight_format, segments, uniform_scale)
    if not out.is_cuda:
        out.copy_(reference.dequantize(weight, out.dtype))
        return
    from qerl.kernels.quant_matmul import launch  # Triton comes only with CUDA builds of torch.

    with launch_on(out.device):
        launch.dequantize_into(weight, out)
