"""NF4, the 4-bit NormalFloat of QLoRA (arXiv 2305.14314, appendix E), laid out as bitsandbytes does it.

    w[n, k] = bf16(CODE_BOOK[code[n, k]] * absmax[n, k // 64])

Blocks of 64 run along the flattened weight, which is along K where K is a multiple of 64. Code book times an
fp32 absmax is not exact in bf16, so the weight is *defined* as the product rounded to bf16; every path
(kernel, dequantize + matmul, reference) multiplies by that value. No double quantization of the absmax when
packing; checkpoints that use it can be read (`qerl.formats.checkpoint`).
"""

from collections.abc import Sequence
from itertools import pairwise

import torch

from qerl.formats.base import PackedTensor, PackingError, as_bf16_matrices, check_method
from qerl.formats.e2m1 import pack_nibbles, unpack_nibbles

BLOCK_SIZE = 64
CODE_BOOK = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
# A value between two entries goes to the nearer one; exactly in the middle, to the lower one.
_BOUNDARIES = tuple((low + high) / 2 for low, high in pairwise(CODE_BOOK))
# bitsandbytes' guard against dividing by the absmax of a block of zeros.
_SMALLEST_ABSMAX = 1e-38
# Blocks encoded at once: bounds the fp32 temporaries to about 50 MB.
_CHUNK_BLOCKS = 1 << 16


class NF4:
    """The NF4 format; see the module text for the definition."""

    name = "nf4"
    block_size = BLOCK_SIZE
    bits_per_weight = 4.5
    methods = ("rtn",)

    def quantize(self, weights: Sequence[torch.Tensor], method: str = "rtn") -> list[PackedTensor]:
        """Pack weights ``[N, K]``, K even; the members of a fused group share nothing in this format.

        Args:
            weights: floating matrices; fp16 and fp32 are rounded to bf16 first. Not modified.
            method: only ``"rtn"``.

        Where K is not a multiple of 64 the absmax is flat, one per 64 consecutive elements of the flattened
        weight, and the last block may be short (a weight smaller than a block is one short block).

        Raises:
            PackingError: K is odd, or not a floating matrix.
            NonFiniteWeightError: NaN or Inf.
            FormatError: unknown method.
        """
        check_method(self, method)
        return [_quantize_matrix(matrix) for matrix in as_bf16_matrices(weights)]

    def dequantize(self, packed: PackedTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Code book times absmax, rounded to bf16, as `dtype`; ``[N, K]``."""
        rows, columns = packed.shape
        _check_layout(packed)
        book = torch.tensor(CODE_BOOK, dtype=torch.float32, device=packed.codes.device)
        values = book[unpack_nibbles(packed.codes).to(torch.int32)]
        if packed.block_scale.ndim == 2:
            values = values.reshape(rows, -1, BLOCK_SIZE) * packed.block_scale[..., None]
        else:
            values = values.flatten() * packed.block_scale.repeat_interleave(BLOCK_SIZE)[: rows * columns]
        return values.reshape(rows, columns).to(torch.bfloat16).to(dtype)

    def unscaled(self, packed: PackedTensor, dtype: torch.dtype) -> torch.Tensor:
        """Equal to `dequantize`: the format has no global scale."""
        return self.dequantize(packed, dtype)


def _quantize_matrix(weight: torch.Tensor) -> PackedTensor:
    rows, columns = weight.shape
    if columns % 2:
        raise PackingError(
            f"in_features = {columns} is odd: two NF4 codes share a byte and a row must end on a byte; "
            "keep this layer in 16 bit"
        )
    # Zeros at the end change no absmax, so a short last block needs no case of its own.
    blocks = torch.nn.functional.pad(weight.flatten(), (0, -weight.numel() % BLOCK_SIZE)).reshape(-1, BLOCK_SIZE)
    absmax = blocks.abs().amax(-1).float()
    codes = torch.cat([_codes_of(*pair) for pair in zip(blocks.split(_CHUNK_BLOCKS), absmax.split(_CHUNK_BLOCKS))])
    aligned = columns % BLOCK_SIZE == 0
    return PackedTensor(
        format="nf4",
        shape=(rows, columns),
        codes=pack_nibbles(codes.flatten()[: rows * columns].reshape(rows, columns)),
        block_scale=absmax.reshape(rows, -1) if aligned else absmax,
        global_scale=None,
    )


def _codes_of(blocks: torch.Tensor, absmax: torch.Tensor) -> torch.Tensor:
    """Codes, uint8 ``[B, 64]``, of bf16 blocks ``[B, 64]`` with fp32 absmax ``[B]``."""
    # Times the reciprocal, not divided by absmax: as the CUDA kernel of bitsandbytes does.
    relative = (blocks.float() * (1.0 / absmax.clamp(min=_SMALLEST_ABSMAX))[:, None]).clamp(-1.0, 1.0)
    boundaries = torch.tensor(_BOUNDARIES, dtype=torch.float32, device=blocks.device)
    return torch.bucketize(relative, boundaries, out_int32=True).to(torch.uint8)


def _check_layout(packed: PackedTensor) -> None:
    rows, columns = packed.shape
    aligned = columns % BLOCK_SIZE == 0
    expected = (rows, columns // BLOCK_SIZE) if aligned else (-(-rows * columns // BLOCK_SIZE),)
    if packed.format != "nf4":
        raise PackingError(f"not an nf4 tensor: format {packed.format!r}")
    if tuple(packed.block_scale.shape) != expected or packed.block_scale.dtype != torch.float32:
        raise PackingError(
            f"absmax of a {rows}x{columns} nf4 weight must be float32 {list(expected)}, "
            f"not {packed.block_scale.dtype} {list(packed.block_scale.shape)}"
        )
