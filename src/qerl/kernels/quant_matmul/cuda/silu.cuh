// SiLU-mul in the epilogue of the product of gate and up: of y = x W^T only silu(gate) * up, [M, N / 2], is stored.
//
// The weight has two segments of equal size, gate and up. A pair is a row tile of gate and the one of up whose channels
// it is multiplied with; both are computed by one block and each is rounded to bf16 before, as two kernels would.
#pragma once
#include "shrink.cuh"
#include "stream_k.cuh"

__device__ __forceinline__ int tile_of_pair(const Params& p, int pair, bool up) {
    return pair + (up ? p.segment_end[0] : 0);
}

__device__ __forceinline__ void prefetch_factors_of_pairs(const Params& p, int first, int last, int thread,
                                                          int threads) {
    prefetch_factors(p, first, last, thread, threads);
    prefetch_factors(p, tile_of_pair(p, first, true), tile_of_pair(p, last, true), thread, threads);
}

// In fp32, by the instructions that Triton makes of kernels/silu_mul: the same bits.
__device__ __forceinline__ float silu_mul(float gate, float up) {
    float power, sigmoid;
    asm("ex2.approx.f32 %0, %1;" : "=f"(power) : "f"(gate * -1.4426950408889634f));
    asm("div.full.f32 %0, %1, %2;" : "=f"(sigmoid) : "f"(1.0f), "f"(1.0f + power));
    return gate * sigmoid * up;
}
__device__ __forceinline__ uint32_t silu_mul(uint32_t gate, uint32_t up) {
    return pack_bf16(silu_mul(__uint_as_float(gate << 16), __uint_as_float(up << 16)),
                     silu_mul(__uint_as_float(gate & 0xFFFF0000u), __uint_as_float(up & 0xFFFF0000u)));
}

// Bias and rounding of a block of 16 channels x 8 tokens, as store_block has them: channels 0 .. 7, and 8 .. 15.
__device__ __forceinline__ uint2 rounded_block(const Epilogue& e, const float (&c)[4]) {
    return make_uint2(pack_bf16(c[0] + e.bias[0], c[1] + e.bias[0]), pack_bf16(c[2] + e.bias[1], c[3] + e.bias[1]));
}

// As store_block, to y [M, N / 2], from such blocks of gate and up.
__device__ __forceinline__ void store_silu_mul(const Params& p, int pair, int token0, int lane, uint2 gate, uint2 up) {
    const int g = lane >> 2, t = lane & 3;
    uint32_t upper = silu_mul(gate.x, up.x), lower = silu_mul(gate.y, up.y);
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(upper));
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(lower));
    if (token0 + g < p.m) {
        uint16_t* y = p.y + (long long)(token0 + g) * (p.n / 2) + pair * 16 + 2 * t;
        *(uint32_t*)y = upper;
        *(uint32_t*)(y + 8) = lower;
    }
}

// Many rows: warps `pair` and `pair` + WARPS / 2 hold the two tiles of a pair.
constexpr int PAIR_BARRIER = 4;  // and the ids after it, one for each pair of warps

__device__ __forceinline__ void sync_pair(int pair) {
    asm volatile("bar.sync %0, %1;" ::"r"(PAIR_BARRIER + pair), "n"(64) : "memory");
}
// Whether any thread of the two warps says so: a shuffle, because a predicate out of a barrier is not known to be the
// same in all lanes, and would put every later wgmma on a divergent path, where they run one after another.
__device__ __forceinline__ bool any_of_pair(int pair, bool mine) {
    uint32_t any;
    asm volatile("{.reg .pred p; setp.ne.u32 p, %1, 0; bar.red.or.pred p, %2, %3, p; selp.u32 %0, 1, 0, p;}"
                 : "=r"(any)
                 : "r"((uint32_t)mine), "r"(PAIR_BARRIER + pair), "n"(64)
                 : "memory");
    return __shfl_sync(~0u, any, 0);
}

// As sum_parts, but one block sums the parts of both warps.
template <int TOKENS, int WARPS>
__device__ __forceinline__ bool sum_parts_of_pair(const Params& p, const Work& work, int tile, bool begins, int warp,
                                                  int lane, float (&c)[TOKENS / 8][4]) {
    const int pair = warp % (WARPS / 2);
    leave_part<TOKENS, WARPS>(p, begins, warp, lane, c);
    sync_pair(pair);
    bool is_last = false;
    if (warp == pair && lane == 0) {
        int* counter = p.arrivals + tile * WARPS + pair;
        __threadfence();  // for the parts of all 64 threads
        is_last = atomicAdd(counter, 1) == work.contributors(tile) - 1;
        if (is_last) *counter = 0;
    }
    if (!any_of_pair(pair, is_last)) return false;
    __threadfence();
    add_parts<TOKENS, WARPS>(p, work, tile, warp, lane, c);
    return true;
}

// Blocks of eight tokens that a warp gives to the other one at a time; large tiles leave little shared memory.
template <int TOKENS>
constexpr int GIVEN = TOKENS == 256   ? 2
                      : TOKENS == 128 ? 4
                                      : TOKENS / 16;

// What both warps of a pair do with their sums: each gives away every other block, and stores what the others make.
// `exchange`: 2 GIVEN blocks of 256 bytes for each pair.
template <int TOKENS, int WARPS>
__device__ __forceinline__ void store_pair(const Params& p, const Epilogue& e, int pair, int token0, int warp, int lane,
                                           uint2* exchange, const float (&c)[TOKENS / 8][4]) {
    constexpr int BLOCKS = GIVEN<TOKENS>;
    const bool up = warp >= WARPS / 2;
    const int index = warp % (WARPS / 2);
    uint2* const given = exchange + (2 * index + up) * BLOCKS * 32 + lane;
    const uint2* const taken = exchange + (2 * index + !up) * BLOCKS * 32 + lane;
#pragma unroll
    for (int first = 0; first < TOKENS / 16; first += BLOCKS) {
        uint2 kept[BLOCKS];
        sync_pair(index);  // what was there has been read
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
            const uint2 even = rounded_block(e, c[2 * (first + i)]), odd = rounded_block(e, c[2 * (first + i) + 1]);
            kept[i] = up ? odd : even;
            given[i * 32] = up ? even : odd;
        }
        sync_pair(index);
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
            const uint2 other = taken[i * 32];
            store_silu_mul(p, pair, token0 + (2 * (first + i) + up) * 8, lane, up ? other : kept[i],
                           up ? kept[i] : other);
        }
    }
}
