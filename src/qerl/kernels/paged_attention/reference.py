"""Decode attention over a paged KV cache in plain torch; the CPU path, and what the kernel is tested by."""

import torch


def read_blocks(cache: torch.Tensor, blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Blocks int64 [B] of ``cache`` [num_blocks, block_size, Hkv, D] in ``dtype``, [B, block_size, Hkv, D]."""
    if cache.dtype == torch.float8_e4m3fn:
        # Bytes: float8 has no index_select.
        return cache.view(torch.uint8).index_select(0, blocks).view(cache.dtype).to(dtype)
    return cache.index_select(0, blocks).to(dtype)


def paged_attention_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """``softmax(scale q K^T) V`` of one query per sequence, in fp32, rounded once; shapes as the public function."""
    num_heads, head_dim = q.shape[1:]
    block_size, num_kv_heads = k_cache.shape[1:3]
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    for index, length in enumerate(context_lens.tolist()):
        if length == 0:
            continue
        blocks = block_table[index, : -(-length // block_size)].long()
        keys, values = (read_blocks(c, blocks, torch.float32).flatten(0, 1)[:length] for c in (k_cache, v_cache))
        grouped = q[index].float().view(num_kv_heads, num_heads // num_kv_heads, head_dim)
        probabilities = torch.softmax(torch.einsum("hgd,nhd->hgn", grouped, keys) * scale, dim=-1)
        out[index] = torch.einsum("hgn,nhd->hgd", probabilities, values).reshape(num_heads, head_dim).to(q.dtype)
    return out
