"""GGUF files as a source: unpacked by transformers into a plain bf16 checkpoint folder."""

import logging
from pathlib import Path

from qerl.formats.base import FormatError

logger = logging.getLogger(__name__)


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
    """Write the model of `file` to `folder`: bf16 weights, config, generation config, tokenizer, chat
    template.

    The whole model is built in memory (transformers has no streaming reader for GGUF).

    Raises:
        FormatError: transformers cannot read this file, or the `gguf` package is missing.
    """
    # transformers takes seconds to import and nothing else of this package needs it.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(file.parent), gguf_file=file.name, dtype=torch.bfloat16, local_files_only=True
        )
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name, local_files_only=True)
    except ImportError as error:
        raise FormatError(f"reading {file} needs the gguf package (pip install gguf): {error}") from error
    except (ValueError, KeyError, OSError, NotImplementedError) as error:
        raise FormatError(f"transformers cannot read {file}: {error}") from error
    # The weights are plain bf16 by now, but the config still calls them quantized, and saving is refused. The
    # hf_quantizer marks the model in the same way.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    plain = type(model)(model.config).to(torch.bfloat16)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    logger.info("unpacked %s: %d parameters", file, sum(p.numel() for p in plain.parameters()))
