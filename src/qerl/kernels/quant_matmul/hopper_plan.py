"""Which Hopper kernel serves a shape, with how many blocks, slices and bytes: plain arithmetic, no GPU needed.

The constants are straight-line fits to sweeps on an H200 over the linears of Qwen2.5-7B and 32B
(``benchmarks/results/kernels-h200.json`` holds the times they lead to); only their ratios matter for the choice.
"""

from dataclasses import dataclass, replace
from functools import cache

from qerl.kernels.quant_matmul.tiles import TILE_ROWS, WINDOW_BYTES, WINDOW_COLUMNS

UNIT_WINDOWS = 4
UNIT_BYTES = UNIT_WINDOWS * WINDOW_BYTES
SHARED_BYTES = 227 * 1024
# Barriers of x in the few-row kernel.
X_CHUNKS = 8
# Up to so many rows of x: mma.sync, with all of x in shared memory. Above: wgmma, with x streamed.
FEW_ROWS = 8
# Rows of one launch, and how many are multiplied by such launches without LoRA; above, weights are dequantized once and
# multiplied by cuBLAS. (Launches of 8,192 rows were no faster: docs/log.md.)
MANY_ROWS = 2048
PACKED_ROWS = 4096
# Counters of the workspace that sums of parts may use, and those of LoRA's u = x A^T inside a product.
COUNTERS = (1 << 18) - (1 << 11)
LORA_COUNTERS = 1 << 11
# Warps beside those that multiply by the weights, which make LoRA's u of few rows.
LORA_WARPS_FEW = 4
# Chunks of 32 columns for which such a warp loads at once, and slices that a warp reads at once where it sums them.
LORA_CHUNKS_FEW, SLICES_AT_ONCE = 5, 8
# Blocks of 16 channels by 8 rows that the two warps of a pair exchange at once where gate and up are multiplied: those
# of a tile, or what tall tiles leave room for (``GIVEN`` in ``silu.cuh``).
_MOST_EXCHANGED = {256: 4, 128: 8}
_EXCHANGED_BYTES = 16 * 8 * 2
# Of the workspace, for slices of u.
LORA_BYTES = 8 << 20
# What a block of the LoRA shrink reads of A and x: less makes more slices to add up.
_SHRINK_BYTES = 48 << 10

# Microseconds a multiprocessor needs for a unit in the few-row kernel, and what cutting k costs at the end: for the
# first tile whose slices a warp sums, and for each further one.
_UNIT_US = 0.065
_SLICE_US, _NEXT_SLICE_US = 0.8, 1.7
# Units of a block from which on 12 and 16 warps pay.
_WARPS = ((100, 16), (48, 12), (0, 8))
# (rows of x in a tile, warpgroups) -> windows a stage, stages, microseconds a window, fixed cost of shared tiles.
_SHAPES = {
    (16, 2): (4, 6, 0.148, 7.7),
    (16, 3): (4, 5, 0.214, 8.2),
    (32, 2): (4, 5, 0.194, 8.9),
    (32, 3): (4, 4, 0.264, 10.3),
    (64, 2): (4, 4, 0.246, 11.2),
    (64, 3): (4, 3, 0.360, 11.7),
    (128, 2): (2, 5, 0.370, 12.8),
    (128, 3): (2, 4, 0.536, 14.1),
    (256, 2): (2, 3, 0.718, 20.5),
}
_WHOLE_US = 4.2
# Blocks of a cluster that share a tile: what that costs, and what a row of x in the tile adds.
_CLUSTER_US, _CLUSTER_ROW_US = {2: 0.5, 3: 2.2, 4: 3.0}, 0.01
# LoRA in a product of many rows, fitted to a sweep with it; the start to what LoRA added, because a sweep only tells
# plans apart. What making a part of u takes before the sum: a start, and windows without decoding, as a share of
# others. When u is there: so long after the parts, and a trip for every round of sums. What the steps that multiply
# by u take, as a share of a window.
_U_US, _U_WINDOW, _U_READY_US, _U_TRIP_US, _U_STEP = 1.8, 0.4, 8.2, 1.4, 1.8
# A kernel of its own that makes u: where a product would take longer for its parts, or cannot make it.
_U_KERNEL_US = 7.5
# Blocks that share tiles stand at different columns of x. Where x outgrows the L2 cache, each of them fetches its own.
_X_CACHE_BYTES = 30 << 20
_X_MISS = 1.1


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _lora_fits(m: int, ranks: int, k: int) -> int:
    """Slices of u [m, ranks] for which the workspace has room; 0: none, or their parts cannot be counted."""
    tiles = _ceil(ranks, 16)
    counted = tiles + 2 <= LORA_COUNTERS and ranks * k < 1 << 32
    return LORA_BYTES // (tiles * _ceil(m, 8) * 512) if counted else 0


