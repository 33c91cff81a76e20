"""Load a decoder with frozen weights from local files, without ever building its 16-bit linears.

The model skeleton is made on the meta device; packed tensors go straight from the file into the groups' buffers, one
group at a time. A 16-bit checkpoint with ``weights="nvfp4"`` is quantized group by group on the way. MXFP4 weights are
held as NVFP4 of equal values.
"""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel

from qerl.formats.base import PackedTensor, WeightFormat, get_format
from qerl.formats.checkpoint import CheckpointReader
from qerl.formats.mxfp4_as_nvfp4 import ScaleRangeError, as_nvfp4
from qerl.nn.attention import PACKED_ATTENTION
from qerl.nn.group import WeightGroup
from qerl.nn.quant_head import QuantHead
from qerl.nn.surgery import (
    ProjectionGroup,
    find_projection_groups,
    install_group,
    install_mlps,
    install_norms,
    install_residual_stream,
)

logger = logging.getLogger(__name__)

WEIGHT_FORMATS = ("bf16", "nvfp4", "nf4", "mxfp4")
HEAD_FORMATS = ("auto", "bf16", "nvfp4")
_HEAD = "lm_head"
_TIED_HEAD = f"{_HEAD}.weight"
# Rows of a head that are quantized at once, so that temporaries stay small beside it.
_HEAD_ROWS = 16384


class ModelLoadError(ValueError):
    """A checkpoint that does not fit the request; the message says what to change."""


class DeviceError(ValueError):
    """A device that is not here, or not supported."""


class WeightSource(Protocol):
    """Where the tensors of a model come from: a checkpoint, or random numbers."""

    path: Path | str

    def names(self) -> Iterable[str]:
        """Names of the tensors, as in a checkpoint."""
        ...

    def is_packed(self, module: str) -> bool:
        """Whether the weight of ``module`` comes packed."""
        ...

    def load(self, name: str) -> torch.Tensor:
        """A plain tensor."""
        ...

    def load_packed(self, module: str) -> PackedTensor:
        """The packed weight of a module."""
        ...


def resolve_device(device: str | torch.device = "auto") -> torch.device:
    """``"auto"`` is CUDA where there is one, the CPU otherwise.

    Raises:
        DeviceError: no such device here, or one that is neither a CPU nor a CUDA GPU.
    """
    if str(device) == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise DeviceError(f"device {device!r} is unknown: use auto, cpu, cuda or cuda:0") from error
    if resolved.type not in ("cpu", "cuda"):
        raise DeviceError(f"device {str(device)!r} is not supported: use auto, cpu, cuda or cuda:0")
    if resolved.type == "cpu":
        if resolved.index:
            raise DeviceError(f"device {str(device)!r} is not supported: there is one CPU device; use cpu")
        return resolved
    found = torch.cuda.device_count()
    if (resolved.index or 0) >= found:
        build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        raise DeviceError(
            f"device {str(device)!r} was asked for, but torch {torch.__version__} ({build}) finds {found} GPUs: use "
            "another, --device cpu, or see qerl doctor"
        )
    return resolved


def resolve_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """``"auto"`` is bf16 on CUDA and fp32 on the CPU (where bf16 matmuls are emulated on most machines).

    Raises:
        ModelLoadError: fp16, which overflows on E4M3-scaled weights, or an unknown name.
    """
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    resolved = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype, None)
    if resolved not in (torch.bfloat16, torch.float32):
        raise ModelLoadError(f"dtype {dtype!r} is not supported: use 'bfloat16', 'float32' or 'auto'.")
    return resolved


def resolve_weights(requested: str, reader: CheckpointReader) -> str:
    """The weight format to load, from the request and from what the checkpoint holds.

    Raises:
        ModelLoadError: unknown name, or a packed checkpoint asked for as another format.
    """
    stored = reader.quantization.format if reader.quantization is not None else "bf16"
    if requested == "auto":
        return stored
    if requested not in WEIGHT_FORMATS:
        raise ModelLoadError(f"weights={requested!r} is unknown; choose from auto, {', '.join(WEIGHT_FORMATS)}.")
    if stored not in ("bf16", requested):
        raise ModelLoadError(
            f"{reader.path} holds {stored} weights, but weights={requested!r} was asked for. Use weights='auto', or "
            "start from the 16-bit checkpoint, from which every format can be made."
        )
    return requested


