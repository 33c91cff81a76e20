"""Which weights are quantized, from names and shapes."""

from typing import Any

import pytest

from qerl.formats.base import ArchitectureError, FormatError, get_format
from qerl.formats.selection import select

NVFP4 = get_format("nvfp4")
CONFIG: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 64}
Shapes = dict[str, tuple[int, ...]]


def decoder(prefix: str = "model.", intermediate: int = 128) -> Shapes:
    shapes: Shapes = {f"{prefix}embed_tokens.weight": (96, 64), "lm_head.weight": (96, 64)}
    for layer in range(2):
        base = f"{prefix}layers.{layer}."
        shapes |= {f"{base}self_attn.{kind}_proj.weight": (64, 64) for kind in "qkvo"}
        shapes |= {f"{base}self_attn.q_proj.bias": (64,), f"{base}input_layernorm.weight": (64,)}
        shapes |= {f"{base}mlp.{kind}_proj.weight": (intermediate, 64) for kind in ("gate", "up")}
        shapes[f"{base}mlp.down_proj.weight"] = (64, intermediate)
    return shapes


def test_projections_of_decoder_layers_in_fused_groups() -> None:
    selection = select(decoder(), CONFIG, NVFP4)
    assert len(selection.groups) == 8
    assert ("model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj") in selection.groups
    attention = tuple(f"model.layers.0.self_attn.{kind}_proj" for kind in "qkv")
    assert attention in selection.groups
    assert ("model.layers.0.self_attn.o_proj",) in selection.groups
    assert selection.kept == {"model.embed_tokens": "embedding", "lm_head": "kept by pattern 'lm_head'"}
    assert selection.ignored() == ["lm_head"]


def test_experts_are_grouped_by_expert_and_routers_kept() -> None:
    shapes = decoder()
    for expert in range(2):
        for kind in ("gate_proj", "up_proj", "down_proj"):
            shapes[f"model.layers.0.mlp.experts.{expert}.{kind}.weight"] = (64, 64)
    shapes["model.layers.0.mlp.gate.weight"] = (2, 64)
    selection = select(shapes, CONFIG, NVFP4)
    base = "model.layers.0.mlp.experts"
    assert (f"{base}.0.gate_proj", f"{base}.0.up_proj") in selection.groups
    assert (f"{base}.1.down_proj",) in selection.groups
    assert selection.kept["model.layers.0.mlp.gate"] == "router"
    assert "model.layers.0.mlp.gate" in selection.ignored()


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model.", ""])
def test_language_part_is_quantized_and_towers_are_not(prefix: str) -> None:
    shapes = decoder(prefix)
    tower = "vision_tower.encoder.layers.0.self_attn.q_proj"
    shapes[f"{tower}.weight"] = (64, 64)
    selection = select(shapes, {"text_config": CONFIG}, NVFP4)
    assert len(selection.groups) == 8
    assert selection.kept[tower] == "not in a decoder layer"


def test_unknown_matrices_of_a_layer_are_kept_and_listed() -> None:
    shapes = decoder() | {"model.layers.0.self_attn.kv_a_proj_with_mqa.weight": (64, 64)}
    selection = select(shapes, CONFIG, NVFP4)
    assert selection.kept["model.layers.0.self_attn.kv_a_proj_with_mqa"] == "not a known projection"


def test_width_that_cannot_be_packed_keeps_that_layer() -> None:
    selection = select(decoder(intermediate=3420), CONFIG, NVFP4)
    reason = selection.kept["model.layers.0.mlp.down_proj"]
    assert reason == "in_features = 3420 is not a multiple of 16"
    assert "model.layers.0.mlp.down_proj" in selection.ignored()
    assert ("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj") in selection.groups


@pytest.mark.parametrize(
    ("pattern", "modules"),
    [
        ("model.layers.0.mlp.down_proj", 1),
        ("o_proj", 2),
        ("mlp.down_proj", 2),
        ("model.layers.1.*", 7),
        (r"re:.*layers\.[01]\.mlp", 6),
    ],
)
def test_keep_patterns(pattern: str, modules: int) -> None:
    selection = select(decoder(), CONFIG, NVFP4, ("lm_head", pattern))
    assert sum(reason == f"kept by pattern {pattern!r}" for reason in selection.kept.values()) == modules
    assert sum(map(len, selection.groups)) == 14 - modules


def test_keeping_one_member_keeps_its_fused_group() -> None:
    selection = select(decoder(), CONFIG, NVFP4, ("model.layers.0.self_attn.k_proj",))
    prefix = "model.layers.0.self_attn"
    assert selection.kept[f"{prefix}.q_proj"].startswith(f"fused with {prefix}.k_proj, which is kept")
    assert not any(f"{prefix}.v_proj" in group for group in selection.groups)
    assert (f"{prefix}.o_proj",) in selection.groups


def test_keep_pattern_with_a_typing_error() -> None:
    with pytest.raises(FormatError, match="'dwn_proj' matches none of 16 matrices"):
        select(decoder(), CONFIG, NVFP4, ("dwn_proj",))


def test_nothing_left() -> None:
    with pytest.raises(FormatError, match=r"none of 16 matrices is left.*14"):
        select(decoder(), CONFIG, NVFP4, ("re:.*_proj",))


def test_other_architectures() -> None:
    gpt2: Shapes = {"transformer.h.0.attn.c_attn.weight": (64, 192), "transformer.wte.weight": (96, 64)}
    with pytest.raises(ArchitectureError, match=r"GPT2LMHeadModel.*none of 2 tensors"):
        select(gpt2, {"architectures": ["GPT2LMHeadModel"]}, NVFP4)
    with pytest.raises(ArchitectureError, match="num_hidden_layers = 3, the weights have 2"):
        select(decoder(), CONFIG | {"num_hidden_layers": 3}, NVFP4)
    with pytest.raises(ArchitectureError, match=r"hidden_size = 128.*\[96, 64\]"):
        select(decoder(), CONFIG | {"hidden_size": 128}, NVFP4)
