"""Triton kernel of head norm, rotary embedding and KV cache write: one program a token and KV head.

A program owns the query heads of its group, their key and their value, so that everything happens in registers. It is
compiled without fused multiply-add, which would round products otherwise than torch does.
"""

import triton
import triton.language as tl

from qerl.kernels.triton import round_to, start_after_predecessor


@triton.jit
def _e4m3_bits(value):
    """fp32 to the bytes of float8_e4m3fn: nearest even, saturating at 448, NaN kept. sm_80 has no such type."""
    sign = (value.to(tl.uint32, bitcast=True) >> 31) << 7
    magnitude = tl.minimum(tl.abs(value), 448.0)
    bits = magnitude.to(tl.uint32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    # Numbers around 2^14 are 2^-9 apart, as E4M3 is below 2^-6: the sum rounds, and its low bits are the code.
    small = (magnitude + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0.015625, small, normal)
    return (sign | tl.where(value == value, code, 0x7F)).to(tl.uint8)


@triton.jit
def _store(pointer, value, mask, FP8: tl.constexpr):
    """fp32 values that are already rounded to the compute dtype, into a cache."""
    if FP8:
        tl.store(pointer, _e4m3_bits(value), mask=mask)
    else:
        tl.store(pointer, round_to(value, pointer.dtype.element_ty), mask=mask)


@triton.jit
def _norm_rotate(
    source, mask, half, half_mask, cos, sin, weight, eps,
    HALF: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """The halves [H, HALF] of the heads at ``source``, normalized, rotated and rounded to its dtype, as fp32."""
    dtype: tl.constexpr = source.dtype.element_ty
    first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        mean = tl.sum(first * first + second * second, 1) / (2 * HALF)
        inverse = (1.0 / tl.sqrt_rn(mean + eps))[:, None]
        first_weight = tl.load(weight + half, mask=half_mask, other=0.0).to(tl.float32)[None, :]
        second_weight = tl.load(weight + HALF + half, mask=half_mask, other=0.0).to(tl.float32)[None, :]
        first = round_to(first_weight * (first * inverse), dtype).to(tl.float32)
        second = round_to(second_weight * (second * inverse), dtype).to(tl.float32)
    rotated_first = round_to(first * cos - second * sin, dtype)
    rotated_second = round_to(second * cos + first * sin, dtype)
    tl.store(source, rotated_first, mask=mask)
    tl.store(source + HALF, rotated_second, mask=mask)
    return rotated_first.to(tl.float32), rotated_second.to(tl.float32)


@triton.jit
def rotary_kv_write_kernel(
    qkv, rope, positions, k_cache, v_cache, slots, q_weight, k_weight, eps,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr, HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr, HAS_NORM: tl.constexpr, FP8: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """qkv [T, (GROUP + 2) KV_HEADS 2 HALF] in place; caches at slots."""
    start_after_predecessor(PDL)
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    head_dim: tl.constexpr = 2 * HALF
    row = qkv + token * ((GROUP + 2) * KV_HEADS * head_dim)
    half = tl.arange(0, HALF_PADDED)
    half_mask = half < HALF
    angles = rope + tl.load(positions + token) * head_dim + half
    cos = tl.load(angles, mask=half_mask, other=0.0)[None, :]
    sin = tl.load(angles + HALF, mask=half_mask, other=0.0)[None, :]

    member = tl.arange(0, GROUP_PADDED)
    query_mask = (member < GROUP)[:, None] & half_mask[None, :]
    query = row + (kv_head * GROUP + member)[:, None] * head_dim + half[None, :]
    _norm_rotate(query, query_mask, half, half_mask, cos, sin, q_weight, eps, HALF, HAS_NORM)

    one_mask = half_mask[None, :]
    key = row + (GROUP * KV_HEADS + kv_head) * head_dim + half[None, :]
    first, second = _norm_rotate(key, one_mask, half, half_mask, cos, sin, k_weight, eps, HALF, HAS_NORM)
    place = (tl.load(slots + token) * KV_HEADS + kv_head) * head_dim + half[None, :]
    stored = one_mask & (place >= 0)  # nothing of a negative slot
    _store(k_cache + place, first, stored, FP8)
    _store(k_cache + place + HALF, second, stored, FP8)
    value = key + KV_HEADS * head_dim
    _store(v_cache + place, tl.load(value, mask=one_mask, other=0.0).to(tl.float32), stored, FP8)
    _store(v_cache + place + HALF, tl.load(value + HALF, mask=one_mask, other=0.0).to(tl.float32), stored, FP8)
