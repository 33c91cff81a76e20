"""Triton kernels of the seeded draw, the vocabulary split into chunks.

1. ``chunk_max_kernel``: the maximum of every chunk of every row.
2. ``chunk_sum_kernel``: the integer weights of every chunk, summed in int64 (their order does not matter).
3. ``pick_kernel``: per sample, the uniform of its counter, the chunk it falls into, and the token inside it.

Weights are never stored: the third kernel computes those of one chunk again, with the same instructions.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from qerl.kernels.decode_rows import fields
from qerl.kernels.triton import INTERPRETED, start_after_predecessor

_TOKEN_ID = tl.constexpr(fields.TOKEN_ID)
_LOGPROB = tl.constexpr(fields.LOGPROB)
_TEMPERATURE_LOGPROB = tl.constexpr(fields.TEMPERATURE_LOGPROB)
_MASK32 = tl.constexpr((1 << 32) - 1)
_MASK26 = tl.constexpr((1 << 26) - 1)


@triton.jit
def _max_or_nan(value):
    """Maximum of a vector, NaN if it holds one."""
    has_nan = tl.max((value != value).to(tl.int32), 0)
    return tl.where(has_nan > 0, float("nan"), tl.max(tl.where(value != value, float("-inf"), value), 0))


@triton.jit
def _row_max(chunk_max, row, chunks, CHUNKS_PADDED: tl.constexpr):
    index = tl.arange(0, CHUNKS_PADDED)
    return _max_or_nan(tl.load(chunk_max + row * chunks + index, mask=index < chunks, other=float("-inf")))


@triton.jit
def _scaled(value, maximum, temperature):
    """value / T - maximum / T, each step rounded once in fp32."""
    return tl.div_rn(value, temperature) - tl.div_rn(maximum, temperature)


@triton.jit
def _weights(scaled, weight_scale):
    """int64 floor(2^b exp(scaled)); 0 where there is no number."""
    # The exponential that torch takes; the one of the language has a larger error.
    exponential = tl.exp(scaled) if INTERPRETED else libdevice.exp(scaled)
    return tl.where(scaled == scaled, exponential * weight_scale, 0.0).to(tl.int64)


@triton.jit
def _mix32(x):
    """The bijection of ``reference._mix32`` on 32-bit words held in int64."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _MASK32
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _MASK32
    return x ^ (x >> 15)


@triton.jit
def _uniform(low, high, position):
    """fp64 number of (0, 1) of a key and a position; ``reference.uniforms`` bit for bit."""
    first = _mix32(_mix32(position & _MASK32) ^ low)
    second = _mix32((first + high) & _MASK32)
    third = _mix32(second ^ _mix32((low + 0x9E3779B9) & _MASK32))
    bits = ((second & _MASK26) << 26) | (third & _MASK26)
    return (2 * bits + 1).to(tl.float64) * 1.1102230246251565e-16  # 2^-53


@triton.jit
def uniforms_kernel(keys, positions, out):
    """out fp64 [N]: lets a test compare the counter with the reference."""
    index = tl.program_id(0)
    uniform = _uniform(tl.load(keys + 2 * index), tl.load(keys + 2 * index + 1), tl.load(positions + index))
    tl.store(out + index, uniform)


