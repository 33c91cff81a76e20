"""Quantizing a checkpoint, tensor by tensor, without building the model.

Only one fused group of weights and one pending output shard are in memory at a time, so the size of the model
does not matter. The result is a folder that this package, transformers (with compressed-tensors or
bitsandbytes) and vLLM load.
"""

import re
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from qerl.formats.base import (
    SUPPORTED_FORMATS,
    AlreadyQuantizedError,
    CheckpointError,
    FormatError,
    WeightFormat,
    check_finite,
    check_method,
    decibel,
    error_energies,
    get_format,
)
from qerl.formats.checkpoint import CheckpointReader
from qerl.formats.companions import copy_companions, plain_config
from qerl.formats.disk_layout import quantization_config, to_disk
from qerl.formats.gguf import find_gguf, unpack_gguf
from qerl.formats.selection import DEFAULT_KEEP, Selection, check_architecture, layer_kind, select
from qerl.formats.writer import DEFAULT_SHARD_BYTES, CheckpointWriter

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class QuantizeReport:
    """What `quantize` did.

    Attributes:
        format: ``"nvfp4"``, ``"nf4"``, ``"mxfp4"`` or ``"bf16"``.
        method: quantization method.
        quantized: modules stored in 4 bit.
        kept: module -> reason, for every other matrix.
        notes: other decisions (tied head dropped, ...).
        bits_per_weight: bits of codes and scales per quantized weight; 16 for bf16.
        sqnr_db: signal to quantization noise ratio by layer kind (``q_proj``, ...), over all layers.
        bytes_before: weight bytes of the source; for a GGUF file its size, for a folder with one the bf16 size.
        bytes_after: bytes of the safetensors files written.
        seconds: wall time.
        peak_rss_bytes: largest resident memory of this process so far.
    """

    format: str
    method: str
    quantized: tuple[str, ...]
    kept: dict[str, str]
    notes: tuple[str, ...]
    bits_per_weight: float
    sqnr_db: dict[str, float]
    bytes_before: int
    bytes_after: int
    seconds: float
    peak_rss_bytes: int


@dataclass(slots=True)
class _Tally:
    """Sums that become the report."""

    signal: dict[str, float] = field(default_factory=dict)
    noise: dict[str, float] = field(default_factory=dict)
    packed_bytes: int = 0
    packed_weights: int = 0

    def sqnr_db(self) -> dict[str, float]:
        return {kind: decibel(self.signal[kind], self.noise[kind]) for kind in sorted(self.signal)}

    def bits_per_weight(self) -> float:
        return 8.0 * self.packed_bytes / self.packed_weights if self.packed_weights else 16.0


def quantize(
    model: str | Path,
    out: str | Path,
    *,
    format: str = "nvfp4",
    method: str = "rtn",
    keep: Sequence[str] = DEFAULT_KEEP,
    device: torch.device | str | None = None,
    force: bool = False,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    progress: Progress | None = None,
) -> QuantizeReport:
    """Write a quantized copy of the checkpoint `model` to the folder `out`.

    All floating tensors are read as bf16 (fp16 and fp32 are rounded to it first), which is what
    llm-compressor makes of a model loaded in bf16. Members of a fused group (q/k/v, gate/up) share one global
    scale (nvfp4). A tied output head stays tied. Tokenizer, chat template and generation config are copied.

    Args:
        model: local folder with safetensors weights, a GGUF file, or a folder that holds one GGUF file.
        out: folder to write; appears only when complete.
        format: ``"nvfp4"``, ``"nf4"``, ``"mxfp4"``, or ``"bf16"`` for a plain 16-bit copy.
        method: ``"rtn"``, or ``"mse"`` (nvfp4).
        keep: modules to leave in 16 bit, see `qerl.formats.selection.select`; they add to the output head,
            which always is.
        device: where to compute; the CPU by default. The result does not depend on it.
        force: replace an existing checkpoint at `out`.
        max_shard_bytes: size of an output file.
        progress: called with (source bytes done, source bytes in all, name of the tensor done).

    Raises:
        FileNotFoundError: no such source.
        FileExistsError: `out` exists, see `CheckpointWriter`.
        FormatError: every other named error of `qerl.formats.base`.
    """
    started = time.perf_counter()
    weight_format = _checked_format(format, method)
    where = _checked_device(device)
    source, target = Path(model).absolute(), Path(out).absolute()
    _check_apart(source, target)
    writer = CheckpointWriter(target, force=force, max_shard_bytes=max_shard_bytes)
    tally = _Tally()
    with _as_folder(source, target) as folder:
        reader = CheckpointReader(folder)
        _check_source(reader)
        dropped, notes = _tied_head(reader)
        selection = _select(reader, dropped, weight_format, keep)
        with writer:
            work = _Copy(reader, writer, weight_format, method, where, tally, progress)
            work.run(selection, dropped)
            _write_companions(reader, writer, weight_format, selection)
    return QuantizeReport(
        format=format,
        method=method,
        quantized=tuple(module for group in selection.groups for module in group),
        kept=selection.kept,
        notes=notes + _stacked_notes(reader),
        bits_per_weight=tally.bits_per_weight(),
        sqnr_db=tally.sqnr_db(),
        bytes_before=source.stat().st_size if source.is_file() else reader.nbytes(),
        bytes_after=sum(file.stat().st_size for file in target.glob("*.safetensors")),
        seconds=time.perf_counter() - started,
        peak_rss_bytes=_peak_rss_bytes(),
    )


