"""MXFP4 weights held as NVFP4, value for value, so that every kernel, layout and gradient of NVFP4 serves them.

A block of 32 with the scale 2^e becomes two blocks of 16 with the E4M3 scale 2^(e - b), under the divisor 2^-b:

    code * 2^e = code * 2^(e - b) / 2^-b,        -9 <= e - b <= 8

E4M3 holds 18 powers of two, subnormals included. b puts the largest scale of the weight (of the fused group, where its
members fit together) at 2^8. A block below the range takes a larger scale and halved codes if that is exact (4 becomes
2, but 1.5 has no half), one above it a smaller scale and doubled codes; blocks of zeros take any scale. What does not
fit even so is refused: to flush small blocks to zero would change the weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from qerl.formats.base import FormatError, PackedTensor
from qerl.formats.e2m1 import MAGNITUDES
from qerl.formats.mxfp4 import BLOCK_SIZE as MXFP4_BLOCK_SIZE
from qerl.formats.mxfp4 import check_layout
from qerl.formats.nvfp4 import BLOCK_SIZE as NVFP4_BLOCK_SIZE

_BIAS = 127
# Powers of two in E4M3 (the lower three are subnormal), and their bytes.
_LOWEST, _HIGHEST = -9, 8
_E4M3_BYTES = (1, 2, 4, *(exponent + 7 << 3 for exponent in range(-6, _HIGHEST + 1)))
# From here on the divisor 2^-b is finite and its reciprocal a normal fp32 number.
_LOWEST_BASE = -126
# Further than any code can be shifted (0.5 is doubled to 4 in three steps).
_MOST_SHIFTS = 3
# What a zero may be shifted by: more than any distance between scales.
_ANY = 1000
# Bytes of codes whose limits are looked up at once.
_CHUNK_BYTES = 1 << 22


class ScaleRangeError(FormatError):
    """The scales of an MXFP4 weight span more powers of two than NVFP4's block scales hold."""


@dataclass(frozen=True, slots=True)
class _Span:
    """Exponents of the blocks of a weight: the largest, the lowest upper and the highest lower limit to move them to.

    Blocks of zeros do not count; `largest` is None where there are no others.
    """

    largest: int | None
    lowest_upper: int
    highest_lower: int

    def base(self) -> int | None:
        """b, or None where none puts all blocks in range."""
        if self.largest is None:
            return 0
        base = max(min(self.largest - _HIGHEST, self.lowest_upper - _LOWEST), _LOWEST_BASE)
        return base if self.highest_lower - _HIGHEST <= base else None


def as_nvfp4(members: Sequence[PackedTensor]) -> list[PackedTensor]:
    """The MXFP4 weights of one fused group as NVFP4 weights of equal values.

    They share one global scale where that is possible, and have their own otherwise. Waits for the device.
    Nothing is modified; codes that stay as they are, are shared with the input.

    Raises:
        PackingError: not an mxfp4 tensor.
        ScaleRangeError: a weight that NVFP4 cannot hold exactly.
    """
    for packed in members:
        check_layout(packed)
    spans = [_span(packed) for packed in members]
    shared = _joined(spans).base()
    bases = [span.base() for span in spans] if shared is None else [shared] * len(spans)
    for position, (packed, span, base) in enumerate(zip(members, spans, bases, strict=True)):
        if base is None:
            needed = span.highest_lower - span.lowest_upper + 1
            raise ScaleRangeError(
                f"weight {position} of the group {list(packed.shape)} needs block scales of {needed} different "
                f"powers of two, from 2^{span.lowest_upper} to 2^{span.highest_lower}, where NVFP4 holds "
                f"{_HIGHEST - _LOWEST + 1}; keep this layer in 16 bit"
            )
    return [_encode(packed, base) for packed, base in zip(members, bases, strict=True)]


def _span(packed: PackedTensor) -> _Span:
    exponents = _exponents(packed)
    nonzero = _half_blocks(packed.codes & 0x77).ne(0).any(-1)
    largest, smallest = _extremes(exponents, exponents, nonzero)
    if largest < smallest:
        return _Span(None, _ANY, -_ANY)
    if largest - smallest <= _HIGHEST - _LOWEST:
        # Nothing has to be shifted, which is so for nearly every real weight: its codes are not looked at.
        return _Span(largest, smallest, largest)
    halvings, doublings = _limits(packed.codes)
    highest_lower, lowest_upper = _extremes(exponents - doublings, exponents + halvings, nonzero)
    return _Span(largest, lowest_upper, highest_lower)


