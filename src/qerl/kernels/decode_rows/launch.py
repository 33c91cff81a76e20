"""Launch of the kernel of a decode step's inputs. Tensors are checked by the caller."""

import torch

from qerl.kernels.decode_rows import triton as kernels
from qerl.kernels.device import dependent_launch

# Cells of a block table that a program copies.
BLOCK = 1024


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
    """Shapes and mutations as the public function; one launch."""
    rows, width = block_table.shape
    if rows == 0:
        return
    pdl = dependent_launch(inputs.device)
    # A table without blocks leaves the other outputs to write.
    kernels.prepare_rows_kernel[(rows, max(1, -(-width // BLOCK)))](
        inputs, sampled, table, token_ids, context_lens, block_table, keys, draw_positions, inputs.shape[1], width,
        BLOCK=BLOCK, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
