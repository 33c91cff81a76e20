"""Reading local Hugging Face checkpoints, 16-bit or packed, one tensor at a time.

Opening a checkpoint reads config.json and the headers of all safetensors files: after that every name, shape
and dtype is known and every file is known to be complete. Weights are read from disk when asked for and are
not kept. `qerl.formats.writer.CheckpointWriter` is the other direction.
"""

import functools
import json
import logging
from pathlib import Path
from typing import Any

import torch

from qerl.formats.base import (
    CheckpointError,
    LayoutError,
    MissingShardError,
    NotQuantizedError,
    PackedTensor,
    UnsafeCheckpointError,
    UnsupportedQuantizationError,
)
from qerl.formats.disk_layout import (
    QuantizationInfo,
    describe_quantization,
    is_quantization_tensor,
    packed_modules,
    swap_nibbles,
)
from qerl.formats.mxfp4 import BLOCK_SIZE as MXFP4_BLOCK_SIZE
from qerl.formats.mxfp4 import LARGEST_SCALE_BYTE
from qerl.formats.nf4 import BLOCK_SIZE as NF4_BLOCK_SIZE
from qerl.formats.nf4 import CODE_BOOK
from qerl.formats.nvfp4 import BLOCK_SIZE as NVFP4_BLOCK_SIZE
from qerl.formats.nvfp4 import EMPTY_BLOCK_SCALE
from qerl.formats.safetensors_file import TensorEntry, read_header, read_tensor
from qerl.formats.writer import CheckpointWriter

__all__ = ["CheckpointReader", "CheckpointWriter", "QuantizationInfo"]

logger = logging.getLogger(__name__)

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
# Second level of bitsandbytes' double quantization.
_NESTED_BLOCK_SIZE = 256


