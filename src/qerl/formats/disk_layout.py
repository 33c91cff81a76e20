"""How packed weights are named and described on disk, by the three producers that exist.

compressed-tensors
    NVFP4: `weight_packed` uint8 [N, K/2], `weight_scale` E4M3 [N, K/16], `weight_global_scale`: the divisor.
    MXFP4: `weight_packed` uint8 [N, K/2], `weight_scale` uint8 [N, K/32], the exponents + 127. The config tells which.
modelopt
    the same bytes as `weight`, `weight_scale`, `weight_scale_2`: the multiplier.
bitsandbytes
    `weight` uint8 [N*K/2, 1] with the even column in the *high* nibble, `weight.absmax`, `weight.quant_map`,
    `weight.quant_state.bitsandbytes__nf4` (JSON as bytes); no global scale.

The first two hold the same bytes of NVFP4; reading a multiplier as a divisor gives garbage that looks like weights. So
the producer is taken from the metadata and must be confirmed by the names, otherwise an error is raised.
NVFP4 and MXFP4 are written the first way, NF4 the third.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from qerl.formats.base import (
    AmbiguousScaleError,
    NotQuantizedError,
    PackedTensor,
    UnsupportedQuantizationError,
)
from qerl.formats.nf4 import BLOCK_SIZE as NF4_BLOCK_SIZE
from qerl.formats.nf4 import CODE_BOOK

# The suffix that proves a producer, and the one that marks a packed module.
_EVIDENCE = {
    "compressed-tensors": (".weight_packed", ".weight_global_scale"),
    "modelopt": (".weight_scale_2",),
    "bitsandbytes": (".weight.quant_state.bitsandbytes__nf4",),
}
_MODULE_SUFFIX = {
    "compressed-tensors": ".weight_packed",
    "modelopt": ".weight_scale_2",
    "bitsandbytes": ".weight.quant_state.bitsandbytes__nf4",
}
# Tensors that say how to quantize activations or the KV cache; weight-only loading leaves them out.
_ACTIVATION_SUFFIXES = (".input_global_scale", ".input_scale", ".output_scale", ".output_global_scale")
_KV_SUFFIXES = (".k_scale", ".v_scale", ".q_scale", ".k_global_scale", ".v_global_scale")
_UNREADABLE_SUFFIXES = (
    ".weight_zero_point",
    ".weight_g_idx",
    ".pre_quant_scale",
    ".weight.quant_state.bitsandbytes__fp4",
)
# What compressed-tensors calls the formats, and how it describes their weights.
_DISK_FORMAT = {"nvfp4": "nvfp4-pack-quantized", "mxfp4": "mxfp4-pack-quantized"}
_COMPRESSED_WEIGHTS = {
    "nvfp4-pack-quantized": {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": 16,
        "symmetric": True,
        "dynamic": False,
        "scale_dtype": "torch.float8_e4m3fn",
        "zp_dtype": None,
    },
    "mxfp4-pack-quantized": {
        "num_bits": 4,
        "type": "float",
        "strategy": "group",
        "group_size": 32,
        "symmetric": True,
        "dynamic": False,
        "scale_dtype": "torch.uint8",
        "zp_dtype": None,
    },
}
_DECISIVE_FIELDS = ("num_bits", "type", "group_size", "symmetric")


@dataclass(frozen=True, slots=True)
class QuantizationInfo:
    """What a quantized checkpoint says of itself.

    Attributes:
        format: ``"nvfp4"``, ``"nf4"`` or ``"mxfp4"``.
        producer: ``"compressed-tensors"``, ``"modelopt"`` or ``"bitsandbytes"``: names and scale convention.
        ignored: module names or patterns that were left in 16 bit, as the checkpoint lists them.
        notes: what is ignored when loading weights only (activation or KV-cache quantization).
    """

    format: str
    producer: str
    ignored: tuple[str, ...]
    notes: tuple[str, ...]


def describe_quantization(
    config: Mapping[str, Any], modelopt_config: Mapping[str, Any] | None, names: Iterable[str]
) -> QuantizationInfo | None:
    """Format, producer and notes of a checkpoint, or None for a 16-bit one.

    Args:
        config: config.json.
        modelopt_config: hf_quant_config.json where there is one.
        names: all tensor names.

    Raises:
        AmbiguousScaleError: names and metadata disagree, or packed tensors come without metadata.
        UnsupportedQuantizationError: a scheme that is not read here.
        NotQuantizedError: metadata of a quantization whose packed tensors are missing.
    """
    names = tuple(names)
    section = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    producer = _producer_by_metadata(section, modelopt_config)
    evidence = {key: _examples(names, suffixes) for key, suffixes in _EVIDENCE.items()}
    found = {key: example for key, example in evidence.items() if example}
    if producer is None and not found:
        return None
    if producer is None or any(key != producer for key in found):
        raise AmbiguousScaleError(
            f"the metadata names {producer or 'no'} quantization, the tensors those of {found}: whether the "
            "global "
            "scale is a divisor or a multiplier cannot be told; restore the quantization_config of "
            "config.json "
            "(or hf_quant_config.json) that was written with these files"
        )
    unreadable = _examples(names, _UNREADABLE_SUFFIXES)
    if unreadable:
        raise UnsupportedQuantizationError(
            f"tensors such as {unreadable} belong to a scheme that is not read here (zero points, AWQ input "
            "scales, "
            "FP4 of bitsandbytes); export plain NVFP4, MXFP4 or NF4"
        )
    details = section if section else (modelopt_config or {}).get("quantization", {})
    format_name, ignored = _FORMAT_READERS[producer](details)
    if producer not in found:
        raise NotQuantizedError(
            f"the config describes a {producer} checkpoint, but none of its {len(names)} tensors ends in "
            f"{' or '.join(_EVIDENCE[producer])}: the weights were saved without being compressed"
        )
    return QuantizationInfo(format_name, producer, ignored, _weight_only_notes(details, names))


def packed_modules(info: QuantizationInfo, names: Iterable[str]) -> tuple[str, ...]:
    """Names of the modules whose weight is packed, in the order of `names`."""
    suffix = _MODULE_SUFFIX[info.producer]
    return tuple(name.removesuffix(suffix) for name in names if name.endswith(suffix))


def is_quantization_tensor(name: str) -> bool:
    """Whether `name` holds an activation or KV-cache scale, which weight-only loading leaves out."""
    return name.endswith(_ACTIVATION_SUFFIXES + _KV_SUFFIXES)


def to_disk(module: str, packed: PackedTensor) -> dict[str, torch.Tensor]:
    """Tensors that store the weight of `module`: nvfp4 and mxfp4 as compressed-tensors, nf4 as bitsandbytes."""
    if packed.format == "mxfp4":
        return {
            f"{module}.weight_packed": packed.codes,
            f"{module}.weight_scale": packed.block_scale.view(torch.uint8),
        }
    if packed.format == "nvfp4":
        return {
            f"{module}.weight_packed": packed.codes,
            f"{module}.weight_scale": packed.block_scale,
            f"{module}.weight_global_scale": packed.global_scale,
        }
    state = {
        "quant_type": "nf4",
        "blocksize": NF4_BLOCK_SIZE,
        "dtype": "bfloat16",
        "shape": list(packed.shape),
    }
    return {
        f"{module}.weight": swap_nibbles(packed.codes).reshape(-1, 1),
        f"{module}.weight.absmax": packed.block_scale.flatten(),
        f"{module}.weight.quant_map": torch.tensor(CODE_BOOK, dtype=torch.float32),
        f"{module}.weight.quant_state.bitsandbytes__nf4": torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8
        ),
    }


def swap_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes with the two nibbles of each byte exchanged; bitsandbytes has the even column high."""
    return (codes << 4) | (codes >> 4)


