// Stream-K: how blocks share the units of tiles, and how the parts of a shared tile are summed.
#pragma once
#include "tiles.cuh"

// How the units (stages) of all tiles are shared out among the blocks. Products of counts stay below 2^32 (the host
// checks): a 64-bit division costs a third of a microsecond.
struct Work {
    unsigned row_blocks, token_blocks, units, total;  // units: of one tile
    bool whole;                                       // no tile is shared between blocks
    unsigned cluster = 1;                             // blocks that share each tile, one after the other; 1: see whole
    __device__ __forceinline__ int begin(unsigned index) const {
        if (cluster > 1) return index / cluster * units + units * (index % cluster) / cluster;
        if (whole) return row_blocks * token_blocks * index / gridDim.x * units;
        return total * index / gridDim.x;
    }
    // The block that computes unit u.
    __device__ __forceinline__ int owner(unsigned u) const { return ((u + 1) * gridDim.x - 1) / total; }
    __device__ __forceinline__ int contributors(int tile) const {
        return whole ? 1 : owner((tile + 1) * units - 1) - owner(tile * units) + 1;
    }
};

// A block's part of a tile it shares: a block begins at most one such tile and ends at most one.
template <int TOKENS, int WARPS>
__device__ __forceinline__ float* part_of(const Params& p, int block, bool begins, int warp, int lane) {
    return p.partial + ((long long)(block * 2 + begins) * WARPS + warp) * (TOKENS * 16) + lane * 4;
}

// Leave a warp's part of a shared tile in the workspace; the caller counts it as arrived.
template <int TOKENS, int WARPS>
__device__ __forceinline__ void leave_part(const Params& p, bool begins, int warp, int lane,
                                           const float (&c)[TOKENS / 8][4]) {
    float* mine = part_of<TOKENS, WARPS>(p, blockIdx.x, begins, warp, lane);
#pragma unroll
    for (int b = 0; b < TOKENS / 8; b++)
        __stcg((float4*)(mine + b * 128), make_float4(c[b][0], c[b][1], c[b][2], c[b][3]));
    __threadfence();
}

// The sum of a warp's parts of a shared tile, in block order, once all of them have arrived.
template <int TOKENS, int WARPS>
__device__ __forceinline__ void add_parts(const Params& p, const Work& work, int tile, int warp, int lane,
                                          float (&c)[TOKENS / 8][4]) {
    const int first = work.owner(tile * work.units), contributors = work.owner((tile + 1) * work.units - 1) - first + 1;
#pragma unroll
    for (int b = 0; b < TOKENS / 8; b++) c[b][0] = c[b][1] = c[b][2] = c[b][3] = 0.0f;
    // The first of them begins the tile; the others begin inside it, in slot 0.
    const float* part = part_of<TOKENS, WARPS>(p, first, true, warp, lane);
    const float* next = part_of<TOKENS, WARPS>(p, first + 1, false, warp, lane);
    constexpr long long BLOCK_STRIDE = 2LL * WARPS * TOKENS * 16;
#pragma unroll(TOKENS <= 32 ? 4 : TOKENS <= 64 ? 2 : 1)
    for (int i = 0; i < contributors; i++) {
#pragma unroll
        for (int b = 0; b < TOKENS / 8; b++) {
            const float4 f = __ldcg((const float4*)(part + b * 128));
            c[b][0] += f.x, c[b][1] += f.y, c[b][2] += f.z, c[b][3] += f.w;
        }
        part = next, next += BLOCK_STRIDE;
    }
}

// The last warp to finish its 16 channels of a shared tile sums all parts and returns true.
template <int TOKENS, int WARPS>
__device__ __forceinline__ bool sum_parts(const Params& p, const Work& work, int tile, bool begins, int warp, int lane,
                                          float (&c)[TOKENS / 8][4]) {
    leave_part<TOKENS, WARPS>(p, begins, warp, lane, c);
    __syncwarp();
    int arrived = 0;
    int* counter = p.arrivals + tile * WARPS + warp;
    if (lane == 0) arrived = atomicAdd(counter, 1);
    if (__shfl_sync(~0u, arrived, 0) != work.contributors(tile) - 1) return false;
    __threadfence();
    if (lane == 0) *counter = 0;
    add_parts<TOKENS, WARPS>(p, work, tile, warp, lane, c);
    return true;
}
