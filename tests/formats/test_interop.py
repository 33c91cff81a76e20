"""Our checkpoints in transformers (compressed-tensors, bitsandbytes), and theirs in ours, with equal values."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from qerl.formats.base import get_format
from qerl.formats.checkpoint import CheckpointReader
from qerl.formats.quantizer import quantize

MakeLlama = Callable[..., Path]
NVFP4 = get_format("nvfp4")


def load_transformers(folder: Path, **options: Any) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options)
    return dict(model.state_dict())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("method", ["rtn", "mse"])
def test_ours_loads_in_transformers_with_equal_weights(
    make_llama: MakeLlama, tmp_path: Path, tied: bool, method: str
) -> None:
    pytest.importorskip("compressed_tensors")
    from transformers import CompressedTensorsConfig

    folder, out = make_llama(tie_word_embeddings=tied, intermediate_size=120), tmp_path / "out"
    report = quantize(folder, out, method=method, max_shard_bytes=30_000, keep=["model.layers.1.*"])
    state = load_transformers(out, quantization_config=CompressedTensorsConfig(dequantize=True))
    source, result = load_transformers(folder), CheckpointReader(out)
    assert len(report.quantized) == 6
    for name in source:
        module = name.removesuffix(".weight")
        if module in report.quantized:
            expected = NVFP4.dequantize(result.load_packed(module), torch.bfloat16)
        else:
            expected = source[name]
        assert torch.equal(state[name], expected), name
    assert torch.equal(state["lm_head.weight"], source["lm_head.weight"])
    assert (state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()) == tied


def test_theirs_loads_in_ours_with_equal_values(make_llama: MakeLlama, tmp_path: Path) -> None:
    """A checkpoint compressed by the library, each layer with a global scale of its own, W4A4 config included."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
    from transformers import CompressedTensorsConfig

    folder = make_llama(tie_word_embeddings=True)
    scheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
    scheme.format = "nvfp4-pack-quantized"
    compressor = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
    tensors = load_file(folder / "model.safetensors")
    modules = [name.removesuffix(".weight") for name in tensors if "_proj" in name]
    for module in modules:
        weight = tensors.pop(f"{module}.weight")
        divisor = generate_gparam(weight.min().reshape(1), weight.max().reshape(1))
        blocks = weight.reshape(len(weight), -1, 16)
        scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights, global_scale=divisor)
        state = {"weight": weight, "weight_scale": scale, "weight_global_scale": divisor}
        parts = compressor.compress(state, scheme)
        tensors |= {f"{module}.{key}": value for key, value in parts.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    section = QuantizationConfig(
        config_groups={"group_0": scheme},
        ignore=["lm_head"],
        format="nvfp4-pack-quantized",
        quantization_status="compressed",
    )
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = json.loads(section.model_dump_json())
    (folder / "config.json").write_text(json.dumps(config))

    reader = CheckpointReader(folder)
    assert sorted(reader.packed_modules()) == sorted(modules)
    theirs = load_transformers(folder, quantization_config=CompressedTensorsConfig(dequantize=True))
    for module in modules:
        mine = NVFP4.dequantize(reader.load_packed(module), torch.bfloat16)
        assert torch.equal(mine, theirs[f"{module}.weight"]), module


def test_mxfp4_loads_in_transformers_with_equal_weights(make_llama: MakeLlama, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from transformers import CompressedTensorsConfig

    folder, out = make_llama(tie_word_embeddings=True, intermediate_size=144), tmp_path / "out"
    report = quantize(folder, out, format="mxfp4", max_shard_bytes=30_000)
    state = load_transformers(out, quantization_config=CompressedTensorsConfig(dequantize=True))
    source, result = load_transformers(folder), CheckpointReader(out)
    assert len(report.quantized) == 12 and len(report.kept) == 3  # 144 is no multiple of 32
    for name in source:
        module = name.removesuffix(".weight")
        if module in report.quantized:
            expected = get_format("mxfp4").dequantize(result.load_packed(module), torch.bfloat16)
        else:
            expected = source[name]
        assert torch.equal(state[name], expected), name


def test_mxfp4_of_the_library_loads_in_ours_with_equal_values(make_llama: MakeLlama, tmp_path: Path) -> None:
    """Compressed by the library and described by its own config, with the zp_dtype of its preset."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams

    folder = make_llama(tie_word_embeddings=True)
    scheme = preset_name_to_scheme("MXFP4A16", ["Linear"])
    scheme.format = "mxfp4-pack-quantized"
    compressor = BaseCompressor.get_value_from_registry("mxfp4-pack-quantized")
    tensors, decoded = load_file(folder / "model.safetensors"), {}
    for module in [name.removesuffix(".weight") for name in tensors if "_proj" in name]:
        weight = tensors.pop(f"{module}.weight")
        blocks = weight.reshape(len(weight), -1, 32)
        scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights)
        parts = compressor.compress({"weight": weight, "weight_scale": scale}, scheme)
        tensors |= {f"{module}.{key}": value for key, value in parts.items()}
        decoded[module] = compressor.decompress(dict(parts), scheme)["weight"].bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    section = QuantizationConfig(
        config_groups={"group_0": scheme},
        ignore=["lm_head"],
        format="mxfp4-pack-quantized",
        quantization_status="compressed",
    )
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = json.loads(section.model_dump_json())
    (folder / "config.json").write_text(json.dumps(config))

    reader = CheckpointReader(folder)
    assert reader.quantization is not None and reader.quantization.format == "mxfp4"
    assert sorted(reader.packed_modules()) == sorted(decoded)
    for module, theirs in decoded.items():
        mine = get_format("mxfp4").dequantize(reader.load_packed(module), torch.bfloat16)
        assert torch.equal(mine, theirs), module


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
@pytest.mark.parametrize("tied", [True, False])
def test_nf4_loads_in_transformers_with_equal_weights(make_llama: MakeLlama, tmp_path: Path, tied: bool) -> None:
    import bitsandbytes
    from transformers import AutoModelForCausalLM

    folder, out = make_llama(tie_word_embeddings=tied), tmp_path / "out"
    quantize(folder, out, format="nf4", keep=["o_proj"])
    result, nf4 = CheckpointReader(out), get_format("nf4")
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16, device_map="cpu")
    packed = {name: m for name, m in model.named_modules() if isinstance(m, bitsandbytes.nn.Linear4bit)}
    assert sorted(packed) == sorted(result.packed_modules())
    for name, module in packed.items():
        theirs = bitsandbytes.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
        assert torch.equal(theirs, nf4.dequantize(result.load_packed(name), torch.bfloat16)), name


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
@pytest.mark.parametrize("double", [True, False])
def test_nf4_saved_by_bitsandbytes_loads_in_ours(make_llama: MakeLlama, tmp_path: Path, double: bool) -> None:
    import bitsandbytes
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    source = make_llama(intermediate_size=512)
    model = AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.bfloat16, device_map="cpu", quantization_config=config
    )
    model.save_pretrained(tmp_path / "theirs")
    reader, nf4 = CheckpointReader(tmp_path / "theirs"), get_format("nf4")
    assert len(reader.packed_modules()) == 14
    for name in reader.packed_modules():
        weight = model.get_submodule(name).weight
        theirs = bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state)
        assert torch.equal(theirs, nf4.dequantize(reader.load_packed(name), torch.bfloat16)), name
