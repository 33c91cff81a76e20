"""Which weights of a checkpoint are quantized, decided from names and shapes alone.

Quantized are the 2-D ``.weight`` of the known projections inside decoder layers. Everything else stays in 16
bit: embeddings, norms, the output head, routers, vision and audio towers, and what the caller keeps. A fused
group is quantized or kept as a whole, because serving engines load it as one matrix.
"""

import fnmatch
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qerl.formats.base import FUSED_GROUPS, ArchitectureError, FormatError, WeightFormat

PROJECTIONS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
    "qkv_proj",
    "gate_up_proj",
)
DEFAULT_KEEP = ("lm_head",)
# Decoder layers of plain decoders and of the language part of multimodal models; towers have other prefixes.
_DECODER_LAYER = re.compile(r"^(?:model\.)?(?:language_model\.)?(?:model\.)?(?:decoder\.)?layers\.(\d+)\.")
_EMBEDDINGS = ("embed", "wte", "wpe")


@dataclass(frozen=True, slots=True)
class Selection:
    """What to do with the 2-D weights of a checkpoint.

    Attributes:
        groups: modules to quantize, fused groups together, others alone.
        kept: module -> reason for every other 2-D weight.
    """

    groups: tuple[tuple[str, ...], ...]
    kept: dict[str, str]

    def ignored(self) -> list[str]:
        """The Linear modules left in 16 bit, as loaders have to be told (embeddings are no Linear)."""
        linear = [module for module in self.kept if not _is_embedding(module)]
        return list(dict.fromkeys(["lm_head", *linear]))


def select(
    shapes: Mapping[str, tuple[int, ...]],
    config: Mapping[str, Any],
    weight_format: WeightFormat,
    keep: Sequence[str] = DEFAULT_KEEP,
) -> Selection:
    """Choose the modules to quantize.

    Args:
        shapes: shape of each tensor by its full name.
        config: config.json, against which layers and width are checked.
        weight_format: decides which widths can be packed.
        keep: patterns of modules to leave in 16 bit: a module name, the end of one (``o_proj``,
            ``mlp.down_proj``), a shell pattern (``model.layers.0.*``), or a regular expression after ``re:``.

    Raises:
        FormatError: a pattern other than the default matches no 2-D weight, or nothing is left to quantize.
        ArchitectureError: no decoder projection at all, or tensors that do not fit `config`.
    """
    modules = {
        name.removesuffix(".weight"): shape
        for name, shape in shapes.items()
        if name.endswith(".weight") and len(shape) == 2
    }
    check_architecture(shapes, config)
    _check_patterns(keep, modules)
    kept: dict[str, str] = {}
    for module, shape in modules.items():
        reason = _reason_to_keep(module, shape, weight_format, keep)
        if reason:
            kept[module] = reason
    groups = []
    for members in _fused_members(modules):
        held = [module for module in members if module in kept]
        if not held:
            groups.append(members)
        for module in members if held else ():
            kept.setdefault(module, f"fused with {held[0]}, which is kept: {kept[held[0]]}")
    if not groups:
        reasons = Counter(kept.values()).most_common(3)
        raise FormatError(
            f"none of {len(modules)} matrices is left to quantize to {weight_format.name}; reasons: {reasons}"
        )
    return Selection(tuple(groups), kept)


def check_architecture(shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]) -> None:
    """Raise `ArchitectureError` unless the tensors are those of a decoder that `config` describes."""
    text_config = config.get("text_config") or config
    layers = {match[1] for match in map(_DECODER_LAYER.match, shapes) if match}
    projections = [name for name in shapes if _DECODER_LAYER.match(name) and _kind(name) in PROJECTIONS]
    architecture = config.get("architectures") or config.get("model_type")
    if not projections:
        raise ArchitectureError(
            f"{architecture}: none of {len(shapes)} tensors is a known projection ({', '.join(PROJECTIONS)}) "
            "of a "
            f"decoder layer; first names: {', '.join(list(shapes)[:3])}"
        )
    expected = text_config.get("num_hidden_layers")
    if expected is not None and len(layers) != expected:
        raise ArchitectureError(
            f"{architecture}: config.json has num_hidden_layers = {expected}, the weights have {len(layers)} "
            "decoder "
            "layers; config and weights are of different models"
        )
    hidden = text_config.get("hidden_size")
    for name, shape in shapes.items():
        if name.endswith("embed_tokens.weight") and hidden is not None and shape[-1] != hidden:
            raise ArchitectureError(
                f"{architecture}: config.json has hidden_size = {hidden}, {name} is {list(shape)}; config "
                "and weights "
                "are of different models"
            )


def layer_kind(module: str) -> str:
    """Last part of a module name: ``q_proj`` of ``model.layers.0.self_attn.q_proj``."""
    return module.rpartition(".")[2]


def _kind(name: str) -> str:
    return layer_kind(name.removesuffix(".weight"))


def _is_embedding(module: str) -> bool:
    return any(part in layer_kind(module) for part in _EMBEDDINGS)


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return module == pattern or module.endswith("." + pattern) or fnmatch.fnmatchcase(module, pattern)


def _check_patterns(keep: Sequence[str], modules: Mapping[str, tuple[int, ...]]) -> None:
    """A pattern with a typing error would quantize what the caller wanted to keep."""
    for pattern in keep:
        # A tied head has no tensor of its own.
        if pattern not in DEFAULT_KEEP and not any(_matches(pattern, module) for module in modules):
            raise FormatError(
                f"keep pattern {pattern!r} matches none of {len(modules)} matrices, such as "
                f"{', '.join(list(modules)[:3])}"
            )


def _reason_to_keep(
    module: str, shape: tuple[int, ...], weight_format: WeightFormat, keep: Sequence[str]
) -> str | None:
    pattern = next((pattern for pattern in keep if _matches(pattern, module)), None)
    if pattern is not None:
        return f"kept by pattern {pattern!r}"
    if _is_embedding(module):
        return "embedding"
    if not _DECODER_LAYER.match(module):
        return "not in a decoder layer"
    if layer_kind(module) not in PROJECTIONS:
        return "router" if layer_kind(module) in ("gate", "router") else "not a known projection"
    if shape[1] % weight_format.block_size:
        return f"in_features = {shape[1]} is not a multiple of {weight_format.block_size}"
    return None


def _fused_members(modules: Mapping[str, tuple[int, ...]]) -> list[tuple[str, ...]]:
    """The modules by fused group, in the order of their first member; unfused ones alone."""
    group_of = {kind: group for group in FUSED_GROUPS for kind in group}
    seen: set[str] = set()
    result = []
    for module in modules:
        if module in seen:
            continue
        prefix = module.removesuffix(layer_kind(module))
        kinds = group_of.get(layer_kind(module), (layer_kind(module),))
        members = tuple(prefix + kind for kind in kinds if prefix + kind in modules)
        seen.update(members)
        result.append(members)
    return result
