"""Triton kernels of paged decode attention: flash attention over slices of the context, and the merge of slices.

One program owns one sequence, one KV head with all query heads of its group, and one slice of the context. The slice
length follows from the context length of the sequence (read on the device), so captured graphs stay right as contexts
grow, and empty slices end at once. Slices are merged by a second kernel in ascending order.
"""

import triton
import triton.language as tl

from qerl.kernels.triton import INTERPRETED, round_to


@triton.jit
def _slice_len(context_len, SLICES: tl.constexpr, BLOCK_N: tl.constexpr):
    """Tokens a slice covers, a multiple of BLOCK_N; at least one step, so that empty contexts divide too."""
    return tl.maximum(tl.cdiv(tl.cdiv(context_len, SLICES), BLOCK_N), 1) * BLOCK_N


@triton.jit
def paged_attention_slice_kernel(
    q, k_cache, v_cache, block_table, context_lens, out, partial, partial_lse,
    scale_log2, block_stride, token_stride, head_stride, max_blocks, num_heads,
    GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """With SLICES == 1 writes out [S, Hq, D]; else partial fp32 [S, Hq, SLICES, D] and its log2-sum-exp."""
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1)
    slice_id = tl.program_id(2)
    context_len = tl.load(context_lens + sequence)
    slice_len = _slice_len(context_len, SLICES, BLOCK_N)
    first = slice_id * slice_len
    last = tl.minimum(first + slice_len, context_len)
    # An empty context still has to write its zeros.
    if (first >= last) & (SLICES > 1):
        return
    head = tl.arange(0, GROUP_PADDED)
    dim = tl.arange(0, DIM_PADDED)
    head_mask = head < GROUP
    dim_mask = dim < HEAD_DIM
    query_row = sequence.to(tl.int64) * num_heads + kv_head * GROUP + head
    query_mask = head_mask[:, None] & dim_mask[None, :]
    query = tl.load(q + query_row[:, None] * HEAD_DIM + dim[None, :], mask=query_mask, other=0.0)
    maximum = tl.full((GROUP_PADDED,), float("-inf"), tl.float32)
    denominator = tl.zeros((GROUP_PADDED,), tl.float32)
    acc = tl.zeros((GROUP_PADDED, DIM_PADDED), tl.float32)
    for start in range(first, last, BLOCK_N):
        token = start + tl.arange(0, BLOCK_N)
        token_mask = token < last
        table = block_table + sequence.to(tl.int64) * max_blocks + token // BLOCK_SIZE
        block = tl.load(table, mask=token_mask, other=0).to(tl.int64)
        place = block * block_stride + (token % BLOCK_SIZE) * token_stride + kv_head * head_stride
        kv_mask = token_mask[:, None] & dim_mask[None, :]
        keys = tl.load(k_cache + place[:, None] + dim[None, :], mask=kv_mask, other=0.0)
        values = tl.load(v_cache + place[:, None] + dim[None, :], mask=kv_mask, other=0.0)
        if INTERPRETED:
            keys = keys.to(tl.float32)
            values = values.to(tl.float32)
            query = query.to(tl.float32)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale_log2
        scores = tl.where(token_mask[None, :], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        correction = tl.exp2(maximum - new_maximum)
        probabilities = tl.exp2(scores - new_maximum[:, None])
        denominator = denominator * correction + tl.sum(probabilities, 1)
        weights = round_to(probabilities, v_cache.dtype.element_ty)
        if INTERPRETED:
            weights = weights.to(tl.float32)
        acc = acc * correction[:, None] + tl.dot(weights, values, input_precision="ieee")
        maximum = new_maximum
    # 1 where nothing was summed: an empty context gives zeros.
    divisor = tl.where(denominator > 0.0, denominator, 1.0)
    acc = acc / divisor[:, None]
    if SLICES == 1:
        target = out + query_row[:, None] * HEAD_DIM + dim[None, :]
        tl.store(target, round_to(acc, out.dtype.element_ty), mask=query_mask)
    else:
        row = query_row * SLICES + slice_id
        tl.store(partial + row[:, None] * HEAD_DIM + dim[None, :], acc, mask=query_mask)
        tl.store(partial_lse + row, maximum + tl.log2(divisor), mask=head_mask)


@triton.jit
def paged_attention_merge_kernel(
    context_lens, partial, partial_lse, out, num_heads,
    HEAD_DIM: tl.constexpr, DIM_PADDED: tl.constexpr, BLOCK_N: tl.constexpr, SLICES: tl.constexpr,
    SLICES_PADDED: tl.constexpr,
):  # fmt: skip
    """out [S, Hq, D] from the slices that the context length of each sequence says were written."""
    sequence = tl.program_id(0)
    row = sequence.to(tl.int64) * num_heads + tl.program_id(1)
    context_len = tl.load(context_lens + sequence)
    index = tl.arange(0, SLICES_PADDED)
    written = (index < SLICES) & (index * _slice_len(context_len, SLICES, BLOCK_N) < context_len)
    lse = tl.load(partial_lse + row * SLICES + index, mask=written, other=float("-inf"))
    maximum = tl.max(lse, 0)
    weight = tl.where(written, tl.exp2(lse - maximum), 0.0)
    dim = tl.arange(0, DIM_PADDED)
    dim_mask = dim < HEAD_DIM
    source = partial + (row * SLICES + index)[:, None] * HEAD_DIM + dim[None, :]
    values = tl.load(source, mask=written[:, None] & dim_mask[None, :], other=0.0)
    total = tl.sum(weight, 0)
    merged = tl.sum(values * weight[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    tl.store(out + row * HEAD_DIM + dim, round_to(merged, out.dtype.element_ty), mask=dim_mask)
