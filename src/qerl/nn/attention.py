"""Padding-free causal attention for the Hugging Face forward, plugged in through ``AttentionInterface``.

A batch is one row ``[1, T]`` of concatenated sequences; a sequence may begin with keys of an earlier one (a prompt that
its samples share, see :mod:`qerl.nn.packing`). On CUDA the work goes to ``torch.nn.attention.varlen.varlen_attn``; on
the CPU, in fp32, and for heads it has no kernel for, sequences of a kind are laid side by side, right-padded, one SDPA
call a kind.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

PACKED_ATTENTION = "qerl_packed"

# torch 2.11 groups heads without being asked; later versions want to be told.
_VARLEN_TAKES_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters


@dataclass(frozen=True)
class PaddedBlock:
    """Sequences of one kind, right-padded for SDPA.

    Attributes:
        q_rows: int64 [S, Q], packed row of each query; padding points at some row of the batch.
        kv_rows: int64 [S, K], packed row of each key.
        valid: bool [S, Q], real queries.
        distance: int64 [S, Q, K], position of the query minus position of the key; negative where the key must not
            be seen (future or padding).
    """

    q_rows: torch.Tensor
    kv_rows: torch.Tensor
    valid: torch.Tensor
    distance: torch.Tensor


@dataclass(frozen=True)
class PackedSequences:
    """The sequences of a packed row: first the prefixes, then the segments that continue them.

    Attributes:
        cu_seqlens_q, cu_seqlens_k: int32 [S + 1], cumulative lengths of queries and keys.
        max_q_len, max_k_len: longest of each.
        kv_rows: int64 [Tk], packed row of each key, sequence by sequence.
        blocks: the same for padded attention.
    """

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_q_len: int
    max_k_len: int
    kv_rows: torch.Tensor
    blocks: tuple[PaddedBlock, ...]

    @classmethod
    def shared_prefix(
        cls, prefix_lengths: torch.Tensor, segment_lengths: torch.Tensor, group: torch.Tensor
    ) -> "PackedSequences":
        """Prefixes of ``prefix_lengths`` int64 [G] (0 allowed), then segments of ``segment_lengths`` int64 [S]
        (at least 1), segment s continuing prefix ``group[s]``."""
        prefix_starts = prefix_lengths.cumsum(0) - prefix_lengths
        segment_starts = int(prefix_lengths.sum()) + segment_lengths.cumsum(0) - segment_lengths
        real = prefix_lengths > 0
        none = torch.zeros_like(prefix_starts[real])
        blocks = [
            _padded_block(none, none, prefix_starts[real], prefix_lengths[real]),
            _padded_block(prefix_starts[group], prefix_lengths[group], segment_starts, segment_lengths),
        ]
        blocks = [block for block in blocks if block.valid.numel()]
        q_lengths = torch.cat([block.valid.sum(1) for block in blocks])
        keys = [(block.distance >= 0).any(1) for block in blocks]
        k_lengths = torch.cat([k.sum(1) for k in keys])
        return cls(
            cu_seqlens_q=F.pad(q_lengths.cumsum(0), (1, 0)).to(torch.int32),
            cu_seqlens_k=F.pad(k_lengths.cumsum(0), (1, 0)).to(torch.int32),
            max_q_len=int(q_lengths.max()),
            max_k_len=int(k_lengths.max()),
            kv_rows=torch.cat([block.kv_rows[k] for block, k in zip(blocks, keys)]),
            blocks=tuple(blocks),
        )


def _padded_block(
    prefix_start: torch.Tensor, prefix_len: torch.Tensor, start: torch.Tensor, length: torch.Tensor
) -> PaddedBlock:
    """Sequences of [S] each: keys are ``prefix_len`` rows at ``prefix_start``, then ``length`` rows at ``start``."""
    if length.numel() == 0:
        empty = length.new_zeros(0, 0)
        return PaddedBlock(empty, empty, empty.bool(), length.new_zeros(0, 0, 0))
    queries = torch.arange(int(length.max()), device=length.device)
    keys = torch.arange(int((prefix_len + length).max()), device=length.device)
    valid = queries < length[:, None]
    in_prefix = keys < prefix_len[:, None]
    own = (start - prefix_len)[:, None] + keys
    real_key = keys < (prefix_len + length)[:, None]
    kv_rows = torch.where(in_prefix, prefix_start[:, None] + keys, torch.where(real_key, own, start[:, None]))
    distance = (prefix_len[:, None] + queries)[:, :, None] - keys
    distance = torch.where(real_key[:, None, :] & valid[:, :, None], distance, -1)
    q_rows = torch.where(valid, start[:, None] + queries, start[:, None])
    return PaddedBlock(q_rows, kv_rows, valid, distance)


def _rows(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """[T, H, D] by row index [S, L] -> [S, H, L, D]."""
    return tensor.index_select(0, rows.flatten()).view(*rows.shape, *tensor.shape[1:]).transpose(1, 2)


def _padded_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seqs: PackedSequences, scale: float, window: int | None
) -> torch.Tensor:
    """[T, Hq, D] x [T, Hkv, D] -> [T, Hq, D], one masked SDPA call per kind of sequence."""
    parts = []
    for block in seqs.blocks:
        mask = block.distance >= 0
        if window is not None:
            mask = mask & (block.distance < window)
        # A padded query sees key 0, so that its softmax is defined; its output is dropped.
        mask = mask | (~block.valid[:, :, None] & (torch.arange(mask.shape[2], device=q.device) == 0))
        out = F.scaled_dot_product_attention(
            _rows(q, block.q_rows),
            _rows(k, block.kv_rows),
            _rows(v, block.kv_rows),
            attn_mask=mask[:, None],
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        parts.append(out.transpose(1, 2)[block.valid])
    return torch.cat(parts)


def varlen_serves(q: torch.Tensor) -> bool:
    """Whether :func:`varlen_attention` takes such queries [Tq, Hq, D]: what torch's kernel for CUDA is made for."""
    return q.is_cuda and q.dtype != torch.float32 and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256


