"""Triton kernel of paged decode attention: flash attention over slices of the context, merged in the same launch.

One program owns one sequence, one KV head with all query heads of its group, and one slice of the context. The slice
length follows from the context length of the sequence (read on the device), so captured graphs stay right as contexts
grow; empty slices end at once. The program of a sequence and head that finishes last merges the slices in ascending
order, so that the result does not depend on which one it is.

E4M3 caches are read as bytes: shifted by 7 bits they are fp16 numbers times 2^-8 (the caller's factors make up for
that), which needs no conversion and is exact, subnormals included. The two NaN bytes read as +-480.
"""

import triton
import triton.language as tl

from qerl.kernels.triton import INTERPRETED, arrive_last, round_to, start_after_predecessor

_GRAIN = tl.constexpr(16)


@triton.jit
def _slice_len(context_len, max_slices, MIN_SLICE: tl.constexpr):
    """Tokens a slice covers: a multiple of 16, at least MIN_SLICE, so that short contexts are not cut up."""
    return tl.maximum(tl.cdiv(tl.cdiv(context_len, max_slices), _GRAIN) * _GRAIN, MIN_SLICE)


@triton.jit
def _dot_operand(tile, FP8: tl.constexpr, DOT: tl.constexpr):
    """A tile of keys or values in the dtype of the products."""
    if FP8:
        bits = tile.to(tl.int16)
        bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        return bits.to(tl.float16, bitcast=True).to(DOT)
    return tile.to(DOT)


