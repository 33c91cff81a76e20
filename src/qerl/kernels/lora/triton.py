"""Triton kernels of the LoRA update of few rows: u = x A^T with K split over programs, and y += u B^T of a fused group.

The parts of a split sum are added in ascending order by the program that finishes last, whichever it is.
"""

import triton
import triton.language as tl

from qerl.kernels.triton import INTERPRETED, arrive_last, round_to, start_after_predecessor


@triton.jit
def lora_shrink_kernel(
    x, a, u, partial, counters, T, R, K, steps,
    SPLITS: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """u [T, R] of x [T, K] and a [R, K]; scratch if SPLITS > 1: partial fp32 [tiles, SPLITS, BLOCK_M, BLOCK_R]."""
    start_after_predecessor(PDL)
    rank = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    split = tl.program_id(1)
    row = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    rank_mask = rank < R
    row_mask = row < T
    DOT: tl.constexpr = tl.float32 if INTERPRETED else x.dtype.element_ty
    acc = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for step in range(steps):
        column = (split * steps + step) * BLOCK_K + tl.arange(0, BLOCK_K)
        column_mask = column < K
        left_mask = row_mask[:, None] & column_mask[None, :]
        left = tl.load(x + row.to(tl.int64)[:, None] * K + column[None, :], mask=left_mask, other=0.0)
        right_mask = rank_mask[:, None] & column_mask[None, :]
        right = tl.load(a + rank.to(tl.int64)[:, None] * K + column[None, :], mask=right_mask, other=0.0)
        acc = tl.dot(left.to(DOT), tl.trans(right.to(DOT)), acc, input_precision="ieee")
    place = u + row.to(tl.int64)[:, None] * R + rank[None, :]
    mask = row_mask[:, None] & rank_mask[None, :]
    if SPLITS == 1:
        tl.store(place, round_to(acc, u.dtype.element_ty), mask=mask)
    else:
        tile = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        size: tl.constexpr = BLOCK_M * BLOCK_R
        inside = tl.arange(0, BLOCK_M)[:, None] * BLOCK_R + tl.arange(0, BLOCK_R)[None, :]
        first = partial + tile.to(tl.int64) * (SPLITS * size)
        tl.store(first + split * size + inside, acc, mask=mask)
        if arrive_last(counters + tile, SPLITS):
            total = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
            for start in tl.static_range(0, SPLITS, AT_ONCE):
                part = (start + tl.arange(0, AT_ONCE))[:, None, None] * size + inside[None, :, :]
                total += tl.sum(tl.load(first + part, mask=mask[None, :, :], other=0.0, cache_modifier=".cg"), 0)
            tl.store(place, round_to(total, u.dtype.element_ty), mask=mask)


@triton.jit
def lora_expand_kernel(
    y, u, b, row_map, T, N, R,
    RANK_PADDED: tl.constexpr, ALIGNED: tl.constexpr, MAP_WIDTH: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [T, N] += u [T, R] B^T in the columns that row_map int32 [blocks, MAP_WIDTH] says; fp32, rounded once."""
    start_after_predecessor(PDL)
    entry = row_map + tl.program_id(0) * MAP_WIDTH
    first_column, end_column = tl.load(entry), tl.load(entry + 1)
    first_rank, rank = tl.load(entry + 2), tl.load(entry + 3)
    place = tl.load(entry + 4)
    if ALIGNED:
        first_column, end_column = tl.multiple_of(first_column, 8), tl.multiple_of(end_column, 8)
        first_rank, rank, place = tl.multiple_of(first_rank, 8), tl.multiple_of(rank, 8), tl.multiple_of(place, 8)
    row = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    inside = tl.arange(0, BLOCK_N)
    column = first_column + inside
    step = tl.arange(0, RANK_PADDED)
    row_mask = row < T
    column_mask = column < end_column
    step_mask = step < rank
    DOT: tl.constexpr = tl.float32 if INTERPRETED else y.dtype.element_ty
    left = tl.load(
        u + row[:, None] * R + first_rank + step[None, :], mask=row_mask[:, None] & step_mask[None, :], other=0.0
    )
    right = tl.load(
        b + place + inside[:, None] * rank + step[None, :], mask=column_mask[:, None] & step_mask[None, :], other=0.0
    )
    update = tl.dot(left.to(DOT), tl.trans(right.to(DOT)), input_precision="ieee")
    target = y + row[:, None] * N + column[None, :]
    mask = row_mask[:, None] & column_mask[None, :]
    total = tl.load(target, mask=mask, other=0.0).to(tl.float32) + update
    tl.store(target, round_to(total, y.dtype.element_ty), mask=mask)
