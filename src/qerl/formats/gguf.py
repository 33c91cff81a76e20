"""GGUF files as a source: unpacked into a plain bf16 checkpoint folder.

Names, permutations and configuration are transformers' (``modeling_gguf_pytorch_utils``), decoding is the gguf
package's. For architectures whose tensors are converted one by one, one tensor is in memory at a time; the others
(experts that are stacked, transposed weights) are built whole by transformers.
"""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from qerl.formats.base import FormatError
from qerl.formats.writer import CheckpointWriter

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)

# The unpacked folder is read once and deleted: small shards, so that little of it is in memory.
_SHARD_BYTES = 1 << 26


def find_gguf(source: Path) -> Path | None:
    """The GGUF file that `source` is or holds; None for a folder that has config.json or no GGUF file.

    Raises:
        FormatError: the folder holds several GGUF files.
    """
    if source.suffix.lower() == ".gguf":
        if not source.is_file():
            raise FileNotFoundError(f"no file {source}")
        return source
    if not source.is_dir() or (source / "config.json").is_file():
        return None
    files = sorted(source.glob("*.gguf"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:5])
        raise FormatError(f"{source} holds {len(files)} GGUF files ({names}); name one of them")
    return files[0] if files else None


def unpack_gguf(file: Path, folder: Path) -> None:
    """Write the model of `file` to the new folder `folder`: bf16 weights, config, generation config, tokenizer, chat
    template.

    Raises:
        FormatError: transformers cannot read this file, tensors are missing, or there is no `gguf` package.
    """
    # transformers takes seconds to import and nothing else of this package needs it.
    from transformers import AutoConfig, AutoTokenizer

    try:
        config = AutoConfig.from_pretrained(str(file.parent), gguf_file=file.name, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name, local_files_only=True)
        model = _stream(file, folder, config)
        if model is None:
            model = _build(file)
            model.save_pretrained(folder)
    except ImportError as error:
        raise FormatError(f"reading {file} needs the gguf package (pip install gguf): {error}") from error
    except (KeyError, OSError, NotImplementedError) as error:
        raise FormatError(f"transformers cannot read {file}: {error}") from error
    except ValueError as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"transformers cannot read {file}: {error}") from error
    tokenizer.save_pretrained(folder)
    logger.info("unpacked %s: %d parameters", file, sum(p.numel() for p in model.parameters()))


def _stream(file: Path, folder: Path, config: "PretrainedConfig") -> "PreTrainedModel | None":
    """Write config and weights tensor by tensor; returns the model on the meta device.

    None, and nothing written, where transformers' conversion of this architecture needs several tensors at once.
    """
    from gguf import GGUFReader, dequantize
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        LlamaTensorProcessor,
        TensorProcessor,
        get_gguf_hf_weights_map,
    )

    reader = GGUFReader(file)
    architecture = reader.fields["general.architecture"].contents()
    processor_class = TENSOR_PROCESSORS.get(architecture, TensorProcessor)
    if processor_class not in (TensorProcessor, LlamaTensorProcessor):
        logger.info("%s: the architecture %s is built whole in memory", file, architecture)
        return None
    processor = processor_class(config=config.to_dict())
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    names = get_gguf_hf_weights_map(model, processor)
    # What two names share (a tied head) is stored once, under the first name.
    wanted = {name: tensor.shape for name, tensor in model.named_parameters()}
    with CheckpointWriter(folder, max_shard_bytes=_SHARD_BYTES) as writer:
        for tensor in reader.tensors:
            result = processor.process(weights=dequantize(tensor.data, tensor.tensor_type), name=tensor.name)
            name = names.get(result.name)
            if name not in wanted:
                continue
            weight = torch.from_numpy(result.weights.copy()).to(torch.bfloat16)
            if weight.shape != wanted.pop(name):
                raise FormatError(f"{file}: {tensor.name} is {list(weight.shape)}, which is not the shape of {name}")
            writer.add(name, weight)
        if wanted:
            raise FormatError(f"{file} lacks {len(wanted)} tensors of a {architecture} model, such as {min(wanted)}")
        writer.add_json("config.json", {})
    _save_config(model, folder)
    return model


def _save_config(model: "PreTrainedModel", folder: Path) -> None:
    """config.json and generation_config.json as `save_pretrained` writes them."""
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)


def _build(file: Path) -> "PreTrainedModel":
    """The whole model as transformers reads it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        str(file.parent), gguf_file=file.name, dtype=torch.bfloat16, local_files_only=True
    )
    # The weights are plain bf16 by now, but the config still calls them quantized, and saving is refused. The
    # hf_quantizer marks the model in the same way.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    plain = type(model)(model.config).to(torch.bfloat16)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    return plain
