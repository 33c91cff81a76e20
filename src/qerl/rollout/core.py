"""Shared vocabulary of the rollout engine: what is asked, what is returned, what one forward pass sees.

Everything here is plain data. The engine (control plane) builds a :class:`ForwardBatch` a step, a
:class:`Runner` (the model) turns it into logits, and callers see only :class:`SamplingParams` and
:class:`CompletionOutput`. Names follow vLLM's vocabulary (``block_table``, ``slot_mapping``,
``finish_reason``).
"""

import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

import torch

if TYPE_CHECKING:
    from qerl.rollout.kv_cache import KVCache

FinishReason = Literal["stop", "length"]

# Below this the division by T overflows ordinary fp32 logits; the distribution is greedy long before.
MIN_TEMPERATURE = 1e-3


class NotTokenIdsError(ValueError):
    """Prompts that are something else than lists of token ids, such as texts."""


class GreedySamplesError(ValueError):
    """Several samples of one prompt at temperature 0, which would be equal (vLLM and transformers refuse them too)."""

    @classmethod
    def of(cls, n: int, name: str = "n") -> "GreedySamplesError":
        """The error for ``n`` samples, which the caller asked for as ``name``."""
        return cls(f"{name}={n} at temperature 0 makes {n} equal samples: set temperature above 0, or {name}=1")


class RequestTooLongError(ValueError):
    """A prompt with its completion exceeds the model length or the whole KV cache; nothing was generated."""


class NonFiniteLogitsError(ValueError):
    """The model returned NaN or +inf logits (or only -inf), so no distribution exists to sample from."""

    @classmethod
    def of_rows(cls, bad: list[int], num_rows: int) -> "NonFiniteLogitsError":
        """The error for the rows ``bad`` of ``num_rows``."""
        return cls(
            f"{len(bad)} of {num_rows} rows have NaN or infinite logits (first: row {bad[0]}); "
            "weights or activations overflowed: check the checkpoint, the adapter and the compute dtype"
        )


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How every prompt of one ``generate`` call is sampled.

    ``temperature`` 0 is greedy. The processed distribution is built in this order: divide by
    ``temperature``, keep the ``top_k`` largest (0 = all; ties with the k-th are kept), keep the smallest set
    of most likely tokens whose mass reaches ``top_p``, drop tokens less likely than ``min_p`` times the most
    likely one. A sample ends with "stop" at any EOS of the model (unless ``ignore_eos``) or any of
    ``stop_token_ids``, and with "length" after ``max_tokens`` tokens; the ending token is kept.

    Raises:
        ValueError: a value is outside its range; the message gives it and the range.
        GreedySamplesError: ``n`` above 1 at temperature 0.
    """

    n: int = 1
    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"n must be at least 1, got {self.n}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not math.isfinite(self.temperature) or 0 != self.temperature < MIN_TEMPERATURE:
            raise ValueError(
                f"temperature must be 0 (greedy) or a finite number of at least {MIN_TEMPERATURE}, "
                f"got {self.temperature}"
            )
        if self.n > 1 and self.greedy:
            raise GreedySamplesError.of(self.n)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}; 1 switches it off")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or positive, got {self.top_k}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}; 0 switches it off")
        negative = [token for token in self.stop_token_ids if token < 0]
        if negative:
            raise ValueError(f"stop_token_ids must not be negative, got {negative}")

    @property
    def greedy(self) -> bool:
        """True when ``temperature`` is 0: the most likely token is taken and nothing else is applied."""
        return self.temperature == 0

    @property
    def distribution(self) -> tuple[float, ...]:
        """What decides how a row of logits is drawn from; rows with equal tuples are sampled together."""
        return (0.0,) if self.greedy else (self.temperature, self.top_k, self.top_p, self.min_p)

    @property
    def truncates(self) -> bool:
        """True when some tokens are cut from the distribution (top_k, top_p or min_p is on)."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


@dataclass(slots=True)
class CompletionOutput:
    """One finished sample. The three lists have equal length; the EOS or stop token, if any, is the last one.

    ``logprobs`` are under the processed distribution that was sampled from, ``temperature_logprobs`` under
    the temperature alone (equal without truncation). Greedy samples report log-probs at temperature 1 in
    both.
    """

    prompt_index: int
    sample_index: int
    token_ids: list[int]
    logprobs: list[float]
    temperature_logprobs: list[float]
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of consecutive sequences of a batch that attention treats alike; all numbers live on the host.

    ``kind``: "decode" (one new token a sequence), "fresh" (nothing in the cache before this step, so
    attention needs only the new K/V) or "chunk" (several new tokens after a cached prefix). Sequences
    ``seq_start:seq_end`` own the rows ``token_start:token_end``; the two maxima are over these sequences.
    """

    kind: Literal["decode", "fresh", "chunk"]
    seq_start: int
    seq_end: int
    token_start: int
    token_end: int
    max_q_len: int
    max_context_len: int


@dataclass(slots=True)
class ForwardBatch:
    """Input of one forward pass: T new tokens of S sequences, packed without padding.

    Rows ``cu_seqlens_q[s]:cu_seqlens_q[s + 1]`` are the new tokens of sequence s, the last of its
    ``context_lens[s]`` tokens. Tensors live on the runner's device.

    Shapes: token_ids, positions, slot_mapping int64 [T]; cu_seqlens_q int32 [S + 1]; context_lens int32 [S]
    (KV length after this step); block_table int32 [S, max_blocks], padded with block 0, which no sequence
    owns; logits_index int64 [R], rows of T whose logits are wanted (R may be 0; None: every row, in order).

    ``segments`` splits the sequences for attention. Empty means "not planned": attention then takes the
    whole batch as one segment, which is always right.

    ``independent_rows``: every row is the newest token of its sequence, at the place that block_table gives
    (which is its slot), and no other row attends to it. Drafts are rows that others attend to. False claims nothing.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    cu_seqlens_q: torch.Tensor
    context_lens: torch.Tensor
    block_table: torch.Tensor
    max_q_len: int
    max_context_len: int
    logits_index: torch.Tensor | None
    segments: tuple[Segment, ...] = field(default=())
    independent_rows: bool = False

    def wanted(self, rows: torch.Tensor) -> torch.Tensor:
        """Of ``rows`` [T, ...] those whose logits are wanted, [R, ...]; ``rows`` itself where that is every one."""
        return rows if self.logits_index is None else rows.index_select(0, self.logits_index)


class Runner(Protocol):
    """The model as the engine sees it: geometry and one forward pass over a paged KV cache."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    dtype: torch.dtype
    device: torch.device
    max_position: int

    def forward(self, batch: ForwardBatch, kv: "KVCache") -> torch.Tensor:
        """Write the new K/V into ``kv`` and return logits, float32 [R, vocab], for the rows that ``batch`` wants."""
        ...

    def capture_key(self) -> Hashable:
        """Equal as long as a CUDA graph of ``forward`` stays right: every address it reads, every branch it took.

        Asked only on CUDA.
        """
        ...
