"""Triton kernels for 4-bit weights: few-row matmul that decodes in registers, and dequantization.

Decoding NVFP4 (`_nvfp4_pairs`). A 4-bit code ``s e e m`` moved to bits 15 and 8..6 of a 16-bit word is the
bf16 number ``value * 2**-126`` (0.5 becomes a bf16 subnormal). Times the block scale as bf16 ``scale *
2**117`` that is ``value * scale * 2**-9``: exact, because a code has 2 significant bits and a scale 4. One
bf16x2 multiplication serves two weights and no conversion instruction is needed; ``2**9`` is folded into the
factor of the fp32 accumulator. The plain form of the same (used by the interpreter, which has no inline
assembly) goes through fp16 bits and fp32.

Even columns of a weight are low nibbles and odd columns high nibbles, so a tile of bytes decodes to an even
and an odd half. The matmul keeps the halves apart (the order of a sum over k is free, and interleaving would
cost a shuffle per pair): the activations are read as int32 words, one even/odd pair each, and split the same
way.

All addresses are 64 bit. Rows past the end are clamped on load and masked on store; columns are masked.
"""

import triton
import triton.language as tl

from qerl.kernels.triton import INTERPRETED, round_to

# NVFP4 weights leave `_nvfp4_pairs` times 2**-9.
NVFP4_FACTOR = 512.0

# Four bytes of codes in $4; the bf16 scale of each byte in the halves of $5, $6. Out: even columns in $0,
# $1, odd columns in $2, $3. fma with -0 is a multiplication that sm_80 has for bf16x2 too.
_NVFP4_ASM = """
{
.reg .b32 w<2>, t, u, z;
mov.b32 z, 0x80008000;
prmt.b32 w0, $4, 0, 0x1404;
prmt.b32 w1, $4, 0, 0x3424;
shl.b32 t, w0, 4;
shr.u32 u, w0, 2;
and.b32 u, u, 0x01C001C0;
lop3.b32 t, t, z, u, 0xEA;
fma.rn.bf16x2 $0, t, $5, z;
shl.b32 t, w1, 4;
shr.u32 u, w1, 2;
and.b32 u, u, 0x01C001C0;
lop3.b32 t, t, z, u, 0xEA;
fma.rn.bf16x2 $1, t, $6, z;
shr.u32 u, w0, 6;
and.b32 u, u, 0x01C001C0;
lop3.b32 t, w0, z, u, 0xEA;
fma.rn.bf16x2 $2, t, $5, z;
shr.u32 u, w1, 6;
and.b32 u, u, 0x01C001C0;
lop3.b32 t, w1, z, u, 0xEA;
fma.rn.bf16x2 $3, t, $6, z;
}
"""
_ASM = tl.constexpr(_NVFP4_ASM)


@triton.jit
def _e4m3_times(byte, factor):
    """fp32 value of E4M3 bytes times `factor`, through fp16 bits (2**-8 off); the two NaN bytes read as +-480."""
    bits = byte.to(tl.int16)
    bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * (factor * 256.0)


