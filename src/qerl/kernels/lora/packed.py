"""The B factors of one fused group in one buffer, and the map of its output rows that the kernel walks.

Layout: the factors lie one behind the other, each [N_i, r_i] row-major. u = x A^T is [T, sum(r)] row-major, and factor
i reads its columns ``rank_start : rank_start + rank``; it adds to the columns ``out_start : out_start + out_features``
of y [T, N].
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

# Output columns of one program, and rows of the map.
BLOCK_N = 64
# Numbers in a row of the map: first column, end of the segment, first rank, rank, place of the first row of B.
MAP_WIDTH = 5
# Columns, ranks and places that are multiples of this let the kernel read 16 bytes at a time.
_ALIGNED = 8


def padded_rank(rank: int) -> int:
    """The rank with which factors of ``rank`` reach the kernels, the rest zeros: the next multiple of 8.

    Other ranks cannot be added before a product rounds, which the members of one group would then not do alike.
    """
    return -(-rank // _ALIGNED) * _ALIGNED


@dataclass(frozen=True, slots=True)
class LoraSegment:
    """One member of a fused group: which columns of u it reads and which of y it adds to."""

    out_start: int
    out_features: int
    rank_start: int
    rank: int


class PackedB:
    """B of all members, scaling included.

    Args:
        segments: the members, no two with a common output column.
        dtype: that of y and u.
        device: where the buffer lives.

    Attributes:
        buffer: [sum(N_i r_i)], uninitialized.
        views: [N_i, r_i] views of the buffer, in the order of ``segments``.
    """

    def __init__(self, segments: Sequence[LoraSegment], dtype: torch.dtype, device: torch.device) -> None:
        self.segments = tuple(segments)
        sizes = [segment.out_features * segment.rank for segment in self.segments]
        self.buffer = torch.empty(sum(sizes), dtype=dtype, device=device)
        self.places = [sum(sizes[:index]) for index in range(len(sizes))]
        self.views = [
            self.buffer[place : place + size].view(segment.out_features, segment.rank)
            for segment, place, size in zip(self.segments, self.places, sizes, strict=True)
        ]
        self.max_rank = max(segment.rank for segment in self.segments)
        numbers = [
            *self.places,
            *(n for s in self.segments for n in (s.rank, s.rank_start, s.out_start, s.out_features)),
        ]
        self.aligned = all(number % _ALIGNED == 0 for number in numbers)
        self._maps: dict[tuple[bool, ...], torch.Tensor] = {}

    def row_map(self, active: tuple[bool, ...]) -> torch.Tensor:
        """int32 [blocks, 5] of the active members, on the device.

        The first call for an ``active`` copies from the host, so it must not be captured in a CUDA graph.
        """
        found = self._maps.get(active)
        if found is None:
            rows = [
                (s.out_start + row, s.out_start + s.out_features, s.rank_start, s.rank, place + row * s.rank)
                for s, place, is_active in zip(self.segments, self.places, active, strict=True)
                if is_active
                for row in range(0, s.out_features, BLOCK_N)
            ]
            found = torch.tensor(rows, dtype=torch.int32, device=self.buffer.device).view(-1, MAP_WIDTH)
            self._maps[active] = found
        return found
