"""Plain torch definition of the quantized matmuls; any device. The CPU path, and what the kernels are tested
by."""

import torch

from qerl.formats.base import PackedTensor, get_format
from qerl.kernels.quant_matmul.tiles import from_tiles
from qerl.kernels.quant_matmul.weight import GroupWeight, LoraUpdate


def dequantize(weight: GroupWeight, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """``[N, K]`` without the global scale: bf16 values (exact for nvfp4, rounded to bf16 for nf4) as
    `dtype`."""
    shape = (weight.out_features, weight.in_features)
    divisor = None if weight.global_scale is None else weight.global_scale[:1]
    codes, block_scale = from_tiles(weight.codes) if weight.layout == "tiles" else (weight.codes, weight.block_scale)
    packed = PackedTensor(weight.format, shape, codes, block_scale, divisor)
    return get_format(weight.format).unscaled(packed, torch.bfloat16).to(dtype)


def row_multiplier(weight: GroupWeight) -> torch.Tensor | None:
    """1 / global scale of each row, fp32 ``[N]``; None for formats without a global scale."""
    if weight.global_scale is None:
        return None
    inverse = weight.global_scale.reciprocal()
    return torch.cat([inverse[i].expand(rows) for i, rows in enumerate(weight.segments)])


def quant_matmul(
    x: torch.Tensor,
    weight: GroupWeight,
    bias: torch.Tensor | None = None,
    lora: LoraUpdate | None = None,
    u: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``x`` [M, K] -> ``(x W^T) * multiplier + u b^T + bias`` [M, N], in fp32, rounded once to `out_dtype` (None: as
    x); `u` [M, R] is that of `lora_shrink`."""
    y = x.float() @ dequantize(weight, torch.float32).t()
    multiplier = row_multiplier(weight)
    if multiplier is not None:
        y = y * multiplier
    if lora is not None and u is not None:
        y = y + lora_update(weight, lora, u)
    if bias is not None:
        y = y + bias.float()
    return y.to(out_dtype or x.dtype)


def lora_shrink(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """u = ``x a^T`` [M, R], summed in fp32, rounded once to the dtype of x."""
    return (x.float() @ a.float().t()).to(x.dtype)


def lora_update(weight: GroupWeight, lora: LoraUpdate, u: torch.Tensor) -> torch.Tensor:
    """fp32 ``[M, N]``: what `lora` adds to the product, with `u` [M, R]."""
    parts = []
    for rows, (column, rank, place) in zip(weight.segments, lora.places, strict=True):
        b = lora.b[place : place + rows * rank].view(rows, rank)
        parts.append(u[:, column : column + rank].float() @ b.float().t())
    return torch.cat(parts, dim=1)


def quant_matmul_dx(dy: torch.Tensor, weight: GroupWeight, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """``dy`` [M, N] -> ``dy (multiplier * W)`` [M, K], in fp32, rounded once to `out_dtype` (None: as dy)."""
    multiplier = row_multiplier(weight)
    scaled = dy.float() if multiplier is None else dy.float() * multiplier
    return (scaled @ dequantize(weight, torch.float32)).to(out_dtype or dy.dtype)
