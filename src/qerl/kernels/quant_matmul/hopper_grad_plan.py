"""Which kernel of ``input_grad.cu`` serves a shape, with how many blocks and bytes: plain arithmetic, no GPU needed.

The kernels do for ``dx = dy W`` what the many-row kernels do for the forward, with columns of dx for channels and
channels for windows; the costs are straight-line fits to a sweep on an H200, as there.
"""

from dataclasses import dataclass
from functools import cache

from qerl.kernels.quant_matmul.hopper_plan import COUNTERS
from qerl.kernels.quant_matmul.tiles import WINDOW_BYTES, WINDOW_COLUMNS

# Rows of dy in one launch, the most that were measured; more come in blocks.
GRAD_ROWS = 8192
# Channels of one step of the sum, four row tiles.
STEP_CHANNELS = 64
# Staged sums of a warpgroup in shared memory (input_grad.cuh).
_STAGED_BYTES = 64 * 160
# (rows of dy in a tile, warpgroups of 64 columns) -> stages, microseconds a step, fixed cost of shared tiles.
_SHAPES = {
    (64, 2): (12, 0.354, 8.5),
    (64, 3): (10, 0.447, 10.4),
    (128, 2): (8, 0.475, 10.2),
    (128, 3): (8, 0.617, 13.8),
    (256, 2): (5, 0.690, 16.5),
}
_WHOLE_US = 3.5
# Blocks that share a tile after whole waves.
_MOST_PARTS = 3
# Blocks that share tiles stand at different columns of dy. Where it outgrows the L2 cache, each fetches its own.
_DY_CACHE_BYTES = 30 << 20
_DY_MISS = 1.2


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True, slots=True)
class InputGradPlan:
    """Launch of ``input_grad_{tokens}_{groups}_{stages}``.

    Attributes:
        tokens: rows of dy a tile covers.
        groups: warpgroups of 64 columns of dx.
        whole: tiles are not shared between blocks. Otherwise those that fill no wave are.
    """

    tokens: int
    groups: int
    whole: bool

    @property
    def stages(self) -> int:
        """Stages of the ring, each one step of the sum."""
        return _SHAPES[self.tokens, self.groups][0]

    @property
    def name(self) -> str:
        """Entry point in ``input_grad.cu``."""
        return f"input_grad_{self.tokens}_{self.groups}_{self.stages}"

    @property
    def macro(self) -> str:
        """The call that defines the entry point."""
        return f"KERNEL({self.tokens}, {self.groups}, {self.stages})"

    def tiles(self, m: int, k: int) -> int:
        """Tiles of dx."""
        return _ceil(k // WINDOW_COLUMNS, self.groups) * _ceil(m, self.tokens)

    def grid(self, m: int, n: int, k: int, multiprocessors: int) -> int:
        """Blocks: one a multiprocessor, but no more than there are steps to share out."""
        return min(multiprocessors, _ceil(n, STEP_CHANNELS) * self.tiles(m, k))

    def waves(self, m: int, n: int, k: int, multiprocessors: int) -> int:
        """Whole tiles of a block. Few tiles left over make it one less: they would have too many parts to add up."""
        tiles, blocks = self.tiles(m, k), self.grid(m, n, k, multiprocessors)
        if self.whole:
            return _ceil(tiles, blocks)
        waves, rest = divmod(tiles, blocks)
        return max(0, waves - 1) if 0 < rest * _MOST_PARTS < blocks else waves

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: the ring, staged sums, barriers, and a flag for each warpgroup."""
        stage = self.tokens * 128 + 4 * self.groups * WINDOW_BYTES + 16
        return 1024 + self.stages * stage + self.groups * _STAGED_BYTES + 16

    def partial_bytes(self, multiprocessors: int) -> int:
        """Workspace: two shared tiles a block, fp32."""
        return 0 if self.whole else multiprocessors * 2 * 64 * self.groups * self.tokens * 4

    def fits(self, m: int, n: int, k: int, multiprocessors: int) -> bool:
        """Whether the kernel can count: its divisions are of 32 bits, and shared tiles have counters."""
        tiles, blocks = self.tiles(m, k), self.grid(m, n, k, multiprocessors)
        shared = max(0, tiles - self.waves(m, n, k, multiprocessors) * blocks)
        return shared * self.groups <= COUNTERS and tiles * _ceil(n, STEP_CHANNELS) * blocks < 1 << 32

    def cost(self, m: int, n: int, k: int, multiprocessors: int) -> float:
        """Estimated microseconds."""
        steps, tiles = _ceil(n, STEP_CHANNELS), self.tiles(m, k)
        _, step_us, shared_us = _SHAPES[self.tokens, self.groups]
        waves = self.waves(m, n, k, multiprocessors)
        shared = tiles - waves * multiprocessors
        if shared <= 0:
            return _WHOLE_US + step_us * steps * waves
        misses = _DY_MISS if 2 * m * n > _DY_CACHE_BYTES else 1.0
        return shared_us + step_us * steps * (waves + misses * shared / multiprocessors)


def all_input_grad_plans() -> list[InputGradPlan]:
    """Every tile shape, with shared and with whole tiles."""
    return [InputGradPlan(tokens, groups, whole) for tokens, groups in _SHAPES for whole in (True, False)]


@cache
def input_grad_plan(m: int, n: int, k: int, multiprocessors: int) -> InputGradPlan | None:
    """The tile shape of least estimated time for dy ``[m, n]`` and W ``[n, k]``; None: dequantize and use cuBLAS."""
    if m > GRAD_ROWS:
        return None
    plans = [plan for plan in all_input_grad_plans() if plan.tokens < max(2 * m, 65)]
    plans = [plan for plan in plans if plan.fits(m, n, k, multiprocessors)]
    return min(plans, key=lambda plan: plan.cost(m, n, k, multiprocessors), default=None)