@triton.jit
def _e2m1_small(code):
    """fp32 value of E2M1 codes (0..15, int16) times 2**-14, through fp16 bits."""
    bits = ((code & 8) << 12) | ((code & 7) << 9)
    return bits.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _nvfp4_pairs(codes, scale_bytes, BLOCK_N: tl.constexpr, BYTES: tl.constexpr):
    """Codes uint8 [BLOCK_N, BYTES], scale bytes [BLOCK_N, BYTES / 8] -> even, odd bf16, weight * 2**-9."""
    if not INTERPRETED:
        scale = _e4m3_times(scale_bytes, 166153499473114484112975882535043072.0).to(tl.bfloat16)  # 2**117
    else:
        scale = _e4m3_times(scale_bytes, 32.0)
    scale = tl.broadcast_to(scale[:, :, None], (BLOCK_N, BYTES // 8, 8))
    scale = tl.reshape(scale, (BLOCK_N, BYTES))
    if not INTERPRETED:
        even, odd = tl.inline_asm_elementwise(
            _ASM,
            "=r,=r,=r,=r,r,r,r",
            [codes, scale],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        wide = codes.to(tl.int16)
        even = (_e2m1_small(wide & 0xF) * scale).to(tl.bfloat16)
        odd = (_e2m1_small(wide >> 4) * scale).to(tl.bfloat16)
    return even, odd


@triton.jit
def _nf4_pairs(codes, absmax, book):
    """Codes uint8, absmax fp32 of the same shape -> even, odd bf16 weights, rounded once."""
    wide = codes.to(tl.int32)
    even = round_to(tl.load(book + (wide & 0xF)) * absmax, tl.bfloat16)
    odd = round_to(tl.load(book + (wide >> 4)) * absmax, tl.bfloat16)
    return even, odd


@triton.jit
def _lane_order(weights, BLOCK_N: tl.constexpr, BYTES: tl.constexpr):
    """Reorder the columns of [BLOCK_N, BYTES] so that a lane's tensor core fragment is contiguous in memory.

    Lane t of four holds k = 16 i + 8 h + 2 t + l (l, h in 0..1). Byte ``t * BYTES/4 + 4 i + 2 h + l`` is put
    there.
    """
    weights = tl.reshape(weights, (BLOCK_N, 4, BYTES // 16, 2, 2))
    return tl.reshape(tl.permute(weights, (0, 2, 3, 1, 4)), (BLOCK_N, BYTES))


@triton.jit
def _lane_order_x(x, BLOCK_M: tl.constexpr, BYTES: tl.constexpr):
    """The same reordering of the rows of [BYTES, BLOCK_M]."""
    x = tl.reshape(x, (4, BYTES // 16, 2, 2, BLOCK_M))
    return tl.reshape(tl.permute(x, (1, 2, 0, 3, 4)), (BYTES, BLOCK_M))


@triton.jit
def few_rows_kernel(
    x, codes, scales, book, row_multiplier, bias, out,
    M, N, K, half_k, scale_stride, steps, multiplier,
    NVFP4: tl.constexpr, ROW_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, SPLIT: tl.constexpr,
    EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of ``out = multiplier * W x^T + bias``, or with SPLIT the plain fp32 sum over one slice of k.

    x int32 [M, K/2] (pairs of bf16), codes uint8 [N, K/2], out bf16 or fp32 [M, N], or fp32 [slices, M, N].
    """
    BYTES: tl.constexpr = BLOCK_K // 2
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    slice_id = tl.program_id(1)
    safe_rows = tl.minimum(rows, N - 1).to(tl.int64)
    batch = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = slice_id * (steps * BLOCK_K)
    last = tl.minimum(first + steps * BLOCK_K, K)
    column = tl.arange(0, BYTES)
    codes_ptr = codes + safe_rows[:, None] * half_k + (first // 2 + column)[None, :]
    x_ptr = x + batch[None, :].to(tl.int64) * half_k + (first // 2 + column)[:, None]
    group = tl.arange(0, BYTES // 8)
    scales_ptr = scales + safe_rows[:, None] * scale_stride + (first // 16 + group)[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in range(first, last, BLOCK_K):
        left = (last - start) // 2
        x_mask = (batch < M)[None, :]
        if EVEN_K:
            packed = tl.load(codes_ptr)
        else:
            packed = tl.load(codes_ptr, mask=(column < left)[None, :], other=0)
            x_mask = x_mask & (column < left)[:, None]
        words = tl.load(x_ptr, mask=x_mask, other=0)
        if NVFP4:
            if EVEN_K:
                scale_bytes = tl.load(scales_ptr)
            else:
                scale_bytes = tl.load(scales_ptr, mask=(group * 8 < left)[None, :], other=0)
            even, odd = _nvfp4_pairs(packed, scale_bytes, BLOCK_N, BYTES)
            scales_ptr += BYTES // 8
        else:
            element = safe_rows[:, None] * K + (start + 2 * column)[None, :]
            absmax = tl.load(scales + element // 64, mask=(column < left)[None, :], other=0.0)
            even, odd = _nf4_pairs(packed, absmax, book)
        x_even = words.to(tl.int16).to(tl.bfloat16, bitcast=True)
        x_odd = (words >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        even = _lane_order(even, BLOCK_N, BYTES)
        odd = _lane_order(odd, BLOCK_N, BYTES)
        x_even = _lane_order_x(x_even, BLOCK_M, BYTES)
        x_odd = _lane_order_x(x_odd, BLOCK_M, BYTES)
        if INTERPRETED:
            acc += tl.dot(even.to(tl.float32), x_even.to(tl.float32), input_precision="ieee")
            acc += tl.dot(odd.to(tl.float32), x_odd.to(tl.float32), input_precision="ieee")
        else:
            acc = tl.dot(even, x_even, acc)
            acc = tl.dot(odd, x_odd, acc)
        codes_ptr += BYTES
        x_ptr += BYTES
    target = batch[None, :].to(tl.int64) * N + rows[:, None]
    mask = (rows < N)[:, None] & (batch < M)[None, :]
    if SPLIT:
        plane = slice_id.to(tl.int64) * M * N
        tl.store(out + plane + target, acc, mask=mask)
    else:
        if ROW_SCALE:
            acc = acc * tl.load(row_multiplier + safe_rows)[:, None]
        acc = acc * multiplier
        if HAS_BIAS:
            acc += tl.load(bias + safe_rows)[:, None].to(tl.float32)
        tl.store(out + target, round_to(acc, out.dtype.element_ty), mask=mask)


@triton.jit
def sum_slices_kernel(
    partial, row_multiplier, bias, out, plane, N, multiplier,
    SLICES: tl.constexpr, ROW_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out bf16 or fp32 [M, N] = multiplier * sum of partial fp32 [SLICES, M, N] in ascending order + bias; plane =
    M N."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1).to(tl.int64)
    mask = column < N
    target = row * N + column
    acc = tl.zeros((BLOCK,), tl.float32)
    source = partial + target
    for _ in tl.static_range(SLICES):
        acc += tl.load(source, mask=mask, other=0.0)
        source += plane
    if ROW_SCALE:
        acc = acc * tl.load(row_multiplier + column, mask=mask, other=0.0)
    acc = acc * multiplier
    if HAS_BIAS:
        acc += tl.load(bias + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + target, round_to(acc, out.dtype.element_ty), mask=mask)


@triton.jit
def dequantize_kernel(
    codes, scales, book, out, N, K, half_k, scale_stride,
    NVFP4: tl.constexpr, BLOCK_N: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """out bf16 or fp32 [N, K] = code * block scale (nvfp4: exact; nf4: rounded to bf16)."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.program_id(1) * BYTES + tl.arange(0, BYTES)
    mask = (rows < N)[:, None] & (column < half_k)[None, :]
    packed = tl.load(codes + rows[:, None] * half_k + column[None, :], mask=mask, other=0)
    if NVFP4:
        group = tl.program_id(1) * (BYTES // 8) + tl.arange(0, BYTES // 8)
        scale_mask = (rows < N)[:, None] & (group < scale_stride)[None, :]
        scale_bytes = tl.load(scales + rows[:, None] * scale_stride + group[None, :], mask=scale_mask, other=0)
        scale = tl.broadcast_to(_e4m3_times(scale_bytes, 16384.0)[:, :, None], (BLOCK_N, BYTES // 8, 8))
        scale = tl.reshape(scale, (BLOCK_N, BYTES))
        wide = packed.to(tl.int16)
        even = (_e2m1_small(wide & 0xF) * scale).to(tl.bfloat16)
        odd = (_e2m1_small(wide >> 4) * scale).to(tl.bfloat16)
    else:
        element = rows[:, None] * K + 2 * column[None, :]
        absmax = tl.load(scales + element // 64, mask=mask, other=0.0)
        even, odd = _nf4_pairs(packed, absmax, book)
    weights = tl.reshape(tl.join(even, odd), (BLOCK_N, 2 * BYTES))
    wide_column = tl.program_id(1) * (2 * BYTES) + tl.arange(0, 2 * BYTES)
    wide_mask = (rows < N)[:, None] & (wide_column < K)[None, :]
    target = out + rows[:, None] * K + wide_column[None, :]
    tl.store(target, weights.to(out.dtype.element_ty), mask=wide_mask)
