"""What belongs to a model beside its weights: config, tokenizer, chat template, licence."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qerl.formats.writer import CheckpointWriter

_COMPANIONS = (
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "chat_template*",
    "additional_chat_templates",
    "*.jinja",
    "*.tiktoken",
    "preprocessor_config.json",
    "processor_config.json",
    "*.py",
    "LICENSE*",
    "NOTICE*",
)


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` (of config.json) for the same model with plain bf16 weights."""
    left_out = ("torch_dtype", "quantization_config")
    return {**{key: value for key, value in config.items() if key not in left_out}, "dtype": "bfloat16"}


def copy_companions(source: Path, writer: CheckpointWriter) -> None:
    """Copy the files beside the weights in the folder `source`; config.json is none of them."""
    for file in sorted({file for pattern in _COMPANIONS for file in source.glob(pattern)}):
        writer.copy(file)