@cache
def _slices_of_u(chunks: int, made: int, sums: int, summed: int, most: int) -> tuple[int, int]:
    """(trips to the L2 cache, slices of `chunks`): the fewest trips, then the fewest loads; `most` slices at most.

    A block makes a slice, `made` chunks a trip; then it does `sums` sums one after the other, `summed` slices a trip.
    """

    def cost(slices: int) -> tuple[int, int]:
        chunks_each = _ceil(chunks, slices)
        return _ceil(chunks_each, made) + sums * _ceil(slices, summed), chunks_each + sums * slices

    best = min(range(1, min(chunks, most) + 1), key=cost)
    return cost(best)[0], best


@dataclass(frozen=True, slots=True)
class LoraCut:
    """How a product of many rows makes u.

    Attributes:
        us: estimated microseconds that this adds.
        slices: of k; None: a kernel before makes u.
        sharers: warps of a block that share each sum of slices: all that sum, or 1, where each sums others.
    """

    us: float
    slices: int | None = None
    sharers: int = 1


@dataclass(frozen=True, slots=True)
class FewRowsPlan:
    """Launch of ``few_rows_{warps}_2`` or ``few_rows_{warps}_2_pair``.

    Attributes:
        warps: of a block.
        slices: parts of k; each tile of 16 channels is summed by the last block to arrive.
        pair: clusters of two blocks share x.
        silu: the result is silu(gate) * up of the two segments of the weight; only with one slice.
    """

    warps: int
    slices: int = 1
    pair: bool = False
    silu: bool = False

    @property
    def name(self) -> str:
        """Entry point in ``few_rows.cu``; with ``_wide`` or ``_silu`` at its end, in the file of that name."""
        return f"few_rows_{self.warps}_2{'_pair' if self.pair else ''}"

    @property
    def macro(self) -> str:
        """The call that defines the entry point."""
        return f"{'PAIRED_' if self.pair else ''}KERNEL({self.warps}, 2)"

    @property
    def step(self) -> int:
        """Channels that stay in one block: a tile, or with SiLU one of gate and one of up."""
        return 2 * TILE_ROWS if self.silu else TILE_ROWS

    def group(self, n: int, multiprocessors: int) -> int:
        """Blocks that share a slice of k (an even number in pairs), none of them without work outside pairs.

        Such a block would exit while the copies of x into its shared memory are under way.
        """
        blocks = multiprocessors // self.slices
        return blocks // 2 * 2 if self.pair else min(blocks, n // self.step)

    def tiles(self, n: int, multiprocessors: int) -> int:
        """Tiles of 16 channels of the busiest block."""
        return _ceil(n // self.step, self.group(n, multiprocessors)) * self.step // TILE_ROWS

    def units(self, n: int, k: int, multiprocessors: int) -> int:
        """Units (four windows) of the busiest block."""
        depth = _ceil(k // WINDOW_COLUMNS, self.slices)
        return self.tiles(n, multiprocessors) * _ceil(depth, UNIT_WINDOWS)

    def lora_slices(self, m: int, ranks: int, k: int, blocks: int) -> int | None:
        """Slices of k in which `blocks` blocks make u [m, ranks]; None: they cannot. Every block sums all of u."""
        tiles, warps = _ceil(ranks, 16), LORA_WARPS_FEW
        most = min(max(1, blocks // tiles), _lora_fits(m, ranks, k))
        if most == 0:
            return None
        return _slices_of_u(k // 32, warps * LORA_CHUNKS_FEW, _ceil(tiles, warps), SLICES_AT_ONCE, most)[1]

    def shared_bytes(self, m: int, n: int, k: int, multiprocessors: int, ranks: int = 0) -> int:
        """Dynamic shared memory: rings, barriers, x, partial sums (as ``few_rows.cuh`` lays them out).

        With `ranks`, the columns of u, also what making u takes.
        """
        windows = k // WINDOW_COLUMNS
        most = self.tiles(n, multiprocessors)
        slots = 0
        for depth in {_ceil(windows, self.slices), windows // self.slices}:
            units = _ceil(depth, UNIT_WINDOWS)
            slots = max(slots, (units * most // self.warps + 1 + units - 2) // units + 1)
        rings = self.warps * 2 * (UNIT_BYTES + 8) + 8 * X_CHUNKS + 8
        x = m * (_ceil(windows, self.slices) * 128 + 16)
        lora = (LORA_WARPS_FEW - 1) * 512 + 2 * m * (ranks + 8) if ranks else 0
        return rings + 128 + x + 128 + self.warps * slots * 512 + lora


@dataclass(frozen=True, slots=True)
class ManyRowsPlan:
    """Launch of ``many_rows_{tokens}_{groups}_{unit}_{stages}``.

    Attributes:
        tokens: rows of x a tile covers.
        groups: warpgroups of 64 channels.
        whole: tiles are not shared between blocks other than those of a cluster.
        silu: the result is silu(gate) * up of the two segments of the weight; not with clusters.
        cluster: blocks that share each tile of a `whole` plan, a part of k each (``cluster_tile.cuh``).
    """

    tokens: int
    groups: int
    whole: bool
    silu: bool = False
    cluster: int = 1

    @property
    def unit(self) -> int:
        """Windows a stage."""
        return _SHAPES[self.tokens, self.groups][0]

    @property
    def stages(self) -> int:
        """Stages of the ring."""
        return _SHAPES[self.tokens, self.groups][1]

    @property
    def name(self) -> str:
        """Entry point in ``many_rows.cu``; with ``_wide`` or ``_silu`` at its end, in the file of that name."""
        return f"many_rows_{self.tokens}_{self.groups}_{self.unit}_{self.stages}"

    @property
    def macro(self) -> str:
        """The call that defines the entry point."""
        return f"KERNEL({self.tokens}, {self.groups}, {self.unit}, {self.stages})"

    @property
    def tiles_at_once(self) -> int:
        """Row tiles of 16 that a copy of weights brings: those of a block, or with SiLU those of gate, then of up."""
        return 2 * self.groups if self.silu else 4 * self.groups

    def tiles(self, m: int, n: int) -> int:
        """Tiles of the output."""
        return _ceil(n, 64 * self.groups) * _ceil(m, self.tokens)

    def grid(self, m: int, n: int, k: int, multiprocessors: int) -> int:
        """Blocks: a cluster a tile; else one a multiprocessor, but no more than there are units to share out."""
        if self.cluster > 1:
            return self.tiles(m, n) * self.cluster
        return min(multiprocessors, _ceil(k // WINDOW_COLUMNS, self.unit) * self.tiles(m, n))

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: the ring and its barriers, what making u takes, what pairs of warps exchange."""
        window = self.tokens * 128 + 4 * self.groups * WINDOW_BYTES
        sums = 512 * self.lora_warps + 16
        blocks = 2 * self.groups * _MOST_EXCHANGED.get(self.tokens, self.tokens // 8) if self.silu else 0
        barriers = 2 * 4 * self.groups * 8 if self.cluster > 1 else 0
        return 1024 + self.stages * (self.unit * window + 16) + sums + _EXCHANGED_BYTES * blocks + barriers

    @property
    def threads(self) -> int:
        """Of a block: the product's warpgroups and those beside them."""
        return 128 * (self.groups + (2 if self.groups == 2 and self.tokens < 256 else 1))

    @property
    def lora_warps(self) -> int:
        """Warps beside the product and the producer: they sum u."""
        return self.threads // 32 - 4 * self.groups - 1

    @cache  # noqa: B019 (plans are few)
    def lora_cut(self, m: int, ranks: int, n: int, k: int, multiprocessors: int) -> LoraCut:
        """How the product makes u [m, ranks].

        A part of u, 64 ranks a warpgroup by a tile's rows by pairs of windows, is made by one block, which makes one at
        most. All blocks share out the sums of slices.
        """
        grid, pairs = self.grid(m, n, k, multiprocessors), _ceil(k // WINDOW_COLUMNS, 2)
        parts = _ceil(m, self.tokens) * _ceil(ranks, 64 * self.groups)
        rounds, warps = _ceil(_ceil(ranks, 16) * _ceil(m, 8), grid), self.lora_warps
        main_us, pair_us = self.main_us(m, n, k, multiprocessors), 2 * _SHAPES[self.tokens, self.groups][2]
        best = LoraCut(_U_KERNEL_US)
        for slices in range(1, min(pairs, grid // parts, _lora_fits(m, ranks, k)) + 1):
            shared, alone = _ceil(slices, warps * SLICES_AT_ONCE), _ceil(slices, SLICES_AT_ONCE)
            trips, sharers = min((_ceil(rounds, warps) * alone, 1), (rounds * shared, warps))
            making_us = _U_US + _U_WINDOW * pair_us * _ceil(pairs, slices)
            us = making_us + max(0.0, _U_READY_US + _U_TRIP_US * trips - main_us)
            if us < best.us:
                best = LoraCut(us, slices, sharers)
        return best

    def main_us(self, m: int, n: int, k: int, multiprocessors: int) -> float:
        """Estimated microseconds until a block needs u: the end of its first tile, or of its part of one."""
        windows, window_us = k // WINDOW_COLUMNS, _SHAPES[self.tokens, self.groups][2]
        if self.cluster > 1:
            windows = self.unit * _ceil(_ceil(windows, self.unit), self.cluster)
        elif not self.whole:
            windows = min(windows, _ceil(windows * self.tiles(m, n), multiprocessors))
        return _WHOLE_US + window_us * windows

    def partial_bytes(self, multiprocessors: int) -> int:
        """Workspace: two shared tiles a block, fp32."""
        return 0 if self.whole else multiprocessors * 2 * 64 * self.groups * self.tokens * 4

    def fits(self, m: int, n: int, k: int, multiprocessors: int) -> bool:
        """Whether the kernel can count (its divisions are of 32 bits, shared tiles have counters); of clusters, whether
        each block has something to multiply and all run at once."""
        tiles, units = self.tiles(m, n), _ceil(k // WINDOW_COLUMNS, self.unit)
        if self.cluster > 1:
            return units >= self.cluster and tiles <= resident_clusters(self.cluster, multiprocessors)
        counted = self.whole or tiles * 4 * self.groups <= COUNTERS
        return counted and tiles * units * self.grid(m, n, k, multiprocessors) < 1 << 32

    def cost(self, m: int, n: int, k: int, multiprocessors: int, ranks: int = 0) -> float:
        """Estimated microseconds; with `ranks` of LoRA those beyond what it adds to any plan."""
        windows, tiles = k // WINDOW_COLUMNS, self.tiles(m, n)
        _, _, window_us, shared_us = _SHAPES[self.tokens, self.groups]
        if self.cluster > 1:
            cost = self.main_us(m, n, k, multiprocessors) + _CLUSTER_US[self.cluster] + _CLUSTER_ROW_US * self.tokens
        elif self.whole:
            cost = _WHOLE_US + window_us * windows * _ceil(tiles, multiprocessors)
        else:
            misses = _X_MISS if 2 * m * k > _X_CACHE_BYTES else 1.0
            cost = shared_us + misses * window_us * windows * tiles / multiprocessors
        if not ranks:
            return cost
        steps = 1.0 if self.cluster > 1 else max(1.0, tiles / multiprocessors)
        return cost + self.lora_cut(m, ranks, n, k, multiprocessors).us + _U_STEP * window_us * steps


def resident_clusters(cluster: int, multiprocessors: int) -> int:
    """Clusters of blocks as large as a multiprocessor that run at the same time at least.

    A cluster stays inside one of the (at most eight) parts of the chip, each of an even number of multiprocessors, so a
    part may have some left over. A product whose u is made by its own blocks waits for all of them.
    """
    left_over = {2: 0, 3: 2, 4: 2}[cluster]
    return max(0, multiprocessors - 8 * left_over) // cluster


def all_many_rows_plans() -> list[ManyRowsPlan]:
    """Every tile shape, with shared tiles, with whole ones and with tiles of clusters."""
    ways = [{"whole": False}, *({"whole": True, "cluster": cluster} for cluster in (1, *_CLUSTER_US))]
    return [ManyRowsPlan(tokens, groups, **way) for tokens, groups in _SHAPES for way in ways]


@cache
def workspace_bytes(multiprocessors: int) -> int:
    """Bytes of partial sums that any launch may use."""
    return max(plan.partial_bytes(multiprocessors) for plan in all_many_rows_plans())


@cache
def few_rows_plan(m: int, n: int, k: int, multiprocessors: int) -> FewRowsPlan | None:
    """The cheapest cut of k that fits shared memory, or None where none does."""
    best: tuple[float, FewRowsPlan] | None = None
    for slices in range(1, min(12, k // WINDOW_COLUMNS, multiprocessors) + 1):
        units = FewRowsPlan(16, slices).units(n, k, multiprocessors)
        warps = next(warps for least, warps in _WARPS if units > least)
        plan = FewRowsPlan(warps, slices, pair=m > 1 and slices == 1 and warps < 16)
        if plan.shared_bytes(m, n, k, multiprocessors) > SHARED_BYTES:
            continue
        if slices > 1 and (slices * n * 8 * 4 > workspace_bytes(multiprocessors) or n // TILE_ROWS > COUNTERS):
            continue
        summed = _ceil(plan.tiles(n, multiprocessors), warps)
        summing_us = _SLICE_US + (summed - 1) * _NEXT_SLICE_US if slices > 1 else 0.0
        cost = units * _UNIT_US + summing_us
        if best is None or cost < best[0]:
            best = cost, plan
    return best[1] if best else None


@cache
def many_rows_plan(m: int, n: int, k: int, multiprocessors: int, clusters: bool = True, ranks: int = 0) -> ManyRowsPlan:
    """The plan of least estimated time among those of tiles not much taller than `m`, with `clusters` or without, for
    all `ranks` of LoRA together."""
    # In the sweeps, whose rows are powers of two, lower tiles were never the best.
    plans = [plan for plan in all_many_rows_plans() if min(m, 64) <= plan.tokens < max(2 * m, 17)]
    plans = [plan for plan in plans if (clusters or plan.cluster == 1) and plan.fits(m, n, k, multiprocessors)]
    return min(plans, key=lambda plan: plan.cost(m, n, k, multiprocessors, ranks))


def product_plan(
    m: int, n: int, k: int, multiprocessors: int, clusters: bool = True, ranks: int = 0
) -> FewRowsPlan | ManyRowsPlan:
    """The kernel of a product of `m` rows with so many ranks of LoRA."""
    plan = few_rows_plan(m, n, k, multiprocessors) if m <= FEW_ROWS else None
    return plan or many_rows_plan(m, n, k, multiprocessors, clusters, ranks)


@cache
def silu_plan(m: int, n: int, k: int, multiprocessors: int, ranks: int = 0) -> FewRowsPlan | ManyRowsPlan | None:
    """Where gate and up, `n` rows together, are multiplied in the product's epilogue; None: it would cut k, or pairs of
    tiles do not fit."""
    plan = replace(product_plan(m, n, k, multiprocessors, clusters=False, ranks=ranks), silu=True)
    if isinstance(plan, ManyRowsPlan):
        return plan
    return plan if plan.slices == 1 and plan.shared_bytes(m, n, k, multiprocessors) <= SHARED_BYTES else None


def shrink_plan(m: int, r: int, k: int, multiprocessors: int) -> tuple[int, int]:
    """Launch of ``lora_shrink_{blocks}``: (blocks of eight tokens a thread block covers, parts of k)."""
    blocks = next((blocks for blocks in (1, 2, 4) if m <= 8 * blocks), 8)
    # Every part leaves an fp32 tile of 16 ranks by eight tokens in the workspace for each of these.
    places = _ceil(r, 16) * _ceil(m, 8 * blocks) * blocks
    fitting = workspace_bytes(multiprocessors) // (places * 16 * 8 * 4) if places <= COUNTERS else 1
    return blocks, max(1, min(_ceil(k * 2 * (16 + 8 * blocks), _SHRINK_BYTES), fitting))