def _joined(spans: Sequence[_Span]) -> _Span:
    """The span of all blocks of several weights."""
    return _Span(
        max((span.largest for span in spans if span.largest is not None), default=None),
        min(span.lowest_upper for span in spans),
        max(span.highest_lower for span in spans),
    )


def _encode(packed: PackedTensor, base: int) -> PackedTensor:
    """`packed` under the divisor 2^-base, which puts every block that is not zero in range."""
    wanted = _exponents(packed) - base
    held = wanted.clamp(_LOWEST, _HIGHEST)
    bytes_ = torch.tensor(_E4M3_BYTES, dtype=torch.uint8, device=held.device)[(held - _LOWEST).int()]
    shift = (held - wanted).clamp(-_MOST_SHIFTS, _MOST_SHIFTS)
    return PackedTensor(
        format="nvfp4",
        shape=packed.shape,
        codes=_shifted(packed.codes, shift),
        block_scale=bytes_.view(torch.float8_e4m3fn),
        global_scale=torch.full((1,), 2.0**-base, dtype=torch.float32, device=held.device),
    )


def _exponents(packed: PackedTensor) -> torch.Tensor:
    """int16 ``[N, K/16]``: the exponent of the scale of each half block."""
    exponents = packed.block_scale.view(torch.uint8).to(torch.int16) - _BIAS
    return exponents.repeat_interleave(MXFP4_BLOCK_SIZE // NVFP4_BLOCK_SIZE, dim=1)


def _half_blocks(codes: torch.Tensor) -> torch.Tensor:
    """Packed codes ``[N, K/2]`` as ``[N, K/16, 8]``."""
    return codes.unflatten(1, (-1, NVFP4_BLOCK_SIZE // 2))


def _extremes(lower: torch.Tensor, upper: torch.Tensor, counted: torch.Tensor) -> tuple[int, int]:
    """The largest of `lower` and the smallest of `upper` where `counted`; -1000 and 1000 if that is nowhere."""
    largest = torch.where(counted, lower, -_ANY).amax()
    smallest = torch.where(counted, upper, _ANY).amin()
    found = torch.stack((largest, smallest)).tolist()
    return int(found[0]), int(found[1])


@cache
def _shift_tables() -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...], tuple[int, ...]]:
    """For every byte of two codes: what it becomes by 3 doublings to 3 halvings, and how often either is exact."""
    rows = []
    for shift in range(-_MOST_SHIFTS, _MOST_SHIFTS + 1):
        wanted = [value * 2.0**-shift for value in MAGNITUDES]
        rows.append([MAGNITUDES.index(value) if value in MAGNITUDES else -1 for value in wanted])
    halvings, doublings = [_ANY], [_ANY]
    for index in range(1, len(MAGNITUDES)):
        exact = [rows[shift + _MOST_SHIFTS][index] >= 0 for shift in range(-_MOST_SHIFTS, _MOST_SHIFTS + 1)]
        doublings.append([*exact[_MOST_SHIFTS::-1], False].index(False) - 1)
        halvings.append([*exact[_MOST_SHIFTS:], False].index(False) - 1)
    pairs = [(byte & 7, byte >> 4 & 7, byte & 0x88) for byte in range(256)]
    moved = tuple(tuple(max(row[a], 0) | max(row[b], 0) << 4 | signs for a, b, signs in pairs) for row in rows)
    most = [tuple(min(limit[a], limit[b]) for a, b, _ in pairs) for limit in (halvings, doublings)]
    return moved, most[0], most[1]


def _limits(codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How often the codes ``[N, K/2]`` of each half block can be halved and doubled exactly, int16 ``[N, K/16]``."""
    tables = [torch.tensor(table, dtype=torch.int16, device=codes.device) for table in _shift_tables()[1:]]
    chunks = _half_blocks(codes).split(max(1, _CHUNK_BYTES // codes.shape[1]))
    halvings, doublings = (torch.cat([table[chunk.int()].amin(-1) for chunk in chunks]) for table in tables)
    return halvings, doublings


def _shifted(codes: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Codes ``[N, K/2]`` halved `shift` times (doubled, where negative) in each half block; zeros keep their sign."""
    if not bool(shift.any()):
        return codes
    table = torch.tensor(_shift_tables()[0], dtype=torch.uint8, device=codes.device).flatten()
    step = max(1, _CHUNK_BYTES // codes.shape[1])
    rows = []
    for chunk, moves in zip(_half_blocks(codes).split(step), shift.split(step), strict=True):
        index = (moves.int() + _MOST_SHIFTS << 8)[..., None] + chunk.int()
        rows.append(table[index].flatten(1))
    return torch.cat(rows)
