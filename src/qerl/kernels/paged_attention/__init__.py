"""Decode attention over a paged KV cache: one query token per sequence."""

import torch

from qerl.kernels.device import launch_on, multiprocessor_count
from qerl.kernels.paged_attention import hopper, reference

__all__ = ["HEAD_DIMS", "paged_attention_decode"]

HEAD_DIMS = (64, 80, 96, 128)
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def paged_attention_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """``softmax(scale q K^T) V`` of each sequence's newest token over its cached context.

    fp32 scores and softmax; probabilities are rounded to the dtype of q (fp16 for a float8 cache) before they meet V on
    CUDA. One launch: long contexts are cut into slices, and the blocks of a sequence and head merge them in order (the
    last program to arrive where there are no clusters): same inputs, same bits. How many slices depends on the shapes
    alone (not on the lengths), so the call can be captured in a CUDA graph after a first one; a sequence of length 0
    (padding of a graph's batch) gives zeros and reads no cache.

    Args:
        q: bf16, fp16 or fp32 ``[S, Hq, D]``, D one of `HEAD_DIMS` on CUDA; rows may be strided (views of a fused qkv).
        k_cache: ``[num_blocks, block_size, Hkv, D]`` in the dtype of q or float8_e4m3fn (scale 1), D contiguous;
            block_size a power of two, at least 16 on CUDA. Hq is a multiple of Hkv.
        v_cache: shape and strides of `k_cache`.
        block_table: int32 ``[S, max_blocks]``; entries past the context may hold anything.
        context_lens: int32 ``[S]`` contiguous, tokens to attend to, the newest included; at most max_blocks *
            block_size.
        scale: factor of the scores, usually ``D ** -0.5``.

    Returns:
        ``[S, Hq, D]`` in the dtype of q.

    Raises:
        ValueError: shapes, dtypes, strides or devices that do not fit.
        UnsupportedGPUError: a GPU below sm_80.
    """
    check_inputs(q, k_cache, v_cache, block_table, context_lens)
    if q.stride(2) != 1 or q.stride(1) != q.shape[2]:
        q = q.contiguous()
    return _decode_op(q, k_cache, v_cache, block_table, context_lens, scale)


def check_inputs(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
) -> None:
    """Refuse what :func:`paged_attention_decode` does not take.

    Raises:
        ValueError: shapes, dtypes, strides or devices that do not fit.
    """
    if q.ndim != 3 or k_cache.ndim != 4 or v_cache.shape != k_cache.shape:
        raise ValueError(
            "expected q [S, Hq, D] and caches [num_blocks, block_size, Hkv, D], "
            f"got {list(q.shape)}, {list(k_cache.shape)}, {list(v_cache.shape)}"
        )
    sequences, num_heads, head_dim = q.shape
    block_size, num_kv_heads, cache_dim = k_cache.shape[1:]
    if cache_dim != head_dim or num_heads % num_kv_heads:
        raise ValueError(
            f"q has {num_heads} heads of {head_dim}, the cache {num_kv_heads} of {cache_dim}: head sizes must be equal "
            "and query heads a multiple of KV heads"
        )
    if q.dtype not in _DTYPES or k_cache.dtype not in (q.dtype, torch.float8_e4m3fn) or v_cache.dtype != k_cache.dtype:
        raise ValueError(
            "q and caches must share bf16, fp16 or fp32 (or the caches be float8_e4m3fn), "
            f"got {q.dtype}, {k_cache.dtype}, {v_cache.dtype}"
        )
    if tuple(context_lens.shape) != (sequences,) or block_table.ndim != 2 or block_table.shape[0] != sequences:
        raise ValueError(
            f"{sequences} queries need context_lens [{sequences}] and block_table [{sequences}, max_blocks], "
            f"got {list(context_lens.shape)} and {list(block_table.shape)}"
        )
    if block_table.dtype != torch.int32 or context_lens.dtype != torch.int32:
        raise ValueError(
            f"block_table and context_lens must be int32, got {block_table.dtype} and {context_lens.dtype}"
        )
    if not context_lens.is_contiguous():
        raise ValueError(f"context_lens must be contiguous, got strides {context_lens.stride()}")
    if len({tensor.device for tensor in (q, k_cache, v_cache, block_table, context_lens)}) > 1:
        raise ValueError(
            f"tensors on different devices: q {q.device}, caches {k_cache.device} and {v_cache.device}, "
            f"block_table {block_table.device}, context_lens {context_lens.device}"
        )
    if q.is_cuda:
        _check_kernel_limits(head_dim, block_size, k_cache, v_cache, block_table)


def _check_kernel_limits(
    head_dim: int, block_size: int, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor
) -> None:
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head size {head_dim} has no kernel; supported: {', '.join(map(str, HEAD_DIMS))}")
    if block_size < 16 or block_size & (block_size - 1):
        raise ValueError(f"block size must be a power of two of at least 16, got {block_size}")
    if k_cache.stride() != v_cache.stride() or k_cache.stride(3) != 1 or block_table.stride(1) != 1:
        raise ValueError(
            "caches must share strides with D contiguous and block_table rows must be contiguous, "
            f"got strides {k_cache.stride()}, {v_cache.stride()}, {block_table.stride()}"
        )


@torch.library.custom_op("qerl::paged_attention_decode", mutates_args=())
def _decode_op(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    if not q.is_cuda:
        return reference.paged_attention_decode(q, k_cache, v_cache, block_table, context_lens, scale)
    if q.shape[0] == 0:
        return q.new_empty(q.shape)
    if hopper.serves(q, k_cache, v_cache):
        with launch_on(q.device):
            return hopper.decode(q, k_cache, v_cache, block_table, context_lens, scale)
    from qerl.kernels.paged_attention import launch  # Triton comes only with CUDA builds of torch.

    longest = block_table.shape[1] * k_cache.shape[1]
    slices = launch.num_slices(q.shape[0], k_cache.shape[2], longest, multiprocessor_count(q.device.index))
    with launch_on(q.device):
        return launch.decode(q, k_cache, v_cache, block_table, context_lens, scale, slices)


@_decode_op.register_fake
def _(q, k_cache, v_cache, block_table, context_lens, scale):  # type: ignore[no-untyped-def]
    return q.new_empty(q.shape)
