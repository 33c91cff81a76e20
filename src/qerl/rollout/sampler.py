"""From logits to tokens and log-probs, reproducible bit for bit.

Randomness is counter-based: one uniform per token, an integer hash of (seed, step, prompt id, sample index,
position). It does not depend on slot, batch, rank or device, so a preempted or rescheduled sample draws the
same tokens again.

The draw is an inverse CDF over *integer* weights floor(2^b exp(z - max z)), b = 62 - ceil(log2 V). Integer
sums do not depend on their order, so no reduction, batch size or device changes them, and cumulative sums
are deterministic on CUDA (float ones are not). Two levels, sums of chunks and then a scan inside one chunk,
make it one pass over the vocabulary. Tokens less likely than 2^-b of the best one (2^-44 at V = 2^18) round
to weight 0; a weight of 0 is never drawn. The normalizer of the log-probs is the same integer sum, so what
is reported is what was sampled from.

Order of the filters: temperature, top_k, top_p, min_p (as in Hugging Face; see ``SamplingParams``).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from qerl.rollout.core import NonFiniteLogitsError, SamplingParams

_MASK64 = (1 << 64) - 1
_MASK32 = (1 << 32) - 1
_MASK26 = (1 << 26) - 1
# Tokens a first-level sum covers; divides the usual vocabulary sizes, so that nothing is padded.
_CHUNK = 128
# Rows are sampled in pieces of at most this many logits, which bounds the temporaries (about 16 bytes each).
_MAX_LOGITS_AT_ONCE = 1 << 24


@dataclass(slots=True)
class SampledTokens:
    """Tokens of N samples on the device: token_ids int64 [N], both kinds of log-probs float32 [N]."""

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    temperature_logprobs: torch.Tensor

    def tolist(self) -> tuple[list[int], list[float], list[float]]:
        """The three columns on the host, in one transfer (float64 holds token ids and float32 exactly).

        Raises:
            NonFiniteLogitsError: a row had NaN or +inf logits, or only -inf.
        """
        fields = (self.token_ids, self.logprobs, self.temperature_logprobs)
        columns = torch.stack([field.double() for field in fields]).tolist()
        bad = [row for row, value in enumerate(columns[2]) if not math.isfinite(value)]
        if bad:
            raise NonFiniteLogitsError.of_rows(bad, len(columns[2]))
        return [int(token) for token in columns[0]], columns[1], columns[2]


def sequence_key(seed: int, step: int, prompt_id: int, sample_index: int) -> tuple[int, int]:
    """64-bit key of one sample's random stream as two 32-bit words: splitmix64 chained over the integers."""
    state = 0
    for word in (seed, step, prompt_id, sample_index):
        state = ((state ^ (word & _MASK64)) + 0x9E3779B97F4A7C15) & _MASK64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
        state ^= state >> 31
    return state & _MASK32, state >> 32


