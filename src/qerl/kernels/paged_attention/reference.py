"""Decode attention over a paged KV cache in plain torch; the CPU path, and what the kernel is tested by."""

import torch


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
    out = torch.zeros_like(q)
    for index, length in enumerate(context_lens.tolist()):
        if length == 0:
            continue
        blocks = block_table[index, : -(-length // block_size)].long()
        keys = k_cache[blocks].flatten(0, 1)[:length].float()
        values = v_cache[blocks].flatten(0, 1)[:length].float()
        grouped = q[index].float().view(num_kv_heads, num_heads // num_kv_heads, head_dim)
        probabilities = torch.softmax(torch.einsum("hgd,nhd->hgn", grouped, keys) * scale, dim=-1)
        out[index] = torch.einsum("hgn,nhd->hgd", probabilities, values).reshape(num_heads, head_dim).to(q.dtype)
    return out
