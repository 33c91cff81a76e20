"""NVFP4, weight only: blocks of 16 columns, E2M1 codes, E4M3 block scales, one fp32 global scale.

    w[n, k] = e2m1(code[n, k]) * block_scale[n, k // 16] / global_scale

``rtn`` reproduces llm-compressor 0.14 (scheme NVFP4A16) bit for bit. In its arithmetic the division by the
tensor's largest magnitude and the ``amax / 6`` of a block are done in bf16, the dtype of the weight, so the
global scale cannot be recomputed from a decoded weight: it must be read. The global scale maps the largest
block scale of the fused group to 448, the E4M3 maximum.

Code (2 significant bits) times block scale (4 bits) is exact in bf16. Kernels therefore multiply by
`unscaled` and divide the fp32 accumulator by the global scale.
"""

from collections.abc import Sequence

import torch

from qerl.formats.base import PackedTensor, PackingError, as_bf16_matrices, check_method
from qerl.formats.e2m1 import (
    E2M1_MAX,
    decode,
    encode,
    pack_nibbles,
    round_magnitude_,
    unpack_nibbles,
)

BLOCK_SIZE = 16
E4M3_MAX = 448.0
# The block scale of a block whose scale rounds to zero; any non-zero value gives zeros. This is the
# library's.
EMPTY_BLOCK_SCALE = 0.125

# Search range of `mse` in E4M3 codes around the rtn scale. Eight codes are a factor of two: +4 and +5 map the
# block's maximum to 4 instead of 6 (a finer grid below it), the negative ones saturate the maximum.
_SEARCH_OFFSETS = (-3, -2, -1, 1, 2, 3, 4, 5, 6)
_E4M3_LARGEST_CODE = 0x7E
# Blocks worked on at once. On the CPU temporaries stay near the caches (about 50 MB); on CUDA a chunk has to be large
# enough that launches do not count (16.8 M weights, about 0.8 GB of temporaries).
_CHUNK_BLOCKS = 1 << 16
_CHUNK_BLOCKS_CUDA = 1 << 20