def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_q_len: int,
    max_k_len: int,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Causal attention of packed sequences where :func:`varlen_serves`, the last query of each at its last key.

    Args:
        q: [Tq, Hq, D]; k, v: [Tk, Hkv, D]; rows may be strided.
        cu_seqlens_q, cu_seqlens_k: int32 [S + 1], cumulative lengths.
        max_q_len, max_k_len: longest of each.
        window: keys a query sees, itself included; None: all.

    Returns:
        [Tq, Hq, D].
    """
    grouped = {"enable_gqa": q.shape[1] != k.shape[1]} if _VARLEN_TAKES_GQA else {}
    sizes = (-1 if window is None else window - 1, 0)
    lengths = (cu_seqlens_q, cu_seqlens_k, max_q_len, max_k_len)
    return varlen_attn(q, k, v, *lengths, scale=scale, window_size=sizes, **grouped)


def _packed_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seqs: PackedSequences, scale: float, window: int | None
) -> torch.Tensor:
    lengths = (seqs.cu_seqlens_q, seqs.cu_seqlens_k, seqs.max_q_len, seqs.max_k_len)
    # Indexing, not index_select: its backward adds the shared rows in a fixed order on CUDA.
    return varlen_attention(q, k[seqs.kv_rows], v[seqs.kv_rows], *lengths, scale, window)


def packed_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    packed_sequences: PackedSequences | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function for transformers: packed where ``packed_sequences`` is given, SDPA otherwise.

    Args:
        query: [1, Hq, T, D]; ``key`` and ``value``: [1, Hkv, T, D].

    Returns:
        output [1, T, Hq, D] and None (no attention weights).
    """
    # Rotary embeddings run in fp32, as the residual stream does; attention takes the dtype of the values.
    query, key = query.to(value.dtype), key.to(value.dtype)
    if packed_sequences is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    scale = scaling if scaling is not None else q.shape[-1] ** -0.5
    attend = _packed_attention if varlen_serves(q) else _padded_attention
    return attend(q, k, v, packed_sequences, scale, sliding_window)[None], None


AttentionInterface.register(PACKED_ATTENTION, packed_attention_forward)
AttentionMaskInterface.register(PACKED_ATTENTION, sdpa_mask)
