"""Shards, index, and that a target appears only when complete."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from qerl.formats import writer as writer_module
from qerl.formats.base import CheckpointError
from qerl.formats.checkpoint import CheckpointReader, CheckpointWriter


def save(out: Path, value: float = 1.0, **options: object) -> None:
    with CheckpointWriter(out, **options) as writer:
        writer.add("a.weight", torch.full((4, 4), value))
        writer.add_json("config.json", {"model_type": "llama"})


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_round_trip_of_every_kind_of_tensor(tmp_path: Path) -> None:
    base = torch.randn(8, 6)
    tensors = {
        "bf16": base.bfloat16(),
        "fp8": base.to(torch.float8_e4m3fn),
        "uint8": base.to(torch.uint8),
        "scalar": torch.tensor(3.0),
        "view": base[2:4],
        "transposed": base.T,
        "empty": torch.zeros(0, 3),
    }
    with CheckpointWriter(tmp_path / "out") as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        writer.add_json("config.json", {})
    assert visible(tmp_path / "out") == ["config.json", "model.safetensors"]
    reader = CheckpointReader(tmp_path / "out")
    for name, tensor in tensors.items():
        loaded = reader.load(name)
        assert loaded.dtype == tensor.dtype
        assert torch.equal(loaded.float(), tensor.float())
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_shards_respect_their_limit_and_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pending: list[int] = []
    save_file = writer_module.save_file

    def recording(tensors: dict[str, torch.Tensor], file: Path, metadata: dict[str, str]) -> None:
        pending.append(sum(tensor.nbytes for tensor in tensors.values()))
        save_file(tensors, file, metadata=metadata)

    monkeypatch.setattr(writer_module, "save_file", recording)
    with CheckpointWriter(tmp_path / "out", max_shard_bytes=1000) as writer:
        for index, count in enumerate([100, 100, 100, 600, 10]):
            writer.add(f"t{index}", torch.full((count,), float(index)))
        writer.add_json("config.json", {})
    # 400 + 400, 400, 2400 (alone, larger than a shard), 40
    assert pending == [800, 400, 2400, 40]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 3640
    assert index["weight_map"]["t3"] == "model-00003-of-00004.safetensors"
    reader = CheckpointReader(tmp_path / "out")
    assert [float(reader.load(f"t{i}")[0]) for i in range(5)] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_pending_view_does_not_hold_its_storage(tmp_path: Path) -> None:
    base = torch.zeros(1000)
    with pytest.raises(RuntimeError, match="stop"), CheckpointWriter(tmp_path / "out") as writer:
        writer.add("part", base[:10])
        assert writer._pending["part"].untyped_storage().nbytes() == 40
        raise RuntimeError("stop")
    assert visible(tmp_path) == []


def test_existing_target_is_refused_and_kept(tmp_path: Path) -> None:
    out = tmp_path / "out"
    save(out)
    with pytest.raises(FileExistsError, match="holds 2 entries"):
        save(out, 2.0)
    assert float(CheckpointReader(out).load("a.weight")[0, 0]) == 1.0
    save(out, 2.0, force=True)
    assert float(CheckpointReader(out).load("a.weight")[0, 0]) == 2.0
    assert visible(tmp_path) == ["out"]


def test_force_never_replaces_what_is_no_checkpoint(tmp_path: Path) -> None:
    out = tmp_path / "home"
    out.mkdir()
    (out / "thesis.tex").write_text("x")
    with pytest.raises(FileExistsError, match=r"no config\.json"):
        save(out, force=True)
    assert visible(out) == ["thesis.tex"]
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(FileExistsError, match="is a file"):
        save(file, force=True)


def test_empty_folder_is_a_valid_target(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    save(tmp_path / "out")
    assert visible(tmp_path) == ["out"]
    assert "a.weight" in CheckpointReader(tmp_path / "out").names()


@pytest.mark.parametrize("force", [False, True])
def test_interruption_leaves_the_target_as_it_was(tmp_path: Path, force: bool) -> None:
    out = tmp_path / "out"
    if force:
        save(out, 1.0)
    with (
        pytest.raises(KeyboardInterrupt),
        CheckpointWriter(out, force=force, max_shard_bytes=16) as writer,
    ):
        writer.add("a.weight", torch.full((4, 4), 9.0))
        writer.add("b.weight", torch.full((4, 4), 9.0))
        assert out.exists() == force
        raise KeyboardInterrupt
    assert visible(tmp_path) == (["out"] if force else [])
    if force:
        assert float(CheckpointReader(out).load("a.weight")[0, 0]) == 1.0


def test_failing_rename_puts_the_old_checkpoint_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    save(out, 1.0)
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if "incomplete" in self.name:
            raise OSError("no space left")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="no space left"):
        save(out, 2.0, force=True)
    assert visible(tmp_path) == ["out"]
    assert float(CheckpointReader(out).load("a.weight")[0, 0]) == 1.0


def test_misuse(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="positive, not 0"):
        CheckpointWriter(tmp_path / "out", max_shard_bytes=0)
    with (
        pytest.raises(CheckpointError, match=r"a\.weight was added twice"),
        CheckpointWriter(tmp_path / "out") as writer,
    ):
        writer.add("a.weight", torch.ones(1))
        writer.add("a.weight", torch.ones(1))
    assert visible(tmp_path) == []


def test_files_are_readable_as_any_other_new_file(tmp_path: Path) -> None:
    save(tmp_path / "out")
    modes = {(tmp_path / "out" / name).stat().st_mode & 0o777 for name in visible(tmp_path / "out")}
    assert len(modes) == 1
