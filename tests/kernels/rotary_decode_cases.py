"""Newest tokens that have not joined their contexts yet: rows of qkv, and caches with NaN in the tokens' places."""

from dataclasses import dataclass, fields

import torch
from attention_cases import make_case

from qerl.kernels.paged_attention.rotary import newest_places


@dataclass
class NewRows:
    qkv: torch.Tensor
    rope: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    context_lens: torch.Tensor
    scale: float
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    eps: float = 1e-6

    @property
    def inputs(self) -> tuple[torch.Tensor | float | None, ...]:
        """Arguments of ``rotary_decode``."""
        return tuple(getattr(self, field.name) for field in fields(self))

    @property
    def rotary_inputs(self) -> tuple[torch.Tensor | float | None, ...]:
        """Arguments of ``rotary_kv_write``."""
        positions, slots = newest_places(self.block_table, self.context_lens, self.k_cache.shape[1])
        caches = (self.k_cache, self.v_cache)
        return self.qkv, self.rope, positions, *caches, slots, self.q_norm, self.k_norm, self.eps

    @property
    def attention_inputs(self) -> tuple[torch.Tensor, ...]:
        """Arguments of ``paged_attention_decode`` before the scale; queries are a view of qkv."""
        kv_heads, head_dim = self.k_cache.shape[2:]
        queries = self.qkv.view(self.qkv.shape[0], -1, head_dim)[:, : -2 * kv_heads]
        return queries, self.k_cache, self.v_cache, self.block_table, self.context_lens

    def to(self, device: str) -> "NewRows":
        """A copy on ``device``; the case itself is left as it is."""
        return NewRows(*(x.clone().to(device) if isinstance(x, torch.Tensor) else x for x in self.inputs))

    def caches_equal(self, other: "NewRows") -> bool:
        """Byte by byte, so that untouched NaN counts as equal."""
        pairs = ((self.k_cache, other.k_cache), (self.v_cache, other.v_cache))
        return all(torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)) for ours, theirs in pairs)


def make_new_rows(
    lengths: tuple[int, ...],
    geometry: tuple[int, int, int, int],
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
    norm_dtype: torch.dtype | None = None,
    whole: bool = True,
) -> NewRows:
    """Of ``geometry``: heads, KV heads, head size, block size.

    With norms, ``whole`` makes rows of small integers, whose squares have the same sum in any order.
    """
    heads, kv_heads, head_dim, block_size = geometry
    case = make_case(lengths, heads, kv_heads, head_dim, block_size, dtype, "cpu", cache_dtype)
    qkv = (3 * torch.randn(len(lengths), (heads + 2 * kv_heads) * head_dim)).to(dtype)
    if norm_dtype is not None and whole:
        qkv = qkv.round()
    qkv[:, -head_dim:] *= torch.logspace(-6, 8, head_dim, base=2)  # values beyond E4M3 at both ends
    angles = torch.rand(max(*lengths, 1), head_dim // 2) * 6
    rope = torch.cat([angles.cos(), angles.sin()], 1)
    # Products that cancel: a fused one would leave what the other lost in rounding.
    half, columns = head_dim // 2, qkv.view(len(lengths), -1, head_dim)
    rope[:, half + 4 : half + 8] = rope[:, 4:8]
    columns[..., half + 4 : half + 6], columns[..., half + 6 : half + 8] = columns[..., 4:6], -columns[..., 6:8]
    norms = [None if norm_dtype is None else (1 + torch.randn(head_dim) / 5).to(norm_dtype) for _ in range(2)]
    rows = NewRows(qkv, rope, *case.inputs[1:], case.scale, *norms)
    slots = rows.rotary_inputs[5]
    for cache in (case.k_cache, case.v_cache):
        poison = torch.full((head_dim,), float("nan")).to(cache.dtype).view(torch.uint8)
        cache.view(torch.uint8).flatten(0, 1)[slots[slots >= 0]] = poison
    return rows
