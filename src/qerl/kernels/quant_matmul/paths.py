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
from qerl.kernels.quant_matmul.hopper_grad_plan import GRAD_ROWS
from qerl.kernels.quant_matmul.hopper_plan import MANY_ROWS, PACKED_ROWS, FewRowsPlan, ManyRowsPlan
from qerl.kernels.quant_matmul.reference import lora_update
from qerl.kernels.quant_matmul.weight import GroupWeight, LoraUpdate
from qerl.kernels.quant_matmul.workspace import workspace
from qerl.kernels.silu_mul import launch as silu_mul

# Of dequantized weights at a time, where the result is fp32: no more than a layer's linears take.
BLOCK_BYTES = 256 << 20


def matmul(
    x: torch.Tensor, weight: GroupWeight, bias: torch.Tensor | None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """``x`` [M, K] contiguous bf16 or fp32 on a GPU -> [M, N] in `out_dtype` (fp32, or None: as x)."""
    m, out_dtype = x.shape[0], out_dtype or x.dtype
    if m == 0:
        return x.new_empty(0, weight.out_features, dtype=out_dtype)
    if weight.layout == "tiles" and x.dtype == torch.bfloat16 and m <= PACKED_ROWS:
        y = x.new_empty(m, weight.out_features, dtype=out_dtype)
        _run(_planned_blocks(m, weight), x, weight, bias, None, y)
        return y
    if weight.layout == "rows" and x.dtype == torch.bfloat16 and m <= FEW_ROWS:
        units = multiprocessor_count(x.device.index)
        config = few_rows_config(m, weight.out_features, weight.in_features, units)
        return launch.few_rows_matmul(x, weight, bias, config, out_dtype)
    return (dequantized_matmul if out_dtype == x.dtype else blockwise_matmul)(x, weight, bias)


def lora_matmul(
    x: torch.Tensor,
    weight: GroupWeight,
    bias: torch.Tensor | None,
    lora: LoraUpdate,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `matmul`, with LoRA: [M, N] and u = ``x a^T`` [M, R].

    Weights in tiles go through the packed kernels at any number of rows, which rounds once.
    """
    out_dtype = out_dtype or x.dtype
    if weight.layout == "tiles" and x.dtype == torch.bfloat16:
        y = x.new_empty(x.shape[0], weight.out_features, dtype=out_dtype)
        return y, _run(_planned_blocks(x.shape[0], weight, ranks=lora.a.shape[0]), x, weight, bias, lora, y)
    u = x @ lora.a.t()
    return matmul(x, weight, bias, torch.float32).add_(lora_update(weight, lora, u)).to(out_dtype), u


def silu_matmul(
    x: torch.Tensor, weight: GroupWeight, bias: torch.Tensor | None, lora: LoraUpdate | None
) -> torch.Tensor:
    """``silu(gate) * up`` of the product [gate | up] as `matmul` and `lora_matmul` round it: [M, N / 2] as `x`."""
    m, packed = x.shape[0], weight.layout == "tiles" and x.dtype == torch.bfloat16
    if packed and (m <= PACKED_ROWS or lora is not None):
        blocks = _planned_blocks(m, weight, silu=True, ranks=lora.a.shape[0] if lora is not None else 0)
        if all(plan is not None for _, plan in blocks):
            y = x.new_empty(m, weight.out_features // 2)
            _run(blocks, x, weight, bias, lora, y)
            return y
    return silu_mul.forward(matmul(x, weight, bias) if lora is None else lora_matmul(x, weight, bias, lora)[0])


# Rows of x and the kernel for them, or None where there is none.
_Blocks = list[tuple[slice, FewRowsPlan | ManyRowsPlan | None]]


def _planned_blocks(m: int, weight: GroupWeight, silu: bool = False, ranks: int = 0) -> _Blocks:
    """Launches that multiply `m` rows by weights in tiles."""
    blocks = _row_blocks(m, MANY_ROWS)
    return [(rows, hopper.plan_for(rows.stop - rows.start, weight, silu, ranks)) for rows in blocks]


def _run(
    blocks: _Blocks,
    x: torch.Tensor,
    weight: GroupWeight,
    bias: torch.Tensor | None,
    lora: LoraUpdate | None,
    y: torch.Tensor,
) -> torch.Tensor | None:
    """Launch `blocks` into `y` (mutated); returns u [M, R] with LoRA."""
    u = x.new_empty(x.shape[0], lora.a.shape[0]) if lora is not None else None
    for rows, plan in blocks:
        hopper.run(plan, x[rows], weight, bias, lora, y[rows], u[rows] if u is not None else None)
    return u


def _row_blocks(m: int, most: int) -> Iterator[slice]:
    """Rows 0 to `m` (exclusive) in blocks of about equal size, `most` at most."""
    step = -(-m // max(1, -(-m // most)))
    yield from (slice(first, min(m, first + step)) for first in range(0, m, max(1, step)))


def matmul_dx(dy: torch.Tensor, weight: GroupWeight, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """``dy`` [M, N] contiguous bf16 or fp32 on a GPU -> [M, K] in `out_dtype` (fp32, or None: as dy)."""
    out_dtype = out_dtype or dy.dtype
    if dy.shape[0] == 0:
        return dy.new_empty(0, weight.in_features, dtype=out_dtype)
    if out_dtype != dy.dtype:
        return blockwise_matmul_dx(dy, weight)
    blocks = [
        (rows, hopper_grad.plan_for(rows.stop - rows.start, weight)) for rows in _row_blocks(dy.shape[0], GRAD_ROWS)
    ]
    if dy.dtype != torch.bfloat16 or any(plan is None for _, plan in blocks):
        return dequantized_matmul_dx(dy, weight)
    dx = dy.new_empty(dy.shape[0], weight.in_features)
    for rows, plan in blocks:
        hopper_grad.run_input_grad(plan, dy[rows], weight, dx[rows])
    return dx


def blockwise_matmul(x: torch.Tensor, weight: GroupWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """`matmul` with an fp32 result, by way of the workspace and a dense GEMM for each block of rows."""
    y = x.new_empty(x.shape[0], weight.out_features, dtype=torch.float32)
    for rows, dense, multiplier in _dense_blocks(weight, x.dtype):
        product = _mm_fp32(x, dense.t()).mul_(multiplier)
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


def dequantized_matmul(x: torch.Tensor, weight: GroupWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """`matmul` by way of the workspace and a dense GEMM."""
    dense = _dequantized(weight, x.dtype)
    alpha = _uniform_factor(weight)
    y = x.new_empty(x.shape[0], weight.out_features)
    if alpha is not None and bias is None:
        return y.addmm_(x, dense.t(), beta=0, alpha=alpha)
    if alpha is not None:
        # Not addmm: with a bias, cuBLAS may round split-K partial sums to bf16 (seen on an H200: error 1.5x).
        return torch.add(bias.float(), _mm_fp32(x, dense.t()), alpha=alpha).to(x.dtype)
    for rows, multiplier in _segments(weight):
        product = _mm_fp32(x, dense[rows].t()) * multiplier
        y[:, rows] = product if bias is None else product + bias[rows].float()
    return y


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
