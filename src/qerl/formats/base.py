"""What every weight format shares: the packed tensor, the format interface, the errors, the fused groups.

A *format* stores one Linear weight ``[N, K]`` (``out_features``, ``in_features``) as 4-bit codes plus a scale
for each block of consecutive columns. The modules of this package are the ground truth: short plain torch, to
which kernels are compared. Weights that are served as one matrix (q/k/v, gate/up) form a *fused group*; in
formats with a global scale the members of a group share it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Protocol, runtime_checkable

import torch

FUSED_GROUPS: tuple[tuple[str, ...], ...] = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

_FORMATS = {
    "nvfp4": ("qerl.formats.nvfp4", "NVFP4"),
    "nf4": ("qerl.formats.nf4", "NF4"),
    "mxfp4": ("qerl.formats.mxfp4", "MXFP4"),
}
SUPPORTED_FORMATS: tuple[str, ...] = tuple(_FORMATS)


_CHUNK = 1 << 22


class FormatError(ValueError):
    """A weight, a checkpoint or a request that cannot be handled; the message says what to change."""


class NonFiniteWeightError(FormatError):
    """A weight holds NaN or Inf."""


class PackingError(FormatError):
    """A shape or dtype that the format cannot pack."""


class CheckpointError(FormatError):
    """A checkpoint folder that cannot be used as it is; the base of the more specific errors below."""


class MissingShardError(CheckpointError):
    """A weight file or a tensor that the index or the packed layout calls for is not there."""


class TruncatedFileError(CheckpointError):
    """A safetensors file that is shorter or longer than its header says, or whose header cannot be read."""


class UnsafeCheckpointError(CheckpointError):
    """Only pickle weights (.bin, .pt, .pth) were found."""


class NotQuantizedError(CheckpointError):
    """A packed weight was asked for where there is none."""


class AlreadyQuantizedError(CheckpointError):
    """The source of a quantization is itself quantized."""


class AmbiguousScaleError(CheckpointError):
    """Metadata and tensor names disagree on the convention of the global scale (divisor or multiplier)."""


class UnsupportedQuantizationError(CheckpointError):
    """A quantized checkpoint in a format that is not read here."""


class LayoutError(CheckpointError):
    """Shape, dtype or content of the parts of a packed weight do not fit together."""


class ArchitectureError(CheckpointError):
    """The tensors do not fit the model that config.json describes, or the model is of a kind not handled."""


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """One 4-bit Linear weight ``[N, K]``.

    Attributes:
        format: ``"nvfp4"``, ``"nf4"`` or ``"mxfp4"``.
        shape: ``(N, K)`` of the unpacked weight.
        codes: uint8 ``[N, K/2]``; column 2j in the low nibble of byte j, column 2j+1 in the high nibble.
        block_scale: nvfp4: float8_e4m3fn ``[N, K/16]``. nf4: float32 absmax ``[N, K/64]``, or flat
            ``[ceil(N*K/64)]`` where K is not a multiple of 64 (blocks then run over row ends). mxfp4:
            float8_e8m0fnu ``[N, K/32]``.
        global_scale: nvfp4: float32 ``[1]``, the divisor in ``w = code * block_scale / global_scale``;
            nf4, mxfp4: None.

    Raises:
        PackingError: codes of the wrong dtype or shape.
    """

    format: str
    shape: tuple[int, int]
    codes: torch.Tensor
    block_scale: torch.Tensor
    global_scale: torch.Tensor | None

    def __post_init__(self) -> None:
        rows, columns = self.shape
        if columns % 2 or tuple(self.codes.shape) != (rows, columns // 2) or self.codes.dtype != torch.uint8:
            raise PackingError(
                f"codes of a {rows}x{columns} {self.format} weight must be uint8 [{rows}, {columns // 2}] "
                f"with an even number of columns, not {self.codes.dtype} {list(self.codes.shape)}"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of codes, block scales and global scale together."""
        parts = [self.codes, self.block_scale]
        if self.global_scale is not None:
            parts.append(self.global_scale)
        return sum(part.numel() * part.element_size() for part in parts)

    def to(self, device: torch.device | str) -> "PackedTensor":
        """The same weight on `device`; dtypes are kept."""
        return replace(
            self,
            codes=self.codes.to(device),
            block_scale=self.block_scale.to(device),
            global_scale=None if self.global_scale is None else self.global_scale.to(device),
        )