class NVFP4:
    """The NVFP4 format; see the module text for the definition."""

    name = "nvfp4"
    block_size = BLOCK_SIZE
    bits_per_weight = 4.5
    methods = ("rtn", "mse")

    def quantize(self, weights: Sequence[torch.Tensor], method: str = "rtn") -> list[PackedTensor]:
        """Pack the weights ``[N_i, K_i]`` of one fused group under one global scale.

        Args:
            weights: floating matrices; fp16 and fp32 are rounded to bf16 first. Not modified.
            method: ``"rtn"`` (bit-equal to llm-compressor) or ``"mse"`` (block scale searched among nearby
                E4M3 values; the squared error of no block is higher than with rtn).

        Raises:
            PackingError: K is not a multiple of 16, or not a floating matrix.
            NonFiniteWeightError: NaN or Inf.
            FormatError: unknown method.
        """
        check_method(self, method)
        matrices = as_bf16_matrices(weights)
        for matrix in matrices:
            _check_width(matrix.shape[1])
        divisor = global_scale(matrices)
        # A copy for each: the members are stored and moved on their own.
        return [_quantize_matrix(matrix, divisor.to(matrix.device, copy=True), method) for matrix in matrices]

    def dequantize(self, packed: PackedTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """``code * (block_scale / global_scale)`` in fp32, then rounded to `dtype`; ``[N, K]``."""
        codes, scale, divisor = _checked_parts(packed)
        return _apply_scale(codes, scale.float() / divisor, torch.float32).to(dtype)

    def unscaled(self, packed: PackedTensor, dtype: torch.dtype) -> torch.Tensor:
        """``code * block_scale``; ``[N, K]``, exact in bf16 (and fp32; fp16 holds the range up to 2688)."""
        codes, scale, _ = _checked_parts(packed)
        return _apply_scale(codes, scale.float(), torch.float32).to(dtype)


def global_scale(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Divisor, float32 ``[1]``, of the bf16 weights of one fused group; 1 where all are (almost) zero.

    It lies on the device of the first weight, and nothing waits for that device.
    """
    where = weights[0].device
    # The largest magnitude in one pass, without a copy of the weight.
    largest = torch.stack([torch.linalg.vector_norm(weight, torch.inf).to(where) for weight in weights]).amax()
    # bf16 division on purpose, see the module text. An overflow to Inf means weights below 1e-35: no scaling.
    divisor = (E4M3_MAX * E2M1_MAX / largest.clamp(min=torch.finfo(largest.dtype).tiny)).float()
    return torch.nan_to_num(divisor, posinf=1.0).reshape(1)


def _check_width(columns: int) -> None:
    if columns % BLOCK_SIZE:
        raise PackingError(
            f"in_features = {columns} is not a multiple of the NVFP4 block size {BLOCK_SIZE} "
            f"({columns % BLOCK_SIZE} columns left over); keep this layer in 16 bit"
        )


def _quantize_matrix(weight: torch.Tensor, divisor: torch.Tensor, method: str) -> PackedTensor:
    """Pack one checked bf16 matrix ``[N, K]`` under the global scale `divisor`."""
    rows, columns = weight.shape
    blocks = weight.reshape(-1, BLOCK_SIZE)
    scale = torch.empty(len(blocks), dtype=torch.float8_e4m3fn, device=weight.device)
    codes = torch.empty(len(blocks), BLOCK_SIZE // 2, dtype=torch.uint8, device=weight.device)
    step = _CHUNK_BLOCKS_CUDA if weight.is_cuda else _CHUNK_BLOCKS
    for first in range(0, len(blocks), step):
        chunk = slice(first, first + step)
        found = _rtn_block_scale(blocks[chunk], divisor)
        values = blocks[chunk].float()
        if method == "mse":
            found = _search_block_scale(values.abs(), found, divisor)
        scale[chunk] = found
        codes[chunk] = pack_nibbles(encode(values.div_((found.float() / divisor)[:, None])))
    return PackedTensor(
        format="nvfp4",
        shape=(rows, columns),
        codes=codes.reshape(rows, columns // 2),
        block_scale=scale.reshape(rows, columns // BLOCK_SIZE),
        global_scale=divisor,
    )


def _rtn_block_scale(blocks: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
    """E4M3 ``[B]`` that maps the largest magnitude of each bf16 block ``[B, 16]`` to 6."""
    wanted = divisor * (torch.linalg.vector_norm(blocks, torch.inf, dim=-1) / E2M1_MAX)
    scale = wanted.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).float()
    return torch.where(scale == 0, EMPTY_BLOCK_SCALE, scale).to(torch.float8_e4m3fn)


def _search_block_scale(magnitudes: torch.Tensor, start: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
    """The E4M3 scale ``[B]`` of least squared error per block among `start` and its neighbours.

    Args:
        magnitudes: fp32 ``[B, 16]``, absolute values (the error does not depend on signs).
    """
    exact = magnitudes.double()
    best_code = start.view(torch.uint8)
    start_code = best_code.to(torch.int16)
    best_error = _block_error(magnitudes, exact, best_code, divisor)
    for offset in _SEARCH_OFFSETS:
        # Positive E4M3 values are ordered as their codes; 0 is no scale and 0x7F is NaN.
        code = (start_code + offset).clamp(1, _E4M3_LARGEST_CODE).to(torch.uint8)
        error = _block_error(magnitudes, exact, code, divisor)
        better = error < best_error
        best_code = torch.where(better, code, best_code)
        best_error = torch.where(better, error, best_error)
    return best_code.view(torch.float8_e4m3fn)


def _block_error(
    magnitudes: torch.Tensor, exact: torch.Tensor, scale_code: torch.Tensor, divisor: torch.Tensor
) -> torch.Tensor:
    """Squared error, float64 ``[B]``, of fp32 blocks ``[B, 16]`` under E4M3 scales given as codes ``[B]``.

    Args:
        magnitudes: absolute values; `exact` are the same as float64.
    """
    scale = (scale_code.view(torch.float8_e4m3fn).float() / divisor)[:, None]
    approximate = round_magnitude_(magnitudes / scale).mul_(scale)
    # float64: which scale is better must not depend on the rounding of a difference or a sum of squares. The order of
    # the sum is written out, so that it is the same on every device.
    error = (exact - approximate).square_()
    while error.shape[1] > 1:
        half = error.shape[1] // 2
        error = error[:, :half] + error[:, half:]
    return error[:, 0]


def _checked_parts(packed: PackedTensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, block scales and divisor of a packed tensor whose layout is NVFP4's, else `PackingError`."""
    rows, columns = packed.shape
    expected = (rows, columns // BLOCK_SIZE)
    if packed.format != "nvfp4" or packed.global_scale is None:
        raise PackingError(f"not an nvfp4 tensor: format {packed.format!r}, global scale {packed.global_scale}")
    _check_width(columns)
    if tuple(packed.block_scale.shape) != expected or packed.block_scale.dtype != torch.float8_e4m3fn:
        raise PackingError(
            f"block scales of a {rows}x{columns} nvfp4 weight must be float8_e4m3fn {list(expected)}, "
            f"not {packed.block_scale.dtype} {list(packed.block_scale.shape)}"
        )
    return packed.codes, packed.block_scale, packed.global_scale


def _apply_scale(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``[N, K]`` values of packed codes ``[N, K/2]`` times the scale ``[N, K/16]`` of their block."""
    rows = codes.shape[0]
    values = decode(unpack_nibbles(codes), dtype).reshape(rows, -1, BLOCK_SIZE)
    return (values * scale.to(dtype)[..., None]).reshape(rows, -1)
