"""Attention over the paged KV pool: softmax(q k^T * scale + causal mask) v for a packed batch, without
gradients.

The batch comes in *segments* (see ``core.Segment``), each with the cheapest right method:

- decode: one query a sequence. On CUDA our kernel reads the pool in place; elsewhere the blocks are gathered up to the
  longest context and one masked SDPA runs, the heads of a KV group standing in as its queries.
- fresh: nothing is cached yet, so causal attention runs on the new K/V: packed as they are by torch's kernel for CUDA
  (16 bit; see ``nn.attention.varlen_serves``), elsewhere by SDPA, padded on the right (a padded row is never seen by a
  real one).
- chunk: several queries behind a cached prefix. Gather, then SDPA under an explicit mask.
"""

import importlib.util
import logging
from functools import cache

import torch
import torch.nn.functional as F

from qerl.kernels.paged_attention.reference import read_blocks
from qerl.nn.attention import varlen_attention, varlen_serves
from qerl.rollout.core import ForwardBatch, Segment
from qerl.rollout.kv_cache import KVCache, blocks_for_tokens

_log = logging.getLogger(__name__)

# Smallest block of the paged decode kernel (it loads a block as one tile).
MIN_KERNEL_BLOCK = 16


def paged_attention(
    q: torch.Tensor,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    kv: KVCache,
    layer: int,
    batch: ForwardBatch,
    scale: float,
) -> torch.Tensor:
    """Attend from every new token to its sequence up to itself.

    Args:
        q: [T, Hq, D]; k_new, v_new: [T, Hkv, D] with Hq a multiple of Hkv; views of a fused row will do.
        kv: the pool; its ``layer`` already holds k_new and v_new (``kernels.rotary`` or ``KVCache.write``).

    Returns:
        [T, Hq, D] in q's dtype.

    Raises:
        ValueError: Hq is not a multiple of Hkv.
    """
    heads, kv_heads = q.shape[1], k_new.shape[1]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot be shared out among {kv_heads} KV heads")
    segments = batch.segments or (_whole_batch(batch),)
    parts = []
    for segment in segments:
        rows = slice(segment.token_start, segment.token_end)
        if segment.kind == "decode":
            parts.append(_decode(q[rows], kv, layer, batch, segment, scale))
        elif segment.kind == "fresh":
            parts.append(_fresh(q[rows], k_new[rows], v_new[rows], batch, segment, scale))
        else:
            parts.append(_chunk(q[rows], kv, layer, batch, segment, scale))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _whole_batch(batch: ForwardBatch) -> Segment:
    sequences, tokens = batch.context_lens.shape[0], batch.token_ids.shape[0]
    kind = "decode" if batch.max_q_len == 1 else "chunk"
    return Segment(kind, 0, sequences, 0, tokens, batch.max_q_len, batch.max_context_len)


@cache
def decode_kernel_serves(head_dim: int, block_size: int) -> bool:
    """Whether the paged decode kernel takes this geometry on CUDA; says once if not, since gathering is slow."""
    if importlib.util.find_spec("triton") is None:
        _log.warning("triton is not installed: decode attention gathers the KV cache in every step, which is slow")
        return False
    from qerl.kernels.paged_attention import HEAD_DIMS

    if head_dim not in HEAD_DIMS or block_size < MIN_KERNEL_BLOCK or block_size & (block_size - 1):
        _log.warning(
            "no decode kernel for head_dim=%d, block_size=%d (it takes %s and powers of two from %d on): "
            "decode attention gathers the KV cache in every step, which is slow",
            head_dim,
            block_size,
            HEAD_DIMS,
            MIN_KERNEL_BLOCK,
        )
        return False
    return True


