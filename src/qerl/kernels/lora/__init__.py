"""The LoRA update of a fused group in two launches: ``u = x A^T`` (:func:`lora_shrink`), ``y += u B^T`` for all members
(:func:`lora_expand`): for weights whose product does not add LoRA itself (``quant_lora_matmul``).

The formula is that of the trainer's layers: u is rounded to the compute dtype, and y + u B^T is summed in fp32 and
rounded once. :class:`PackedB` says how u and B are laid out.
"""

import torch

from qerl.kernels.device import launch_on, multiprocessor_count
from qerl.kernels.lora import reference
from qerl.kernels.lora.packed import LoraSegment, PackedB, padded_rank
from qerl.kernels.quant_matmul import hopper
from qerl.kernels.rows import aligned_rows

__all__ = ["MAX_SHRINK_ROWS", "LoraSegment", "PackedB", "lora_expand", "lora_shrink", "padded_rank"]

MAX_SHRINK_ROWS = hopper.MAX_SHRINK_ROWS
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def lora_shrink(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """``x a^T`` of few rows with K split over programs, added up in a fixed order; no gradient.

    Args:
        x: bf16, fp16 or fp32 [T, K]. Above `MAX_SHRINK_ROWS` (256), on the CPU, and on a Hopper GPU above
            2^21 numbers, a plain matmul.
        a: [R, K] contiguous, in the dtype of ``x``: the A factors of all members.

    Returns:
        [T, R] in the dtype of ``x``.

    Raises:
        ValueError: shapes, dtypes, devices or strides that do not fit.
        UnsupportedGPUError: a GPU below sm_80.
    """
    if x.ndim != 2 or a.ndim != 2 or x.shape[1] != a.shape[1] or not a.is_contiguous():
        raise ValueError(f"expected x [T, K] and contiguous a [R, K], got {list(x.shape)} and {list(a.shape)}")
    if x.dtype not in _DTYPES or a.dtype != x.dtype or a.device != x.device:
        raise ValueError(
            "x and a must share bf16, fp16 or fp32 and the device, "
            f"got {x.dtype} on {x.device}, {a.dtype} on {a.device}"
        )
    if not x.is_cuda or x.shape[0] > MAX_SHRINK_ROWS:
        return reference.lora_shrink(x, a)
    return _shrink_op(x, a)


def _on_hopper(x: torch.Tensor) -> bool:
    return (
        x.is_cuda
        and x.dtype == torch.bfloat16
        and 0 < x.shape[0] <= MAX_SHRINK_ROWS
        and x.shape[1] % 32 == 0
        and hopper.is_supported(x.device)
    )


def lora_expand(y: torch.Tensor, u: torch.Tensor, b: PackedB, active: tuple[bool, ...]) -> None:
    """``y[:, segment] += u[:, ranks] B^T`` for every active member of a fused group; no gradient.

    On CUDA the first call for an ``active`` copies from the host: make one before capturing a graph.

    Args:
        y: [T, N] contiguous, in the dtype of ``b``. **Mutated.**
        u: [T, sum(r)] contiguous, from :func:`lora_shrink`.
        b: the B factors with their segments.
        active: which members of ``b`` to apply.

    Raises:
        ValueError: shapes, dtypes, devices or strides that do not fit.
        UnsupportedGPUError: a GPU below sm_80.
    """
    columns = max(segment.out_start + segment.out_features for segment in b.segments)
    ranks = max(segment.rank_start + segment.rank for segment in b.segments)
    if y.ndim != 2 or u.ndim != 2 or y.shape[0] != u.shape[0] or y.shape[1] < columns or u.shape[1] < ranks:
        raise ValueError(
            f"expected y [T, {columns} or more] and u [T, {ranks} or more], got {list(y.shape)} and {list(u.shape)}"
        )
    if len({y.dtype, u.dtype, b.buffer.dtype}) > 1 or len({y.device, u.device, b.buffer.device}) > 1:
        raise ValueError(
            f"y, u and b must share dtype and device, got {y.dtype} on {y.device}, {u.dtype} on {u.device}, "
            f"{b.buffer.dtype} on {b.buffer.device}"
        )
    if len(active) != len(b.segments) or not y.is_contiguous() or not u.is_contiguous():
        raise ValueError(f"y and u must be contiguous, and active must say so of {len(b.segments)} members")
    if y.is_cuda:
        _expand_op(y, u, b.buffer, b.row_map(active), b.max_rank, b.aligned)
    else:
        reference.lora_expand(y, u, b, active)


@torch.library.custom_op("qerl::lora_shrink", mutates_args=())
def _shrink_op(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    if _on_hopper(x):
        with launch_on(x.device):
            return hopper.lora_shrink(aligned_rows(x), a)
    from qerl.kernels.lora import launch  # Triton comes only with CUDA builds of torch.

    splits = launch.num_splits(x.shape[0], a.shape[0], x.shape[1], multiprocessor_count(x.device.index))
    with launch_on(x.device):
        return launch.lora_shrink(aligned_rows(x), a, splits)


@_shrink_op.register_fake
def _(x, a):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape[0], a.shape[0])


@torch.library.custom_op("qerl::lora_expand", mutates_args=("y",))
def _expand_op(
    y: torch.Tensor, u: torch.Tensor, b: torch.Tensor, row_map: torch.Tensor, max_rank: int, aligned: bool
) -> None:
    from qerl.kernels.lora import launch  # Triton comes only with CUDA builds of torch.

    with launch_on(y.device):
        launch.lora_expand(y, u, b, row_map, max_rank, aligned)


@_expand_op.register_fake
def _(y, u, b, row_map, max_rank, aligned):  # type: ignore[no-untyped-def]
    return None