def _mix32(x: torch.Tensor) -> torch.Tensor:
    """Bijection of 32-bit words held in int64. Both factors are below 2^31, so products stay below 2^63."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _MASK32
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _MASK32
    return x ^ (x >> 15)


def uniforms(keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One number of the open interval (0, 1) for each (key, position), with 52 random bits.

    Args:
        keys: int64 [N, 2], the words of :func:`sequence_key`.
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


def sample(
    logits: torch.Tensor,
    sampling: SamplingParams,
    keys: torch.Tensor,
    positions: torch.Tensor,
    rows: torch.Tensor | None = None,
) -> SampledTokens:
    """Draw one token for each of N samples. Nothing is mutated and nothing waits for the device.

    Args:
        logits: float32 [R, V].
        keys, positions: as for :func:`uniforms`, for the N samples.
        rows: int64 [N], the row of ``logits`` each sample draws from (several may share one); None means N =
            R.

    Rows without a distribution (NaN) are reported by :meth:`SampledTokens.tolist`, since only it may wait.
    """
    vocab_size = logits.shape[-1]
    at_once = max(1, _MAX_LOGITS_AT_ONCE // vocab_size)
    pieces = []
    for start in range(0, positions.shape[0], at_once):
        part = slice(start, start + at_once)
        picked = logits[part] if rows is None else logits.index_select(0, rows[part])
        if sampling.greedy:
            pieces.append(_take_best(picked))
        else:
            pieces.append(_draw(picked, sampling, uniforms(keys[part], positions[part])))
    if len(pieces) == 1:
        return pieces[0]
    return SampledTokens(
        torch.cat([piece.token_ids for piece in pieces]),
        torch.cat([piece.logprobs for piece in pieces]),
        torch.cat([piece.temperature_logprobs for piece in pieces]),
    )


def _take_best(logits: torch.Tensor) -> SampledTokens:
    """Greedy: the first of the largest logits, with its log-prob at temperature 1 in both columns."""
    token_ids = logits.argmax(-1)
    scaled, weights = _weights(logits, 1.0)
    logprobs = _logprobs(scaled, weights.sum(-1), token_ids, weights.shape[-1])
    return SampledTokens(token_ids, logprobs, logprobs)


def _draw(logits: torch.Tensor, sampling: SamplingParams, uniform: torch.Tensor) -> SampledTokens:
    vocab_size = logits.shape[-1]
    scaled, weights = _weights(logits, sampling.temperature)
    full_total = weights.sum(-1) if sampling.truncates else None
    if sampling.truncates:
        weights = _truncate(scaled, weights, sampling)
    token_ids, total = _invert_cdf(weights, uniform)
    logprobs = _logprobs(scaled, total, token_ids, vocab_size)
    if full_total is None:
        return SampledTokens(token_ids, logprobs, logprobs)
    return SampledTokens(token_ids, logprobs, _logprobs(scaled, full_total, token_ids, vocab_size))


def _weight_bits(vocab_size: int) -> int:
    """b such that V weights of at most 2^b sum to at most 2^62."""
    return 62 - math.ceil(math.log2(vocab_size))


def _weights(logits: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits / T minus their maximum, float32 [R, V], and the integer weights, int64 [R, V]."""
    scaled = logits / temperature
    scaled -= scaled.amax(-1, keepdim=True)
    # Scaling a float32 by a power of two is exact, so the only rounding is the floor of the cast.
    weights = scaled.exp().mul_(2.0 ** _weight_bits(logits.shape[-1])).long()
    return scaled, weights


def _logprobs(scaled: torch.Tensor, total: torch.Tensor, token_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """float32 [R]: log-prob of ``token_ids`` where ``total`` [R] is the integer normalizer."""
    chosen = scaled.gather(-1, token_ids[:, None])[:, 0].double()
    return (chosen - (total.double() * 2.0 ** -_weight_bits(vocab_size)).log()).float()


def _truncate(scaled: torch.Tensor, weights: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Set the weights of tokens outside top_k, top_p and min_p to 0, in this order. Returns a new tensor."""
    if 0 < sampling.top_k < scaled.shape[-1]:
        kth = scaled.topk(sampling.top_k, dim=-1).values[:, -1:]
        weights = weights.masked_fill(scaled < kth, 0)
    if sampling.top_p < 1:
        # Stable, so that among equals the lower token id comes first on every device.
        ordered, index = weights.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered
        total = before[:, -1:] + ordered[:, -1:]
        # A token stays while the mass strictly before it is short of top_p: the one that reaches it is kept.
        dropped = before.double() >= sampling.top_p * total.double()
        weights = torch.zeros_like(weights).scatter_(-1, index, ordered.masked_fill(dropped, 0))
    if sampling.min_p > 0:
        # The most likely token has scaled logit 0, and no filter removes it.
        weights = weights.masked_fill(scaled < math.log(sampling.min_p), 0)
    return weights


def _invert_cdf(weights: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids int64 [R] at ``uniform`` float64 [R] of the cumulative ``weights`` int64 [R, V], and their
    sums [R].

    Clamps keep the indices of rows without a distribution (NaN logits give meaningless weights) inside
    bounds.
    """
    rows, vocab_size = weights.shape
    if vocab_size % _CHUNK:
        weights = torch.nn.functional.pad(weights, (0, -vocab_size % _CHUNK))
    chunked = weights.view(rows, -1, _CHUNK)
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


def keys_tensor(keys: Sequence[tuple[int, int]], device: torch.device) -> torch.Tensor:
    """int64 [N, 2] on ``device`` of :func:`sequence_key` values."""
    return torch.tensor(keys, dtype=torch.int64, device=device).reshape(-1, 2)
