"""Headers and single tensors of safetensors files.

A file is: 8 bytes little-endian header length, a JSON header (name -> dtype, shape, data_offsets), the data.
Headers are read here rather than through the safetensors library so that every shape is known, and every file
length checked, before the first weight is loaded; and tensors are read into their own memory, so that a
loaded tensor never keeps a mapping of a file that is then replaced.
"""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from qerl.formats.base import CheckpointError, TruncatedFileError

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_LARGEST_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies: `nbytes` bytes at `offset` (from the start) of `file`."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_header(file: Path) -> dict[str, TensorEntry]:
    """All tensors of a safetensors file by name.

    Raises:
        TruncatedFileError: the length of the file is not what its header says.
        CheckpointError: a dtype that is not known, or a shape that does not fill its bytes.
    """
    actual = file.stat().st_size
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        if actual < 8 or header_bytes > min(_LARGEST_HEADER_BYTES, actual - 8):
            raise TruncatedFileError(
                f"{file}: {actual} bytes, too short for a safetensors header of {header_bytes} bytes; "
                "the download or copy is incomplete, fetch the file again"
            )
        try:
            header = json.loads(stream.read(header_bytes))
        except ValueError as error:
            raise TruncatedFileError(f"{file}: the safetensors header is not JSON ({error})") from error
    header.pop("__metadata__", None)
    start = 8 + header_bytes
    entries = {name: _entry(file, name, field, start) for name, field in header.items()}
    expected = max((entry.offset + entry.nbytes for entry in entries.values()), default=start)
    if actual != expected:
        raise TruncatedFileError(
            f"{file}: {actual} bytes, but its header describes {expected} bytes "
            f"({expected - actual:+d}); the download or copy is incomplete, fetch the file again"
        )
    return entries


def read_tensor(entry: TensorEntry) -> torch.Tensor:
    """The tensor of `entry`, contiguous on the CPU in memory of its own.

    Raises:
        TruncatedFileError: the file has become shorter since its header was read.
    """
    raw = torch.empty(entry.nbytes, dtype=torch.uint8)
    with entry.file.open("rb", buffering=0) as stream:
        stream.seek(entry.offset)
        view = memoryview(raw.numpy())
        filled = 0
        while filled < entry.nbytes:
            count = stream.readinto(view[filled:])
            if not count:
                raise TruncatedFileError(f"{entry.file}: ends {entry.nbytes - filled} bytes inside a tensor")
            filled += count
    return raw.view(entry.dtype).reshape(entry.shape)


def _entry(file: Path, name: str, field: dict, start: int) -> TensorEntry:
    if field["dtype"] not in _DTYPES:
        raise CheckpointError(f"{file}: tensor {name} has the unknown dtype {field['dtype']}")
    dtype, shape = _DTYPES[field["dtype"]], tuple(field["shape"])
    first, end = field["data_offsets"]
    if end - first != math.prod(shape) * dtype.itemsize:
        raise CheckpointError(
            f"{file}: tensor {name} of {dtype} {list(shape)} needs {math.prod(shape) * dtype.itemsize} "
            "bytes, "
            f"its header gives it {end - first}"
        )
    return TensorEntry(file, dtype, shape, start + first, end - first)


def fsync_directory(folder: Path) -> None:
    """Make renames inside `folder` durable (no-op on systems without directory handles)."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
