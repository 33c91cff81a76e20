"""E2M1, the 4-bit float of NVFP4 and MXFP4 (OCP Microscaling Formats v1.0, table 5), and nibble packing.

A code is ``sign << 3 | index`` into the magnitudes ``0 .5 1 1.5 2 3 4 6``. Rounding is to nearest, ties to
the even code, which inside each binade is ties-to-even on a grid of step .5 (below 2), 1 (below 4) or 2.
"""

import torch

E2M1_MAX = 6.0
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = MAGNITUDES + tuple(-value for value in MAGNITUDES)

# Index of a magnitude by twice its value (0 1 2 3 4 6 8 12); the holes are never looked up.
_INDEX_OF_DOUBLE = (0, 1, 2, 3, 4, 0, 5, 0, 6, 0, 0, 0, 7)
_EXPONENT_BITS = 0x7F800000


def round_magnitude_(magnitudes: torch.Tensor) -> torch.Tensor:
    """Round `magnitudes` (float32, not negative) in place to the nearest E2M1 value, saturating at 6; returned too.

    The grid in [2^e, 2^(e+1)) has step 2^(e-1), and that of e = 0 goes down to zero. Adding 1.5 * 2^23 steps leaves
    fp32 no bits below a step, so the addition itself rounds to it, ties to even.
    """
    shift = magnitudes.clamp_(max=E2M1_MAX).clamp(min=1.0).view(torch.int32).bitwise_and_(_EXPONENT_BITS)
    shift = shift.view(torch.float32).mul_(1.5 * 2.0**22)
    return magnitudes.add_(shift).sub_(shift)


def round_to_e2m1(values: torch.Tensor) -> torch.Tensor:
    """The nearest E2M1 value of each element, saturating at 6; float32 in, same shape out."""
    return torch.copysign(round_magnitude_(values.abs()), values)


def encode(values: torch.Tensor) -> torch.Tensor:
    """Codes (uint8, 0..15) of `values` (float32, any shape) after rounding.

    A negative value that rounds to zero keeps its sign (code 8), an input of -0.0 does not (code 0):
    this is what compressed-tensors stores.
    """
    doubled = round_magnitude_(values.abs()).mul_(2.0).to(torch.int32)
    table = torch.tensor(_INDEX_OF_DOUBLE, dtype=torch.uint8, device=values.device)
    return table[doubled] | ((values < 0).to(torch.uint8) << 3)


def decode(codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of uint8 `codes` (0..15) as `dtype`; exact in every 16-bit float. Same shape."""
    return torch.tensor(VALUES, dtype=dtype, device=codes.device)[codes.to(torch.int32)]


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """4-bit codes uint8 ``[..., K]``, K even, to uint8 ``[..., K/2]``; even columns go to the low nibble."""
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).contiguous()


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Inverse of `pack_nibbles`: uint8 ``[..., K/2]`` to uint8 ``[..., K]``."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
