"""Fused qkv rows, a table of angles and a paged cache that the tests of the rotary kernel share."""

from dataclasses import dataclass

import torch


@dataclass
class RotaryCase:
    qkv: torch.Tensor
    rope: torch.Tensor
    positions: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    slots: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    eps: float = 1e-6

    @property
    def inputs(self) -> tuple[torch.Tensor | float | None, ...]:
        return (
            self.qkv,
            self.rope,
            self.positions,
            self.k_cache,
            self.v_cache,
            self.slots,
            self.q_norm,
            self.k_norm,
            self.eps,
        )

    def to(self, device: str) -> "RotaryCase":
        """A copy on ``device``; the case itself is left as it is."""
        moved = [None if t is None else t.clone().to(device) for t in self.inputs[:8]]
        return RotaryCase(*moved, self.eps)


# heads, KV heads, head size
SHAPES = {"gqa7-d128": (7, 1, 128), "gqa3-d64": (9, 3, 64), "mha-d80": (2, 2, 80), "gqa5-d32": (10, 2, 32)}


def make_rotary(
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    with_norm: bool,
    cache_dtype: torch.dtype | None = None,
) -> RotaryCase:
    """Random rows at random positions and distinct slots; the cache holds NaN."""
    qkv = (3 * torch.randn(tokens, (heads + 2 * kv_heads) * head_dim)).to(dtype)
    angles = torch.rand(50, head_dim // 2) * 6
    rope = torch.cat([angles.cos(), angles.sin()], 1)
    blocks = tokens // 16 + 2
    poison = torch.full((2, blocks, 16, kv_heads, head_dim), float("nan"))
    caches = poison.to(cache_dtype or dtype)
    slots = torch.randperm(blocks * 16)[:tokens]
    norms = [(1 + 0.2 * torch.randn(head_dim)).to(dtype) if with_norm else None for _ in range(2)]
    return RotaryCase(qkv, rope, torch.randint(0, 50, (tokens,)), caches[0].clone(), caches[1].clone(), slots, *norms)
