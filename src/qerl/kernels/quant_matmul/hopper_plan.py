"""Which Hopper kernel serves a shape, with how many blocks, slices and bytes: plain arithmetic, no GPU needed."""

from dataclasses import dataclass
from functools import cache

from qerl.kernels.quant_matmul.tiles import TILE_ROWS, WINDOW_BYTES, WINDOW_COLUMNS

UNIT_WINDOWS = 4
UNIT_BYTES = UNIT_WINDOWS * WINDOW_BYTES
# Up to so many rows of x, mma.sync with all of x in shared memory; above, wgmma with x streamed.
FEW_ROWS = 16
SHARED_BYTES = 227 * 1024
# Barriers of x in the few-row kernel.
X_CHUNKS = 8
# Microseconds one multiprocessor needs for a unit at full memory bandwidth, and what a second slice of k costs at the
# end of a launch (measured on an H200; only their ratio matters).
_UNIT_US = 0.065
_SLICE_US = 1.3


@dataclass(frozen=True, slots=True)
class FewRowsPlan:
    """Launch of ``few_rows_{blocks}_{warps}_{stages}``.

    Attributes:
        blocks: groups of 8 rows of x.
        slices: parts of k; each is summed by the last block to arrive.
        shared_bytes: dynamic shared memory.
    """

    blocks: int
    warps: int
    stages: int
    slices: int
    shared_bytes: int

    @property
    def name(self) -> str:
        return f"few_rows_{self.blocks}_{self.warps}_{self.stages}"


@dataclass(frozen=True, slots=True)
class ManyRowsPlan:
    """Launch of ``many_rows_{tokens}_{groups}_{unit}_{stages}``.

    Attributes:
        tokens: rows of x a tile covers.
        groups: warpgroups of 64 channels.
        unit: windows a stage.
        stages: of the ring.
        whole: tiles are not shared between blocks.
    """

    tokens: int
    groups: int
    unit: int
    stages: int
    whole: bool

    @property
    def name(self) -> str:
        return f"many_rows_{self.tokens}_{self.groups}_{self.unit}_{self.stages}"

    def grid(self, m: int, n: int, k: int, multiprocessors: int) -> int:
        """Blocks: one a multiprocessor, but no more than there are units to share out."""
        units = _ceil(k // WINDOW_COLUMNS, self.unit)
        return min(multiprocessors, units * _ceil(n, 64 * self.groups) * _ceil(m, self.tokens))

    @property
    def shared_bytes(self) -> int:
        window = self.tokens * 128 + 4 * self.groups * WINDOW_BYTES
        return 1024 + self.stages * (self.unit * window + 16)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def few_rows_shared_bytes(m: int, n: int, k: int, multiprocessors: int, warps: int, stages: int, slices: int) -> int:
    """Dynamic shared memory of the few-row kernel: rings, barriers, x, partial sums (as ``few_rows.cu`` lays them out)."""
    blocks = _ceil(m, 8)
    tiles, depth = n // TILE_ROWS, _ceil(k // WINDOW_COLUMNS, slices)
    most = _ceil(tiles, few_rows_group(multiprocessors, slices))
    slots = 0
    for windows in {depth, k // WINDOW_COLUMNS // slices}:
        units = _ceil(windows, UNIT_WINDOWS)
        slots = max(slots, (units * most // warps + 1 + units - 2) // units + 1)
    rings = warps * stages * (UNIT_BYTES + 8) + 8 * X_CHUNKS
    x = m * (depth * 128 + 16)
    return rings + 128 + x + 128 + warps * slots * blocks * 512


def few_rows_group(multiprocessors: int, slices: int) -> int:
    """Blocks that share a slice of k: even, because clusters of two blocks share x."""
    return multiprocessors // slices // 2 * 2


@cache
def few_rows_plan(m: int, n: int, k: int, multiprocessors: int) -> FewRowsPlan | None:
    """The cheapest cut of k that fits shared memory, or None where none does."""
    best: tuple[float, FewRowsPlan] | None = None
    tiles, windows = n // TILE_ROWS, k // WINDOW_COLUMNS
    blocks = _ceil(m, 8)
    shapes = ((16, 2), (8, 2))
    for slices in range(1, min(12, windows) + 1):
        for warps, stages in shapes:
            shared = few_rows_shared_bytes(m, n, k, multiprocessors, warps, stages, slices)
            if shared > SHARED_BYTES:
                continue
            units = _ceil(tiles, few_rows_group(multiprocessors, slices)) * _ceil(_ceil(windows, slices), UNIT_WINDOWS)
            cost = units * _UNIT_US + (_SLICE_US if slices > 1 else 0) + (0.0 if warps == 16 else 0.5)
            if best is None or cost < best[0]:
                best = cost, FewRowsPlan(blocks, warps, stages, slices, shared)
            break
    return best[1] if best else None


@cache
def many_rows_plan(m: int, n: int, k: int, multiprocessors: int) -> ManyRowsPlan:
    """Tile shape by the rows of x; whole tiles where that leaves little of the GPU idle."""
    if m <= 32:
        shape = (32, 3, 4, 4)
    elif m <= 64:
        shape = (64, 3, 4, 3)
    elif m <= 128:
        shape = (128, 2, 2, 5)
    else:
        shape = (256, 2, 2, 3)
    tiles = _ceil(n, 64 * shape[1]) * _ceil(m, shape[0])
    waves = tiles / multiprocessors
    whole = _ceil(tiles, multiprocessors) <= 1.07 * waves
    return ManyRowsPlan(*shape, whole)
