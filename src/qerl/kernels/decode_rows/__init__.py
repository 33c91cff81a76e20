"""What a decode step reads, made in one launch of the matrix that the host sent and the tokens of the step before.

``fields`` names the rows of that matrix. All of it is data movement, the same bits on every device.
"""

import torch

from qerl.kernels.decode_rows import fields, reference
from qerl.kernels.device import launch_on

__all__ = ["fields", "prepare_rows"]


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
    """Fill the inputs of a decode step of N rows, N being the rows of ``token_ids``. Never waits for the device.

    Args:
        inputs: int64 [F, C], the rows that ``fields`` names from SOURCE to TABLE_ROW at least; columns from N on are
            not read. A source below 0 takes TOKEN, any other is an index into ``sampled``; TABLE_ROW is one into
            ``table``. Indices are not checked.
        sampled: int64 [M], what the step before sampled.
        table: int32 [S, W], block tables.
        token_ids: int64 [N]. **Mutated**: the tokens to feed.
        context_lens: int32 [N]. **Mutated**: position + 1.
        block_table: int32 [N, W]. **Mutated**: every row's block table.
        keys: int64 [N, 2]. **Mutated**: every row's random key.
        draw_positions: int64 [N]. **Mutated**: the position of the token to draw, position + 1.

    All contiguous and on one device; what is mutated shares no memory with anything else.

    Raises:
        ValueError: shapes, dtypes, strides or devices that do not fit.
        UnsupportedGPUError: a GPU below sm_80.
    """
    if inputs.ndim != 2 or table.ndim != 2 or sampled.ndim != 1 or token_ids.ndim != 1:
        raise ValueError(
            "expected inputs [F, C], sampled [M], table [S, W] and token_ids [N], got "
            f"{list(inputs.shape)}, {list(sampled.shape)}, {list(table.shape)} and {list(token_ids.shape)}"
        )
    rows, width = token_ids.shape[0], table.shape[1]
    if inputs.shape[0] <= fields.TABLE_ROW or inputs.shape[1] < rows:
        raise ValueError(
            f"{rows} rows need inputs of at least {fields.TABLE_ROW + 1} x {rows}, got {list(inputs.shape)}"
        )
    for name, tensor, dtype, shape in (
        ("inputs", inputs, torch.int64, tuple(inputs.shape)),
        ("sampled", sampled, torch.int64, tuple(sampled.shape)),
        ("table", table, torch.int32, tuple(table.shape)),
        ("token_ids", token_ids, torch.int64, (rows,)),
        ("context_lens", context_lens, torch.int32, (rows,)),
        ("block_table", block_table, torch.int32, (rows, width)),
        ("keys", keys, torch.int64, (rows, 2)),
        ("draw_positions", draw_positions, torch.int64, (rows,)),
    ):
        if tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be {dtype} {list(shape)} contiguous, got {tensor.dtype} {list(tensor.shape)} with "
                f"strides {tensor.stride()}"
            )
        if tensor.device != inputs.device:
            raise ValueError(f"inputs are on {inputs.device}, {name} on {tensor.device}")
    _prepare_op(inputs, sampled, table, token_ids, context_lens, block_table, keys, draw_positions)


@torch.library.custom_op(
    "qerl::prepare_rows", mutates_args=("token_ids", "context_lens", "block_table", "keys", "draw_positions")
)
def _prepare_op(
    inputs: torch.Tensor,
    sampled: torch.Tensor,
    table: torch.Tensor,
    token_ids: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    keys: torch.Tensor,
    draw_positions: torch.Tensor,
) -> None:
    if not inputs.is_cuda:
        reference.prepare_rows(inputs, sampled, table, token_ids, context_lens, block_table, keys, draw_positions)
        return
    from qerl.kernels.decode_rows import launch  # Triton comes only with CUDA builds of torch.

    with launch_on(inputs.device):
        launch.prepare_rows(inputs, sampled, table, token_ids, context_lens, block_table, keys, draw_positions)


@_prepare_op.register_fake
def _(inputs, sampled, table, token_ids, context_lens, block_table, keys, draw_positions):  # type: ignore[no-untyped-def]
    return None
