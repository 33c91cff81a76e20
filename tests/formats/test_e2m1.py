"""E2M1 rounding, codes and nibble order."""

import torch

from qerl.formats.e2m1 import MAGNITUDES, VALUES, decode, encode, pack_nibbles, round_to_e2m1, unpack_nibbles


def test_rounding_is_nearest_with_ties_to_the_even_code() -> None:
    # Every 64th of a unit up to beyond the maximum, so all midpoints are hit exactly.
    values = torch.arange(-7 * 64, 7 * 64 + 1, dtype=torch.float32) / 64
    for value, rounded in zip(values.tolist(), round_to_e2m1(values).tolist()):
        distances = [abs(min(abs(value), 6.0) - magnitude) for magnitude in MAGNITUDES]
        nearest = [index for index, distance in enumerate(distances) if distance == min(distances)]
        expected = next(index for index in nearest if len(nearest) == 1 or index % 2 == 0)
        assert abs(rounded) == MAGNITUDES[expected], value


def test_every_code_survives_decoding_and_encoding() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    assert decode(codes).tolist() == list(VALUES)
    # -0 as an input is stored as +0: code 8 comes only from negative values that round to zero.
    expected = codes.clone()
    expected[8] = 0
    assert torch.equal(encode(decode(codes)), expected)


def test_sign_of_zero_follows_the_sign_of_the_rounded_value() -> None:
    assert encode(torch.tensor([-0.1, 0.1, -0.0, 0.0, -0.25, -0.26])).tolist() == [8, 0, 0, 0, 8, 9]


def test_saturates_at_six() -> None:
    assert encode(torch.tensor([5.0, 5.01, 6.0, 1e9, -1e9])).tolist() == [6, 7, 7, 7, 15]


def test_even_columns_are_in_the_low_nibble() -> None:
    codes = torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)
    packed = pack_nibbles(codes)
    assert packed.tolist() == [[0x21, 0x0F]]
    assert torch.equal(unpack_nibbles(packed), codes)


def test_decoding_is_exact_in_sixteen_bits() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(decode(codes, dtype).float(), decode(codes))