def _resident_mxfp4(
    names: tuple[str, ...], tensors: list[PackedTensor], dtype: torch.dtype, device: torch.device
) -> tuple[str, list[PackedTensor] | list[torch.Tensor]]:
    """The format in which a group holds these MXFP4 weights, and the weights in it; equal values either way."""
    tensors = [tensor.to(device) for tensor in tensors]
    try:
        return "nvfp4", as_nvfp4(tensors)
    except ScaleRangeError as error:
        logger.warning("%s: held in 16 bit instead of 4, with the values of MXFP4: %s", ", ".join(names), error)
        return "bf16", [get_format("mxfp4").dequantize(tensor, dtype) for tensor in tensors]


def resolve_head(requested: str, reader: CheckpointReader) -> str:
    """The format of the output head: ``bf16`` (compute dtype), or the packed format to hold it in.

    Raises:
        ModelLoadError: unknown name, or a head that is stored packed asked for as another format.
    """
    if requested not in HEAD_FORMATS:
        raise ModelLoadError(f"head={requested!r} is unknown; choose from {', '.join(HEAD_FORMATS)}.")
    if reader.quantization is None or not reader.is_packed(_HEAD):
        return "bf16" if requested == "auto" else requested
    stored = reader.quantization.format
    if requested not in ("auto", stored):
        raise ModelLoadError(
            f"{reader.path} holds its output head as {stored}, but head={requested!r} was asked for. Use head='auto', "
            "or start from the 16-bit checkpoint."
        )
    return stored


