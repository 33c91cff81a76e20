"""Does the engine sample from the policy that is trained? Re-score what it sampled, at every rollout.

The probe runs the trainer's forward under the same noise, so its difference is arithmetic alone (summation order,
rounding); the shift that AQN causes on purpose is measured apart from it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from qerl.rollout.core import CompletionOutput
from qerl.trainer.logprobs import packed_logprobs


class ParityError(RuntimeError):
    """Engine and trainer run different policies."""


@dataclass(frozen=True, slots=True)
class Parity:
    """Absolute log-prob differences engine vs trainer over ``tokens`` sampled tokens."""

    tokens: int
    mean: float
    max: float


def effective_sample_size(ratios: torch.Tensor) -> float:
    """``(sum w)^2 / (n sum w^2)`` of importance ratios [n], in (0, 1]; 1 when all are equal."""
    weights = ratios.double()
    total = weights.square().sum()
    return float(weights.sum().square() / (weights.numel() * total)) if total > 0 else 0.0


def probe_parity(
    model: nn.Module,
    prompts: Sequence[list[int]],
    outputs: Sequence[CompletionOutput],
    num_tokens: int,
    pad_id: int,
) -> Parity:
    """Re-score at least ``num_tokens`` sampled tokens (or all there are), whole completions in order.

    Args:
        model: the trainer's model, noise slots as they were while sampling.
        prompts: token ids of each row.
        outputs: the engine's sample of each row.
        num_tokens: tokens wanted.
        pad_id: any valid token id.
    """
    rows, seen = [], 0
    for prompt, output in zip(prompts, outputs, strict=True):
        if seen >= num_tokens:
            break
        if output.token_ids:
            rows.append((prompt, output))
            seen += len(output.token_ids)
    if not rows:
        return Parity(0, 0.0, 0.0)
    trainer, engine = rescore(model, rows, pad_id)
    difference = (trainer - engine).abs()
    return Parity(difference.numel(), float(difference.mean()), float(difference.max()))


@torch.no_grad()
def rescore(
    model: nn.Module, rows: Sequence[tuple[list[int], CompletionOutput]], pad_id: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of every sampled token by the trainer's forward of one batch, and as the engine gave them.

    Args:
        model: with a scoring head at the temperature of sampling.
        rows: (prompt, sample), none without tokens.
        pad_id: any valid token id.

    Returns:
        (trainer's, engine's), fp32 [tokens] on the CPU, row after row.
    """
    prompt_len = max(len(p) for p, _ in rows)
    completion_len = max(len(o.token_ids) for _, o in rows)
    device = next(model.parameters()).device
    ids = torch.full((len(rows), prompt_len + completion_len), pad_id, dtype=torch.long)
    mask = torch.zeros_like(ids)
    sampled = torch.zeros(len(rows), completion_len)
    for row, (prompt, output) in enumerate(rows):
        span = slice(prompt_len - len(prompt), prompt_len + len(output.token_ids))
        ids[row, span] = torch.tensor(prompt + output.token_ids)
        mask[row, span] = 1
        sampled[row, : len(output.token_ids)] = torch.tensor(output.temperature_logprobs)
    logprobs, _ = packed_logprobs(model, ids.to(device), mask.to(device), completion_len)
    real = mask[:, prompt_len:].bool()
    return logprobs.cpu()[real], sampled[real]
