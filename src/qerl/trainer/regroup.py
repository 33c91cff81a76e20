"""Keep groups together when TRL splits a generated batch into micro-batches.

TRL shuffles rows before it splits, which scatters each group over all micro-batches; the packed forward would then run
nearly every prompt in every one of them. Rows are put back beside their group here; the order of the groups stays the
shuffled one.
"""

from typing import Any

import torch


def group_order(prompt_ids: torch.Tensor, prompt_mask: torch.Tensor) -> torch.Tensor:
    """Row order that keeps equal prompts together, groups in the order of their first row.

    Args:
        prompt_ids: int64 [B, P], left-padded; ``prompt_mask``: [B, P].

    Returns:
        int64 [B], a stable permutation.
    """
    keyed = prompt_ids.masked_fill(prompt_mask == 0, -1)
    _, group = torch.unique(keyed, dim=0, return_inverse=True)
    rows = torch.arange(group.shape[0], device=group.device)
    first_row = torch.full_like(rows, group.shape[0]).scatter_reduce_(0, group, rows, "amin")
    return torch.argsort(first_row[group], stable=True)


def regroup(batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Deal the rows of ``batches`` anew, whole groups first; sizes stay the same, per-batch scalars are kept."""
    if len(batches) < 2:
        return batches
    rows = batches[0]["prompt_ids"].shape[0]

    def joined(name: str) -> torch.Tensor:
        return torch.cat([batch[name] for batch in batches])

    order = group_order(joined("prompt_ids"), joined("prompt_mask"))
    result = [dict(batch) for batch in batches]
    for name, value in batches[0].items():
        if isinstance(value, torch.Tensor) and value.ndim > 0:
            for batch, part in zip(result, joined(name)[order].split(rows), strict=True):
                batch[name] = part
    return result
