"""The two CUDA paths of the quantized matmul and the choice between them.

Every path multiplies by the same bf16 weights and applies the global scale to the fp32 accumulator; what
differs is the order of summation. cuBLAS gets the scale as alpha. Where the segments of a group have
different global scales there is one GEMM per segment with an fp32 result, scaled by a device tensor: no
launch waits for the host.
"""

import torch

from qerl.kernels.device import multiprocessor_count
from qerl.kernels.quant_matmul import launch
from qerl.kernels.quant_matmul.config import FEW_ROWS, few_rows_config
from qerl.kernels.quant_matmul.weight import GroupWeight
from qerl.kernels.quant_matmul.workspace import workspace


def matmul(x: torch.Tensor, weight: GroupWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """``x`` [M, K] contiguous bf16 or fp32 on a GPU -> [M, N]."""
    m = x.shape[0]
    if m == 0:
        return x.new_empty(0, weight.out_features)
    if x.dtype == torch.bfloat16 and m <= FEW_ROWS:
        units = multiprocessor_count(x.device.index)
        config = few_rows_config(m, weight.out_features, weight.in_features, units)
        return launch.few_rows_matmul(x, weight, bias, config)
    return dequantized_matmul(x, weight, bias)


def matmul_dx(dy: torch.Tensor, weight: GroupWeight) -> torch.Tensor:
    """``dy`` [M, N] contiguous bf16 or fp32 on a GPU -> [M, K]."""
    if dy.shape[0] == 0:
        return dy.new_empty(0, weight.in_features)
    return dequantized_matmul_dx(dy, weight)


def dequantized_matmul(x: torch.Tensor, weight: GroupWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """`matmul` by way of the workspace and a dense GEMM."""
    dense = _dequantized(weight, x.dtype)
    alpha = _uniform_factor(weight)
    y = x.new_empty(x.shape[0], weight.out_features)
    if alpha is not None:
        if bias is None:
            return y.addmm_(x, dense.t(), beta=0, alpha=alpha)
        # Not addmm: with a bias, cuBLAS may round split-K partial sums to bf16 (seen on an H200: error 1.5x).
        return torch.add(bias.float(), _mm_fp32(x, dense.t()), alpha=alpha).to(x.dtype)
    for rows, multiplier in _segments(weight):
        product = _mm_fp32(x, dense[rows].t()) * multiplier
        y[:, rows] = product if bias is None else product + bias[rows].float()
    return y


def dequantized_matmul_dx(dy: torch.Tensor, weight: GroupWeight) -> torch.Tensor:
    """`matmul_dx` by way of the workspace; segments are summed in fp32, first to last."""
    dense = _dequantized(weight, dy.dtype)
    alpha = _uniform_factor(weight)
    if alpha is not None:
        return dy.new_empty(dy.shape[0], weight.in_features).addmm_(dy, dense, beta=0, alpha=alpha)
    total = dy.new_zeros(dy.shape[0], weight.in_features, dtype=torch.float32)
    for rows, multiplier in _segments(weight):
        total.addcmul_(_mm_fp32(dy[:, rows], dense[rows]), multiplier)
    return total.to(dy.dtype)


def _dequantized(weight: GroupWeight, dtype: torch.dtype) -> torch.Tensor:
    dense = workspace((weight.out_features, weight.in_features), dtype, weight.device)
    launch.dequantize_into(weight, dense)
    return dense


def _uniform_factor(weight: GroupWeight) -> float | None:
    return 1.0 if weight.global_scale is None else weight.uniform_scale


def _segments(weight: GroupWeight) -> list[tuple[slice, torch.Tensor]]:
    """(rows, 1 / global scale as a device scalar) of each segment."""
    assert weight.global_scale is not None
    inverse = weight.global_scale.reciprocal()
    start, parts = 0, []
    for index, rows in enumerate(weight.segments):
        parts.append((slice(start, start + rows), inverse[index]))
        start += rows
    return parts


def _mm_fp32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b with an fp32 result."""
    return a @ b if a.dtype == torch.float32 else torch.mm(a, b, out_dtype=torch.float32)