@dataclass(slots=True)
class _Copy:
    """One pass over the source: packs the selected groups, copies the rest as bf16."""

    reader: CheckpointReader
    writer: CheckpointWriter
    weight_format: WeightFormat | None
    method: str
    device: torch.device
    tally: _Tally
    progress: Progress | None

    def run(self, selection: Selection, dropped: frozenset[str]) -> None:
        group_of = {f"{module}.weight": group for group in selection.groups for module in group}
        names = sorted((name for name in self.reader.names() if name not in dropped), key=_natural_order)
        total = sum(self.reader.tensor_bytes(name) for name in names)
        finished: set[str] = set()
        done = 0
        for name in names:
            if name in finished:
                continue
            group = group_of.get(name)
            if group is None:
                self.writer.add(name, self._load_bf16(name))
                members = [name]
            else:
                self._pack(group)
                members = [f"{module}.weight" for module in group]
            finished.update(members)
            done += sum(self.reader.tensor_bytes(member) for member in members)
            if self.progress is not None:
                self.progress(done, total, name)

    def _pack(self, group: tuple[str, ...]) -> None:
        weights = [self._load_bf16(f"{module}.weight").to(self.device) for module in group]
        for module, weight, packed in zip(
            group, weights, self.weight_format.quantize(weights, self.method), strict=True
        ):
            signal, noise = error_energies(weight, self.weight_format.dequantize(packed))
            kind = layer_kind(module)
            self.tally.signal[kind] = self.tally.signal.get(kind, 0.0) + signal
            self.tally.noise[kind] = self.tally.noise.get(kind, 0.0) + noise
            self.tally.packed_bytes += packed.nbytes
            self.tally.packed_weights += weight.numel()
            for name, tensor in to_disk(module, packed).items():
                self.writer.add(name, tensor)

    def _load_bf16(self, name: str) -> torch.Tensor:
        tensor = self.reader.load(name)
        if not tensor.is_floating_point():
            return tensor
        tensor = tensor.to(torch.bfloat16)
        check_finite(tensor, name)
        return tensor


def _select(
    reader: CheckpointReader, dropped: frozenset[str], weight_format: WeightFormat | None, keep: Sequence[str]
) -> Selection:
    shapes = {name: reader.shape(name) for name in reader.names() if name not in dropped}
    if weight_format is None:
        check_architecture(shapes, reader.config)
        return Selection((), {})
    ordered = {name: shapes[name] for name in sorted(shapes, key=_natural_order)}
    return select(ordered, reader.config, weight_format, tuple(dict.fromkeys((*DEFAULT_KEEP, *keep))))


def _stacked_notes(reader: CheckpointReader) -> tuple[str, ...]:
    """A note on weights with more than two dimensions: a silent 16-bit copy of all experts would surprise."""
    stacked = [name for name in reader.names() if len(reader.shape(name)) > 2]
    if not stacked:
        return ()
    share = sum(map(reader.tensor_bytes, stacked)) / reader.nbytes()
    return (
        f"{len(stacked)} tensors of more than two dimensions (stacked experts, convolutions; {share:.0%} of the "
        f"bytes) stay in 16 bit, first {stacked[0]}",
    )


