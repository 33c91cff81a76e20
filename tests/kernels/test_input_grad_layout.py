"""The index arithmetic of cuda/input_grad.cuh replayed in plain integers: which lane holds which weight and sum."""

from collections import Counter

import pytest
import torch
from test_tiles import random_rows

from qerl.kernels.quant_matmul import to_tiles
from qerl.kernels.quant_matmul.hopper_grad_plan import InputGradPlan
from qerl.kernels.quant_matmul.tiles import WINDOW_COLUMNS

GROUPS, STEP_TILES, PITCH = 2, 4, 160
LANE = torch.arange(32)
G, T = LANE >> 2, LANE & 3
MASK, ONES = 0x81C081C0, 0xFFFFFFFF


def byte_perm(a: torch.Tensor, b: torch.Tensor, selector: torch.Tensor) -> torch.Tensor:
    """``__byte_perm`` with a selector for each lane."""
    both = a | b << 32
    chosen = [(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i for i in range(4)]
    return sum(chosen[1:], chosen[0])


def words_at(memory: torch.Tensor, address: torch.Tensor) -> torch.Tensor:
    """uint32 at byte addresses."""
    return sum((memory[address + i] << 8 * i for i in range(1, 4)), memory[address])


def copied(rows: torch.Tensor, swizzled: bool) -> torch.Tensor:
    """Shared memory after a tensor copy of ``[..., 64]`` bytes: the 64-byte swizzle moves pieces of 16 bytes."""
    place = torch.arange(rows.numel())
    memory = torch.zeros(rows.numel(), dtype=torch.long)
    memory[place ^ (place >> 7 & 3) << 4 if swizzled else place] = rows.reshape(-1).long()
    return memory


def bf16(bits: torch.Tensor) -> torch.Tensor:
    return (bits << 16).to(torch.int32).view(torch.float32).double()


def fragment(codes: torch.Tensor, scales: torch.Tensor, group: int, warp: int, i: int) -> torch.Tensor:
    """decode_transposed for all lanes: [lane, register, half] x 2^9."""
    address = i * GROUPS * 512 + group * 512 + T * 128 + (warp ^ T) * 16 + (LANE >> 3) * 4
    assert len({(int(a) >> 2) % 32 for a in address}) == 16 == len(set(address.tolist()))  # no bank conflict
    even, odd = words_at(codes, address), words_at(codes, address + 64)
    at = (i * GROUPS + group) * 64 + T * 16
    scale_words = [words_at(scales, at + 4 * word) for word in range(4)]
    upper_half = (LANE & 4) > 0
    mine = torch.where(upper_half, 0x7632, 0x5410)
    other_halves = torch.where(upper_half, 0x5410, 0x7632)
    first, second = -(LANE >> 3) & 3, (1 - (LANE >> 3)) & 3
    select = first | second << 4 | (first + 4) << 8 | (second + 4) << 12
    w, other = byte_perm(even, odd, mine), byte_perm(even, odd, other_halves)
    pairs = [byte_perm(scale_words[h], scale_words[h + 2], select) & 0x0FF00FF0 | 0x70007000 for h in range(2)]
    rotated = (other * 8192 & 0x80008000) | (w >> 3 & 0x7FFF7FFF)
    decoded = [w, (w * 2) ^ (w * 64), w * 8, (w * 4) ^ rotated]
    values = torch.zeros(32, 4, 2, dtype=torch.float64)
    for register in range(4):
        for half in range(2):
            code = bf16((decoded[register] & MASK & ONES) >> 16 * half & 0xFFFF)
            values[:, register, half] = code * bf16(pairs[register >> 1] >> 16 * half & 0xFFFF) * 2.0**9
    return values


def columns_of(warp: int) -> torch.Tensor:
    """Column of a window of each of the sixteen rows of a warp's fragment."""
    low = 16 * (torch.arange(8) >> 1) + 2 * warp + (torch.arange(8) & 1)
    return torch.cat([low, low + 8])


def test_the_fragments_of_a_step_are_the_transposed_weights() -> None:
    n, k = 16 * STEP_TILES, WINDOW_COLUMNS * GROUPS
    packed, block_scale = random_rows(n, k)
    tiles = to_tiles(packed, block_scale)
    codes = copied(tiles[..., :512].reshape(STEP_TILES, GROUPS, 8, 64), swizzled=True)
    scales = copied(tiles[..., 512:], swizzled=False)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
    nibbles = torch.stack((packed & 15, packed >> 4), -1).view(n, k).long()
    weight = table[nibbles] * block_scale.double().repeat_interleave(16, 1)
    for group in range(GROUPS):
        for warp in range(4):
            columns = columns_of(warp) + group * WINDOW_COLUMNS
            for i in range(STEP_TILES):
                values = fragment(codes, scales, group, warp, i)
                expected = weight[i * 16 : i * 16 + 16, columns].t()  # A is [16 columns, 16 channels]
                for register in range(4):  # of mma's A: rows g and g + 8, then the upper eight of the sum
                    for half in range(2):
                        wanted = expected[G + 8 * (register & 1), 2 * T + half + 8 * (register >> 1)]
                        assert torch.equal(values[:, register, half], wanted)


def test_staged_sums_come_out_as_rows() -> None:
    """stmatrix.trans of every warp's sums, then what each thread reads back."""
    sums = torch.arange(64 * 64).view(64, 64)  # [token, column]
    memory = torch.full((64 * PITCH // 2,), -1)
    for warp in range(4):
        fragments = sums[:, columns_of(warp)].t()  # C is [16 columns, tokens]
        for b in range(0, 8, 2):
            for lane in range(32):  # addresses a row of eight: a token, and rows 8 u .. 8 u + 7 of the fragment
                block, upper = lane >> 4, lane >> 3 & 1
                to = ((lane >> 4) * 8 + (lane & 7)) * PITCH + (warp * 2 + upper) * 16 + b * 8 * PITCH
                memory[to // 2 : to // 2 + 8] = fragments[8 * upper : 8 * upper + 8, (b + block) * 8 + (lane & 7)]
    for place in range(128):
        token, piece = place >> 3, place & 7
        for i in range(0, 64, 16):
            read = []
            for w in range(4):
                address = token * PITCH + (piece & 1) * 16 + (piece >> 1) * 4 + i * PITCH + w * 32
                read += memory[address // 2 : address // 2 + 2].tolist()
            assert read == sums[token + i, piece * 8 : piece * 8 + 8].tolist()


def steps_of(plan: InputGradPlan, shape: tuple[int, int, int], blocks: int, block: int) -> list[list[int]]:
    """Schedule of a block as (tile, first step, last step + 1) in order; ``input_grad.cuh``."""
    m, n, k = shape
    units, tiles = -(-n // 64), plan.tiles(m, k)
    whole = min(plan.waves(m, n, k, blocks) * blocks, tiles)
    runs = [[tile, 0, units] for tile in range(block, whole, blocks)]
    total = (tiles - whole) * units
    at, end = total * block // blocks, total * (block + 1) // blocks
    while at < end:
        tile, unit = divmod(at, units)
        stop = min(units, unit + end - at)
        runs.append([whole + tile, unit, stop])
        at += stop - unit
    return runs


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    "shape", [(2048, 18944, 3584), (2048, 3584, 3584), (2048, 3584, 18944), (300, 512, 3584), (17, 64, 64)], ids=str
)
def test_every_step_is_computed_once(shape: tuple[int, int, int], whole: bool) -> None:
    plan, (m, n, k) = InputGradPlan(256, 2, whole), shape
    units, tiles = -(-n // 64), plan.tiles(m, k)
    blocks = plan.grid(*shape, 132)
    runs = [steps_of(plan, shape, blocks, block) for block in range(blocks)]
    seen = Counter((tile, unit) for run in runs for tile, first, last in run for unit in range(first, last))
    assert seen == Counter((tile, unit) for tile in range(tiles) for unit in range(units))
    parts = Counter(tile for run in runs for tile, first, last in run if last - first < units)
    assert not parts if whole else max(parts.values(), default=0) <= max(4, -(-blocks // tiles) + 1)
    for run in runs:  # a slot of the workspace for a tile the block begins, and one for a tile it ends
        slots = Counter(first == 0 for _, first, last in run if last - first < units)
        assert max(slots.values(), default=0) <= 1


def test_few_tiles_left_over_are_not_cut_into_many_parts() -> None:
    plan = InputGradPlan(256, 2, False)
    assert plan.waves(2048, 18944, 3584, 132) == 1  # 224 tiles: 92 are shared
    assert plan.waves(2048, 3584, 18944, 132) == 8  # 1184 tiles: 128 are shared
    assert plan.waves(1024, 3584, 2176, 66) == 0  # 68 tiles: two left over
    assert plan.waves(1024, 3584, 2112, 68) == 1  # 68 tiles
