"""Limits of the engine, and what a call reports about itself."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits of the engine.

    ``num_blocks`` fixes the KV pool in blocks, ``memory_bytes`` in bytes; with neither, each call gets what
    its worst case needs, on the CPU at most 4 GiB or half of the free memory, and 80 % of it on CUDA. ``max_num_seqs``
    bounds the samples that run at once, ``max_batch_tokens`` the tokens of one forward pass (longer prompts
    are prefilled in chunks), ``max_model_len`` prompt plus completion (None: the model's own limit).
    ``kv_dtype``: "auto" stores keys and values in the compute dtype, "fp8" in float8 E4M3 with a scale of 1: half the
    memory and traffic of bf16, at 4 significant bits. ``cuda_graphs=False`` runs every decode step eagerly (for
    debugging; same results).

    Raises:
        ValueError: a limit is smaller than 1, both sizes of the pool are given, or ``kv_dtype`` is unknown.
    """

    block_size: int = 16
    num_blocks: int | None = None
    max_num_seqs: int = 256
    max_batch_tokens: int = 8192
    max_model_len: int | None = None
    memory_bytes: int | None = None
    kv_dtype: Literal["auto", "fp8"] = "auto"
    cuda_graphs: bool = True

    def __post_init__(self) -> None:
        for name in ("block_size", "num_blocks", "max_num_seqs", "max_batch_tokens", "max_model_len", "memory_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.kv_dtype not in ("auto", "fp8"):
            raise ValueError(f"kv_dtype must be auto or fp8, got {self.kv_dtype!r}")
        if self.num_blocks is not None and self.memory_bytes is not None:
            raise ValueError(
                f"num_blocks={self.num_blocks} and memory_bytes={self.memory_bytes} both size the KV cache: "
                "give one of them"
            )


@dataclass(slots=True)
class EngineStats:
    """What the last ``generate`` call (or the session so far) did.

    ``prompt_tokens`` and ``generated_tokens`` count what was asked and returned; ``computed_tokens`` every
    token that went through the model, recomputation after preemption and discarded look-ahead included.
    ``decode_steps`` of the ``steps`` fed one token per sample; ``decode_seconds`` and ``prefill_seconds``
    (all other steps) are wall time between results. ``graph_captures`` counts CUDA graphs captured,
    ``graph_replays`` steps that ran from one. ``lora_sync_ms`` is the runner's last LoRA synchronization.
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

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over wall time; 0 before anything was generated."""
        return self.generated_tokens / self.seconds if self.seconds else 0.0
