"""Padding-free batches that run every prompt once per group.

A group's samples share their prompt. The packed row holds each distinct prompt once (all but its last token), then
one segment per sample: the prompt's last token and the completion without its own last token. Every token of a
segment predicts exactly one completion token, so the head runs on segments only, and the linears of the decoder see
``P + G C`` instead of ``G (P + C)`` tokens per group of G. Causal attention makes this exact: a prompt's hidden
states do not depend on what follows. Segments attend to their prompt's keys and to themselves (see
:mod:`qerl.nn.attention`).
"""

from dataclasses import dataclass

import torch

from qerl.nn.attention import PackedSequences


@dataclass(frozen=True)
class PackedBatch:
    """A [B, L] batch as one row of T tokens.

    Attributes:
        input_ids: int64 [T]; prefixes of distinct prompts, then the segments of rows 0..B-1.
        position_ids: int64 [T].
        labels: int64 [T], the next token on segments, -100 on prefixes.
        sequences: what attention needs.
        completion_mask: bool [B, C], where the segments' outputs belong.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor
    sequences: PackedSequences
    completion_mask: torch.Tensor

    def unpack(self, values: torch.Tensor) -> torch.Tensor:
        """Outputs of the scored rows (labels >= 0), in order, to [B, C]; zero on padding."""
        return values.new_zeros(self.completion_mask.shape).masked_scatter(self.completion_mask, values)


def pack_batch(input_ids: torch.Tensor, attention_mask: torch.Tensor, completion_len: int) -> PackedBatch:
    """Pack left-padded prompts and right-padded completions.

    Args:
        input_ids: int64 [B, L]; the last ``completion_len`` columns are the completions.
        attention_mask: [B, L], 1 on real tokens; every prompt has at least one. Rows without completion tokens
            (masked out by the trainer) get no segment.

    Raises:
        ValueError: a row without prompt, or no completion token in the whole batch.
    """
    prompt_len = input_ids.shape[1] - completion_len
    mask = attention_mask.bool()
    prompt_mask, completion_mask = mask[:, :prompt_len], mask[:, prompt_len:]
    if prompt_len == 0 or not bool(prompt_mask[:, -1].all()):
        raise ValueError("every row needs a left-padded prompt of at least one token before its completion")
    if not bool(completion_mask.any()):
        raise ValueError("no completion token in the batch")
    prompts = input_ids[:, :prompt_len].masked_fill(~prompt_mask, -1)
    distinct, group = torch.unique(prompts, dim=0, return_inverse=True)
    prefix_mask = distinct[:, :-1] >= 0
    prefix_lengths = prefix_mask.sum(1)
    segment_inputs = torch.cat([input_ids[:, prompt_len - 1 : prompt_len], input_ids[:, prompt_len:-1]], dim=1)
    labels = input_ids[:, prompt_len:][completion_mask]
    row_prefix = prefix_lengths[group]
    columns = torch.arange(completion_len, device=input_ids.device)
    prefix_positions = prefix_mask.long().cumsum(1) - 1
    has_segment = completion_mask.any(1)
    return PackedBatch(
        input_ids=torch.cat([distinct[:, :-1][prefix_mask], segment_inputs[completion_mask]]),
        position_ids=torch.cat([prefix_positions[prefix_mask], (row_prefix[:, None] + columns)[completion_mask]]),
        labels=torch.cat([labels.new_full((int(prefix_lengths.sum()),), -100), labels]),
        sequences=PackedSequences.shared_prefix(
            prefix_lengths, completion_mask.sum(1)[has_segment], group[has_segment]
        ),
        completion_mask=completion_mask,
    )
