"""Sizes of a decoder, from its config.json or by name, and what a step must read of it."""

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any


class GeometryError(ValueError):
    """A config that says too little about the model."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of a decoder of the Llama family."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    def linears(self) -> dict[str, tuple[tuple[int, ...], int]]:
        """Segments (output rows) and in_features of the four fused linears of a layer."""
        kv = self.kv_heads * self.head_dim
        return {
            "qkv": ((self.heads * self.head_dim, kv, kv), self.hidden),
            "o": ((self.hidden,), self.heads * self.head_dim),
            "gate_up": ((self.intermediate, self.intermediate), self.hidden),
            "down": ((self.hidden,), self.intermediate),
        }

    @property
    def parameters(self) -> int:
        """Weights of all linears, the embedding and the head."""
        linears = sum(sum(segments) * k for segments, k in self.linears().values())
        return self.layers * linears + 2 * self.vocab * self.hidden

    def kv_token_bytes(self, itemsize: int) -> int:
        """Bytes of keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize


def geometry_of(config: Any, name: str) -> Geometry:
    """From a transformers config (or anything with its attributes)."""
    heads = config.num_attention_heads
    return Geometry(
        name=name,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocab=config.vocab_size,
    )


def geometry_of_values(values: dict[str, Any], name: str) -> Geometry:
    """From the values of a config.json.

    Raises:
        GeometryError: a size is missing.
    """
    try:
        return geometry_of(SimpleNamespace(**values), name)
    except AttributeError as error:
        raise GeometryError(f"the config of {name} has no {error.name}: is it a decoder's?") from error


def check_fits_cpu(geometry: Geometry, limit: int) -> None:
    """Refuse a measurement that would run for hours.

    Raises:
        GeometryError: more than ``limit`` parameters.
    """
    if geometry.parameters > limit:
        raise GeometryError(
            f"{geometry.name} has {geometry.parameters:,} parameters to measure, on the CPU at most {limit:,} are: use "
            "--device cuda on a machine with a GPU, or --config-json with a small model"
        )


# Qwen2.5-7B and Qwen2.5-32B.
KNOWN = {
    "7B": Geometry("7B", 28, 3584, 18944, 28, 4, 128, 152064),
    "32B": Geometry("32B", 64, 5120, 27648, 40, 8, 128, 152064),
}


def read_config(path: Path) -> dict[str, Any]:
    """The values of a config.json.

    Raises:
        GeometryError: no JSON object with a ``model_type``.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise GeometryError(f"{path} is no JSON: {error}") from error
    if not isinstance(values, dict) or "model_type" not in values:
        raise GeometryError(f"{path} is no config.json of a model: it has no model_type")
    return values
