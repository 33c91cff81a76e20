"""Limits of the engine, and what a call reports about itself."""

from dataclasses import dataclass
from typing import Literal

_LOWEST = {
    "block_size": 1,
    "num_blocks": 1,
    "max_num_seqs": 1,
    "max_batch_tokens": 1,
    "max_model_len": 1,
    "memory_bytes": 1,
    "speculative_tokens": 0,
    "speculative_max_batch": 1,
    "speculative_history": 0,
}
# Drafts of a sample at most. Each is a row of the decode steps' static buffers for every sample that may draft, and the
# costs that decide on drafts were measured up to 64 rows (speculation.py): a longer draft never pays.
MAX_SPECULATIVE_TOKENS = 64
# Rows of a CUDA grid, one a sample; far more than any GPU has KV cache for.
MAX_NUM_SEQS = 65_535


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits of the engine.

    ``num_blocks`` fixes the KV pool in blocks, ``memory_bytes`` in bytes; with neither, each call gets what
    its worst case needs, on the CPU at most 4 GiB or half of the free memory, and 80 % of it on CUDA. ``max_num_seqs``
    bounds the samples that run at once, ``max_batch_tokens`` the prompt tokens of one forward pass (longer prompts
    are prefilled in chunks; the next token of each running sample comes on top), ``max_model_len`` prompt plus
    completion (None: the model's own limit).
    ``kv_dtype``: "auto" stores keys and values in the compute dtype, "fp8" in float8 E4M3 with a scale of 1: half the
    memory and traffic of bf16, at 4 significant bits. ``cuda_graphs=False`` runs every decode step eagerly (for
    debugging; same results).

    ``speculative_tokens`` is the number of tokens guessed ahead for a sample at most (0: no speculative decoding; at
    most 64, and fewer than a sequence may have), done while at most ``speculative_max_batch`` samples run. Guesses come
    from the prompt and the group's completions, and, with ``speculative_history``, from as many tokens of earlier
    calls' completions of the same prompt (4 bytes each). Every token is still the one that the sampler draws. See
    ``speculative_run.py``.

    Raises:
        ValueError: a limit is smaller than 1 (of drafts and history: than 0), both sizes of the pool are given,
            ``kv_dtype`` is unknown, there are too many drafts, or there is a history but no drafts.
    """

    block_size: int = 16
    num_blocks: int | None = None
    max_num_seqs: int = 256
    max_batch_tokens: int = 8192
    max_model_len: int | None = None
    memory_bytes: int | None = None
    kv_dtype: Literal["auto", "fp8"] = "auto"
    cuda_graphs: bool = True
    speculative_tokens: int = 0
    speculative_max_batch: int = 8
    speculative_history: int = 0

    def __post_init__(self) -> None:
        for name, lowest in _LOWEST.items():
            value = getattr(self, name)
            if value is not None and value < lowest:
                raise ValueError(f"{name} must be at least {lowest}, got {value}")
        if self.max_num_seqs > MAX_NUM_SEQS:
            raise ValueError(f"max_num_seqs must be at most {MAX_NUM_SEQS:,}, got {self.max_num_seqs:,}")
        if self.kv_dtype not in ("auto", "fp8"):
            raise ValueError(f"kv_dtype must be auto or fp8, got {self.kv_dtype!r}")
        if self.num_blocks is not None and self.memory_bytes is not None:
            raise ValueError(
                f"num_blocks={self.num_blocks} and memory_bytes={self.memory_bytes} both size the KV cache: "
                "give one of them"
            )
        if self.speculative_tokens > MAX_SPECULATIVE_TOKENS:
            raise ValueError(
                f"speculative_tokens must be at most {MAX_SPECULATIVE_TOKENS}, got {self.speculative_tokens}"
            )
        if self.speculative_history and not self.speculative_tokens:
            raise ValueError(
                f"speculative_history={self.speculative_history} keeps completions to guess from, but "
                "speculative_tokens=0 guesses nothing: set speculative_tokens, or leave speculative_history at 0"
            )

    @property
    def max_rows(self) -> int:
        """Rows of the largest decode step: a sample each, or a sample and its drafts each."""
        drafting = min(self.speculative_max_batch, self.max_num_seqs) * (self.speculative_tokens + 1)
        return max(self.max_num_seqs, drafting if self.speculative_tokens else 0)


@dataclass(slots=True)
class EngineStats:
    """What the last ``generate`` call (or the session so far) did.

    ``prompt_tokens`` and ``generated_tokens`` count what was asked and returned; ``computed_tokens`` every
    token that went through the model, recomputation after preemption, discarded look-ahead and refuted drafts included.
    ``decode_steps`` of the ``steps`` fed one token per sample and drafts after it; ``decode_seconds`` and
    ``prefill_seconds`` (all other steps) are wall time between results. ``speculative_steps`` of the decode steps had
    drafts, ``drafted_tokens`` in all, ``accepted_tokens`` of which gained a token. ``graph_captures`` counts CUDA
    graphs captured, ``graph_replays`` steps that ran from one. ``lora_sync_ms`` is the runner's last LoRA
    synchronization.
    """

    num_prompts: int = 0
    num_samples: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    computed_tokens: int = 0
    steps: int = 0
    preemptions: int = 0
    peak_running: int = 0
    peak_blocks: int = 0
    num_blocks: int = 0
    kv_bytes: int = 0
    seconds: float = 0.0
    decode_steps: int = 0
    decode_seconds: float = 0.0
    prefill_seconds: float = 0.0
    graph_captures: int = 0
    graph_replays: int = 0
    lora_sync_ms: float = 0.0
    peak_kv_bytes: int = 0
    speculative_steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over wall time; 0 before anything was generated."""
        return self.generated_tokens / self.seconds if self.seconds else 0.0

    @property
    def acceptance(self) -> float:
        """Share of the drafted tokens that gained a token; 0 before anything was drafted."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else 0.0
