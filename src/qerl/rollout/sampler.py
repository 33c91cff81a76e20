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

from qerl.kernels.sampling import reference, sample_rows, sample_rows_into
from qerl.kernels.sampling.reference import uniforms
from qerl.rollout.core import NonFiniteLogitsError, SamplingParams

_MASK64 = (1 << 64) - 1
_MASK32 = (1 << 32) - 1
# Torch samples in pieces of at most this many logits, which bounds the temporaries (about 16 bytes each).
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


def sample(
    logits: torch.Tensor,
    sampling: SamplingParams,
    keys: torch.Tensor,
    positions: torch.Tensor,
    rows: torch.Tensor | None = None,
) -> SampledTokens:
    """Draw one token for each of N samples. Nothing is mutated and nothing waits for the device.

    On CUDA, samples without truncation take three launches (:mod:`qerl.kernels.sampling`); truncated ones take torch's
    ops, some dozens. Both can be captured in a CUDA graph.

    Args:
        logits: float32 [R, V].
        keys: int64 [N, 2], the words of :func:`sequence_key`.
        positions: int64 [N], the absolute position in the sequence of the token to draw.
        rows: int64 [N], the row of ``logits`` each sample draws from (several may share one); None means N =
            R.

    Rows without a distribution (NaN) are reported by :meth:`SampledTokens.tolist`, since only it may wait.
    """
    if logits.is_cuda and not sampling.truncates:
        token_ids, logprobs = sample_rows(logits, keys, positions, sampling.temperature, rows)
        return SampledTokens(token_ids, logprobs, logprobs)
    at_once = max(1, _MAX_LOGITS_AT_ONCE // logits.shape[-1])
    pieces = []
    for start in range(0, positions.shape[0], at_once):
        part = slice(start, start + at_once)
        picked = logits[part] if rows is None else logits.index_select(0, rows[part])
        if sampling.truncates:
            pieces.append(_draw_truncated(picked, sampling, uniforms(keys[part], positions[part])))
        else:
            token_ids, logprobs = reference.sample_rows(picked, keys[part], positions[part], sampling.temperature)
            pieces.append(SampledTokens(token_ids, logprobs, logprobs))
    if len(pieces) == 1:
        return pieces[0]
    return SampledTokens(
        torch.cat([piece.token_ids for piece in pieces]),
        torch.cat([piece.logprobs for piece in pieces]),
        torch.cat([piece.temperature_logprobs for piece in pieces]),
    )


def sample_into(
    logits: torch.Tensor,
    sampling: SamplingParams,
    keys: torch.Tensor,
    positions: torch.Tensor,
    token_ids: torch.Tensor,
    results: torch.Tensor,
) -> None:
    """:func:`sample` of one sample a row of ``logits``, into ``token_ids`` int64 [R] and ``results`` float64 [3, R]
    (rows TOKEN_ID, LOGPROB and TEMPERATURE_LOGPROB of ``decode_rows.fields``), which are mutated.

    Takes no launch beyond those of :func:`sample` on CUDA without truncation.
    """
    if logits.is_cuda and not sampling.truncates:
        sample_rows_into(logits, keys, positions, sampling.temperature, token_ids, results)
        return
    drawn = sample(logits, sampling, keys, positions)
    reference.store_results(drawn.token_ids, drawn.logprobs, drawn.temperature_logprobs, token_ids, results)


def _draw_truncated(logits: torch.Tensor, sampling: SamplingParams, uniform: torch.Tensor) -> SampledTokens:
    scaled, weights = reference.integer_weights(logits, sampling.temperature)
    token_ids, total = reference.invert_cdf(_truncate(scaled, weights, sampling), uniform)
    return SampledTokens(
        token_ids,
        reference.token_logprobs(scaled, total, token_ids),
        reference.token_logprobs(scaled, weights.sum(-1), token_ids),
    )


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


def keys_tensor(keys: Sequence[tuple[int, int]], device: torch.device) -> torch.Tensor:
    """int64 [N, 2] on ``device`` of :func:`sequence_key` values."""
    return torch.tensor(keys, dtype=torch.int64, device=device).reshape(-1, 2)
