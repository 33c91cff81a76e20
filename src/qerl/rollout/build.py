"""Put an engine over a model: ours where the runner knows the architecture, transformers' generation elsewhere."""

import dataclasses
import json
import logging
from pathlib import Path
from typing import Literal, TypedDict, Unpack

import torch
from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from qerl.nn.loading import eos_token_ids, load_model
from qerl.nn.lora import prepare_lora_config
from qerl.rollout.core import RequestTooLongError
from qerl.rollout.engine import EngineConfig, RolloutEngine
from qerl.rollout.kv_cache import blocks_for_tokens
from qerl.rollout.lora import AdapterMismatchError
from qerl.rollout.model_guard import GuardedEngine
from qerl.rollout.runner import DecoderRunner, UnsupportedArchitectureError
from qerl.rollout.transformers_backend import TransformersEngine

logger = logging.getLogger(__name__)

DEFAULT_MAX_MODEL_LEN = 4096


class EngineOptions(TypedDict, total=False):
    """Fields of :class:`~qerl.rollout.config.EngineConfig`, which has their defaults, for the builder to choose."""

    max_num_seqs: int
    memory_bytes: int | None
    kv_dtype: Literal["auto", "fp8"]
    cuda_graphs: bool
    speculative_tokens: int
    speculative_max_batch: int
    speculative_history: int


def make_engine(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_model_len: int,
    useful_model_len: int | None = None,
    backend: str = "auto",
    **options: Unpack[EngineOptions],
) -> RolloutEngine | TransformersEngine:
    """An engine over ``model`` (which may be PEFT-wrapped).

    Args:
        max_model_len: longest prompt + completion it must serve.
        useful_model_len: longest it should serve where the model allows; default: ``max_model_len``.
        backend: ``engine``, ``transformers`` or ``auto`` (engine, with a logged fallback).
        options: limits of the engine, see :class:`EngineOptions`.

    Raises:
        UnsupportedArchitectureError: ``backend="engine"`` and the runner does not know the model.
        ValueError: ``max_model_len`` beyond the model's positions, or an impossible limit.
        RequestTooLongError: ``memory_bytes`` holds less than one such sequence.
    """
    config = EngineConfig(**options)
    eos = eos_token_ids(model, tokenizer.eos_token_id)
    limit = model.config.max_position_embeddings
    if max_model_len > limit:
        raise ValueError(
            f"prompt + completion may reach {max_model_len} tokens, but the model has {limit} positions: lower "
            "max_model_len (of a training run: max_prompt_length or max_completion_length)"
        )
    useful = min(limit, max(max_model_len, useful_model_len or 0))
    runner = None if backend == "transformers" else _make_runner(model, max_model_len, useful, backend, config)
    if runner is None:
        return TransformersEngine(model, eos, useful, config.max_num_seqs)
    config = dataclasses.replace(config, max_model_len=min(useful, runner.max_position))
    engine = GuardedEngine(model, runner, eos, config)
    if config.memory_bytes is not None:
        _check_cache_size(engine, config.memory_bytes, max_model_len)
    return engine


def _make_runner(
    model: nn.Module, max_model_len: int, useful_model_len: int, backend: str, config: EngineConfig
) -> DecoderRunner | None:
    """The runner of ``model``; None, which is logged, where it does not know the model and ``backend`` is auto.

    Raises:
        UnsupportedArchitectureError: ``backend="engine"`` and the runner does not know the model.
    """
    try:
        runner = DecoderRunner(model, useful_model_len)
        if max_model_len > runner.max_position:
            raise UnsupportedArchitectureError(
                f"sequences of {max_model_len} tokens exceed the model's sliding window of {runner.max_position}"
            )
    except UnsupportedArchitectureError as error:
        if backend == "engine":
            raise
        lost = ", without speculative decoding" if config.speculative_tokens else ""
        logger.warning("rollouts fall back to transformers generation (slower%s): %s", lost, error)
        return None
    return runner


def _check_cache_size(engine: RolloutEngine, memory_bytes: int, max_model_len: int) -> None:
    """One sequence of full length must fit the KV cache, and the null block beside it."""
    needed = (blocks_for_tokens(max_model_len, engine.config.block_size) + 1) * engine.pool.block_bytes
    if memory_bytes < needed:
        raise RequestTooLongError(
            f"a KV cache of {memory_bytes / 2**30:.6f} GiB holds no sequence of {max_model_len} tokens, which takes "
            f"{needed / 2**30:.6f} GiB: raise kv_cache_gb, or lower max_prompt_length or max_completion_length"
        )


def load_adapter(model: nn.Module, adapter: str | Path, *, is_trainable: bool = False) -> nn.Module:
    """Wrap ``model`` with a PEFT adapter from disk, frozen unless ``is_trainable``.

    Raises:
        AdapterMismatchError: no adapter there, or tensors of it that match nothing in the model.
    """
    from peft import LoraConfig, PeftModel
    from safetensors import safe_open

    folder = Path(adapter)
    weights = folder / "adapter_model.safetensors"
    if not (folder / "adapter_config.json").is_file() or not weights.is_file():
        of_run = folder / "adapter"
        hint = f"; that of this run is {of_run}" if (of_run / "adapter_config.json").is_file() else ""
        raise AdapterMismatchError(
            f"{folder} holds no PEFT adapter (adapter_config.json and adapter_model.safetensors){hint}"
        )
    config = prepare_lora_config(LoraConfig.from_pretrained(str(folder)), model)
    wrapped = PeftModel.from_pretrained(
        model, str(folder), config=config, autocast_adapter_dtype=True, is_trainable=is_trainable
    )
    # Not the state dict: it would turn every packed weight into rows.
    have = {name.replace(".default", "") for name, _ in wrapped.named_parameters() if "lora_" in name}
    with safe_open(weights, framework="pt") as file:
        stored = set(file.keys())
    if have != stored:
        odd = sorted(stored ^ have)
        raise AdapterMismatchError(
            f"adapter {folder} does not fit the model: {len(stored - have)} of its {len(stored)} tensors match nothing "
            f"and {len(have - stored)} of the model's are missing (for example {odd[0]}). Was it trained on another "
            "model?"
        )
    wrapped.eval()
    return wrapped


def build_engine(
    model_path: str | Path,
    *,
    weights: str = "auto",
    head: str = "auto",
    adapter: str | Path | None = None,
    device: str | torch.device = "auto",
    dtype: str = "auto",
    max_model_len: int | None = None,
    **options: Unpack[EngineOptions],
) -> tuple[RolloutEngine | TransformersEngine, PreTrainedTokenizerBase, nn.Module]:
    """Load model, tokenizer and adapter from local folders and put an engine over them.

    Args:
        model_path: folder with config.json and safetensors (16-bit or packed).
        weights, head: see :func:`qerl.nn.loading.load_model`.
        adapter: PEFT adapter folder; a checkpoint of a run is one.
        max_model_len: default: the model's positions, at most 4096.
        options: limits of the engine, see :class:`EngineOptions`.
    """
    path = Path(model_path)
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"{path} holds no model (no config.json): give a local folder")
    positions = json.loads((path / "config.json").read_text()).get("max_position_embeddings", DEFAULT_MAX_MODEL_LEN)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = load_model(path, weights=weights, head=head, device=device, dtype=dtype)
    if adapter is not None:
        model = load_adapter(model, adapter)
    engine = make_engine(
        model, tokenizer, max_model_len=max_model_len or min(positions, DEFAULT_MAX_MODEL_LEN), **options
    )
    return engine, tokenizer, model
