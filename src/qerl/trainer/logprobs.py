"""Trainer log-probs: one padding-free forward, every prompt once, the LM head on completion tokens only.

The head (:mod:`qerl.nn.head`) divides the logits by the sampling temperature, so that an unchanged policy has ratio 1
at any temperature, and never holds ``[B, T, vocab]``.
"""

import torch
from torch import nn

from qerl.nn.packing import pack_batch


def packed_logprobs(
    model: nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor, completion_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies of the last ``completion_len`` columns.

    Args:
        model: model with a scoring head (see :func:`qerl.nn.head.install_scoring_head`), wrapped or not.
        input_ids: int64 [B, L], prompts left-padded and completions right-padded.
        attention_mask: [B, L].
        completion_len: C.

    Returns:
        (log-probs [B, C], entropies [B, C]), fp32, zero on padding.
    """
    mask = attention_mask
    nothing_to_score = not bool(mask[:, -completion_len:].any())
    if nothing_to_score:
        # Every completion was masked out (all truncated). The loss must still be 0 with a graph behind it, so one
        # token is scored and its values are multiplied by 0.
        mask = mask.clone()
        mask[0, -completion_len] = 1
    batch = pack_batch(input_ids, mask, completion_len)
    scored = model(
        input_ids=batch.input_ids[None],
        position_ids=batch.position_ids[None],
        packed_sequences=batch.sequences,
        # Transformers passes 4-D masks through; any other would be expanded to [T, T] (ours ignores it).
        attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=input_ids.device),
        score_labels=batch.labels,
    )
    logprobs, entropies = (batch.unpack(values) for values in scored)
    return (logprobs * 0.0, entropies * 0.0) if nothing_to_score else (logprobs, entropies)
