"""Inputs of a decode step in plain torch."""

import torch

from qerl.kernels.decode_rows import fields


def prepare_rows(
    inputs: torch.Tensor,
    sampled: torch.Tensor,
    table: torch.Tensor,
    token_ids: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    keys: torch.Tensor,
    draw_positions: torch.Tensor,
) -> None:
    """Shapes and mutations as the public function. Nothing waits for the device."""
    fed = inputs[:, : token_ids.shape[0]]
    source, position = fed[fields.SOURCE], fed[fields.POSITION]
    sampled_before = sampled.index_select(0, source.clamp_min(0))
    token_ids.copy_(torch.where(source < 0, fed[fields.TOKEN], sampled_before))
    draw_positions.copy_(position + 1)
    context_lens.copy_(draw_positions)
    block_table.copy_(table.index_select(0, fed[fields.TABLE_ROW]))
    keys.copy_(fed[fields.KEY_LOW : fields.KEY_HIGH + 1].t())
