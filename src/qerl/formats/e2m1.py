"""E2M1, the 4-bit float of NVFP4 and MXFP4 (OCP Microscaling Formats v1.0, table 5), and nibble packing.

A code is ``sign << 3 | index`` into the magnitudes ``0 .5 1 1.5 2 3 4 6``. Rounding is to nearest, ties to
the even code, which inside each binade is ties-to-even on a grid of step .5 (below 2), 1 (below 4) or 2.
"""

import torch

E2M1_MAX = 6.0
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = MAGNITUDES + tuple(-value for value in MAGNITUDES)

# Largest fp32 that rounds to magnitude i or below: the midpoint where the even code is below it, else the number just
# under the midpoint. One comparison each, so that rounding is one pass over memory instead of ten.
_UPPER_BOUNDS = (0.25, 0.75 - 2**-24, 1.25, 1.75 - 2**-23, 2.5, 3.5 - 2**-22, 5.0)


def nearest_index(magnitudes: torch.Tensor) -> torch.Tensor:
    """Index (int32) into `MAGNITUDES` of the nearest one of each element; saturates at 6, ties to the even index.

    Args:
        magnitudes: float32, not negative, any shape.
    """
    bounds = torch.tensor(_UPPER_BOUNDS, dtype=torch.float32, device=magnitudes.device)
    return torch.bucketize(magnitudes, bounds, out_int32=True)


def round_to_e2m1(values: torch.Tensor) -> torch.Tensor:
    """The nearest E2M1 value of each element, saturating at 6; float32 in, same dtype and shape out."""
    table = torch.tensor(MAGNITUDES, dtype=values.dtype, device=values.device)
    return torch.copysign(table[nearest_index(values.abs())], values)


def encode(values: torch.Tensor) -> torch.Tensor:
    """Codes (uint8, 0..15) of `values` (float32, any shape) after rounding.

    A negative value that rounds to zero keeps its sign (code 8), an input of -0.0 does not (code 0):
    this is what compressed-tensors stores.
    """
    return nearest_index(values.abs()).to(torch.uint8) | ((values < 0).to(torch.uint8) << 3)


def decode(codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of uint8 `codes` (0..15) as `dtype`; exact in every 16-bit float. Same shape."""
    return torch.tensor(VALUES, dtype=dtype, device=codes.device)[codes.to(torch.int32)]


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """4-bit codes uint8 ``[..., K]``, K even, to uint8 ``[..., K/2]``; even columns go to the low nibble."""
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).contiguous()


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Inverse of `pack_nibbles`: uint8 ``[..., K/2]`` to uint8 ``[..., K]``."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
