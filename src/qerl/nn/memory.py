"""Byte accounting of a model with frozen weights: what is resident, what is a cache, what is trained."""

from dataclasses import dataclass

import torch
from torch import nn

from qerl.nn.group import WeightGroup


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """Bytes by owner; storages that several modules share are counted once.

    Attributes:
        packed_weights: frozen group buffers (the one resident copy), a packed head among them.
        dense_cache: dequantized copies that the CPU path keeps (0 on CUDA).
        other_frozen: embeddings, a head that is not packed, norms, biases, buffers.
        trainable: LoRA masters and whatever else requires a gradient.
    """

    packed_weights: int
    dense_cache: int
    other_frozen: int
    trainable: int

    @property
    def total(self) -> int:
        """Sum in bytes."""
        return self.packed_weights + self.dense_cache + self.other_frozen + self.trainable

    def rows(self) -> list[tuple[str, int]]:
        """(label, bytes) rows for a table."""
        return [
            ("packed weights (one copy, trainer and engine)", self.packed_weights),
            ("dequantized cache (CPU path)", self.dense_cache),
            ("embeddings, head, norms", self.other_frozen),
            ("trainable (LoRA masters)", self.trainable),
        ]


def _unique_bytes(tensors: list[torch.Tensor]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def model_memory(model: nn.Module) -> ModelMemory:
    """Account for every tensor of ``model`` (Parameters, buffers, caches)."""
    groups = [m for m in model.modules() if isinstance(m, WeightGroup)]
    packed = {id(g.packed) for g in groups}
    parameters = [p for p in model.parameters() if id(p) not in packed]
    frozen = [p for p in parameters if not p.requires_grad] + list(model.buffers())
    return ModelMemory(
        packed_weights=_unique_bytes([g.packed for g in groups]),
        dense_cache=sum(g.cache_bytes for g in groups),
        other_frozen=_unique_bytes(frozen),
        trainable=_unique_bytes([p for p in parameters if p.requires_grad]),
    )