def _decode(
    q: torch.Tensor, kv: KVCache, layer: int, batch: ForwardBatch, segment: Segment, scale: float
) -> torch.Tensor:
    """q [S, Hq, D] -> [S, Hq, D], one query a sequence."""
    context_lens = batch.context_lens[segment.seq_start : segment.seq_end]
    if q.is_cuda and decode_kernel_serves(q.shape[-1], kv.block_size):
        from qerl.kernels.paged_attention import paged_attention_decode

        table = batch.block_table[segment.seq_start : segment.seq_end]
        return paged_attention_decode(q, kv.k[layer], kv.v[layer], table, context_lens, scale)
    k, v = _gather(kv, layer, batch, segment, q.dtype)
    sequences, heads, head_dim = q.shape
    # [S, Hkv, Hq / Hkv, D]: the query heads of one KV head as its queries, so that K/V are not repeated.
    grouped = q.reshape(sequences, k.shape[1], -1, head_dim)
    key_positions = torch.arange(k.shape[2], device=q.device)
    mask = (key_positions < context_lens[:, None])[:, None, None]
    out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale)
    return out.reshape(sequences, heads, head_dim)


def _fresh(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    batch: ForwardBatch,
    segment: Segment,
    scale: float,
) -> torch.Tensor:
    """q [T, Hq, D], k and v [T, Hkv, D] of sequences without cached tokens -> [T, Hq, D]."""
    if varlen_serves(q):
        bounds = batch.cu_seqlens_q[segment.seq_start : segment.seq_end + 1] - segment.token_start
        return varlen_attention(q, k, v, bounds, bounds, segment.max_q_len, segment.max_q_len, scale)
    padded, packed = _padding(batch, segment)
    q, k, v = (x[padded].transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1)[packed]


def _chunk(
    q: torch.Tensor, kv: KVCache, layer: int, batch: ForwardBatch, segment: Segment, scale: float
) -> torch.Tensor:
    """q [T, Hq, D] -> [T, Hq, D]: any mix of new and cached tokens."""
    padded, packed = _padding(batch, segment)
    k, v = _gather(kv, layer, batch, segment, q.dtype)
    # Repeated by hand: with a mask, CUDA has no fused kernel for grouped heads.
    repeats = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
    context_lens = batch.context_lens[segment.seq_start : segment.seq_end, None, None]
    q_lens = batch.cu_seqlens_q.diff()[segment.seq_start : segment.seq_end, None, None]
    query_positions = context_lens - q_lens + torch.arange(padded.shape[1], device=q.device)[:, None]
    key_positions = torch.arange(k.shape[2], device=q.device)
    # A padded query sees the whole context, never nothing: an empty row would be NaN.
    mask = (key_positions <= query_positions) & (key_positions < context_lens)
    out = F.scaled_dot_product_attention(q[padded].transpose(1, 2), k, v, attn_mask=mask[:, None], scale=scale)
    return out.transpose(1, 2).flatten(0, 1)[packed]


def _gather(
    kv: KVCache, layer: int, batch: ForwardBatch, segment: Segment, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of the segment in ``dtype``, [S, Hkv, C, D]; C is its longest context rounded up to blocks."""
    blocks = blocks_for_tokens(segment.max_context_len, kv.block_size)
    table = batch.block_table[segment.seq_start : segment.seq_end, :blocks]
    k, v = (read_blocks(pool[layer], table.flatten(), dtype) for pool in (kv.k, kv.v))
    shape = (table.shape[0], blocks * kv.block_size, *k.shape[-2:])
    return k.view(shape).transpose(1, 2), v.view(shape).transpose(1, 2)


def _padding(batch: ForwardBatch, segment: Segment) -> tuple[torch.Tensor, torch.Tensor]:
    """Index of the segment's rows as [S, max_q] (rows beyond a sequence repeat its last one) and the way
    back [T].

    Both count from the segment's first row; ``padded.flatten()[packed]`` is 0..T-1.
    """
    bounds = batch.cu_seqlens_q[segment.seq_start : segment.seq_end + 1].long() - segment.token_start
    starts, ends = bounds[:-1, None], bounds[1:, None]
    columns = torch.arange(segment.max_q_len, device=bounds.device)
    padded = torch.minimum(starts + columns, ends - 1)
    tokens = torch.arange(segment.token_end - segment.token_start, device=bounds.device)
    sequence = torch.searchsorted(bounds[1:], tokens, right=True)
    packed = sequence * segment.max_q_len + tokens - bounds[sequence]
    return padded, packed