def quantization_config(format_name: str, ignored: Iterable[str]) -> dict[str, Any]:
    """``quantization_config`` of config.json for weights stored by `to_disk`; `ignored` stay in 16 bit."""
    if format_name == "nf4":
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": False,
            "bnb_4bit_compute_dtype": "bfloat16",
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_skip_modules": list(ignored),
        }
    disk_format = _DISK_FORMAT[format_name]
    weights = {
        **_COMPRESSED_WEIGHTS[disk_format],
        "actorder": None,
        "block_structure": None,
        "observer": "memoryless_minmax",
        "observer_kwargs": {},
    }
    group = {
        "format": disk_format,
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": disk_format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignored),
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
        "global_compression_ratio": None,
        # The version of the compressed-tensors scheme that these keys follow, not of this project.
        "version": "0.19.0",
    }


def _examples(names: tuple[str, ...], suffixes: tuple[str, ...]) -> str | None:
    return next((name for name in names if name.endswith(suffixes)), None)


def _producer_by_metadata(section: Mapping[str, Any] | None, modelopt_config: Mapping[str, Any] | None) -> str | None:
    """The producer that the metadata names; None where there is no metadata."""
    if not section and not modelopt_config:
        return None
    method = str((section or {}).get("quant_method", "modelopt" if modelopt_config else "")).lower()
    # ModelOpt writes "modelopt"; converters also "modelopt_fp4".
    producer = "modelopt" if method.startswith("modelopt") else method
    if producer not in _EVIDENCE:
        raise UnsupportedQuantizationError(
            f"quant_method {method!r} is not read here; supported: {', '.join(_EVIDENCE)}. Start from the "
            "16-bit "
            "checkpoint of the model and run `qerl quantize`"
        )
    return producer


