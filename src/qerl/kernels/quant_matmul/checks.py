"""What the products accept."""

import torch

from qerl.kernels.quant_matmul.weight import GroupWeight, LoraUpdate

DTYPES = (torch.bfloat16, torch.float32)


class ActivationDtypeError(ValueError):
    """Activations of a dtype in which the product is not safe."""


def check_product(
    x: torch.Tensor, weight: GroupWeight, bias: torch.Tensor | None, out_dtype: torch.dtype | None
) -> bool:
    """Check the operands of ``x W^T + bias``; whether the result is wider than `x`.

    Raises:
        ActivationDtypeError, ValueError: they do not fit.
    """
    check_activation("x", x, weight, weight.in_features)
    expected = (weight.out_features,), x.dtype, x.device
    if bias is not None and (tuple(bias.shape), bias.dtype, bias.device) != expected:
        raise ValueError(
            f"bias must be {x.dtype} [{weight.out_features}] on {x.device} like x and the weight's rows, "
            f"got {bias.dtype} {list(bias.shape)} on {bias.device}"
        )
    return is_wide(x, out_dtype)


def check_activation(name: str, tensor: torch.Tensor, weight: GroupWeight, width: int) -> None:
    """Check an operand ``[..., width]`` of a product with `weight`.

    Raises:
        ActivationDtypeError: neither bf16 nor fp32.
        ValueError: another width or device.
    """
    if tensor.dtype == torch.float16:
        raise ActivationDtypeError(
            f"{name} is float16: products with {weight.format} weights can overflow fp16 partial sums "
            "(terms reach 2688 times the activation before the global scale). Use bfloat16 or float32"
        )
    if tensor.dtype not in DTYPES:
        raise ActivationDtypeError(f"{name} must be bfloat16 or float32, got {tensor.dtype}")
    if tensor.ndim == 0 or tensor.shape[-1] != width:
        raise ValueError(
            f"last dimension of {name} must be {width} for a weight of {weight.out_features} rows and "
            f"{weight.in_features} columns, got shape {list(tensor.shape)}"
        )
    if tensor.device != weight.device:
        raise ValueError(f"{name} is on {tensor.device}, the weight on {weight.device}")


def is_wide(x: torch.Tensor, out_dtype: torch.dtype | None) -> bool:
    """Whether the result is wider than `x`.

    Raises:
        ActivationDtypeError: neither the dtype of `x` nor fp32.
    """
    if out_dtype not in (None, x.dtype, torch.float32):
        raise ActivationDtypeError(f"out_dtype must be float32 or that of the operand, {x.dtype}, got {out_dtype}")
    return out_dtype not in (None, x.dtype)


def check_lora(x: torch.Tensor, weight: GroupWeight, lora: LoraUpdate) -> None:
    """Check that `lora` can be added to the product of `x` and `weight`.

    Raises:
        ValueError: dtypes, devices, strides or places do not fit.
    """
    a, b, width = lora.a, lora.b, lora.a.shape[0]
    if x.ndim != 2 or a.shape != (width, x.shape[1]) or a.dtype != x.dtype or b.dtype != x.dtype:
        raise ValueError(
            f"a must be {x.dtype} [R, {weight.in_features}] like x {list(x.shape)}, and b of that dtype; got "
            f"{a.dtype} {list(a.shape)} and {b.dtype}"
        )
    if a.device != x.device or b.device != x.device:
        raise ValueError(f"x is on {x.device}, a on {a.device}, b on {b.device}")
    if b.ndim != 1 or not b.is_contiguous() or not a.is_contiguous():
        raise ValueError(
            f"a must be contiguous, b one-dimensional and contiguous; got strides {a.stride()} and "
            f"b {list(b.shape)} with strides {b.stride()}"
        )
    fits = len(lora.places) == len(weight.segments) and all(
        min(column, rank, place) >= 0
        and (column % 8, rank % 8, place % 8) == (0, 0, 0)
        and column + rank <= width
        and place + rows * rank <= b.numel()
        for rows, (column, rank, place) in zip(weight.segments, lora.places, strict=False)
    )
    if not fits or width % 8:
        raise ValueError(
            f"places {lora.places} do not fit segments {weight.segments}, a of {width} rows and b of {b.numel()}: "
            "columns, ranks and places come in multiples of 8"
        )