@runtime_checkable
class WeightFormat(Protocol):
    """What a format module provides. Instances hold no state."""

    name: str
    block_size: int
    bits_per_weight: float
    methods: tuple[str, ...]

    def quantize(self, weights: Sequence[torch.Tensor], method: str = "rtn") -> list[PackedTensor]:
        """Pack the weights of one fused group (each ``[N_i, K]``, floating; read as bf16)."""
        ...

    def dequantize(self, packed: PackedTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weight ``[N, K]`` that `packed` stands for."""
        ...

    def unscaled(self, packed: PackedTensor, dtype: torch.dtype) -> torch.Tensor:
        """``[N, K]`` without the global scale: exact in bf16 for nvfp4 and mxfp4, rounded to bf16 for nf4."""
        ...


def get_format(name: str) -> WeightFormat:
    """The format called `name`. Raises `FormatError` that lists the supported ones."""
    if name not in _FORMATS:
        raise FormatError(f"unknown weight format {name!r}; supported: {', '.join(SUPPORTED_FORMATS)}")
    # Imported here because the format modules import this one.
    module, attribute = _FORMATS[name]
    return getattr(import_module(module), attribute)()


def check_finite(weight: torch.Tensor, name: str) -> None:
    """Raise `NonFiniteWeightError` if `weight`, called `name`, holds NaN or Inf; the message counts them."""
    # The largest magnitude is NaN or Inf exactly where an element is: one pass, and one wait for the device.
    if weight.numel() == 0 or bool(torch.isfinite(torch.linalg.vector_norm(weight, torch.inf))):
        return
    finite = torch.isfinite(weight)
    nan_count = int(torch.isnan(weight).sum())
    inf_count = int((~finite).sum()) - nan_count
    raise NonFiniteWeightError(
        f"{name} {list(weight.shape)} holds {nan_count} NaN and {inf_count} Inf among {weight.numel()} "
        "values; "
        "repair the source checkpoint (an overflow in training or in a 16-bit cast is the usual cause)"
    )


def check_method(weight_format: WeightFormat, method: str) -> None:
    """Raise `FormatError` unless `weight_format` knows the quantization method `method`."""
    if method not in weight_format.methods:
        raise FormatError(
            f"format {weight_format.name} has no method {method!r}; supported: {', '.join(weight_format.methods)}"
        )


def as_bf16_matrices(weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The weights of a group as finite contiguous bf16 matrices.

    fp16 and fp32 are rounded to bf16 first: the formats are defined on bf16 weights, because another dtype
    gives other scales and another checkpoint than llm-compressor makes of the bf16 model.

    Raises:
        PackingError: empty group, or a weight that is not a non-empty floating matrix.
        NonFiniteWeightError: NaN or Inf, with the position of the weight in the group.
    """
    if not weights:
        raise PackingError("a fused group needs at least one weight, got none")
    matrices = []
    for position, weight in enumerate(weights):
        if weight.ndim != 2 or weight.numel() == 0 or not weight.is_floating_point():
            raise PackingError(
                f"weight {position} of the group must be a non-empty floating [N, K] matrix, "
                f"not {weight.dtype} {list(weight.shape)}"
            )
        matrix = weight.detach().to(torch.bfloat16).contiguous()
        check_finite(matrix, f"weight {position} of the group")
        matrices.append(matrix)
    return matrices


def error_energies(weight: torch.Tensor, approximation: torch.Tensor) -> tuple[float, float]:
    """Sums of squares of `weight` and of ``weight - approximation``, in float64. Shapes must be equal."""
    if weight.shape != approximation.shape:
        raise PackingError(f"shapes differ: {list(weight.shape)} and {list(approximation.shape)}")
    sums = torch.zeros(2, dtype=torch.float64, device=weight.device)
    # In pieces, so that the float64 copies stay small beside the weight.
    for exact, approximate in zip(weight.flatten().split(_CHUNK), approximation.flatten().split(_CHUNK)):
        sums[0] += exact.double().square().sum()
        sums[1] += (exact.double() - approximate.double()).square().sum()
    signal, noise = sums.tolist()
    return signal, noise


def decibel(signal: float, noise: float) -> float:
    """``10 log10(signal / noise)``; +inf without noise, -inf with noise but no signal."""
    if noise == 0.0:
        return float("inf")
    return float(10.0 * torch.log10(torch.tensor(signal / noise, dtype=torch.float64)))


def sqnr_db(w: torch.Tensor, w_hat: torch.Tensor) -> float:
    """Signal to quantization noise ratio in dB of `w_hat` as an approximation of `w` (equal shapes)."""
    return decibel(*error_energies(w, w_hat))