@triton.jit
def _merge(
    partial, partial_lse, target, first_slice, slices,
    GROUP: tl.constexpr, HEADS_PADDED: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Merge the slices of one sequence and KV head into target [GROUP, HEAD_DIM], in ascending order.

    Loads pass the L1 cache (see `arrive_last`). Tiles have a slice axis so that AT_ONCE slices are on their way
    together: one after the other would cost a trip to L2 each.
    """
    step = tl.arange(0, AT_ONCE)
    head = tl.arange(0, HEADS_PADDED)
    dim = tl.arange(0, DIM_PADDED)
    head_mask = head < GROUP
    dim_mask = dim < HEAD_DIM
    maximum = tl.full((HEADS_PADDED,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS_PADDED,), tl.float32)
    merged = tl.zeros((HEADS_PADDED, DIM_PADDED), tl.float32)
    for start in range(0, slices, AT_ONCE):
        row = (first_slice + start + step)[:, None] * GROUP + head[None, :]
        there = (start + step < slices)[:, None] & head_mask[None, :]
        lse = tl.load(partial_lse + row, mask=there, other=float("-inf"), cache_modifier=".cg")
        source = partial + row[:, :, None] * HEAD_DIM + dim[None, None, :]
        value = tl.load(source, mask=there[:, :, None] & dim_mask[None, None, :], other=0.0, cache_modifier=".cg")
        # 0 for the rows that pad the group: -inf minus itself would be NaN.
        new_maximum = tl.where(head_mask, tl.maximum(maximum, tl.max(lse, 0)), 0.0)
        correction = tl.exp2(maximum - new_maximum)
        weight = tl.exp2(lse - new_maximum[None, :])
        total = total * correction + tl.sum(weight, 0)
        merged = merged * correction[:, None] + tl.sum(value * weight[:, :, None], 0)
        maximum = new_maximum
    merged = merged / tl.where(head_mask, total, 1.0)[:, None]
    place = target + head[:, None] * HEAD_DIM + dim[None, :]
    tl.store(place, round_to(merged, target.dtype.element_ty), mask=head_mask[:, None] & dim_mask[None, :])


@triton.jit
def paged_attention_kernel(
    q, k_cache, v_cache, block_table, context_lens, out, partial, partial_lse, counters,
    score_factor, value_factor, q_stride, block_stride, token_stride, head_stride, max_blocks, max_slices,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
    MIN_SLICE: tl.constexpr, HEADS_PADDED: tl.constexpr, AT_ONCE: tl.constexpr, FP8: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [S, Hq, D]; scratch if SPLIT: partial fp32 [S, Hkv, max_slices, GROUP, D] and its log2-sum-exp."""
    start_after_predecessor(PDL)
    kv_head = tl.program_id(0)
    slice_id = tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    context_len = tl.load(context_lens + sequence)
    slice_len = _slice_len(context_len, max_slices, MIN_SLICE)
    first = slice_id * slice_len
    last = tl.minimum(first + slice_len, context_len)
    # An empty context still has to write its zeros.
    if (slice_id > 0) & (first >= last):
        return
    head = tl.arange(0, GROUP_PADDED)
    dim = tl.arange(0, DIM_PADDED)
    head_mask = head < GROUP
    dim_mask = dim < HEAD_DIM
    offsets = head[:, None] * HEAD_DIM + dim[None, :]
    mask = head_mask[:, None] & dim_mask[None, :]
    query = tl.load(q + sequence * q_stride + kv_head * (GROUP * HEAD_DIM) + offsets, mask=mask, other=0.0)
    half: tl.constexpr = tl.float16 if FP8 else q.dtype.element_ty
    DOT: tl.constexpr = tl.float32 if INTERPRETED or q.dtype.element_ty == tl.float32 else half
    query = query.to(DOT)
    maximum = tl.full((GROUP_PADDED,), float("-inf"), tl.float32)
    denominator = tl.zeros((GROUP_PADDED,), tl.float32)
    acc = tl.zeros((GROUP_PADDED, DIM_PADDED), tl.float32)
    table = block_table + sequence * max_blocks
    for start in range(first, last, BLOCK_N):
        token = start + tl.arange(0, BLOCK_N)
        token_mask = token < last
        block = tl.load(table + token // BLOCK_SIZE, mask=token_mask, other=0).to(tl.int64)
        place = block * block_stride + (token % BLOCK_SIZE) * token_stride + kv_head * head_stride
        kv_mask = token_mask[:, None] & dim_mask[None, :]
        keys = _dot_operand(tl.load(k_cache + place[:, None] + dim[None, :], mask=kv_mask, other=0.0), FP8, DOT)
        values = _dot_operand(tl.load(v_cache + place[:, None] + dim[None, :], mask=kv_mask, other=0.0), FP8, DOT)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * score_factor
        scores = tl.where(token_mask[None, :], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        correction = tl.exp2(maximum - new_maximum)
        probabilities = tl.exp2(scores - new_maximum[:, None])
        denominator = denominator * correction + tl.sum(probabilities, 1)
        weights = round_to(probabilities, half).to(DOT)
        acc = acc * correction[:, None] + tl.dot(weights, values, input_precision="ieee")
        maximum = new_maximum
    # 1 where nothing was summed: an empty context gives zeros.
    divisor = tl.where(denominator > 0.0, denominator, 1.0)
    acc = acc * (value_factor / divisor)[:, None]
    pair = sequence * KV_HEADS + kv_head
    target = out + pair * (GROUP * HEAD_DIM) + offsets
    slices = tl.cdiv(context_len, slice_len)
    if SPLIT:
        if slices > 1:
            row = pair * max_slices + slice_id
            tl.store(partial + row * (GROUP * HEAD_DIM) + offsets, acc, mask=mask)
            tl.store(partial_lse + row * GROUP + head, maximum + tl.log2(divisor), mask=head_mask)
            if arrive_last(counters + pair, slices):
                _merge(
                    partial, partial_lse, out + pair * (GROUP * HEAD_DIM), pair * max_slices, slices,
                    GROUP, HEADS_PADDED, HEAD_DIM, DIM_PADDED, AT_ONCE,
                )  # fmt: skip
        else:
            tl.store(target, round_to(acc, out.dtype.element_ty), mask=mask)
    else:
        tl.store(target, round_to(acc, out.dtype.element_ty), mask=mask)
