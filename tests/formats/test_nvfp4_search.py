"""The `mse` search against the same search written block by block with other arithmetic, in exact numbers."""

from fractions import Fraction
from itertools import pairwise

import pytest
import torch

from qerl.formats.e2m1 import MAGNITUDES, round_to_e2m1
from qerl.formats.nvfp4 import NVFP4, global_scale

OFFSETS = (0, -3, -2, -1, 1, 2, 3, 4, 5, 6)


def stepped_rounding(values: torch.Tensor) -> torch.Tensor:
    """E2M1 rounding by a division and a comparison for each binade."""
    magnitude = values.abs().clamp(max=6.0)
    step = torch.where(magnitude < 2.0, 0.5, torch.where(magnitude < 4.0, 1.0, 2.0)).to(values.dtype)
    return torch.copysign((magnitude / step).round() * step, values)


def test_rounding_turns_at_the_midpoints_to_the_last_bit() -> None:
    """Both neighbours of every midpoint, and the midpoints."""
    middles = torch.tensor([(a + b) / 2 for a, b in pairwise(MAGNITUDES)])
    infinity = torch.tensor(float("inf"))
    values = torch.cat([torch.nextafter(middles, -infinity), middles, torch.nextafter(middles, infinity)])
    values = torch.cat([values, torch.tensor([0.0, 1e-45, 5.9, 6.0, 7.0, 1e38, float("inf")]), torch.rand(4096) * 8])
    assert torch.equal(round_to_e2m1(values), stepped_rounding(values))
    assert torch.equal(round_to_e2m1(-values), stepped_rounding(-values))


def searched(block: list[float], start: int, divisor: torch.Tensor) -> int:
    """The E4M3 code of least exact squared error; the first of equal ones in the order of `OFFSETS`."""
    values = torch.tensor(block)
    best, least = start, None
    for offset in OFFSETS:
        code = min(max(start + offset, 1), 0x7E)
        scale = torch.tensor([code], dtype=torch.uint8).view(torch.float8_e4m3fn).float() / divisor
        approximate = (stepped_rounding(values / scale) * scale).tolist()
        error = sum((Fraction(a) - Fraction(b)) ** 2 for a, b in zip(block, approximate, strict=True))
        if least is None or error < least:
            best, least = code, error
    return best


@pytest.mark.parametrize("kind", ["gaussian", "heavy", "integers", "tiny"])
def test_every_block_gets_the_scale_of_least_error(kind: str) -> None:
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(16, 64, generator=generator)
    if kind == "heavy":
        weight = weight**5
    if kind == "integers":  # blocks that several scales represent exactly: ties
        weight = torch.randint(-6, 7, weight.shape, generator=generator).float()
    if kind == "tiny":
        weight = weight * 1e-30
    weight = weight.bfloat16()
    rtn, mse = (NVFP4().quantize([weight], method)[0] for method in ("rtn", "mse"))
    divisor = global_scale([weight])
    starts = rtn.block_scale.view(torch.uint8).flatten().tolist()
    blocks = weight.float().reshape(-1, 16).tolist()
    expected = [searched(block, start, divisor) for block, start in zip(blocks, starts, strict=True)]
    assert mse.block_scale.view(torch.uint8).flatten().tolist() == expected
    if kind == "gaussian":
        assert expected != starts