def _read_compressed_tensors(section: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    groups = section.get("config_groups") or {}
    formats = {section.get("format")} | {group.get("format") for group in groups.values()} - {None}
    names = {disk: name for name, disk in _DISK_FORMAT.items()}
    if len(formats) != 1 or not formats <= names.keys():
        raise UnsupportedQuantizationError(
            f"compressed-tensors format {sorted(map(str, formats))}; supported, one at a time: {', '.join(names)}"
        )
    (disk_format,) = formats
    wanted = {key: _COMPRESSED_WEIGHTS[disk_format][key] for key in _DECISIVE_FIELDS}
    for name, group in groups.items():
        weights = group.get("weights") or {}
        differing = {key: weights.get(key) for key, value in wanted.items() if weights.get(key) != value}
        if differing:
            raise UnsupportedQuantizationError(f"{name} has weights with {differing}; supported: {wanted}")
    # Transforms rotate the inputs of a layer at run time, sparsity stores a bitmask: both change the product.
    for key in ("transform_config", "sparsity_config"):
        if (section.get(key) or {}).get("format", "present" if section.get(key) else "dense") != "dense":
            raise UnsupportedQuantizationError(f"the checkpoint uses {key}, which is not read here")
    return names[disk_format], tuple(section.get("ignore") or ())


def _read_modelopt(section: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    algorithm = str(section.get("quant_algo", "")).upper()
    if algorithm not in ("NVFP4", "W4A16_NVFP4"):
        raise UnsupportedQuantizationError(f"ModelOpt quant_algo {algorithm!r}; supported: NVFP4, W4A16_NVFP4")
    group_size = section.get("group_size", 16)
    if group_size != 16:
        raise UnsupportedQuantizationError(f"ModelOpt NVFP4 with group_size {group_size}; supported: 16")
    return "nvfp4", tuple(section.get("ignore") or section.get("exclude_modules") or ())


def _read_bitsandbytes(section: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    if not section.get("load_in_4bit") or section.get("bnb_4bit_quant_type") != "nf4":
        raise UnsupportedQuantizationError(
            f"bitsandbytes with load_in_4bit={section.get('load_in_4bit')}, "
            f"bnb_4bit_quant_type={section.get('bnb_4bit_quant_type')}; supported: 4-bit nf4"
        )
    return "nf4", tuple(section.get("llm_int8_skip_modules") or ())


_FORMAT_READERS = {
    "compressed-tensors": _read_compressed_tensors,
    "modelopt": _read_modelopt,
    "bitsandbytes": _read_bitsandbytes,
}


def _weight_only_notes(section: Mapping[str, Any], names: tuple[str, ...]) -> tuple[str, ...]:
    notes = []
    groups = (section.get("config_groups") or {}).values()
    if any(group.get("input_activations") for group in groups) or _examples(names, _ACTIVATION_SUFFIXES):
        notes.append("activation quantization ignored: the weights are used with 16-bit activations")
    has_kv_scheme = section.get("kv_cache_scheme") or section.get("kv_cache_quant_algo")
    if has_kv_scheme or _examples(names, _KV_SUFFIXES):
        notes.append("KV-cache quantization ignored: the cache holds 16-bit keys and values")
    return tuple(notes)
