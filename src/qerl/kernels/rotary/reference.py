"""Head norm, rotary embedding and KV cache write in plain torch; the CPU path."""

import torch

from qerl.kernels.rms_norm.reference import rms_norm

_E4M3_MAX = 448.0


def split_heads(qkv: torch.Tensor, kv_heads: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views q [T, Hq, D], k and v [T, Hkv, D] of qkv [T, (Hq + 2 Hkv) D]."""
    heads = qkv.view(qkv.shape[0], qkv.shape[1] // head_dim, head_dim)
    return heads.split((heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of ``x`` [T, H, D] with fp32 ``cos``/``sin`` [T, 1, D], as transformers computes it; fp32."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def write_cache(cache: torch.Tensor, slot_mapping: torch.Tensor, new: torch.Tensor) -> None:
    """Store ``new`` [T, Hkv, D] in ``cache`` [blocks, block_size, Hkv, D] at ``slot_mapping`` int64 [T]; mutates it.

    Values are cast to the cache's dtype; float8_e4m3fn saturates.
    """
    if cache.dtype == torch.float8_e4m3fn:
        # Bytes: float8 has no index_copy_.
        new = new.float().clamp(-_E4M3_MAX, _E4M3_MAX).to(cache.dtype).view(torch.uint8)
        cache = cache.view(torch.uint8)
    cache.flatten(0, 1).index_copy_(0, slot_mapping, new.to(cache.dtype))


def rotary_kv_write(
    qkv: torch.Tensor,
    rope: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
) -> None:
    """Shapes and mutations as the public function."""
    q, k, v = split_heads(qkv, k_cache.shape[2], k_cache.shape[3])
    cos, sin = (half.repeat(1, 2).unsqueeze(1) for half in rope[positions].chunk(2, dim=-1))
    for heads, weight in ((q, q_norm), (k, k_norm)):
        normed = heads if weight is None else rms_norm(heads, weight, None, eps)
        heads.copy_(rotate(normed, cos, sin))
    stored = slot_mapping >= 0
    write_cache(k_cache, slot_mapping[stored], k[stored])
    write_cache(v_cache, slot_mapping[stored], v[stored])