class CheckpointReader:
    """A local checkpoint folder with safetensors weights, single or sharded.

    Args:
        path: folder with config.json and ``*.safetensors``.

    Attributes:
        path: the folder.
        config: config.json as a dict.
        quantization: what the checkpoint says of its packed weights, None for a 16-bit one.

    Raises:
        FileNotFoundError: no such folder.
        CheckpointError: (and its subclasses in `qerl.formats.base`) no config.json, pickle weights, missing
            shard, truncated file, contradictory or unsupported quantization.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise FileNotFoundError(
                f"no checkpoint folder {self.path}: give a local folder (`hf download REPO --local-dir DIR` makes one)"
            )
        self.config: dict[str, Any] = self._read_json("config.json")
        self._entries = _read_entries(self.path)
        has_modelopt = (self.path / "hf_quant_config.json").is_file()
        modelopt = self._read_json("hf_quant_config.json") if has_modelopt else None
        self.quantization = describe_quantization(self.config, modelopt, self._entries)
        modules = packed_modules(self.quantization, self._entries) if self.quantization else ()
        self._packed = dict.fromkeys(modules)
        for note in self.quantization.notes if self.quantization else ():
            _warn_once(f"{self.path}: {note}")

    def names(self) -> list[str]:
        """All tensor names on disk, parts of packed weights included."""
        return list(self._entries)

    def plain_names(self) -> list[str]:
        """Tensor names without the parts of packed weights and without activation and KV-cache scales."""
        return [
            name for name in self._entries if not is_quantization_tensor(name) and not self._belongs_to_packed(name)
        ]

    def packed_modules(self) -> list[str]:
        """Names of the modules whose weight is packed (without ``.weight``)."""
        return list(self._packed)

    def is_packed(self, module: str) -> bool:
        """Whether the weight of `module` is stored packed."""
        return module in self._packed

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape on disk of the tensor `name`, without loading it."""
        return self._entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Dtype on disk of the tensor `name`, without loading it."""
        return self._entry(name).dtype

    def tensor_bytes(self, name: str) -> int:
        """Bytes on disk of the tensor `name`."""
        return self._entry(name).nbytes

    def nbytes(self) -> int:
        """Bytes of all tensors together, headers not counted."""
        return sum(entry.nbytes for entry in self._entries.values())

    def load(self, name: str, device: torch.device | str = "cpu") -> torch.Tensor:
        """The tensor `name` as it is on disk. Raises `MissingShardError` if there is none."""
        return read_tensor(self._entry(name)).to(device)

    def load_packed(self, module: str, device: torch.device | str = "cpu") -> PackedTensor:
        """The packed weight of `module`, whatever the producer, in the layout of `PackedTensor`.

        A multiplier (ModelOpt) becomes the divisor ``1 / multiplier`` in fp32. Blocks whose scale is NaN
        (mxfp4: or above 2^125) or a global scale that is not a positive number are replaced by harmless ones
        where all their codes are zero (old exporters did this for zero weights), and refused elsewhere.

        Raises:
            NotQuantizedError: the weight is not packed.
            LayoutError: shapes, dtypes or values that do not fit together.
        """
        if self.quantization is None or module not in self._packed:
            kind = "16-bit" if self.quantization is None else self.quantization.producer
            raise NotQuantizedError(
                f"{module} is not packed in {self.path}: a {kind} checkpoint with {len(self._packed)} packed "
                "modules; "
                "quantize it with `qerl quantize`"
            )
        if self.quantization.format == "nf4":
            return self._load_nf4(module).to(device)
        if self.quantization.format == "mxfp4":
            return self._load_mxfp4(module).to(device)
        return self._load_nvfp4(module).to(device)

    def _load_nvfp4(self, module: str) -> PackedTensor:
        is_divisor = self.quantization is not None and self.quantization.producer == "compressed-tensors"
        codes = self.load(f"{module}.weight_packed" if is_divisor else f"{module}.weight")
        scale = self.load(f"{module}.weight_scale")
        stored = self.load(f"{module}.weight_global_scale" if is_divisor else f"{module}.weight_scale_2")
        if codes.ndim != 2 or codes.dtype != torch.uint8:
            raise LayoutError(f"{module}: codes must be uint8 [N, K/2], not {codes.dtype} {list(codes.shape)}")
        rows, columns = codes.shape[0], codes.shape[1] * 2
        expected = (rows, columns // NVFP4_BLOCK_SIZE)
        if (
            columns % NVFP4_BLOCK_SIZE
            or tuple(scale.shape) != expected
            or scale.dtype != torch.float8_e4m3fn
            or stored.numel() != 1
            or not stored.is_floating_point()
        ):
            raise LayoutError(
                f"{module}: codes [{rows}, {columns // 2}] are a {rows}x{columns} weight, whose block scales "
                "must be "
                f"float8_e4m3fn {list(expected)} and whose global scale one number; the file has "
                f"{scale.dtype} "
                f"{list(scale.shape)} and {stored.dtype} {list(stored.shape)} (swizzled or transposed scales "
                "are not "
                "read here)"
            )
        divisor = stored.float().reshape(1)
        if not is_divisor:
            divisor = 1.0 / divisor
        scale, divisor = _without_invalid_scales(module, codes, scale, divisor)
        return PackedTensor("nvfp4", (rows, columns), codes, scale, divisor)

    def _load_mxfp4(self, module: str) -> PackedTensor:
        codes, scale = self.load(f"{module}.weight_packed"), self.load(f"{module}.weight_scale")
        fits = codes.ndim == scale.ndim == 2 and codes.dtype == scale.dtype == torch.uint8
        if not fits or scale.shape[0] != codes.shape[0] or scale.shape[1] * MXFP4_BLOCK_SIZE != codes.shape[1] * 2:
            raise LayoutError(
                f"{module}: an mxfp4 weight has codes uint8 [N, K/2] and block scales uint8 [N, K/{MXFP4_BLOCK_SIZE}]; "
                f"the file has {codes.dtype} {list(codes.shape)} and {scale.dtype} {list(scale.shape)}"
            )
        if f"{module}.weight_global_scale" in self._entries:
            raise LayoutError(f"{module}: it has a weight_global_scale, which MXFP4 does not; is it NVFP4?")
        invalid = scale > LARGEST_SCALE_BYTE
        if bool(invalid.any()):
            wrong = invalid & (codes & 0x77).unflatten(1, (-1, MXFP4_BLOCK_SIZE // 2)).ne(0).any(-1)
            if bool(wrong.any()):
                raise LayoutError(
                    f"{module}: {int(wrong.sum())} of {scale.numel()} block scales are NaN (255) or above 2^125 with "
                    "codes that are not zero; the checkpoint is damaged"
                )
            scale = scale.masked_fill(invalid, 0)
        shape = (codes.shape[0], codes.shape[1] * 2)
        return PackedTensor("mxfp4", shape, codes, scale.view(torch.float8_e8m0fnu), None)

    def _load_nf4(self, module: str) -> PackedTensor:
        weight = f"{module}.weight"
        state = json.loads(bytes(self.load(f"{weight}.quant_state.bitsandbytes__nf4").tolist()))
        if state.get("quant_type") != "nf4" or state.get("blocksize") != NF4_BLOCK_SIZE:
            raise UnsupportedQuantizationError(
                f"{module}: {state.get('quant_type')} with blocks of {state.get('blocksize')}; "
                f"supported: nf4 with blocks of {NF4_BLOCK_SIZE}"
            )
        if self.load(f"{weight}.quant_map").tolist() != torch.tensor(CODE_BOOK).tolist():
            raise LayoutError(f"{module}: its quant_map is not the NF4 code book")
        rows, columns = state["shape"]
        raw = self.load(weight).view(torch.uint8)
        absmax = self._load_absmax(weight, state)
        blocks = -(-rows * columns // NF4_BLOCK_SIZE)
        if columns % 2 or raw.numel() * 2 != rows * columns or absmax.numel() != blocks:
            raise LayoutError(
                f"{module}: a {rows}x{columns} nf4 weight needs an even width, {rows * columns // 2} bytes "
                "and "
                f"{blocks} absmax; the file has {raw.numel()} and {absmax.numel()}"
            )
        if not bool(torch.isfinite(absmax).all()):
            raise LayoutError(f"{module}: {int((~torch.isfinite(absmax)).sum())} absmax are not finite")
        aligned = columns % NF4_BLOCK_SIZE == 0
        codes = swap_nibbles(raw).reshape(rows, columns // 2)
        return PackedTensor("nf4", (rows, columns), codes, absmax.reshape(rows, -1) if aligned else absmax, None)

    def _load_absmax(self, weight: str, state: dict[str, Any]) -> torch.Tensor:
        """fp32 absmax per block; double quantization (QLoRA, section 3) is undone."""
        absmax = self.load(f"{weight}.absmax").flatten()
        if f"{weight}.nested_absmax" not in self._entries:
            return absmax.float()
        if state.get("nested_blocksize") != _NESTED_BLOCK_SIZE or absmax.dtype != torch.uint8:
            raise LayoutError(
                f"{weight}: double-quantized absmax is {absmax.dtype} in blocks of "
                f"{state.get('nested_blocksize')}; "
                f"expected uint8 in blocks of {_NESTED_BLOCK_SIZE}"
            )
        table = self.load(f"{weight}.nested_quant_map").float()
        outer = self.load(f"{weight}.nested_absmax").float().repeat_interleave(_NESTED_BLOCK_SIZE)
        return table[absmax.int()] * outer[: absmax.numel()] + float(state["nested_offset"])

    def _belongs_to_packed(self, name: str) -> bool:
        module, separator, rest = name.rpartition(".weight")
        # "weight", "weight_packed", "weight.absmax", ... are parts; "weight" inside a module name is not
        # last.
        return bool(separator) and module in self._packed and (not rest or rest[0] in "._")

    def _entry(self, name: str) -> TensorEntry:
        if name not in self._entries:
            raise MissingShardError(f"{self.path} has no tensor {name} (it has {len(self._entries)} tensors)")
        return self._entries[name]

    def _read_json(self, file_name: str) -> dict[str, Any]:
        file = self.path / file_name
        if not file.is_file():
            raise CheckpointError(f"{self.path} has no {file_name}; it is not a Hugging Face checkpoint folder")
        try:
            return json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise CheckpointError(f"{file} is not valid JSON: {error}") from error


def _read_entries(path: Path) -> dict[str, TensorEntry]:
    """All tensors of the checkpoint folder; checks that index, shards and headers agree."""
    if (path / SINGLE_FILE).is_file():
        return read_header(path / SINGLE_FILE)
    if not (path / INDEX_FILE).is_file():
        raise _no_weights(path)
    weight_map: dict[str, str] = json.loads((path / INDEX_FILE).read_text(encoding="utf-8"))["weight_map"]
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if not (path / shard).is_file()]
    if missing:
        lost = sum(shard in missing for shard in weight_map.values())
        raise MissingShardError(
            f"{path}: {len(missing)} of {len(shards)} shards are missing ({', '.join(missing[:3])}), which "
            "hold "
            f"{lost} of {len(weight_map)} tensors; fetch them again"
        )
    headers = {shard: read_header(path / shard) for shard in shards}
    absent = [name for name, shard in weight_map.items() if name not in headers[shard]]
    if absent:
        raise MissingShardError(
            f"{path}: the index places {len(absent)} tensors in shards that lack them, first {absent[0]} in "
            f"{weight_map[absent[0]]}; index and shards are of different saves"
        )
    return {name: headers[shard][name] for name, shard in weight_map.items()}


def _no_weights(path: Path) -> CheckpointError:
    """The error for a folder without ``model.safetensors`` and without an index."""
    pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in path.glob(pattern))
    if pickles:
        return UnsafeCheckpointError(
            f"{path} holds only pickle weights ({', '.join(pickles[:3])}), which can run code when loaded; "
            "convert "
            f"them: AutoModelForCausalLM.from_pretrained({str(path)!r}).save_pretrained(NEW_DIR)"
        )
    others = sorted(file.name for file in path.glob("*.safetensors"))
    detail = f"it has {', '.join(others[:3])} but no {INDEX_FILE}" if others else "no safetensors file at all"
    return MissingShardError(f"{path} has no {SINGLE_FILE}: {detail}")


def _without_invalid_scales(
    module: str, codes: torch.Tensor, scale: torch.Tensor, divisor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """NaN block scales and an invalid global scale replaced where only zero codes depend on them."""
    valid = bool(torch.isfinite(divisor).all()) and float(divisor) > 0.0
    invalid_blocks = torch.isnan(scale.float())
    if valid and not bool(invalid_blocks.any()):
        return scale, divisor
    # Bit 3 of a nibble is the sign: a byte without other bits is a pair of zeros.
    nonzero = (codes & 0x77).reshape(codes.shape[0], -1, NVFP4_BLOCK_SIZE // 2).ne(0).any(-1)
    wrong = nonzero if not valid else nonzero & invalid_blocks
    if bool(wrong.any()):
        raise LayoutError(
            f"{module}: {int(invalid_blocks.sum())} of {scale.numel()} block scales are NaN and the global "
            "scale is "
            f"{float(divisor)}, with non-zero codes in {int(wrong.sum())} blocks; the checkpoint is damaged"
        )
    repaired = torch.where(invalid_blocks, EMPTY_BLOCK_SCALE, scale.float()).to(torch.float8_e4m3fn)
    return repaired, divisor if valid else torch.ones_like(divisor)


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)
