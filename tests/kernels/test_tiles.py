"""The tile layout of Hopper's kernels: exact both ways, and what the kernels' arithmetic makes of it."""

import pytest
import torch
from kernel_cases import make_group

from qerl.kernels.quant_matmul import GroupWeight, TileLayoutError, dequantize, from_tiles, quant_matmul, to_tiles
from qerl.kernels.quant_matmul.tiles import WINDOW_BYTES, group_fits_tiles


def random_rows(n: int, k: int, lowest: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of every value but the negative and NaN scales."""
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    scales = torch.randint(lowest, 127, (n, k // 16), dtype=torch.uint8)
    return codes, scales.view(torch.float8_e4m3fn)


@pytest.mark.parametrize("shape", [(16, 64), (48, 576), (2064, 128)], ids=str)
def test_round_trip_is_exact(shape: tuple[int, int]) -> None:
    codes, scales = random_rows(*shape)
    tiles = to_tiles(codes, scales)
    assert tiles.shape == (shape[0] // 16, shape[1] // 64, WINDOW_BYTES)
    assert tiles.numel() == codes.numel() + scales.numel()
    back_codes, back_scales = from_tiles(tiles)
    assert torch.equal(back_codes, codes)
    assert torch.equal(back_scales.view(torch.uint8), scales.view(torch.uint8))


def test_blocks_of_scale_zero_keep_their_value() -> None:
    codes, scales = random_rows(16, 64, lowest=0)
    scales.view(torch.uint8)[0] = 0
    codes_back, scales_back = from_tiles(to_tiles(codes, scales))
    assert torch.equal(scales_back.view(torch.uint8), scales.view(torch.uint8))
    assert (codes_back[0] == 0).all()
    present = (scales.view(torch.uint8) != 0).repeat_interleave(8, dim=1)
    assert torch.equal(codes_back[present], codes[present])


def _bf16(bits: torch.Tensor) -> torch.Tensor:
    return bits.to(torch.int32).bitwise_left_shift(16).view(torch.float32).double()


def test_the_kernels_arithmetic_on_a_window() -> None:
    """cuda/tiles.cuh in plain integers: fragments, scale words, and the powers of two they carry."""
    codes, scales = random_rows(16, 64)
    window = to_tiles(codes, scales)[0, 0].long()
    words = (window[:512].view(32, 4, 4) << torch.arange(0, 32, 8)).sum(-1)
    scale_words = (window[512:].view(8, 2, 4) << torch.arange(0, 32, 8)).sum(-1)
    mask, ones = 0x81C081C0, 0xFFFFFFFF
    registers = [
        words & mask,
        (words * 8) & mask,
        ((words * 2) ^ (words * 64)) & mask,
        ((words * 4) ^ ((words << 29 | words >> 3) & ones)) & mask,
    ]
    rotated = (scale_words << 8 | scale_words >> 24) & ones
    pairs = [(word & 0x0FF00FF0) | 0x70007000 for word in (scale_words, rotated)]
    values = torch.stack((codes & 15, codes >> 4), -1).view(16, 64).long()
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
    expected = table[values] * scales.double().repeat_interleave(16, 1)
    for lane in range(32):
        g, t = divmod(lane, 4)
        for j in range(4):
            for register in range(4):
                row, column = g + 8 * (register & 1), 16 * j + 2 * t + 8 * (register >> 1)
                pair = pairs[j & 1][g, register & 1]
                scale = _bf16(pair >> (16 * (j >> 1)) & 0xFFFF)
                for half in range(2):
                    code = _bf16(registers[register][lane, j] >> (16 * half) & 0xFFFF)
                    assert float(code * scale) * 2.0**9 == float(expected[row, column + half])


@pytest.mark.parametrize("byte", [127, 200, 255], ids=["nan", "negative", "negative-nan"])
def test_scales_that_no_quantizer_makes_are_refused(byte: int) -> None:
    codes, scales = random_rows(16, 64)
    scales.view(torch.uint8)[3, 2] = byte
    with pytest.raises(TileLayoutError, match="NaN or negative"):
        to_tiles(codes, scales)


@pytest.mark.parametrize("shape", [(24, 64), (16, 96)], ids=str)
def test_shapes_that_do_not_divide_are_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(TileLayoutError, match=f"{shape[0]} x {shape[1]}"):
        to_tiles(*random_rows(*shape))


def test_the_reference_reads_both_layouts() -> None:
    rows = make_group("nvfp4", (32, 16), 128, uniform=False)
    tiles = in_tiles(rows)
    assert (rows.layout, tiles.layout, rows.nbytes) == ("rows", "tiles", tiles.nbytes)
    x = torch.randn(3, 128)
    assert torch.equal(quant_matmul(x, tiles), quant_matmul(x, rows))
    assert torch.equal(dequantize(tiles), dequantize(rows))


def test_a_weight_that_is_no_tiles_is_named() -> None:
    rows = make_group("nvfp4", (32,), 128)
    with pytest.raises(ValueError, match=r"segments \(8, 24\)"):
        GroupWeight("nvfp4", (8, 24), 128, to_tiles(rows.codes, rows.block_scale), None, torch.ones(2))


def test_more_members_than_the_kernels_tell_apart_stay_in_rows() -> None:
    assert group_fits_tiles((16,) * 4, 64) and not group_fits_tiles((16,) * 5, 64)
    rows = make_group("nvfp4", (16,) * 5, 64)
    with pytest.raises(ValueError, match="at most 4 segments"):
        GroupWeight("nvfp4", (16,) * 5, 64, to_tiles(rows.codes, rows.block_scale), None, torch.ones(5))


def in_tiles(weight: GroupWeight) -> GroupWeight:
    """The same weight in the other layout."""
    codes = to_tiles(weight.codes, weight.block_scale)
    return GroupWeight(
        weight.format, weight.segments, weight.in_features, codes, None, weight.global_scale, weight.uniform_scale
    )
