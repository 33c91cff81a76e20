"""Launches of the paged attention kernels. Tensors are checked by the caller."""

import math

import torch

from qerl.kernels.paged_attention import triton as kernels

_BLOCK_N = 64
_MAX_SLICES = 64
# A tile of the tensor core has at least 16 rows.
_MIN_GROUP = 16


def num_slices(sequences: int, num_kv_heads: int, max_context_len: int, multiprocessors: int) -> int:
    """Slices of the context so that about four programs share an SM; a power of two, from shapes alone."""
    wanted = 4 * multiprocessors // (sequences * num_kv_heads)
    longest = -(-max_context_len // _BLOCK_N)
    limit = max(1, min(wanted, longest, _MAX_SLICES))
    return 1 << (limit.bit_length() - 1)


def decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    slices: int,
) -> torch.Tensor:
    """Shapes as the public function; `slices` a power of two."""
    sequences, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    group = num_heads // num_kv_heads
    dim_padded = 1 << (head_dim - 1).bit_length()
    out = torch.empty_like(q)
    partial = lse = None
    if slices > 1:
        partial = torch.empty(sequences, num_heads, slices, head_dim, dtype=torch.float32, device=q.device)
        lse = torch.empty(sequences, num_heads, slices, dtype=torch.float32, device=q.device)
    kernels.paged_attention_slice_kernel[(sequences, num_kv_heads, slices)](
        q, k_cache, v_cache, block_table, context_lens, out, partial, lse,
        scale * math.log2(math.e), k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
        block_table.stride(0), num_heads,
        GROUP=group, GROUP_PADDED=max(_MIN_GROUP, 1 << (group - 1).bit_length()),
        HEAD_DIM=head_dim, DIM_PADDED=dim_padded, BLOCK_SIZE=block_size, BLOCK_N=_BLOCK_N, SLICES=slices,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    if slices > 1:
        kernels.paged_attention_merge_kernel[(sequences, num_heads)](
            context_lens, partial, lse, out, num_heads,
            HEAD_DIM=head_dim, DIM_PADDED=dim_padded, BLOCK_N=_BLOCK_N, SLICES=slices, SLICES_PADDED=slices,
            num_warps=2,
        )  # fmt: skip
    return out
