"""Reading checkpoints of the three producers, and the named error of every kind of damage."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from qerl.formats import checkpoint
from qerl.formats.base import (
    AmbiguousScaleError,
    CheckpointError,
    LayoutError,
    MissingShardError,
    NotQuantizedError,
    PackedTensor,
    TruncatedFileError,
    UnsafeCheckpointError,
    UnsupportedQuantizationError,
    get_format,
)
from qerl.formats.checkpoint import CheckpointReader
from qerl.formats.disk_layout import quantization_config, to_disk

MODULE = "model.layers.0.self_attn.q_proj"
NVFP4 = get_format("nvfp4")
Edit = Callable[[dict[str, torch.Tensor], dict[str, Any]], None]


def packed_weight() -> PackedTensor:
    torch.manual_seed(3)
    return NVFP4.quantize([torch.randn(8, 64)])[0]


def write(folder: Path, tensors: dict[str, torch.Tensor], section: dict[str, Any] | None) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config: dict[str, Any] = {"model_type": "llama"}
    if section is not None:
        config["quantization_config"] = section
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_nvfp4(folder: Path, edit: Edit | None = None) -> Path:
    """compressed-tensors checkpoint of one packed weight and one norm; `edit(tensors, section)` damages it."""
    tensors = {**to_disk(MODULE, packed_weight()), "model.norm.weight": torch.ones(64).bfloat16()}
    section = quantization_config("nvfp4", ["lm_head"])
    if edit is not None:
        edit(tensors, section)
    return write(folder, tensors, section)


def modelopt_tensors(packed: PackedTensor) -> dict[str, torch.Tensor]:
    return {
        f"{MODULE}.weight": packed.codes,
        f"{MODULE}.weight_scale": packed.block_scale,
        f"{MODULE}.weight_scale_2": (1.0 / packed.global_scale).reshape(()),
        "model.norm.weight": torch.ones(64).bfloat16(),
    }


# --- what is read -------------------------------------------------------------------------------------------------


def test_compressed_tensors(tmp_path: Path) -> None:
    reader = CheckpointReader(write_nvfp4(tmp_path))
    expected = packed_weight()
    packed = reader.load_packed(MODULE)
    assert reader.quantization is not None
    assert (reader.quantization.format, reader.quantization.producer) == ("nvfp4", "compressed-tensors")
    assert reader.quantization.ignored == ("lm_head",)
    assert reader.quantization.notes == ()
    assert reader.packed_modules() == [MODULE]
    assert reader.plain_names() == ["model.norm.weight"]
    assert reader.is_packed(MODULE) and not reader.is_packed("model.norm")
    assert packed.shape == (8, 64)
    assert torch.equal(NVFP4.dequantize(packed), NVFP4.dequantize(expected))
    assert torch.equal(packed.global_scale, expected.global_scale)
    assert reader.shape(f"{MODULE}.weight_packed") == (8, 32)
    assert reader.dtype(f"{MODULE}.weight_scale") == torch.float8_e4m3fn


@pytest.mark.parametrize("where", ["config.json", "hf_quant_config.json"])
def test_modelopt_multiplier_becomes_a_divisor(tmp_path: Path, where: str) -> None:
    expected = packed_weight()
    section = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    legacy = {"quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}}
    write(tmp_path, modelopt_tensors(expected), section if where == "config.json" else None)
    if where == "hf_quant_config.json":
        (tmp_path / where).write_text(json.dumps(legacy))
    reader = CheckpointReader(tmp_path)
    packed = reader.load_packed(MODULE)
    assert reader.quantization is not None
    assert reader.quantization.producer == "modelopt"
    assert reader.quantization.ignored == ("lm_head",)
    assert reader.plain_names() == ["model.norm.weight"]
    assert torch.equal(packed.codes, expected.codes)
    # Two roundings of a reciprocal: at most one unit in the last place, far from the factor of 1e6 of a mix-up.
    torch.testing.assert_close(packed.global_scale, expected.global_scale, rtol=2**-23, atol=0)


def test_activation_and_cache_quantization_is_left_out_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def add_w4a4(tensors: dict[str, torch.Tensor], section: dict[str, Any]) -> None:
        tensors[f"{MODULE}.input_global_scale"] = torch.ones(1)
        tensors["model.layers.0.self_attn.k_scale"] = torch.ones(1)
        section["config_groups"]["group_0"]["input_activations"] = {"num_bits": 4}
        section["kv_cache_scheme"] = {"num_bits": 8}

    folder = write_nvfp4(tmp_path, add_w4a4)
    with caplog.at_level(logging.WARNING):
        first, second = CheckpointReader(folder), CheckpointReader(folder)
    assert first.quantization is not None and len(first.quantization.notes) == 2
    assert first.plain_names() == ["model.norm.weight"]
    assert torch.equal(second.load_packed(MODULE).codes, packed_weight().codes)
    messages = [record.getMessage() for record in caplog.records]
    assert sum("activation quantization ignored" in message for message in messages) == 1
    assert sum("KV-cache quantization ignored" in message for message in messages) == 1


def test_nf4_on_disk_has_the_even_column_in_the_high_nibble(tmp_path: Path) -> None:
    nf4 = get_format("nf4")
    weight = torch.randn(4, 128)
    (expected,) = nf4.quantize([weight])
    write(tmp_path, to_disk(MODULE, expected), quantization_config("nf4", ["lm_head"]))
    raw = load_file(tmp_path / "model.safetensors")[f"{MODULE}.weight"]
    assert raw.shape == (256, 1)
    assert int(raw[0, 0]) >> 4 == int(expected.codes[0, 0]) & 15
    reader = CheckpointReader(tmp_path)
    assert reader.plain_names() == []
    assert torch.equal(nf4.dequantize(reader.load_packed(MODULE)), nf4.dequantize(expected))


def test_nf4_double_quantization_is_undone(tmp_path: Path) -> None:
    nf4 = get_format("nf4")
    (expected,) = nf4.quantize([torch.randn(64, 512)])
    tensors = to_disk(MODULE, expected)
    table = torch.linspace(-1, 1, 256)
    codes = torch.arange(512).remainder(256).to(torch.uint8)
    outer = torch.tensor([0.5, 2.0])
    tensors[f"{MODULE}.weight.absmax"] = codes
    tensors[f"{MODULE}.weight.nested_absmax"] = outer
    tensors[f"{MODULE}.weight.nested_quant_map"] = table
    key = f"{MODULE}.weight.quant_state.bitsandbytes__nf4"
    state = json.loads(bytes(tensors[key].tolist())) | {"nested_blocksize": 256, "nested_offset": 2.5}
    tensors[key] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    reader = CheckpointReader(write(tmp_path, tensors, quantization_config("nf4", [])))
    wanted = torch.cat([table * 0.5, table * 2.0]) + 2.5
    torch.testing.assert_close(reader.load_packed(MODULE).block_scale.flatten(), wanted, rtol=1e-6, atol=0)


def test_sixteen_bit_checkpoint(make_llama: Callable[..., Path]) -> None:
    folder = make_llama(shard_size="20KB")
    reader = CheckpointReader(folder)
    assert len(list(folder.glob("*.safetensors"))) > 2
    assert reader.quantization is None and reader.packed_modules() == []
    assert reader.plain_names() == reader.names()
    for file in folder.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            assert torch.equal(reader.load(name), tensor)
    assert reader.nbytes() == sum(reader.tensor_bytes(name) for name in reader.names())


# --- zero weights of old exporters (NaN scales) -------------------------------------------------------------------


def test_nan_scale_of_a_zero_block_decodes_to_zeros(tmp_path: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor], section: dict[str, Any]) -> None:
        tensors[f"{MODULE}.weight_packed"][0, :8] = 0x80
        tensors[f"{MODULE}.weight_scale"].view(torch.uint8)[0, 0] = 0x7F

    packed = CheckpointReader(write_nvfp4(tmp_path, spoil)).load_packed(MODULE)
    assert bool((NVFP4.dequantize(packed)[0, :16] == 0).all())
    assert bool(torch.isfinite(NVFP4.dequantize(packed)).all())


def test_infinite_global_scale_of_a_zero_tensor_decodes_to_zeros(tmp_path: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor], section: dict[str, Any]) -> None:
        tensors[f"{MODULE}.weight_packed"].zero_()
        tensors[f"{MODULE}.weight_global_scale"].fill_(float("inf"))

    packed = CheckpointReader(write_nvfp4(tmp_path, spoil)).load_packed(MODULE)
    assert packed.global_scale.tolist() == [1.0]
    assert bool((NVFP4.dequantize(packed) == 0).all())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0])
def test_invalid_global_scale_of_other_weights_is_refused(tmp_path: Path, value: float) -> None:
    def spoil(tensors: dict[str, torch.Tensor], section: dict[str, Any]) -> None:
        tensors[f"{MODULE}.weight_global_scale"].fill_(value)

    with pytest.raises(LayoutError, match="non-zero codes in 32 blocks"):
        CheckpointReader(write_nvfp4(tmp_path, spoil)).load_packed(MODULE)


def test_nan_scale_of_other_blocks_is_refused(tmp_path: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor], section: dict[str, Any]) -> None:
        tensors[f"{MODULE}.weight_scale"].view(torch.uint8)[0, 0] = 0x7F

    with pytest.raises(LayoutError, match=r"1 of 32 block scales are NaN.* 1 blocks"):
        CheckpointReader(write_nvfp4(tmp_path, spoil)).load_packed(MODULE)


# --- metadata that does not fit -----------------------------------------------------------------------------------


def test_packed_tensors_without_metadata_are_ambiguous(tmp_path: Path) -> None:
    write(tmp_path, to_disk(MODULE, packed_weight()), None)
    with pytest.raises(AmbiguousScaleError, match="names no quantization"):
        CheckpointReader(tmp_path)


def test_modelopt_names_under_compressed_tensors_metadata_are_ambiguous(tmp_path: Path) -> None:
    write(tmp_path, modelopt_tensors(packed_weight()), quantization_config("nvfp4", []))
    with pytest.raises(AmbiguousScaleError, match=r"compressed-tensors.*weight_scale_2"):
        CheckpointReader(tmp_path)


def test_compressed_tensors_names_under_modelopt_metadata_are_ambiguous(tmp_path: Path) -> None:
    write(tmp_path, to_disk(MODULE, packed_weight()), {"quant_method": "modelopt", "quant_algo": "NVFP4"})
    with pytest.raises(AmbiguousScaleError, match=r"modelopt.*weight_global_scale"):
        CheckpointReader(tmp_path)


def test_metadata_without_packed_tensors(tmp_path: Path) -> None:
    write(tmp_path, {f"{MODULE}.weight": torch.zeros(8, 64)}, quantization_config("nvfp4", []))
    with pytest.raises(NotQuantizedError, match="none of its 1 tensors"):
        CheckpointReader(tmp_path)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"quant_method": "gptq"}, "'gptq'.*supported: compressed-tensors, modelopt, bitsandbytes"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "'FP8'.*NVFP4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "group_size 32"),
        ({"quant_method": "compressed-tensors", "format": "mxfp8-quantized"}, "mxfp8-quantized.*mxfp4-pack"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "load_in_4bit=None"),
        (quantization_config("nvfp4", []) | {"transform_config": {"config_groups": {"R1": {}}}}, "transform"),
        (quantization_config("nvfp4", []) | {"sparsity_config": {"format": "sparse-24"}}, "sparsity"),
    ],
)
def test_schemes_that_are_not_read(tmp_path: Path, section: dict[str, Any], message: str) -> None:
    write(tmp_path, {"model.norm.weight": torch.ones(4)}, section)
    with pytest.raises(UnsupportedQuantizationError, match=message):
        CheckpointReader(tmp_path)


def test_awq_input_scales_are_not_read(tmp_path: Path) -> None:
    tensors = modelopt_tensors(packed_weight()) | {f"{MODULE}.pre_quant_scale": torch.ones(64)}
    write(tmp_path, tensors, {"quant_method": "modelopt", "quant_algo": "NVFP4"})
    with pytest.raises(UnsupportedQuantizationError, match="pre_quant_scale"):
        CheckpointReader(tmp_path)


@pytest.mark.parametrize(
    ("part", "replacement"),
    [
        ("weight_scale", torch.ones(8, 2).to(torch.float8_e4m3fn)),
        ("weight_scale", torch.ones(128, 4).to(torch.float8_e4m3fn)),
        ("weight_scale", torch.ones(8, 4)),
        ("weight_packed", torch.zeros(8, 30, dtype=torch.uint8)),
        ("weight_packed", torch.zeros(2, 8, 32, dtype=torch.uint8)),
        ("weight_global_scale", torch.ones(8)),
    ],
)
def test_parts_that_do_not_fit_together(tmp_path: Path, part: str, replacement: torch.Tensor) -> None:
    def spoil(tensors: dict[str, torch.Tensor], section: dict[str, Any]) -> None:
        tensors[f"{MODULE}.{part}"] = replacement

    with pytest.raises(LayoutError, match=MODULE):
        CheckpointReader(write_nvfp4(tmp_path, spoil)).load_packed(MODULE)


def test_missing_part_of_a_packed_weight(tmp_path: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor], section: dict[str, Any]) -> None:
        del tensors[f"{MODULE}.weight_scale"]

    with pytest.raises(MissingShardError, match=r"no tensor .*weight_scale .*3 tensors"):
        CheckpointReader(write_nvfp4(tmp_path, spoil)).load_packed(MODULE)


def test_asking_for_a_packed_weight_of_a_plain_module(tmp_path: Path, make_llama: Callable[..., Path]) -> None:
    with pytest.raises(NotQuantizedError, match="16-bit checkpoint with 0 packed"):
        CheckpointReader(make_llama()).load_packed(MODULE)
    with pytest.raises(NotQuantizedError, match="compressed-tensors checkpoint with 1 packed"):
        CheckpointReader(write_nvfp4(tmp_path / "packed")).load_packed("model.norm")


def test_nf4_with_wrong_sizes(tmp_path: Path) -> None:
    tensors = to_disk(MODULE, get_format("nf4").quantize([torch.randn(4, 128)])[0])
    tensors[f"{MODULE}.weight.absmax"] = torch.ones(7)
    write(tmp_path, tensors, quantization_config("nf4", []))
    with pytest.raises(LayoutError, match="256 bytes and 8 absmax; the file has 256 and 7"):
        CheckpointReader(tmp_path).load_packed(MODULE)


# --- damaged folders ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [0, 4, 40, -1])
def test_truncated_file(tmp_path: Path, kept: int) -> None:
    file = write_nvfp4(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(TruncatedFileError, match=rf"model.safetensors: {file.stat().st_size} bytes"):
        CheckpointReader(tmp_path)


def test_file_that_shrinks_after_opening(tmp_path: Path) -> None:
    reader = CheckpointReader(write_nvfp4(tmp_path))
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-500])
    with pytest.raises(TruncatedFileError, match="inside a tensor"):
        for name in reader.names():
            reader.load(name)


def test_missing_shard(make_llama: Callable[..., Path]) -> None:
    folder = make_llama(shard_size="20KB")
    victim = sorted(folder.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(MissingShardError, match=rf"1 of \d+ shards are missing \({victim.name}\)"):
        CheckpointReader(folder)


def test_index_of_another_save(make_llama: Callable[..., Path]) -> None:
    folder = make_llama(shard_size="20KB")
    index = folder / checkpoint.INDEX_FILE
    content = json.loads(index.read_text())
    content["weight_map"]["model.extra.weight"] = next(iter(content["weight_map"].values()))
    index.write_text(json.dumps(content))
    with pytest.raises(MissingShardError, match=r"1 tensors in shards that lack them.*model\.extra"):
        CheckpointReader(folder)


def test_pickle_weights_are_refused_with_the_way_to_convert(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80")
    with pytest.raises(UnsafeCheckpointError, match=r"pytorch_model\.bin.*save_pretrained"):
        CheckpointReader(tmp_path)


def test_folders_without_the_expected_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="hf download"):
        CheckpointReader(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        CheckpointReader(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(MissingShardError, match="no safetensors file at all"):
        CheckpointReader(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(MissingShardError, match=r"adapter_model\.safetensors"):
        CheckpointReader(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        CheckpointReader(tmp_path)
