"""MXFP4 held as NVFP4: equal values wherever that is possible, and a named error elsewhere."""

import random

import pytest
import torch

from qerl.formats import mxfp4_as_nvfp4
from qerl.formats.base import PackedTensor, PackingError, get_format
from qerl.formats.e2m1 import MAGNITUDES, pack_nibbles
from qerl.formats.mxfp4_as_nvfp4 import ScaleRangeError, as_nvfp4

MXFP4, NVFP4 = get_format("mxfp4"), get_format("nvfp4")


def packed_of(codes: torch.Tensor, exponents: list[list[int]]) -> PackedTensor:
    """An MXFP4 weight of these codes (uint8 ``[N, K]``, 0..15) and exponents of scales."""
    scale = (torch.tensor(exponents) + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
    return PackedTensor("mxfp4", tuple(codes.shape), pack_nibbles(codes), scale, None)


def check_equal(members: list[PackedTensor], held: list[PackedTensor]) -> None:
    """Bytes of the values, signs of zeros included, in fp32; all parts are what NVFP4 kernels take."""
    for packed, result in zip(members, held, strict=True):
        assert result.format == "nvfp4" and result.shape == packed.shape
        assert torch.equal(NVFP4.dequantize(result).view(torch.int32), MXFP4.dequantize(packed).view(torch.int32))
        bytes_ = result.block_scale.view(torch.uint8)
        assert bool(((bytes_ > 0) & (bytes_ < 127)).all())
        # What kernels compute: exact products, times the reciprocal of the divisor.
        product = NVFP4.unscaled(result, torch.bfloat16).float() * (1.0 / result.global_scale)
        assert torch.equal(product, MXFP4.dequantize(packed))


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e30])
def test_quantized_weights_keep_values_and_share_a_divisor(scale: float) -> None:
    weights = [torch.randn(24, 128) * scale, torch.randn(8, 128) * scale * 30, torch.zeros(4, 128)]
    weights[0][3, 32:64] = 0.0
    weights[0][4, :32] *= 1e-3
    members = MXFP4.quantize(weights)
    held = as_nvfp4(members)
    check_equal(members, held)
    assert len({float(packed.global_scale) for packed in held}) == 1
    # The largest scale is at 2^8, as far from the subnormals of E4M3 as it can be.
    assert max(float(packed.block_scale.float().max()) for packed in held[:2]) == 256.0


@pytest.mark.parametrize("exponent", [-127, -118, -1, 0, 90, 125])
def test_eighteen_powers_of_two_fit_whatever_the_codes(exponent: int) -> None:
    lowest = max(-127, exponent - 17)
    codes = torch.randint(0, 16, (4, 64), dtype=torch.uint8)
    codes[:, 0], codes[:, 32] = 7, 1  # 6 cannot be doubled, 0.5 not be halved
    packed = packed_of(codes, [[exponent, lowest]] * 4)
    held = as_nvfp4([packed])
    check_equal([packed], held)
    assert held[0].codes is packed.codes


def test_blocks_out_of_range_are_shifted_where_that_is_exact() -> None:
    codes = torch.zeros(1, 96, dtype=torch.uint8)
    codes[0, :32] = 7  # 6 under 2^0
    codes[0, 32:64] = torch.tensor([0, 2, 4, 14, 12, 8, 2, 6] * 4)  # 1, 2, -4, ...: halves are exact
    codes[0, 64:] = torch.tensor([1, 2, 3, 9, 10, 0, 8, 11] * 4)  # 0.5, 1, 1.5, ...: doubles are exact
    low = packed_of(codes[:, :64], [[0, -18]])
    check_equal([low], held := as_nvfp4([low]))
    assert held[0].block_scale.float().tolist() == [[256.0, 256.0, 2.0**-9, 2.0**-9]]
    both = packed_of(codes, [[0, -18, 2]])
    check_equal([both], held := as_nvfp4([both]))
    assert held[0].block_scale.float().tolist() == [[256.0, 256.0, 2.0**-9, 2.0**-9, 256.0, 256.0]]


