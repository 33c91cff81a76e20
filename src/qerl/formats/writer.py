"""Writing checkpoints: sharded safetensors, streamed, and visible only when complete.

Everything goes into a hidden folder beside the target, which is renamed at the end. A run that is interrupted
leaves the target as it was.
"""

import json
import logging
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors.torch import save_file

from qerl.formats.base import CheckpointError
from qerl.formats.safetensors_file import fsync_directory

logger = logging.getLogger(__name__)

DEFAULT_SHARD_BYTES = 1 << 30


class CheckpointWriter:
    """Context manager that writes one checkpoint folder.

    At most one shard (`max_shard_bytes`, or a single larger tensor) is held in memory. Leaving the ``with``
    block normally puts the folder in place; leaving it by an exception removes what was written.

    Args:
        out: the folder to make.
        force: replace an existing checkpoint at `out`; it is kept until the new one is complete.
        max_shard_bytes: size at which a shard is written out.

    Raises:
        FileExistsError: `out` exists and is not an empty folder, without `force`; or, with `force`, it is not
            a checkpoint folder (no config.json), so that a mistyped path deletes nothing.
        CheckpointError: `max_shard_bytes` is not positive, or a name is added twice.
    """

    def __init__(self, out: str | Path, *, force: bool = False, max_shard_bytes: int = DEFAULT_SHARD_BYTES) -> None:
        if max_shard_bytes <= 0:
            raise CheckpointError(f"max_shard_bytes must be positive, not {max_shard_bytes}")
        self.out = Path(out).absolute()
        _check_target(self.out, force=force)
        self._max_shard_bytes = max_shard_bytes
        self._folder = self.out.parent / f".{self.out.name}.incomplete-{os.getpid()}"
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._shard_of: dict[str, int] = {}
        self._shards = 0
        self.total_bytes = 0

    def __enter__(self) -> "CheckpointWriter":
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._pending.clear()
            shutil.rmtree(self._folder, ignore_errors=True)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Store `tensor` under `name`; it must not be modified before the block is left."""
        if name in self._shard_of:
            raise CheckpointError(f"tensor {name} was added twice")
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self._max_shard_bytes:
            self._flush()
        # A view would drag its whole storage into the pending shard, so views are copied.
        is_view = tensor.untyped_storage().nbytes() != size
        stored = tensor.detach().cpu().contiguous()
        self._pending[name] = stored.clone() if is_view and stored.data_ptr() == tensor.data_ptr() else stored
        self._pending_bytes += size
        self._shard_of[name] = self._shards
        self.total_bytes += size

    def add_json(self, file_name: str, content: dict[str, Any]) -> None:
        """Write `content` as ``file_name``."""
        (self._folder / file_name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def copy(self, source: Path) -> None:
        """Copy a file or folder (tokenizer, chat templates) under its own name."""
        if source.is_dir():
            shutil.copytree(source, self._folder / source.name)
        else:
            shutil.copyfile(source, self._folder / source.name)

    def _flush(self) -> None:
        file = self._folder / _part_name(self._shards)
        save_file(self._pending, file, metadata={"format": "pt"})
        # save_file makes files that only their owner reads; give them the mode of any other new file.
        file.chmod(self._folder.stat().st_mode & 0o666)
        self._pending, self._pending_bytes = {}, 0
        self._shards += 1

    def _finish(self) -> None:
        if self._pending:
            self._flush()
        self._name_shards()
        for file in self._folder.iterdir():
            if file.is_file():
                with file.open("rb") as stream:
                    os.fsync(stream.fileno())
        _put_in_place(self._folder, self.out)

    def _name_shards(self) -> None:
        """Final file names, which hold the number of shards, and the index if there are several."""
        if self._shards == 1:
            (self._folder / _part_name(0)).rename(self._folder / "model.safetensors")
            return
        final = [f"model-{i + 1:05d}-of-{self._shards:05d}.safetensors" for i in range(self._shards)]
        for shard, file_name in enumerate(final):
            (self._folder / _part_name(shard)).rename(self._folder / file_name)
        weight_map = {name: final[shard] for name, shard in self._shard_of.items()}
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
        self.add_json("model.safetensors.index.json", index)


def _check_target(out: Path, *, force: bool) -> None:
    """Raise `FileExistsError` unless a checkpoint may be written at `out`; see `CheckpointWriter`."""
    if not out.exists():
        return
    if not out.is_dir():
        raise FileExistsError(f"{out} is a file; give a folder")
    entries = len(os.listdir(out))
    if entries and not force:
        raise FileExistsError(
            f"{out} exists and holds {entries} entries; choose another folder, or use --force (force=True) to "
            "replace it"
        )
    if entries and not (out / "config.json").is_file():
        raise FileExistsError(
            f"{out} holds {entries} entries but no config.json, so it is not a checkpoint and --force does not "
            "replace it; remove it yourself if that is what you want"
        )


def _part_name(shard: int) -> str:
    return f"part-{shard}.safetensors"


def _put_in_place(folder: Path, out: Path) -> None:
    """Rename `folder` to `out`; an older `out` is deleted only after that."""
    old = out.parent / f".{out.name}.old-{os.getpid()}"
    replaced = out.exists()
    if replaced:
        out.rename(old)
    try:
        folder.rename(out)
    except OSError:
        if replaced:
            old.rename(out)
        raise
    fsync_directory(out.parent)
    if replaced:
        shutil.rmtree(old)
        logger.info("replaced the checkpoint at %s", out)
