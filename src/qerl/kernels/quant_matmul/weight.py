"""The packed weight of a fused group of linears, as the kernels take it."""

from dataclasses import dataclass

import torch

_BLOCK_SIZE = {"nvfp4": 16, "nf4": 64}
_SCALE_DTYPE = {"nvfp4": torch.float8_e4m3fn, "nf4": torch.float32}


@dataclass(slots=True)
class GroupWeight:
    """Frozen 4-bit weight ``[N, K]`` made of row segments (q/k/v or gate/up, or a single linear).

    Views of storage that somebody else owns; nothing here is copied or mutated.

    Attributes:
        format: ``"nvfp4"`` or ``"nf4"``.
        segments: rows of each member; they sum to N.
        in_features: K.
        codes: uint8 ``[N, K/2]``, contiguous; low nibble = even column.
        block_scale: nvfp4: float8_e4m3fn ``[N, K/16]``; nf4: float32 absmax ``[N, K/64]``, or flat
            ``[ceil(N*K/64)]`` where K is not a multiple of 64. Contiguous.
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
    block_scale: torch.Tensor
    global_scale: torch.Tensor | None = None
    uniform_scale: float | None = None

    def __post_init__(self) -> None:
        if self.format not in _BLOCK_SIZE:
            raise ValueError(f"unknown weight format {self.format!r}; supported: {', '.join(_BLOCK_SIZE)}")
        n, k = self.out_features, self.in_features
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
        return self.codes.numel() + self.block_scale.numel() * self.block_scale.element_size()


def _expect(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must be {dtype} {list(shape)}, got {tensor.dtype} {list(tensor.shape)}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()} for {list(shape)}")