def test_halves_of_a_block_and_zeros_are_placed_on_their_own() -> None:
    codes = torch.zeros(1, 64, dtype=torch.uint8)
    codes[0, :32] = 7
    codes[0, 40] = 8  # -0.0
    codes[0, 48:] = 6  # 4, which has three halves
    packed = packed_of(codes, [[0, -20]])
    check_equal([packed], held := as_nvfp4([packed]))
    assert held[0].codes[0, 24:].tolist() == [0x11] * 8
    zeros = packed_of(torch.tensor([[0, 8] * 16], dtype=torch.uint8), [[-127]])
    check_equal([zeros], held := as_nvfp4([zeros]))
    assert float(held[0].global_scale) == 1.0


def test_members_that_do_not_fit_together_have_their_own_divisors() -> None:
    members = MXFP4.quantize([torch.randn(4, 64), torch.randn(4, 64) * 1e-12])
    held = as_nvfp4(members)
    check_equal(members, held)
    assert float(held[0].global_scale) < 1e-6 * float(held[1].global_scale)


def test_what_does_not_fit_is_refused_with_numbers() -> None:
    codes = torch.full((2, 64), 7, dtype=torch.uint8)
    codes[1, 40] = 1  # 0.5
    packed = packed_of(codes, [[0, 0], [0, -18]])
    with pytest.raises(
        ScaleRangeError, match=r"weight 1 .*\[2, 64\] needs .* 19 .*2\^-18 to 2\^0, where NVFP4 holds 18"
    ):
        as_nvfp4([packed_of(codes, [[0, 0], [0, -17]]), packed])
    with pytest.raises(PackingError, match="not an mxfp4 tensor"):
        as_nvfp4(NVFP4.quantize([torch.randn(2, 32)]))


def drawn_weight(seed: int) -> PackedTensor:
    """Six blocks, some of which can be shifted, with scales over a range about as wide as NVFP4's."""
    draw = random.Random(seed)
    # Any codes; such as can be halved, twice, thrice; such as can be doubled; zeros.
    kinds = (range(16), (0, 2, 4, 6, 14), (0, 4, 12), (6, 14), (0, 1, 2, 9), (0, 8))
    codes = [draw.choices(draw.choice(kinds), k=16) for _ in range(12)]
    middle = draw.choice((5, 9))
    exponents = [[middle, draw.choice((0, 1, 2))], [middle, draw.choice((17, 18, 19))], [middle, middle]]
    return packed_of(torch.tensor(codes, dtype=torch.uint8).reshape(3, 64), exponents)


def fits(packed: PackedTensor) -> bool:
    """By trying every divisor and every scale for every half block."""
    blocks = MXFP4.dequantize(packed).double().abs().reshape(-1, 16).tolist()

    def exact(block: list[float], base: int) -> bool:
        return any(all(value * 2.0 ** -(base + e) in MAGNITUDES for value in block) for e in range(-9, 9))

    return any(all(exact(block, base) for block in blocks) for base in range(-15, 35))


def test_fuzzed_weights_fit_exactly_when_an_exhaustive_search_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mxfp4_as_nvfp4, "_CHUNK_BYTES", 40)
    seen = {"as they are": 0, "shifted": 0, "refused": 0}
    for seed in range(120):
        packed = drawn_weight(seed)
        if fits(packed):
            (held,) = as_nvfp4([packed])
            check_equal([packed], [held])
            seen["as they are" if torch.equal(held.codes, packed.codes) else "shifted"] += 1
        else:
            seen["refused"] += 1
            with pytest.raises(ScaleRangeError):
                as_nvfp4([packed])
    assert min(seen.values()) > 8, seen


@pytest.mark.gpu
def test_cuda_gives_the_same_bytes() -> None:
    weights = [torch.randn(48, 256), torch.randn(16, 256) * 40]
    weights[0][2, :64] *= 1e-4
    weights[0][3] = 0.0
    shifted = next(packed for packed in map(drawn_weight, range(120)) if fits(packed))
    for members in (MXFP4.quantize(weights), [shifted]):
        on_cuda = as_nvfp4([packed.to("cuda") for packed in members])
        for mine, expected in zip(on_cuda, as_nvfp4(members), strict=True):
            assert torch.equal(mine.codes.cpu(), expected.codes)
            assert torch.equal(mine.block_scale.view(torch.uint8).cpu(), expected.block_scale.view(torch.uint8))
            assert torch.equal(mine.global_scale.cpu(), expected.global_scale)
