"""A trained adapter merged into 16-bit weights, tensor by tensor, without building the model.

    merged = bf16(base + s B A)        base decoded from 4 bits, everything in fp32, rounded once

The base of a run on 4-bit weights is what those bits decode to, not the 16-bit weights they were made from: the
adapter was trained on top of the former. So a 16-bit folder that was quantized while loading (``weights: nvfp4``) is
quantized here in the same way first. So is a head that the run held in NVFP4, which then is stored apart from a tied
embedding.
"""

import json
import math
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig
from peft.utils.other import get_pattern_key
from safetensors import safe_open

from qerl.formats.base import FUSED_GROUPS, PackedTensor, get_format
from qerl.formats.checkpoint import CheckpointReader, CheckpointWriter
from qerl.formats.companions import copy_companions, plain_config
from qerl.formats.writer import DEFAULT_SHARD_BYTES
from qerl.nn.loading import quantize_rows, resolve_head, resolve_weights
from qerl.nn.lora import AdapterError, check_lora_config
from qerl.nn.surgery import SINGLE_PROJECTIONS

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class MergeReport:
    """What `merge_adapter` did: adapted modules, the weight format of their base, bytes written."""

    merged: tuple[str, ...]
    weights: str
    total_bytes: int


class AdapterFile:
    """A PEFT LoRA adapter on disk; matrices are read when asked for.

    Args:
        folder: holds adapter_config.json and adapter_model.safetensors.

    Raises:
        AdapterError: no adapter, not plain LoRA, or tensors that are no pairs of A and B.
    """

    def __init__(self, folder: Path) -> None:
        for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
            if not (folder / name).is_file():
                raise AdapterError(f"{folder} holds no PEFT adapter ({name} is missing)")
        config = LoraConfig.from_pretrained(str(folder))
        if not isinstance(config, LoraConfig):
            raise AdapterError(f"{folder} holds a {type(config).__name__}, not LoRA")
        check_lora_config(config)
        self.folder, self.config = folder, config
        with safe_open(folder / ADAPTER_WEIGHTS, framework="pt") as file:
            names = set(file.keys())
        self.modules = sorted(
            name.removeprefix(_PREFIX).removesuffix(".lora_A.weight")
            for name in names
            if name.endswith("lora_A.weight")
        )
        expected = {self._name(module, side) for module in self.modules for side in "AB"}
        if names != expected or not names:
            odd = sorted(names ^ expected)
            raise AdapterError(
                f"{folder} holds {len(names)} tensors that are no pairs of LoRA matrices (such as "
                f"{odd[0] if odd else 'none at all'}); only plain LoRA can be merged"
            )

    @staticmethod
    def _name(module: str, side: str) -> str:
        return f"{_PREFIX}{module}.lora_{side}.weight"

    def delta(self, module: str, device: torch.device) -> torch.Tensor:
        """``s B A`` in fp32 ``[N, K]``; rank and alpha patterns and rsLoRA's scaling are honoured.

        Raises:
            AdapterError: the stored rank is not the config's.
        """
        config = self.config
        rank = config.rank_pattern.get(get_pattern_key(config.rank_pattern.keys(), module), config.r)
        alpha = config.alpha_pattern.get(get_pattern_key(config.alpha_pattern.keys(), module), config.lora_alpha)
        with safe_open(self.folder / ADAPTER_WEIGHTS, framework="pt") as file:
            a, b = (file.get_tensor(self._name(module, side)).to(device, torch.float32) for side in "AB")
        if a.shape[0] != rank or b.shape[1] != rank:
            raise AdapterError(f"{module} has rank {a.shape[0]} in {self.folder}, its config says {rank}")
        return b @ a * (alpha / (math.sqrt(rank) if config.use_rslora else rank))