def _load_head(
    model: PreTrainedModel, reader: WeightSource, format: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Put a packed head in place of the model's own (mutates ``model``).

    A tied one is made of the embedding, which must be loaded, and stays 16 bit itself: the two are no longer one.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if getattr(model, _HEAD, None) is not head or type(head) is not nn.Linear or head.bias is not None:
        raise ModelLoadError(
            f"head={format!r}: {type(model).__name__} has no plain linear head without bias named {_HEAD}; use "
            "head='auto'."
        )
    shape = (head.out_features, head.in_features)
    is_tied = model.config.tie_word_embeddings and not reader.is_packed(_HEAD)
    if reader.is_packed(_HEAD):
        packed = reader.load_packed(_HEAD)
    else:
        block = get_format(format).block_size
        if shape[1] % block:
            raise ModelLoadError(
                f"head={format!r}: hidden size {shape[1]} is not a multiple of the {format} block of {block}; use "
                "head='bf16'."
            )
        if not is_tied and _TIED_HEAD not in reader.names():
            raise ModelLoadError(f"{reader.path} has no {_TIED_HEAD} and its config does not tie it to the embedding.")
        weight = embedding.weight if is_tied else reader.load(_TIED_HEAD)
        packed = quantize_rows(get_format(format), weight.detach().to(device, torch.bfloat16))
    if tuple(packed.shape) != shape:
        raise ModelLoadError(
            f"{_HEAD} in {reader.path} has shape {tuple(packed.shape)}, the config says {shape}: another model's "
            "weights?"
        )
    if packed.format == "mxfp4":
        format, (packed,) = _resident_mxfp4((_HEAD,), [packed], dtype, device)
    if isinstance(packed, torch.Tensor):  # no 4-bit encoding of ours holds it: an ordinary head, of these values
        head.weight, model.config.tie_word_embeddings = nn.Parameter(packed, requires_grad=False), False
        return
    group = WeightGroup(format, shape[:1], shape[1], dtype, device)
    group.load_segment(0, packed)
    group.settle_layout()
    setattr(model, _HEAD, QuantHead(group))
    if is_tied:
        model.config.tie_word_embeddings = False
        logger.warning(
            "the output head is an %s copy of the tied embedding, which stays 16 bit: %.1f MB more, not less",
            format, group.resident_bytes / 1e6,
        )  # fmt: skip


def quantize_rows(weight_format: WeightFormat, weight: torch.Tensor) -> PackedTensor:
    """``weight`` packed as a whole would be, in parts of rows that share its global scale."""
    parts = weight_format.quantize(weight.split(_HEAD_ROWS))
    codes = torch.cat([part.codes for part in parts])
    scales = torch.cat([part.block_scale.view(torch.uint8) for part in parts]).view(parts[0].block_scale.dtype)
    return PackedTensor(weight_format.name, tuple(weight.shape), codes, scales, parts[0].global_scale)


def _load_group(
    found: ProjectionGroup, reader: WeightSource, weights: str, dtype: torch.dtype, device: torch.device
) -> None:
    names = found.full_names
    packed_on_disk = [reader.is_packed(name) for name in names]
    if any(packed_on_disk) and not all(packed_on_disk):
        raise ModelLoadError(f"only some of {', '.join(names)} are packed in {reader.path}")
    if all(packed_on_disk):
        tensors = [reader.load_packed(name) for name in names]
        format = tensors[0].format
    else:
        tensors = [reader.load(f"{name}.weight") for name in names]
        quantizable = weights != "bf16" and tensors[0].shape[1] % get_format(weights).block_size == 0
        format = weights if quantizable else "bf16"
        if quantizable:
            tensors = get_format(weights).quantize([t.to(device, torch.bfloat16) for t in tensors])
        elif weights != "bf16":
            logger.warning(
                "%s stays 16 bit: in_features %d is not a multiple of the %s block of %d",
                ", ".join(names), tensors[0].shape[1], weights, get_format(weights).block_size,
            )  # fmt: skip
    for name, linear, tensor in zip(names, found.linears, tensors, strict=True):
        if tuple(tensor.shape) != (linear.out_features, linear.in_features):
            raise ModelLoadError(
                f"{name} in {reader.path} has shape {tuple(tensor.shape)}, the config says "
                f"{(linear.out_features, linear.in_features)}: another model's weights?"
            )
    if format == "mxfp4":
        format, tensors = _resident_mxfp4(names, tensors, dtype, device)
    group = WeightGroup(format, [t.shape[0] for t in tensors], tensors[0].shape[1], dtype, device)
    biases = []
    for index, (name, linear, tensor) in enumerate(zip(names, found.linears, tensors, strict=True)):
        group.load_segment(index, tensor)
        has_bias = linear.bias is not None
        biases.append(reader.load(f"{name}.bias").to(device, dtype) if has_bias else None)
    group.settle_layout()
    install_group(found, group, biases)


def _load_rest(model: nn.Module, reader: WeightSource, dtype: torch.dtype, device: torch.device) -> None:
    """Materialize every parameter that is still on the meta device (embeddings, norms, head)."""
    stored = set(reader.names())
    for name, parameter in list(model.named_parameters()):
        if parameter.device.type != "meta":
            continue
        if name == _TIED_HEAD and name not in stored:
            continue
        if name not in stored:
            raise ModelLoadError(f"{reader.path} has no tensor {name}, which {type(model).__name__} needs.")
        tensor = reader.load(name)
        if tensor.shape != parameter.shape:
            raise ModelLoadError(
                f"{name} has shape {tuple(tensor.shape)} in {reader.path}, the config says "
                f"{tuple(parameter.shape)}: another model's weights?"
            )
        parent = model.get_submodule(name.rpartition(".")[0])
        value = nn.Parameter(tensor.to(device, dtype), requires_grad=False)
        setattr(parent, name.rpartition(".")[2], value)


def _tie_head(model: PreTrainedModel, config: PretrainedConfig, reader: WeightSource) -> None:
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if isinstance(head, QuantHead):
        return
    if head.weight.device.type != "meta" and not config.tie_word_embeddings:
        return
    if not config.tie_word_embeddings:
        raise ModelLoadError(f"{reader.path} has no {_TIED_HEAD} and its config does not tie it to the embedding.")
    head.weight = embedding.weight


def empty_model(config: PretrainedConfig, dtype: torch.dtype, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """The transformers skeleton of ``config`` with every parameter on the meta device (sets ``config.dtype``)."""
    config.dtype = dtype
    with init_empty_weights(include_buffers=False):
        return AutoModelForCausalLM.from_config(
            config, attn_implementation=PACKED_ATTENTION, trust_remote_code=trust_remote_code
        )


def fill_model(
    model: PreTrainedModel,
    reader: WeightSource,
    weights: str,
    dtype: torch.dtype,
    device: torch.device,
    head: str = "bf16",
) -> None:
    """Fill an empty model from ``reader``, one fused group at a time, and replace its modules (mutates ``model``).

    ``head`` is the format that :func:`resolve_head` gives.

    Raises:
        ModelLoadError: weights of another model, or a missing tensor.
    """
    for found in list(find_projection_groups(model)):
        _load_group(found, reader, weights, dtype, device)
    needs_embedding = model.config.tie_word_embeddings and not reader.is_packed(_HEAD)
    if head != "bf16" and not needs_embedding:
        _load_head(model, reader, head, dtype, device)
    _load_rest(model, reader, dtype, device)
    if head != "bf16" and needs_embedding:
        _load_head(model, reader, head, dtype, device)
    install_norms(model)
    install_residual_stream(model)
    _tie_head(model, model.config, reader)
    install_mlps(model)
    left = [n for n, t in (*model.named_parameters(), *model.named_buffers()) if t.device.type == "meta"]
    if left:
        raise ModelLoadError(f"{len(left)} tensors were not loaded from {reader.path}: {', '.join(left[:5])}")
    for name, buffer in model.named_buffers():
        parent = model.get_submodule(name.rpartition(".")[0])
        setattr(parent, name.rpartition(".")[2], buffer.to(device))
    model.requires_grad_(False)
    model.eval()
    model.qerl_weights, model.qerl_head = weights, head


def load_model(
    path: str | Path,
    *,
    weights: str = "auto",
    head: str = "auto",
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Load a causal LM with frozen (packed) weights and slotted norms, ready for LoRA and for the engine.

    Args:
        path: local folder with ``config.json`` and safetensors, 16-bit or packed.
        weights: ``auto`` (as stored), ``bf16``, ``nvfp4``, ``nf4`` or ``mxfp4``; a 16-bit checkpoint is quantized while
            loading.
        head: output head: ``auto`` (as stored), ``bf16`` (the compute dtype) or ``nvfp4``, made while loading from a
            16-bit one, or from a tied embedding, which then stays beside it.
        dtype: compute dtype of activations, norms and a head that is not packed.
        device: where it goes.
        trust_remote_code: passed to transformers; off unless asked for.

    Returns:
        The transformers model; ``model.qerl_weights`` and ``model.qerl_head`` name the formats. All parameters are
        frozen. MXFP4 weights are held in groups (and written to state dicts) as NVFP4 of equal values, see
        :mod:`qerl.formats.mxfp4_as_nvfp4`; a group that this encoding cannot hold is 16 bit, with a warning.

    Raises:
        ModelLoadError: weights of another model, a missing tensor, a format that does not fit.
    """
    device = resolve_device(device)
    dtype = resolve_dtype(dtype, device)
    reader = CheckpointReader(path)
    weights, head = resolve_weights(weights, reader), resolve_head(head, reader)
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # transformers would look for a quantizer of its own
    model = empty_model(config, dtype, trust_remote_code=trust_remote_code)
    fill_model(model, reader, weights, dtype, device, head)
    if (Path(path) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(path)
    config.name_or_path = str(path)
    return model


def eos_token_ids(model: PreTrainedModel, extra: int | None = None) -> tuple[int, ...]:
    """Every id that ends a sample: the generation config's, the config's and the tokenizer's (``extra``)."""
    ids: list[int] = []
    for value in (model.generation_config.eos_token_id, model.config.eos_token_id, extra):
        values = value if isinstance(value, (list, tuple)) else [value]
        ids.extend(v for v in values if v is not None and v not in ids)
    return tuple(ids)
