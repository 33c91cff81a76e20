"""Whether the engine's log-probs are right, at any depth: it may not be much farther from fp32 than transformers is.

How far two 16-bit forwards are apart says little by itself: rounding adds up over the layers. Random models with the
spread of logits of Qwen2.5-32B (bf16 on a CPU; mean over tokens) are this far from their own fp32 forward:

=======================  =====  =====  =====  =====
layers                       8     16     32     64
=======================  =====  =====  =====  =====
transformers' forward    0.030  0.050  0.067  0.111
engine                   0.030  0.052  0.068  0.117
engine with FP8 cache    0.185  0.283  0.402  0.515
=======================  =====  =====  =====  =====

A wrong engine is off by the spread of the logits, which is about 1.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from qerl.benchmarking.results import Row
from qerl.benchmarking.subject import Subject
from qerl.benchmarking.timing import CheckFailedError
from qerl.nn.fp32_copy import fp32_copy
from qerl.nn.head import chunked_logprobs
from qerl.nn.quant_head import head_weight
from qerl.rollout.core import CompletionOutput

# By dtype of the KV cache: (how many times as far from fp32 as transformers the engine may be, and how much on top of
# it, since the means of few tokens scatter). The engine was at 0.9 to 1.1 times, with an FP8 cache, which transformers
# does not have, at 5.0 to 6.2 times, whatever the depth.
LIMITS = {"bf16": (2.0, 0.02), "fp32": (2.0, 1e-3), "fp8": (10.0, 0.1)}


@torch.no_grad()
def check_agreement(subject: Subject, prompt: list[int], output: CompletionOutput, tokens: int = 64) -> Row:
    """Mean differences of log-probs over the first ``tokens`` tokens of ``output``: engine and transformers
    (``parity``), and each of them and a forward with fp32 layers (``engine_fp32``, ``transformers_fp32``).

    Raises:
        CheckFailedError: the engine is too far from fp32.
    """
    drawn = output.token_ids[:tokens]
    engine = torch.tensor(output.logprobs[: len(drawn)], device=subject.device)
    causal = subject.model.get_base_model() if hasattr(subject.model, "get_base_model") else subject.model
    theirs = _score(causal, subject, prompt, drawn)
    with fp32_layers(causal.base_model.layers):
        exact = _score(causal, subject, prompt, drawn)
    parity, off, their_off = (
        round(float((a - b).abs().mean()), 6) for a, b in ((engine, theirs), (engine, exact), (theirs, exact))
    )
    factor, floor = LIMITS[subject.kv_name]
    limit = factor * their_off + floor
    if not off <= limit:
        raise CheckFailedError(
            f"the engine's log-probs are off an fp32 forward by {off:.4f} a token on average, over the limit of "
            f"{limit:.4f} ({factor:g} times the {their_off:.4f} of transformers, and {floor:g})"
        )
    return {"parity": parity, "engine_fp32": off, "transformers_fp32": their_off}


def _score(causal: nn.Module, subject: Subject, prompt: list[int], drawn: list[int]) -> torch.Tensor:
    """Log-probs of ``drawn`` behind ``prompt`` under the forward of transformers."""
    ids = torch.tensor([prompt + drawn], device=subject.device)
    hidden = causal.base_model(ids, use_cache=False).last_hidden_state[0]
    rows = hidden[len(prompt) - 1 : len(prompt) - 1 + len(drawn)].to(subject.runner.dtype)
    return chunked_logprobs(rows, head_weight(causal), torch.tensor(drawn, device=subject.device))[0]


@contextmanager
def fp32_layers(layers: nn.ModuleList) -> Iterator[None]:
    """Let decoder ``layers`` (mutated within the block) compute in fp32 with dequantized weights.

    Those of one layer are held at a time: a copy of the whole model would take 4 bytes a weight.
    """
    kept = list(layers)
    for index, layer in enumerate(kept):
        layers[index] = _Fp32Layer(layer)
    try:
        yield
    finally:
        for index, layer in enumerate(kept):
            layers[index] = layer


class _Fp32Layer(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Of an fp32 copy, which is dropped again."""
        return fp32_copy(self.layer)(hidden.float(), **kwargs)