@triton.jit
def chunk_max_kernel(logits, chunk_max, V, chunks, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """chunk_max fp32 [R, chunks] of logits fp32 [R, V]; NaN where the chunk holds one."""
    start_after_predecessor(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    value = tl.load(logits + row * V + token, mask=token < V, other=float("-inf"))
    tl.store(chunk_max + row * chunks + chunk, _max_or_nan(value))


@triton.jit
def chunk_sum_kernel(
    logits, chunk_max, chunk_sum, V, chunks, temperature, weight_scale,
    CHUNK: tl.constexpr, CHUNKS_PADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """chunk_sum int64 [R, chunks]: the summed weights of every chunk."""
    start_after_predecessor(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    value = tl.load(logits + row * V + token, mask=token < V, other=float("-inf"))
    maximum = _row_max(chunk_max, row, chunks, CHUNKS_PADDED)
    weights = _weights(_scaled(value, maximum, temperature), weight_scale)
    tl.store(chunk_sum + row * chunks + chunk, tl.sum(weights, 0))


# Rows of a step's buffers start anywhere. Scalars gain nothing by alignment, which would only ask for one more kernel.
@triton.jit(do_not_specialize_on_alignment=["positions", "token_ids", "results"])
def pick_kernel(
    logits, keys, positions, rows, chunk_max, chunk_sum, token_ids, logprobs, results,
    V, chunks, temperature, weight_scale, inverse_scale, results_stride,
    GREEDY: tl.constexpr, HAS_ROWS: tl.constexpr, HAS_RESULTS: tl.constexpr, CHUNK: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """token_ids int64 [N], and logprobs fp32 [N] or results fp64 [3, N]; NaN for a row whose maximum is not finite."""
    start_after_predecessor(PDL)
    sample = tl.program_id(0)
    row = sample.to(tl.int64)
    if HAS_ROWS:
        row = tl.load(rows + sample)
    maximum = _row_max(chunk_max, row, chunks, CHUNKS_PADDED)
    index = tl.arange(0, CHUNKS_PADDED)
    sums = tl.load(chunk_sum + row * chunks + index, mask=index < chunks, other=0)
    total = tl.sum(sums, 0)
    inside = tl.arange(0, CHUNK)
    if GREEDY:
        best = tl.load(chunk_max + row * chunks + index, mask=index < chunks, other=float("nan"))
        chunk = tl.minimum(tl.min(tl.where(best == maximum, index, CHUNKS_PADDED), 0), chunks - 1)
        token = chunk * CHUNK + inside
        value = tl.load(logits + row * V + token, mask=token < V, other=float("nan"))
        offset = tl.min(tl.where(value == maximum, inside, CHUNK), 0)
    else:
        uniform = _uniform(tl.load(keys + 2 * sample), tl.load(keys + 2 * sample + 1), tl.load(positions + sample))
        # u is at most 1 - 2^-53, half a unit in the last place below 1: the rounded product stays below the total.
        target = (uniform * total.to(tl.float64)).to(tl.int64)
        # The first end above the target: chunks and tokens of weight 0 are skipped.
        ends = tl.cumsum(sums, 0)
        chunk = tl.minimum(tl.sum((ends <= target).to(tl.int32), 0), chunks - 1)
        before = tl.sum(tl.where(index < chunk, sums, 0), 0)
        token = chunk * CHUNK + inside
        value = tl.load(logits + row * V + token, mask=token < V, other=float("-inf"))
        weights = _weights(_scaled(value, maximum, temperature), weight_scale)
        offset = tl.sum((tl.cumsum(weights, 0) + before <= target).to(tl.int32), 0)
    chosen = tl.minimum(chunk * CHUNK + offset, V - 1)
    scaled = _scaled(tl.load(logits + row * V + chosen), maximum, temperature)
    logprob = (scaled.to(tl.float64) - tl.log(total.to(tl.float64) * inverse_scale)).to(tl.float32)
    finite = (maximum > float("-inf")) & (maximum < float("inf"))
    tl.store(token_ids + sample, chosen.to(tl.int64))
    logprob = tl.where(finite, logprob, float("nan"))
    if HAS_RESULTS:
        tl.store(results + _TOKEN_ID * results_stride + sample, chosen.to(tl.float64))
        tl.store(results + _LOGPROB * results_stride + sample, logprob.to(tl.float64))
        tl.store(results + _TEMPERATURE_LOGPROB * results_stride + sample, logprob.to(tl.float64))
    else:
        tl.store(logprobs + sample, logprob)