def merge_adapter(
    base: str | Path,
    adapter: str | Path,
    out: str | Path,
    *,
    weights: str = "auto",
    head: str = "auto",
    device: torch.device | str = "cpu",
    force: bool = False,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> MergeReport:
    """Write the merged model as a plain bf16 checkpoint with tokenizer, which transformers and vLLM load.

    One fused group and one pending shard are in memory at a time.

    Args:
        base: folder of the model that was trained, 16-bit or packed.
        adapter: PEFT adapter folder.
        out: folder to write; appears only when complete.
        weights, head: what the run's were, see :func:`qerl.nn.loading.load_model`.
        device: where to compute.
        force: replace a checkpoint at `out`.
        max_shard_bytes: size of an output file.

    Raises:
        AdapterError: no plain LoRA adapter, or one of another model.
        FileExistsError, FormatError: see `CheckpointWriter` and `CheckpointReader`.
        ModelLoadError: `weights` or `head` does not fit the base.
    """
    reader, where = CheckpointReader(base), torch.device(device)
    found = AdapterFile(Path(adapter))
    weights, head = resolve_weights(weights, reader), resolve_head(head, reader)
    waiting = set(found.modules)
    with CheckpointWriter(out, force=force, max_shard_bytes=max_shard_bytes) as writer:
        for name, weight in _base_tensors(reader, weights, head, where):
            module = name.removesuffix(".weight")
            if module in waiting:
                waiting.remove(module)
                delta = found.delta(module, where)
                if delta.shape != weight.shape:
                    raise AdapterError(
                        f"{module} is {list(weight.shape)} in {base}, the adapter's is {list(delta.shape)}: was it "
                        "trained on another model?"
                    )
                weight = weight.float() + delta
            writer.add(name, weight.to(torch.bfloat16) if weight.is_floating_point() else weight)
        if waiting:
            raise AdapterError(
                f"{len(waiting)} of {len(found.modules)} adapted modules are not in {base}, such as {min(waiting)}: "
                "was the adapter trained on another model?"
            )
        untied = {} if head == "bf16" else {"tie_word_embeddings": False}
        writer.add_json("config.json", plain_config(reader.config) | untied)
        copy_companions(reader.path, writer)
    return MergeReport(tuple(found.modules), weights, writer.total_bytes)


def export_adapter(adapter: str | Path, out: str | Path, *, base: str | None = None, force: bool = False) -> None:
    """Copy the adapter alone (a plain PEFT adapter) to `out`, naming `base` as the model it belongs to.

    Raises:
        AdapterError: no plain LoRA adapter.
        FileExistsError: `out` exists, without `force`; or, with it, is no adapter folder.
    """
    source, target = AdapterFile(Path(adapter)).folder, Path(out).absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        if not force:
            raise FileExistsError(f"{target} exists; choose another folder, or use --force (force=True) to replace it")
        if not (target / ADAPTER_CONFIG).is_file():
            raise FileExistsError(f"{target} is no adapter folder, so --force does not replace it; remove it yourself")
    target.parent.mkdir(parents=True, exist_ok=True)
    config = json.loads((source / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    if base is not None:
        config["base_model_name_or_path"] = base
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.incomplete-", dir=target.parent) as folder:
        made = Path(folder) / "adapter"
        made.mkdir()
        (made / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        shutil.copyfile(source / ADAPTER_WEIGHTS, made / ADAPTER_WEIGHTS)
        if target.exists():
            target.rename(Path(folder) / "replaced")
        made.rename(target)


def _base_tensors(
    reader: CheckpointReader, weights: str, head: str, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the model by its name in a plain checkpoint; packed weights decoded to fp32."""
    for module in reader.packed_modules():
        yield f"{module}.weight", _decode(reader.load_packed(module, device))
    plain = dict.fromkeys(reader.plain_names())
    quantized = () if weights == "bf16" or reader.quantization is not None else _projection_groups(plain)
    for group in quantized:
        tensors = [reader.load(f"{module}.weight", device) for module in group]
        weight_format = get_format(weights)
        if tensors[0].shape[1] % weight_format.block_size == 0:
            packed = weight_format.quantize([tensor.to(torch.bfloat16) for tensor in tensors])
            tensors = [_decode(part) for part in packed]
        for module, tensor in zip(group, tensors, strict=True):
            del plain[f"{module}.weight"]
            yield f"{module}.weight", tensor
    if head != "bf16" and not reader.is_packed("lm_head"):
        yield _HEAD, _decoded_head(reader, head, device)
        plain.pop(_HEAD, None)
    for name in plain:
        yield name, reader.load(name, device)


def _decoded_head(reader: CheckpointReader, head: str, device: torch.device) -> torch.Tensor:
    """What the run's packed head decodes to, fp32; made of the embedding where the two were tied."""
    embeddings = [name for name in reader.names() if name.endswith("embed_tokens.weight")]
    source = embeddings[0] if reader.config.get("tie_word_embeddings") and embeddings else _HEAD
    return _decode(quantize_rows(get_format(head), reader.load(source, device).to(torch.bfloat16)))


def _projection_groups(names: dict[str, None]) -> list[tuple[str, ...]]:
    """The groups that :func:`qerl.nn.loading.load_model` quantizes, from the names of the weights."""
    groups = []
    for kinds in (*FUSED_GROUPS, *((kind,) for kind in SINGLE_PROJECTIONS)):
        ending = f".{kinds[0]}.weight"
        for prefix in [name.removesuffix(ending) for name in names if name.endswith(ending)]:
            members = tuple(f"{prefix}.{kind}" for kind in kinds)
            if all(f"{member}.weight" in names for member in members):
                groups.append(members)
    return groups


def _decode(packed: PackedTensor) -> torch.Tensor:
    return get_format(packed.format).dequantize(packed)
