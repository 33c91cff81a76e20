"""The packed weight of a fused group of linears, as the kernels take it."""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

import torch

from qerl.kernels.quant_matmul.tiles import TILE_ROWS, WINDOW_BYTES, WINDOW_COLUMNS, group_fits_tiles

_BLOCK_SIZE = {"nvfp4": 16, "nf4": 64}
_SCALE_DTYPE = {"nvfp4": torch.float8_e4m3fn, "nf4": torch.float32}


@dataclass(slots=True)
class GroupWeight:
    """Frozen 4-bit weight ``[N, K]`` made of row segments (q/k/v or gate/up, or a single linear).

    It comes in one of two layouts of the same bytes: ``"rows"``, in which every format is stored on disk, and
    ``"tiles"`` (nvfp4 only), in which Hopper's kernels read it (:mod:`qerl.kernels.quant_matmul.tiles`).

    Views of storage that somebody else owns; nothing here is copied or mutated.

    Attributes:
        format: ``"nvfp4"`` or ``"nf4"``.
        segments: rows of each member; they sum to N.
        in_features: K.
        codes: uint8 ``[N, K/2]``, contiguous; low nibble = even column. In tiles: uint8 ``[N/16, K/64, 576]``, codes
            and block scales.
        block_scale: nvfp4: float8_e4m3fn ``[N, K/16]``; nf4: float32 absmax ``[N, K/64]``, or flat
            ``[ceil(N*K/64)]`` where K is not a multiple of 64. Contiguous. None in tiles.
        global_scale: nvfp4: float32 ``[S]``, the divisor of each segment; nf4: None.
        uniform_scale: 1/G as a Python float if all segments have the divisor G, else None. A host copy, so that no
            launch waits for the device.

    Raises:
        ValueError: unknown format, or tensors that do not fit it or each other.
    """

    format: str
    segments: tuple[int, ...]
    in_features: int
    codes: torch.Tensor
    block_scale: torch.Tensor | None
    global_scale: torch.Tensor | None = None
    uniform_scale: float | None = None

    def __post_init__(self) -> None:
        if self.format not in _BLOCK_SIZE:
            raise ValueError(f"unknown weight format {self.format!r}; supported: {', '.join(_BLOCK_SIZE)}")
        n, k = self.out_features, self.in_features
        if self.layout == "tiles":
            self._check_tiles()
            return
        step = 16 if self.format == "nvfp4" else 2
        if k % step or k <= 0 or n <= 0:
            raise ValueError(f"a {self.format} weight needs N > 0 and K a multiple of {step}, got N={n}, K={k}")
        _expect("codes", self.codes, torch.uint8, (n, k // 2))
        block = _BLOCK_SIZE[self.format]
        shape = (n, k // block) if k % block == 0 else (-(-n * k // block),)
        _expect("block_scale", self.block_scale, _SCALE_DTYPE[self.format], shape)
        if self.format == "nvfp4":
            if self.global_scale is None:
                raise ValueError("an nvfp4 weight needs its global_scale (float32 [S], divisors); got None")
            _expect("global_scale", self.global_scale, torch.float32, (len(self.segments),))
        elif self.global_scale is not None or self.uniform_scale is not None:
            raise ValueError("an nf4 weight has no global scale; pass None")

    def _check_tiles(self) -> None:
        n, k = self.out_features, self.in_features
        if self.format != "nvfp4" or not group_fits_tiles(self.segments, k):
            raise ValueError(
                f"tiles hold nvfp4 weights with at most 4 segments of multiples of 16 rows and K a multiple of 64, "
                f"got {self.format}, segments {self.segments}, K={k}"
            )
        _expect("codes", self.codes, torch.uint8, (n // TILE_ROWS, k // WINDOW_COLUMNS, WINDOW_BYTES))
        if self.global_scale is None:
            raise ValueError("an nvfp4 weight needs its global_scale (float32 [S], divisors); got None")
        _expect("global_scale", self.global_scale, torch.float32, (len(self.segments),))

    def rows(self, first: int, last: int) -> "GroupWeight":
        """Rows `first` to `last` (exclusive) of one nvfp4 segment, as views; in tiles both are multiples of 16."""
        ends = list(accumulate(self.segments))
        index = bisect_right(ends, first)
        if not first < last <= ends[min(index, len(ends) - 1)]:
            raise ValueError(f"rows {first} to {last} lie in no single segment of {self.segments}")
        step = TILE_ROWS if self.layout == "tiles" else 1
        part = slice(first // step, last // step)
        assert self.global_scale is not None
        scales = None if self.block_scale is None else self.block_scale[part]
        divisor = self.global_scale[index : index + 1]
        shape = (last - first,), self.in_features
        return GroupWeight(self.format, *shape, self.codes[part], scales, divisor, self.uniform_scale)

    @property
    def layout(self) -> str:
        """``"rows"`` or ``"tiles"``."""
        return "rows" if self.block_scale is not None else "tiles"

    @property
    def out_features(self) -> int:
        """N, the rows of all segments together."""
        return sum(self.segments)

    @property
    def device(self) -> torch.device:
        """Where the packed bytes live."""
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of codes and block scales: what a pass over the weight reads."""
        return self.codes.nbytes + (0 if self.block_scale is None else self.block_scale.nbytes)


@dataclass(slots=True)
class LoraUpdate:
    """What a product adds before it rounds: ``y[:, segment] += u[:, columns] b^T`` with ``u = x a^T`` rounded to bf16.

    Attributes:
        a: bf16 ``[R, K]`` contiguous, the factors of all members.
        b: bf16, one-dimensional: the factors ``[N_i, r_i]`` row-major somewhere in it, scaling included.
        places: per segment of the weight (first column of u, rank, place of the factor in b); rank 0 adds nothing.
    """

    a: torch.Tensor
    b: torch.Tensor
    places: tuple[tuple[int, int, int], ...]


def _expect(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must be {dtype} {list(shape)}, got {tensor.dtype} {list(tensor.shape)}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()} for {list(shape)}")
