"""MXFP4 (OCP Microscaling Formats v1.0), weight only: blocks of 32 columns, E2M1 codes, E8M0 block scales.

    w[n, k] = e2m1(code[n, k]) * 2 ** (byte[n, k // 32] - 127)

``rtn`` reproduces llm-compressor 0.14 (scheme MXFP4A16) bit for bit. Its scale differs from the specification's
``floor(log2(amax)) - 2`` (which may saturate everything above 6 of up to 8): it is one larger where amax / scale would
be 7 or more, so amax / scale lies in [3.5, 7) and only values above 6 of up to 7 saturate.

Every weight has two significant bits, so it is exact in bf16. There is no global scale. The products of MXFP4 weights
are those of NVFP4: `qerl.formats.mxfp4_as_nvfp4`.
"""

from collections.abc import Sequence

import torch

from qerl.formats.base import PackedTensor, PackingError, as_bf16_matrices, check_method
from qerl.formats.e2m1 import decode, encode, pack_nibbles, unpack_nibbles

BLOCK_SIZE = 32
# The largest scale, 2^125, with which no code leaves the range of bf16. The library goes on to 2^126 for
# weights from 3.0e38 on, which gives Inf; here they saturate at 2.6e38.
LARGEST_SCALE_BYTE = 252

_MANTISSA_BITS = 7
# Added to the bits of a bf16 number, a quarter carries into its exponent from 1.75 times a power of two on.
_QUARTER = 1 << (_MANTISSA_BITS - 2)
# Exponent of 4, the power of two that the largest magnitude of a block is scaled to (before it is rounded).
_CODE_EXPONENT = 2
# Blocks worked on at once, as in `qerl.formats.nvfp4`: bounds temporaries on the CPU, launches on CUDA.
_CHUNK_BLOCKS = 1 << 15
_CHUNK_BLOCKS_CUDA = 1 << 19


class MXFP4:
    """The MXFP4 format; see the module text for the definition."""

    name = "mxfp4"
    block_size = BLOCK_SIZE
    bits_per_weight = 4.25
    methods = ("rtn",)

    def quantize(self, weights: Sequence[torch.Tensor], method: str = "rtn") -> list[PackedTensor]:
        """Pack weights ``[N, K]``; the members of a fused group share nothing in this format.

        Args:
            weights: floating matrices; fp16 and fp32 are rounded to bf16 first. Not modified.
            method: only ``"rtn"``.

        Raises:
            PackingError: K is not a multiple of 32, or not a floating matrix.
            NonFiniteWeightError: NaN or Inf.
            FormatError: unknown method.
        """
        check_method(self, method)
        matrices = as_bf16_matrices(weights)
        for matrix in matrices:
            _check_width(matrix.shape[1])
        return [_quantize_matrix(matrix) for matrix in matrices]

    def dequantize(self, packed: PackedTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Code times scale, ``[N, K]``; exact in fp32 and bf16."""
        check_layout(packed)
        values = decode(unpack_nibbles(packed.codes)).reshape(packed.shape[0], -1, BLOCK_SIZE)
        return (values * packed.block_scale.float()[..., None]).reshape(packed.shape).to(dtype)

    def unscaled(self, packed: PackedTensor, dtype: torch.dtype) -> torch.Tensor:
        """Equal to `dequantize`: the format has no global scale."""
        return self.dequantize(packed, dtype)


def check_layout(packed: PackedTensor) -> None:
    """Raise `PackingError` unless the layout of `packed` is MXFP4's."""
    rows, columns = packed.shape
    expected = (rows, columns // BLOCK_SIZE)
    if packed.format != "mxfp4" or packed.global_scale is not None:
        raise PackingError(f"not an mxfp4 tensor: format {packed.format!r}, global scale {packed.global_scale}")
    _check_width(columns)
    if tuple(packed.block_scale.shape) != expected or packed.block_scale.dtype != torch.float8_e8m0fnu:
        raise PackingError(
            f"block scales of a {rows}x{columns} mxfp4 weight must be float8_e8m0fnu {list(expected)}, "
            f"not {packed.block_scale.dtype} {list(packed.block_scale.shape)}"
        )


def _check_width(columns: int) -> None:
    if columns % BLOCK_SIZE:
        raise PackingError(
            f"in_features = {columns} is not a multiple of the MXFP4 block size {BLOCK_SIZE} "
            f"({columns % BLOCK_SIZE} columns left over); keep this layer in 16 bit"
        )


def _quantize_matrix(weight: torch.Tensor) -> PackedTensor:
    """Pack one checked bf16 matrix ``[N, K]``."""
    rows, columns = weight.shape
    blocks = weight.reshape(-1, BLOCK_SIZE)
    scale = torch.empty(len(blocks), dtype=torch.uint8, device=weight.device)
    codes = torch.empty(len(blocks), BLOCK_SIZE // 2, dtype=torch.uint8, device=weight.device)
    step = _CHUNK_BLOCKS_CUDA if weight.is_cuda else _CHUNK_BLOCKS
    for first in range(0, len(blocks), step):
        chunk = slice(first, first + step)
        scale[chunk] = _scale_bytes(blocks[chunk])
        # 2^(127 - byte) from its bits: a multiplication by it is exact, and it is a normal number for every byte.
        inverse = (254 - scale[chunk].int() << 23).view(torch.float32)
        codes[chunk] = pack_nibbles(encode(blocks[chunk].float().mul_(inverse[:, None])))
    return PackedTensor(
        format="mxfp4",
        shape=(rows, columns),
        codes=codes.reshape(rows, columns // 2),
        block_scale=scale.view(torch.float8_e8m0fnu).reshape(rows, columns // BLOCK_SIZE),
        global_scale=None,
    )


def _scale_bytes(blocks: torch.Tensor) -> torch.Tensor:
    """E8M0 bytes, uint8 ``[B]``, of bf16 blocks ``[B, 32]``; 0 for a block of zeros, as the library has it."""
    bits = torch.linalg.vector_norm(blocks, torch.inf, dim=-1).view(torch.int16).int()
    exponent = (bits + _QUARTER) >> _MANTISSA_BITS
    return (exponent - _CODE_EXPONENT).clamp(0, LARGEST_SCALE_BYTE).to(torch.uint8)
