"""Limits of the engine, and what a call reports about itself."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits of the engine.

    ``num_blocks`` fixes the KV pool in blocks, ``memory_bytes`` in bytes; with neither, each call gets what
    its worst case needs, at most 4 GiB on the CPU and 80 % of the free memory on CUDA. ``max_num_seqs``
    bounds the samples that run at once, ``max_batch_tokens`` the tokens of one forward pass (longer prompts
    are prefilled in chunks), ``max_model_len`` prompt plus completion (None: the model's own limit).
    ``cuda_graphs=False`` runs every decode step eagerly (for debugging; same results).

    Raises:
        ValueError: a limit is smaller than 1, or both sizes of the pool are given.
    """

    block_size: int = 16
    num_blocks: int | None = None
    max_num_seqs: int = 256
    max_batch_tokens: int = 8192
    max_model_len: int | None = None
    memory_bytes: int | None = None
    cuda_graphs: bool = True

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and name != "cuda_graphs" and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
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
