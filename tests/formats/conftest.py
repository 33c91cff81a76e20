"""Tiny random Llama checkpoints on disk."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

MakeLlama = Callable[..., Path]


@pytest.fixture
def make_llama(tmp_path: Path) -> MakeLlama:
    """``make_llama(name, *, shard_size, dtype, edit, **config)`` -> folder of a random 2-layer Llama.

    ``edit(state_dict)`` may change the weights before they are saved.
    """

    def make(
        name: str = "source",
        *,
        shard_size: str = "5GB",
        dtype: torch.dtype = torch.bfloat16,
        edit: Callable[[dict[str, torch.Tensor]], None] | None = None,
        **config: Any,
    ) -> Path:
        from transformers import LlamaConfig, LlamaForCausalLM

        settings = {
            "vocab_size": 96,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "tie_word_embeddings": False,
        }
        torch.manual_seed(1)
        model = LlamaForCausalLM(LlamaConfig(**(settings | config))).to(dtype)
        if edit is not None:
            with torch.no_grad():
                edit(dict(model.named_parameters()))
        folder = tmp_path / name
        model.save_pretrained(folder, max_shard_size=shard_size)
        (folder / "tokenizer.json").write_text('{"version": "1.0"}')
        (folder / "tokenizer_config.json").write_text("{}")
        (folder / "chat_template.jinja").write_text("{{ messages }}")
        return folder

    return make
