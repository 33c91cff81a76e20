"""Launches of the Triton kernels: grids, strides, scale factors. Tensors are checked by the caller."""

from functools import cache

import torch

from qerl.formats.nf4 import CODE_BOOK
from qerl.kernels.quant_matmul import triton as kernels
from qerl.kernels.quant_matmul.config import FewRowsConfig, few_rows_block_m
from qerl.kernels.quant_matmul.reference import row_multiplier
from qerl.kernels.quant_matmul.weight import GroupWeight

_DEQUANTIZE_ROWS = 16
_DEQUANTIZE_BYTES = 128
_SUM_COLUMNS = 1024


@cache
def _code_book(device: torch.device) -> torch.Tensor:
    return torch.tensor(CODE_BOOK, dtype=torch.float32, device=device)


def _scales_and_book(weight: GroupWeight) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Block scales as the kernels read them (E4M3 as bytes: sm_80 has no such type), and the NF4 code
    book."""
    if weight.format == "nvfp4":
        return weight.block_scale.view(torch.uint8), None
    return weight.block_scale, _code_book(weight.device)


def few_rows_matmul(
    x: torch.Tensor,
    weight: GroupWeight,
    bias: torch.Tensor | None,
    config: FewRowsConfig,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """``x`` bf16 [M, K] contiguous -> bf16 or fp32 [M, N]; weights stay packed until registers."""
    m, n, k = x.shape[0], weight.out_features, weight.in_features
    block_m = few_rows_block_m(m)
    steps = -(-k // (config.block_k * config.slices))
    scales, book = _scales_and_book(weight)
    multiplier = 1.0 if weight.uniform_scale is None else weight.uniform_scale
    if weight.format == "nvfp4":
        multiplier *= kernels.NVFP4_FACTOR
    per_row = row_multiplier(weight) if weight.uniform_scale is None else None
    y = torch.empty(m, n, dtype=out_dtype, device=x.device)
    split = config.slices > 1
    partial = torch.empty(config.slices, m, n, dtype=torch.float32, device=x.device) if split else y
    grid = (-(-n // config.block_n), config.slices, -(-m // block_m))
    kernels.few_rows_kernel[grid](
        x.view(torch.int32),
        weight.codes,
        scales,
        book,
        per_row,
        bias,
        partial,
        m,
        n,
        k,
        k // 2,
        k // 16,
        steps,
        multiplier,
        NVFP4=weight.format == "nvfp4",
        ROW_SCALE=per_row is not None,
        HAS_BIAS=bias is not None,
        SPLIT=split,
        EVEN_K=k % config.block_k == 0,
        BLOCK_M=block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if split:
        kernels.sum_slices_kernel[(-(-n // _SUM_COLUMNS), m)](
            partial,
            per_row,
            bias,
            y,
            m * n,
            n,
            multiplier,
            SLICES=config.slices,
            ROW_SCALE=per_row is not None,
            HAS_BIAS=bias is not None,
            BLOCK=_SUM_COLUMNS,
        )
    return y


def dequantize_into(weight: GroupWeight, out: torch.Tensor) -> None:
    """Write ``[N, K]`` without the global scale into `out` (bf16 or fp32, contiguous)."""
    n, k = weight.out_features, weight.in_features
    scales, book = _scales_and_book(weight)
    grid = (-(-n // _DEQUANTIZE_ROWS), -(-k // (2 * _DEQUANTIZE_BYTES)))
    kernels.dequantize_kernel[grid](
        weight.codes,
        scales,
        book,
        out,
        n,
        k,
        k // 2,
        k // 16,
        NVFP4=weight.format == "nvfp4",
        BLOCK_N=_DEQUANTIZE_ROWS,
        BYTES=_DEQUANTIZE_BYTES,
        num_warps=4,
    )
