// Many rows: a part of u = x A^T that a block makes with the warps of its product before its own sum. x comes through
// the ring, as for the sum and ahead of it, A straight into registers.
#pragma once
#include "shrink.cuh"

// 64 GROUPS ranks, TOKENS rows of x, some pairs of windows of k; at most one part a block (the host sees to it). UNIT
// windows of x are a step through the ring.
template <int TOKENS, int GROUPS, int UNIT>
struct RingPart {
    int group = 0, token_block = 0, slice = 0, first = 0, last = 0;  // of ranks; pairs of windows
    __device__ __forceinline__ static int token_blocks(const Params& p) { return (p.m + TOKENS - 1) / TOKENS; }
    __device__ __forceinline__ explicit RingPart(const Params& p) {
        if (!p.lora.a) return;
        const int groups = (p.lora.width + 64 * GROUPS - 1) / (64 * GROUPS), pairs = (p.k / 64 + 1) / 2;
        int index = blockIdx.x;
        if (index >= groups * token_blocks(p) * p.lora.slices) return;
        group = index % groups, index /= groups;
        token_block = index % token_blocks(p), slice = index / token_blocks(p);
        first = pairs * slice / p.lora.slices, last = pairs * (slice + 1) / p.lora.slices;
    }
    __device__ __forceinline__ int first_unit() const { return first * 2 / UNIT; }
    __device__ __forceinline__ int steps() const { return (last * 2 + UNIT - 1) / UNIT - first_unit(); }
    __device__ __forceinline__ bool has(int window) const { return window >= first * 2 && window < last * 2; }
    // Whether a warpgroup has ranks to multiply.
    __device__ __forceinline__ bool concerns(const Params& p, int warpgroup) const {
        return (group * GROUPS + warpgroup) * 64 < p.lora.width;
    }
};

// Of one warpgroup.
__device__ __forceinline__ void sync_warpgroup(int barrier) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(128) : "memory");
}

// What this part reads of A, on the way into the L2 cache.
template <int TOKENS, int GROUPS, int UNIT>
__device__ __forceinline__ void prefetch_a(const Params& p, const RingPart<TOKENS, GROUPS, UNIT>& part, int thread,
                                           int threads) {
    const int rank0 = part.group * 64 * GROUPS, ranks = min(64 * GROUPS, p.lora.width - rank0);
    const int window0 = part.first * 2, windows = min(part.last * 2, p.k / 64) - window0;
    const uint16_t* const from = p.lora.a + (long long)rank0 * p.k + window0 * 64;
#pragma unroll 1
    for (int i = thread; i < ranks * windows; i += threads)
        prefetch(from + (long long)(i % ranks) * p.k + i / ranks * 64);
}

// Lane t of a quad has row t of a 4 x 4 matrix, then its column t.
__device__ __forceinline__ void transpose_in_quads(uint4& v, int lane) {
    auto swap = [&](uint32_t& lower, uint32_t& upper, int flip) {
        const bool second = lane & flip;
        const uint32_t other = __shfl_xor_sync(~0u, second ? lower : upper, flip);
        if (second) lower = other;
        else upper = other;
    };
    swap(v.x, v.y, 1), swap(v.z, v.w, 1);
    swap(v.x, v.z, 2), swap(v.y, v.w, 2);
}

// Fragments of a rank tile and the columns of a window; zeros for what is not there. Loads of 16 bytes, because those
// of four touch eight lines each.
__device__ __forceinline__ void load_a(uint32_t (&a)[4][4], const Params& p, int tile, int window, int lane) {
    const int row = tile * 16 + (lane >> 2);
    const uint16_t* const from = p.lora.a + (long long)row * p.k + window * 64 + 8 * (lane & 3);
#pragma unroll
    for (int lower = 0; lower < 2; lower++) {
        const bool present = window < p.k / 64 && row + 8 * lower < p.lora.width;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint4 v = {};
            if (present) v = *(const uint4*)(from + 8LL * lower * p.k + half * 32);
            transpose_in_quads(v, lane);
            a[2 * half][lower] = v.x, a[2 * half][2 + lower] = v.y;
            a[2 * half + 1][lower] = v.z, a[2 * half + 1][2 + lower] = v.w;
        }
    }
}

// A warp's 16 ranks of a part, to the workspace. Every thread tells `stored`, so that no product waits for its stores.
template <int TOKENS, int GROUPS, int UNIT>
__device__ __forceinline__ void leave_u(const Params& p, const RingPart<TOKENS, GROUPS, UNIT>& part, uint32_t stored,
                                        int warp, int lane, const float (&c)[TOKENS / 8][4]) {
    const int tile = part.group * 4 * GROUPS + warp, blocks = (p.m + 7) / 8, first = part.token_block * (TOKENS / 8);
    float4* const to =
        (float4*)p.lora.partial + ((long long)(part.slice * rank_tiles(p) + tile) * blocks + first) * 32 + lane;
    if (tile < rank_tiles(p))
#pragma unroll
        for (int b = 0; b < TOKENS / 8; b++)
            if (first + b < blocks) __stcg(to + b * 32, make_float4(c[b][0], c[b][1], c[b][2], c[b][3]));
    barrier_arrive(stored);
}

// A warp beside the product tells the other blocks, once `stored` says so.
template <int TOKENS, int GROUPS, int UNIT>
__device__ __forceinline__ void publish_u(const Params& p, const RingPart<TOKENS, GROUPS, UNIT>& part, uint32_t stored,
                                          int lane) {
    if (!part.steps()) return;
    const int tile0 = part.group * 4 * GROUPS, tiles = min(4 * GROUPS, rank_tiles(p) - tile0);
    barrier_wait(stored, 0);
    __threadfence();  // for the threads that told, too
    __syncwarp();
    if (lane < tiles) atomicAdd(p.lora.counters + 2 + tile0 + lane, 1);
}
