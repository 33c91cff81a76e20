"""The model whose rollouts are measured: its engine, and what a decode step must read and multiply."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig

from qerl.benchmarking.geometry import Geometry, geometry_of, read_config
from qerl.nn.group import WeightGroup
from qerl.nn.loading import load_model, resolve_device
from qerl.nn.lora import lora_layers
from qerl.nn.random_weights import add_random_adapter, random_model
from qerl.nn.surgery import quant_groups
from qerl.rollout.engine import EngineConfig, RolloutEngine
from qerl.rollout.runner import DecoderRunner

_DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}


class UnsupportedBenchError(ValueError):
    """Something was asked to be measured that the engine does not do."""


@dataclass(slots=True)
class Subject:
    """A model under measurement.

    Attributes:
        name: of its rows.
        weights: format of the linears.
        lora_rank: 0 without an adapter.
        model: transformers model, PEFT-wrapped with an adapter.
        runner: over it.
        geometry: its sizes.
        kv_dtype: ``auto`` (the compute dtype) or ``fp8``, as the engine knows them.
        seed: of the weights, where they are random, and of what is sampled.
    """

    name: str
    weights: str
    lora_rank: int
    model: nn.Module
    runner: DecoderRunner
    geometry: Geometry
    kv_dtype: str = "auto"
    seed: int = 0

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.runner.device

    @property
    def compute_dtype(self) -> str:
        """``bf16`` or ``fp32``."""
        return _DTYPE_NAMES[self.runner.dtype]

    @property
    def kv_name(self) -> str:
        """Dtype of keys and values in the rows."""
        return self.compute_dtype if self.kv_dtype == "auto" else self.kv_dtype

    @property
    def head_name(self) -> str:
        """Format of the output head in the rows."""
        head = self.runner.head
        return head.format if isinstance(head, WeightGroup) else self.compute_dtype

    def engine(
        self, max_num_seqs: int, max_model_len: int, num_blocks: int, *, eos: Sequence[int] = (), **drafts: int
    ) -> RolloutEngine:
        """An engine with a pool of fixed size, so that warm-up and measurement share it.

        ``eos`` end a sample (by default none does); ``drafts`` are the ``speculative_*`` limits of ``EngineConfig``.
        """
        config = EngineConfig(
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            kv_dtype=self.kv_dtype,
            **drafts,
        )
        return RolloutEngine(self.runner, eos, config)

    @property
    def lora_parameters(self) -> int:
        """Numbers in the factors of all adapter layers."""
        layers = lora_layers(self.model).values()
        return sum(p.numel() for layer in layers for p in (*layer.lora_A.parameters(), *layer.lora_B.parameters()))

    @property
    def head_parameters(self) -> int:
        """Weights of the output head."""
        return self.geometry.vocab * self.geometry.hidden

    def step_bytes(self, batch: int, context: float) -> float:
        """Bytes that a decode step of ``batch`` sequences must read: weights, head, LoRA, keys and values."""
        weights = sum(group.resident_bytes for group in quant_groups(self.model).values())
        head = self.runner.head  # one of the groups, where it is packed
        head_bytes = 0 if isinstance(head, WeightGroup) else head.numel() * head.element_size()
        itemsize = self.runner.dtype.itemsize
        kv = batch * context * self.geometry.kv_token_bytes(1 if self.kv_dtype == "fp8" else itemsize)
        return weights + head_bytes + self.lora_parameters * itemsize + kv

    def step_flops(self, batch: int, context: float) -> float:
        """FLOPs of the same step."""
        groups = quant_groups(self.model).values()
        parameters = sum(group.out_features * group.in_features for group in groups)
        if not isinstance(self.runner.head, WeightGroup):
            parameters += self.head_parameters
        parameters += self.lora_parameters
        sizes = self.geometry
        return batch * (2.0 * parameters + 4.0 * context * sizes.heads * sizes.head_dim * sizes.layers)


def build_subject(
    source: Path,
    *,
    weights: str,
    lora_rank: int,
    head: str = "auto",
    kv_dtype: str = "auto",
    device: str = "auto",
    seed: int = 0,
    name: str | None = None,
) -> Subject:
    """From a config.json (random weights) or a model folder; ``head`` as in :func:`qerl.nn.loading.load_model`.

    Raises:
        GeometryError: no usable config.
        UnsupportedArchitectureError: the engine does not run this architecture.
    """
    if source.is_dir():
        model = load_model(source, weights=weights, head=head, device=device)
    else:
        values = read_config(source)
        values.pop("quantization_config", None)
        kind = values.pop("model_type")
        config, head = AutoConfig.for_model(kind, **values), "bf16" if head == "auto" else head
        model = random_model(config, weights=weights, head=head, device=device, seed=seed)
    geometry = geometry_of(model.config, name or source.stem)
    weights = model.qerl_weights
    if lora_rank:
        model = add_random_adapter(model, lora_rank, seed)
    return Subject(name or source.stem, weights, lora_rank, model, DecoderRunner(model), geometry, kv_dtype, seed)


def engine_kv_dtype(asked: str, device: str) -> str:
    """``--kv-dtype`` as the engine takes it: ``auto`` for the compute dtype, or ``fp8``.

    Raises:
        UnsupportedBenchError: another dtype.
    """
    compute = _compute_name(device)
    if asked in ("auto", compute):
        return "auto"
    if asked == "fp8":
        return asked
    raise UnsupportedBenchError(f"--kv-dtype {asked} is not supported; use auto, {compute} (on this device) or fp8")


def model_head(asked: str, device: str) -> str:
    """``--head-dtype`` as models take it: ``auto`` (as stored), ``bf16`` for the compute dtype, or ``nvfp4``.

    Raises:
        UnsupportedBenchError: another dtype.
    """
    compute = _compute_name(device)
    if asked in ("auto", "nvfp4"):
        return asked
    if asked == compute:
        return "bf16"
    raise UnsupportedBenchError(f"--head-dtype {asked} is not supported; use auto, {compute} (on this device) or nvfp4")


def _compute_name(device: str) -> str:
    return "bf16" if resolve_device(device).type == "cuda" else "fp32"
