"""The seeded draw in plain torch: the CPU path, what the kernels are tested by, and the parts of a truncated draw.

Nothing here waits for the device or copies from the host, so all of it can be captured in a CUDA graph.
"""

import math

import torch

from qerl.kernels.decode_rows import fields

_MASK32 = (1 << 32) - 1
_MASK26 = (1 << 26) - 1
# Tokens a first-level sum covers; divides the usual vocabulary sizes, so that nothing is padded.
_CHUNK = 128


def _mix32(x: torch.Tensor) -> torch.Tensor:
    """Bijection of 32-bit words held in int64. Both factors are below 2^31, so products stay below 2^63."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _MASK32
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _MASK32
    return x ^ (x >> 15)


def uniforms(keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One number of the open interval (0, 1) for each (key, position), with 52 random bits.

    Args:
        keys: int64 [N, 2], two 32-bit words each.
        positions: int64 [N], the absolute position in the sequence of the token to draw.

    Returns:
        float64 [N], equal on every device.
    """
    low, high = keys.unbind(-1)
    first = _mix32(_mix32(positions & _MASK32) ^ low)
    second = _mix32((first + high) & _MASK32)
    third = _mix32(second ^ _mix32((low + 0x9E3779B9) & _MASK32))
    bits = (second & _MASK26) << 26 | (third & _MASK26)
    return (2 * bits + 1).double() * 2.0**-53


def weight_bits(vocab_size: int) -> int:
    """b such that V weights of at most 2^b sum to at most 2^62."""
    return 62 - math.ceil(math.log2(vocab_size))


def integer_weights(logits: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits / T minus their maximum, float32 [R, V], and the weights floor(2^b exp(.)), int64 [R, V]."""
    scaled = logits / temperature
    scaled -= scaled.amax(-1, keepdim=True)
    # Scaling a float32 by a power of two is exact, so the only rounding is the floor of the cast.
    weights = scaled.exp().mul_(2.0 ** weight_bits(logits.shape[-1])).long()
    return scaled, weights


def token_logprobs(scaled: torch.Tensor, total: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """float32 [R]: log-prob of ``token_ids`` int64 [R] where ``total`` int64 [R] is the normalizer of ``scaled``."""
    chosen = scaled.gather(-1, token_ids[:, None])[:, 0].double()
    return (chosen - (total.double() * 2.0 ** -weight_bits(scaled.shape[-1])).log()).float()


def invert_cdf(weights: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids int64 [R] at ``uniform`` float64 [R] of the cumulative ``weights`` int64 [R, V], and their
    sums [R].

    Clamps keep the indices of rows without a distribution (NaN logits give meaningless weights) inside
    bounds.
    """
    rows, vocab_size = weights.shape
    if vocab_size % _CHUNK:
        weights = torch.nn.functional.pad(weights, (0, -vocab_size % _CHUNK))
    chunked = weights.view(rows, weights.shape[1] // _CHUNK, _CHUNK)
    chunk_ends = chunked.sum(-1).cumsum(-1)
    total = chunk_ends[:, -1]
    # u is at most 1 - 2^-53, half a unit in the last place below 1, so the rounded product stays below the total.
    target = (uniform * total.double()).long()[:, None]
    # right=True finds the first end above the target, which skips everything of weight 0.
    chunk = torch.searchsorted(chunk_ends, target, right=True).clamp_max(chunk_ends.shape[-1] - 1)
    inside = chunked.gather(1, chunk[:, :, None].expand(-1, -1, _CHUNK))[:, 0]
    before = chunk_ends.gather(1, chunk) - inside.sum(-1, keepdim=True)
    offset = torch.searchsorted(inside.cumsum(-1), target - before, right=True)
    return (chunk * _CHUNK + offset)[:, 0].clamp_max(vocab_size - 1), total


def sample_rows(
    logits: torch.Tensor,
    keys: torch.Tensor,
    positions: torch.Tensor,
    temperature: float,
    rows: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes and meaning as the public function."""
    picked = logits if rows is None else logits.index_select(0, rows)
    if temperature == 0:
        token_ids = picked.argmax(-1)
        scaled, weights = integer_weights(picked, 1.0)
        return token_ids, token_logprobs(scaled, weights.sum(-1), token_ids)
    scaled, weights = integer_weights(picked, temperature)
    token_ids, total = invert_cdf(weights, uniforms(keys, positions))
    return token_ids, token_logprobs(scaled, total, token_ids)


def sample_rows_into(
    logits: torch.Tensor,
    keys: torch.Tensor,
    positions: torch.Tensor,
    temperature: float,
    token_ids: torch.Tensor,
    results: torch.Tensor,
) -> None:
    """Shapes, meaning and mutations as the public function."""
    drawn, logprobs = sample_rows(logits, keys, positions, temperature)
    store_results(drawn, logprobs, logprobs, token_ids, results)


def store_results(
    drawn: torch.Tensor,
    logprobs: torch.Tensor,
    temperature_logprobs: torch.Tensor,
    token_ids: torch.Tensor,
    results: torch.Tensor,
) -> None:
    """Tokens int64 [N] and both log-probs fp32 [N] into ``token_ids`` int64 [N] and ``results`` float64 [3, N], which
    are mutated; float64 holds all of them exactly."""
    token_ids.copy_(drawn)
    results[fields.TOKEN_ID].copy_(drawn)
    results[fields.LOGPROB].copy_(logprobs)
    results[fields.TEMPERATURE_LOGPROB].copy_(temperature_logprobs)
