"""Launches of the LoRA kernels. Tensors are contiguous and checked by the caller."""

import torch

from qerl.kernels.arrival import arrival_counters
from qerl.kernels.device import dependent_launch
from qerl.kernels.lora import triton as kernels
from qerl.kernels.lora.packed import BLOCK_N, MAP_WIDTH

BLOCK_M = 16
BLOCK_R = 32
BLOCK_K = 128
MAX_SPLITS = 32
# Parts of a split sum that are loaded together (64 registers a thread).
_AT_ONCE = 16
_PROGRAMS_PER_SM = 2
_LARGEST_EXPAND_ROWS = 64


def num_splits(rows: int, ranks: int, in_features: int, multiprocessors: int) -> int:
    """Splits of K that give every SM its programs; a power of two, from shapes alone."""
    programs = max(1, -(-rows // BLOCK_M) * -(-ranks // BLOCK_R))
    limit = max(1, min(_PROGRAMS_PER_SM * multiprocessors // programs, -(-in_features // BLOCK_K), MAX_SPLITS))
    return 1 << (limit.bit_length() - 1)


def lora_shrink(x: torch.Tensor, a: torch.Tensor, splits: int) -> torch.Tensor:
    """[T, K] x [R, K] -> [T, R] in the dtype of `x`; `splits` a power of two. One launch."""
    rows, width = x.shape
    ranks = a.shape[0]
    u = torch.empty(rows, ranks, dtype=x.dtype, device=x.device)
    grid = (-(-ranks // BLOCK_R), splits, -(-rows // BLOCK_M))
    partial = counters = None
    if splits > 1:
        tiles = grid[0] * grid[2]
        partial = torch.empty(tiles, splits, BLOCK_M, BLOCK_R, dtype=torch.float32, device=x.device)
        counters = arrival_counters(tiles, x.device)
    pdl = dependent_launch(x.device)
    if rows:
        kernels.lora_shrink_kernel[grid](
            x, a, u, partial, counters, rows, ranks, width, -(-width // (BLOCK_K * splits)),
            SPLITS=splits, AT_ONCE=min(splits, _AT_ONCE), BLOCK_M=BLOCK_M, BLOCK_R=BLOCK_R, BLOCK_K=BLOCK_K, PDL=pdl,
            num_warps=4, num_stages=4, launch_pdl=pdl,
        )  # fmt: skip
    return u


def lora_expand(
    y: torch.Tensor, u: torch.Tensor, b: torch.Tensor, row_map: torch.Tensor, max_rank: int, aligned: bool
) -> None:
    """Add in place; `b` and `row_map` as :class:`PackedB` holds them. One launch."""
    rows, width = y.shape
    blocks = row_map.shape[0]
    if rows == 0 or blocks == 0:
        return
    # Products in fp32 have no tensor core: a larger tile would not fit the registers.
    largest = BLOCK_M if y.dtype == torch.float32 else _LARGEST_EXPAND_ROWS
    block_m = min(max(BLOCK_M, 1 << (rows - 1).bit_length()), largest)
    pdl = dependent_launch(y.device)
    kernels.lora_expand_kernel[(blocks, -(-rows // block_m))](
        y, u, b, row_map, rows, width, u.shape[1],
        RANK_PADDED=max(16, 1 << (max_rank - 1).bit_length()), ALIGNED=aligned, MAP_WIDTH=MAP_WIDTH,
        BLOCK_M=block_m, BLOCK_N=BLOCK_N, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
