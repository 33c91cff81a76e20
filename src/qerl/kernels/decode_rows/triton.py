"""Triton kernel of a decode step's inputs: one program a row and piece of its block table."""

import triton
import triton.language as tl

from qerl.kernels.decode_rows import fields
from qerl.kernels.triton import start_after_predecessor

_SOURCE = tl.constexpr(fields.SOURCE)
_TOKEN = tl.constexpr(fields.TOKEN)
_POSITION = tl.constexpr(fields.POSITION)
_KEY_LOW = tl.constexpr(fields.KEY_LOW)
_KEY_HIGH = tl.constexpr(fields.KEY_HIGH)
_TABLE_ROW = tl.constexpr(fields.TABLE_ROW)


@triton.jit
def prepare_rows_kernel(
    inputs, sampled, table, token_ids, context_lens, block_table, keys, draw_positions, C, W,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """token_ids [N], context_lens [N], block_table [N, W], keys [N, 2], draw_positions [N] of inputs [F, C].

    Every program loads its row's fields, without a branch, so that all loads are on their way at once; the row's first
    program stores what is made of them.
    """
    start_after_predecessor(PDL)
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    source = tl.load(inputs + _SOURCE * C + row)
    table_row = tl.load(inputs + _TABLE_ROW * C + row)
    given = tl.load(inputs + _TOKEN * C + row)
    position = tl.load(inputs + _POSITION * C + row) + 1
    key_low = tl.load(inputs + _KEY_LOW * C + row)
    key_high = tl.load(inputs + _KEY_HIGH * C + row)
    sampled_before = tl.load(sampled + tl.maximum(source, 0))
    cell = piece * BLOCK + tl.arange(0, BLOCK)
    inside = cell < W
    tl.store(block_table + row * W + cell, tl.load(table + table_row * W + cell, mask=inside, other=0), mask=inside)
    first = piece == 0
    tl.store(token_ids + row, tl.where(source < 0, given, sampled_before), mask=first)
    tl.store(context_lens + row, position.to(tl.int32), mask=first)
    tl.store(keys + 2 * row, key_low, mask=first)
    tl.store(keys + 2 * row + 1, key_high, mask=first)
    tl.store(draw_positions + row, position, mask=first)
