"""Which path and which tile sizes `quant_matmul` takes, by shape."""

from dataclasses import dataclass

# Up to this many rows of activations the weights stay packed until registers; above, they are dequantized into a
# workspace and cuBLAS multiplies. 64 rows are one tile: a second one would read and decode every weight again, and
# from there on the dequantization is shared by enough rows. `qerl bench kernels` measures both sides.
FEW_ROWS = 64


@dataclass(frozen=True, slots=True)
class FewRowsConfig:
    """Launch parameters of the few-row kernel.

    Attributes:
        block_n: output channels a program owns.
        block_k: columns a step, a multiple of 32.
        slices: parts of k, each summed by its own program (1: no second kernel).
        num_warps, num_stages: as Triton means them.
    """

    block_n: int
    block_k: int
    slices: int
    num_warps: int
    num_stages: int


def few_rows_block_m(rows: int) -> int:
    """Rows of activations a program holds: the next power of two, 16 (a tensor core tile) to 64."""
    return min(64, max(16, 1 << (rows - 1).bit_length()))


def few_rows_config(m: int, n: int, k: int, multiprocessors: int) -> FewRowsConfig:
    """Tile sizes for `m` rows of activations and weights [n, k] on a GPU of `multiprocessors` SMs.

    k is cut until about two programs share an SM (loads of one hide the waits of the other), but never into
    slices of less than 512 columns, below which start and end of a program outweigh its loop.
    """
    block_n, block_k = 128, 128
    tiles = -(-n // block_n)
    wanted = 2 * multiprocessors
    slices = 1
    while tiles * slices < wanted and slices < 16 and k // (2 * slices) >= 512:
        slices *= 2
    return FewRowsConfig(block_n, block_k, slices, num_warps=4, num_stages=4)