def _checked_format(name: str, method: str) -> WeightFormat | None:
    """The format called `name`, which must know `method`; None for bf16."""
    if name == "bf16":
        if method != "rtn":
            raise FormatError(f"format bf16 has no method {method!r}; it only rounds")
        return None
    if name not in SUPPORTED_FORMATS:
        raise FormatError(f"unknown weight format {name!r}; supported: {', '.join((*SUPPORTED_FORMATS, 'bf16'))}")
    weight_format = get_format(name)
    check_method(weight_format, method)
    return weight_format


def _checked_device(device: torch.device | str | None) -> torch.device:
    try:
        where = torch.device(device or "cpu")
    except RuntimeError as error:
        raise FormatError(f"unknown device {device!r}: {error}") from error
    if where.type == "cuda" and (where.index or 0) >= torch.cuda.device_count():
        raise FormatError(f"device {where} asked for, but there are {torch.cuda.device_count()} CUDA devices")
    return where


def _check_apart(source: Path, target: Path) -> None:
    """Neither path may hold the other: replacing one would delete the other."""
    source, target = source.resolve(), target.resolve()
    if source == target or source in target.parents or target in source.parents:
        raise FormatError(f"source {source} and output {target} overlap; choose a folder beside the source")


def _check_source(reader: CheckpointReader) -> None:
    """Only a 16- or 32-bit checkpoint can be quantized."""
    if reader.quantization is not None:
        raise AlreadyQuantizedError(
            f"{reader.path} is already quantized ({reader.quantization.format}, "
            f"{len(reader.packed_modules())} modules, by {reader.quantization.producer}); start from the "
            "16-bit model"
        )
    floats = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    other = [name for name in reader.names() if name.endswith(".weight") and reader.dtype(name) not in floats]
    if other:
        raise AlreadyQuantizedError(
            f"{reader.path}: {len(other)} weights are not 16- or 32-bit floats, first {other[0]} "
            f"({reader.dtype(other[0])}); start from the 16-bit model"
        )


def _tied_head(reader: CheckpointReader) -> tuple[frozenset[str], tuple[str, ...]]:
    """Names to leave out because they repeat the embedding of a tied model, and notes on it.

    Raises:
        CheckpointError: config.json says tied, the stored head differs from the embedding.
    """
    config = reader.config
    text_config = config.get("text_config") or config
    tied = config.get("tie_word_embeddings", text_config.get("tie_word_embeddings"))
    heads = [name for name in reader.names() if name.endswith("lm_head.weight")]
    embeddings = [name for name in reader.names() if name.endswith("embed_tokens.weight")]
    if not tied or not heads or not embeddings:
        return frozenset(), ()
    if not torch.equal(reader.load(heads[0]), reader.load(embeddings[0])):
        raise CheckpointError(
            f"{reader.path}: tie_word_embeddings is true, but {heads[0]} {list(reader.shape(heads[0]))} "
            "differs from "
            f"{embeddings[0]}; set tie_word_embeddings to false in config.json if the head is meant to be "
            "used"
        )
    return frozenset(heads), (f"{heads[0]} not stored: it equals the tied {embeddings[0]}",)


def _write_companions(
    reader: CheckpointReader,
    writer: CheckpointWriter,
    weight_format: WeightFormat | None,
    selection: Selection,
) -> None:
    config = plain_config(reader.config)
    if weight_format is not None:
        config["quantization_config"] = quantization_config(weight_format.name, selection.ignored())
    writer.add_json("config.json", config)
    copy_companions(reader.path, writer)


@contextmanager
def _as_folder(source: Path, target: Path) -> Iterator[Path]:
    """`source` as a folder of safetensors: itself, or a GGUF model unpacked on the disk of `target`."""
    gguf = find_gguf(source)
    if gguf is None:
        yield source
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.gguf-", dir=target.parent) as folder:
        unpack_gguf(gguf, Path(folder))
        yield Path(folder)


def _natural_order(name: str) -> list[tuple[int, str]]:
    """Sort key under which layer 2 comes before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _peak_rss_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
