"""The CUDA paths of the quantized matmul and the choice between them.

Every path multiplies by the same bf16 weights and applies the global scale to the fp32 accumulator; what
differs is the order of summation. cuBLAS gets the scale as alpha. Where the segments of a group have
different global scales there is one GEMM per segment with an fp32 result, scaled by a device tensor: no
launch waits for the host.

fp32 results of bf16 operands (an output head) are computed over blocks of rows, because a head has several times the
rows of the largest linear: the workspace need not grow with it.
"""

from collections.abc import Iterator

import torch

from qerl.kernels.device import multiprocessor_count
from qerl.kernels.quant_matmul import hopper, hopper_grad, launch
from qerl.kernels.quant_matmul.config import FEW_ROWS, few_rows_config
from qerl.kernels.quant_matmul.hopper_plan import MANY_ROWS
from qerl.kernels.quant_matmul.reference import lora_update
from qerl.kernels.quant_matmul.weight import GroupWeight, LoraUpdate
from qerl.kernels.quant_matmul.workspace import workspace

# Of dequantized weights at a time, where the result is fp32: no more than a layer's linears take.
BLOCK_BYTES = 256 << 20


def matmul(
    x: torch.Tensor, weight: GroupWeight, bias: torch.Tensor | None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """``x`` [M, K] contiguous bf16 or fp32 on a GPU -> [M, N] in `out_dtype` (fp32, or None: as x)."""
    m, out_dtype = x.shape[0], out_dtype or x.dtype
    if m == 0:
        return x.new_empty(0, weight.out_features, dtype=out_dtype)
    if weight.layout == "tiles" and x.dtype == torch.bfloat16 and m <= MANY_ROWS:
        return hopper.matmul(x, weight, bias, None, out_dtype)[0]
    if weight.layout == "rows" and x.dtype == torch.bfloat16 and m <= FEW_ROWS:
        units = multiprocessor_count(x.device.index)
        config = few_rows_config(m, weight.out_features, weight.in_features, units)
        return launch.few_rows_matmul(x, weight, bias, config, out_dtype)
    product = dequantized_matmul if out_dtype == x.dtype else blockwise_matmul
    return product(x, weight, bias, None, None)


def lora_matmul(
    x: torch.Tensor,
    weight: GroupWeight,
    bias: torch.Tensor | None,
    lora: LoraUpdate,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `matmul`, with LoRA: [M, N] and u = ``x a^T`` [M, R]."""
    m, out_dtype = x.shape[0], out_dtype or x.dtype
    if m == 0:
        return x.new_empty(0, weight.out_features, dtype=out_dtype), x.new_empty(0, lora.a.shape[0])
    if weight.layout == "tiles" and x.dtype == torch.bfloat16 and m <= MANY_ROWS:
        y, u = hopper.matmul(x, weight, bias, lora, out_dtype)
        assert u is not None
        return y, u
    u = x @ lora.a.t()
    product = dequantized_matmul if out_dtype == x.dtype else blockwise_matmul
    return product(x, weight, bias, lora, u), u


def matmul_dx(dy: torch.Tensor, weight: GroupWeight, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """``dy`` [M, N] contiguous bf16 or fp32 on a GPU -> [M, K] in `out_dtype` (fp32, or None: as dy)."""
    out_dtype = out_dtype or dy.dtype
    if dy.shape[0] == 0:
        return dy.new_empty(0, weight.in_features, dtype=out_dtype)
    if out_dtype != dy.dtype:
        return blockwise_matmul_dx(dy, weight)
    plan = hopper_grad.plan_for(dy.shape[0], weight) if dy.dtype == torch.bfloat16 else None
    if plan is None:
        return dequantized_matmul_dx(dy, weight)
    dx = dy.new_empty(dy.shape[0], weight.in_features)
    hopper_grad.run_input_grad(plan, dy, weight, dx)
    return dx


def blockwise_matmul(
    x: torch.Tensor,
    weight: GroupWeight,
    bias: torch.Tensor | None,
    lora: LoraUpdate | None,
    u: torch.Tensor | None,
) -> torch.Tensor:
    """`matmul` with an fp32 result, by way of the workspace and a dense GEMM for each block of rows."""
    y = x.new_empty(x.shape[0], weight.out_features, dtype=torch.float32)
    extra = None if lora is None or u is None else lora_update(weight, lora, u)
    for rows, dense, multiplier in _dense_blocks(weight, x.dtype):
        product = _mm_fp32(x, dense.t()).mul_(multiplier)
        if extra is not None:
            product += extra[:, rows]
        y[:, rows] = product if bias is None else product.add_(bias[rows])
    return y


def blockwise_matmul_dx(dy: torch.Tensor, weight: GroupWeight) -> torch.Tensor:
    """`matmul_dx` with an fp32 result; blocks are summed first to last."""
    total = dy.new_zeros(dy.shape[0], weight.in_features, dtype=torch.float32)
    for rows, dense, multiplier in _dense_blocks(weight, dy.dtype):
        total += _mm_fp32(dy[:, rows], dense).mul_(multiplier)
    return total


def _dense_blocks(
    weight: GroupWeight, dtype: torch.dtype
) -> Iterator[tuple[slice, torch.Tensor, float | torch.Tensor]]:
    """(rows, their dequantized weights in the workspace until the next is asked for, 1 / global scale).

    NF4 comes whole: its blocks may run over the ends of rows.
    """
    if weight.format == "nf4":
        yield slice(0, weight.out_features), _dequantized(weight, dtype), 1.0
        return
    most = max(16, BLOCK_BYTES // (weight.in_features * dtype.itemsize) // 16 * 16)
    alpha = weight.uniform_scale
    for segment, inverse in _segments(weight):
        length = segment.stop - segment.start
        step = -(-length // (-(-length // most) * 16)) * 16  # blocks of about equal size
        for first in range(segment.start, segment.stop, step):
            last = min(segment.stop, first + step)
            dense = _dequantized(weight.rows(first, last), dtype)
            yield slice(first, last), dense, inverse if alpha is None else alpha


def dequantized_matmul(
    x: torch.Tensor,
    weight: GroupWeight,
    bias: torch.Tensor | None,
    lora: LoraUpdate | None,
    u: torch.Tensor | None,
) -> torch.Tensor:
    """`matmul` by way of the workspace and a dense GEMM."""
    dense = _dequantized(weight, x.dtype)
    alpha = _uniform_factor(weight)
    y = x.new_empty(x.shape[0], weight.out_features)
    if alpha is not None and (bias is None or lora is not None):
        # The GEMM adds what LoRA and bias left in y to its fp32 sum; only that small term has been rounded before.
        if lora is not None and u is not None:
            _lora_into(y, weight, bias, lora, u)
        return y.addmm_(x, dense.t(), beta=0 if lora is None else 1, alpha=alpha)
    extra = None if lora is None or u is None else lora_update(weight, lora, u)
    if alpha is not None and bias is not None:
        # Not addmm: with a bias, cuBLAS may round split-K partial sums to bf16 (seen on an H200: error 1.5x).
        return torch.add(bias.float(), _mm_fp32(x, dense.t()), alpha=alpha).to(x.dtype)
    for rows, multiplier in _segments(weight):
        product = _mm_fp32(x, dense[rows].t()) * multiplier
        if extra is not None:
            product += extra[:, rows]
        y[:, rows] = product if bias is None else product + bias[rows].float()
    return y


def _lora_into(
    y: torch.Tensor, weight: GroupWeight, bias: torch.Tensor | None, lora: LoraUpdate, u: torch.Tensor
) -> None:
    """Write the LoRA term and the bias into `y`, rounded once together; zeros where a segment has neither."""
    start = 0
    for rows, (column, rank, place) in zip(weight.segments, lora.places, strict=True):
        part, offset = y[:, start : start + rows], None if bias is None else bias[start : start + rows]
        b, columns = lora.b[place : place + rows * rank].view(rows, rank), u[:, column : column + rank]
        if rank and offset is not None:
            torch.addmm(offset, columns, b.t(), out=part)
        elif rank:
            torch.mm(columns, b.t(), out=part)
        elif offset is not None:
            part.copy_(offset.expand_as(part))
        else:
            part.zero_()
        start += rows


def dequantize_into(weight: GroupWeight, out: torch.Tensor) -> None:
    """Write ``[N, K]`` without the global scale into `out` (bf16 or fp32, contiguous)."""
    (hopper if weight.layout == "tiles" else launch).dequantize_into(weight, out)


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
    dequantize_into(weight, dense)
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
