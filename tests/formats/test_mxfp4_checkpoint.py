"""MXFP4 on disk: round trip, what distinguishes it from NVFP4, and the named error of every kind of damage."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from qerl.formats.base import LayoutError, PackedTensor, UnsupportedQuantizationError, get_format
from qerl.formats.checkpoint import CheckpointReader
from qerl.formats.disk_layout import quantization_config, to_disk

MODULE = "model.layers.0.mlp.down_proj"
MXFP4 = get_format("mxfp4")


def packed_weight() -> PackedTensor:
    torch.manual_seed(3)
    return MXFP4.quantize([torch.randn(8, 64)])[0]


def write(folder: Path, changed: dict[str, torch.Tensor] | None = None, section: dict[str, Any] | None = None) -> Path:
    """A checkpoint of one packed weight, with some of its parts `changed`."""
    tensors = {name: tensor.clone() for name, tensor in to_disk(MODULE, packed_weight()).items()}
    tensors |= {f"{MODULE}.{part}": tensor for part, tensor in (changed or {}).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {"model_type": "llama", "quantization_config": section or quantization_config("mxfp4", ["lm_head"])}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_round_trip(tmp_path: Path) -> None:
    reader, expected = CheckpointReader(write(tmp_path)), packed_weight()
    assert reader.quantization is not None
    assert (reader.quantization.format, reader.quantization.producer) == ("mxfp4", "compressed-tensors")
    assert reader.packed_modules() == [MODULE] and reader.plain_names() == []
    packed = reader.load_packed(MODULE)
    assert torch.equal(packed.codes, expected.codes)
    assert torch.equal(packed.block_scale.view(torch.uint8), expected.block_scale.view(torch.uint8))
    assert packed.global_scale is None
    stored = load_file(tmp_path / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in stored.items()} == {
        f"{MODULE}.weight_packed": torch.uint8,
        f"{MODULE}.weight_scale": torch.uint8,
    }


def test_invalid_scales_of_zero_blocks_decode_to_zeros(tmp_path: Path) -> None:
    codes, scale = packed_weight().codes.clone(), packed_weight().block_scale.view(torch.uint8).clone()
    codes[1, :16], codes[2, 16:] = 0, 0x80
    scale[1, 0], scale[2, 1] = 255, 254
    packed = CheckpointReader(write(tmp_path, {"weight_packed": codes, "weight_scale": scale})).load_packed(MODULE)
    decoded = MXFP4.dequantize(packed)
    assert bool(torch.isfinite(decoded).all()) and not decoded[1, :32].any() and not decoded[2, 32:].any()
    assert torch.equal(decoded[3:], MXFP4.dequantize(packed_weight())[3:])


@pytest.mark.parametrize("byte", [253, 255])
def test_invalid_scales_of_other_blocks_are_refused(tmp_path: Path, byte: int) -> None:
    scale = packed_weight().block_scale.view(torch.uint8).clone()
    scale[4, 1] = byte
    with pytest.raises(LayoutError, match=r"1 of 16 block scales are NaN \(255\) or above 2\^125"):
        CheckpointReader(write(tmp_path, {"weight_scale": scale})).load_packed(MODULE)


@pytest.mark.parametrize(
    ("part", "replacement"),
    [
        ("weight_scale", torch.ones(8, 4, dtype=torch.uint8)),
        ("weight_scale", torch.ones(4, 2, dtype=torch.uint8)),
        ("weight_scale", torch.ones(8, 2).to(torch.float8_e4m3fn)),
        ("weight_packed", torch.zeros(8, 24, dtype=torch.uint8)),
        ("weight_packed", torch.zeros(2, 8, 32, dtype=torch.uint8)),
        ("weight_global_scale", torch.ones(1)),
    ],
)
def test_parts_that_do_not_fit_together(tmp_path: Path, part: str, replacement: torch.Tensor) -> None:
    with pytest.raises(LayoutError, match=MODULE):
        CheckpointReader(write(tmp_path, {part: replacement})).load_packed(MODULE)


def test_config_of_another_format_or_of_both(tmp_path: Path) -> None:
    both = copy.deepcopy(quantization_config("mxfp4", []))
    both["config_groups"]["group_1"] = quantization_config("nvfp4", [])["config_groups"]["group_0"]
    with pytest.raises(
        UnsupportedQuantizationError, match=r"mxfp4-pack-quantized', 'nvfp4-pack-quantized.*one at a time"
    ):
        CheckpointReader(write(tmp_path, section=both))
    small = quantization_config("mxfp4", [])
    small["config_groups"]["group_0"]["weights"]["group_size"] = 16
    with pytest.raises(UnsupportedQuantizationError, match=r"weights with \{'group_size': 16\}; supported.*32"):
        CheckpointReader(write(tmp_path, section=small))
