// u = x A^T of LoRA inside the product that adds u B^T: warps without other work compute it while the weights stream.
//
// Rank tiles of 16 and slices of k are dealt out to the blocks. The last block to bring its slice of a tile sums all of
// them, in slice order: same input, same bits. All blocks of a launch are resident (the host launches no more than
// fit), so that waiting for u, which needs all of them, ends.
#pragma once
#include "tiles.cuh"

// Threads of some warps of a block; every user has its own barrier.
template <int BARRIER, int THREADS>
__device__ __forceinline__ void sync_warps() {
    asm volatile("bar.sync %0, %1;" ::"n"(BARRIER), "n"(THREADS) : "memory");
}

__device__ __forceinline__ void prefetch_lines(const void* from, int bytes, int thread, int threads) {
#pragma unroll 1
    for (int i = thread * 128; i < bytes; i += threads * 128) prefetch((const char*)from + i);
}

// What this block will read of A, and of the factors of row tiles first .. last - 1, on the way into the L2 cache.
__device__ __forceinline__ void prefetch_factors(const Params& p, int first, int last, int thread, int threads) {
#pragma unroll 1
    for (int tile = first; tile < last; tile++) {
        const Factor factor(p, segment_of(p, tile), tile);
        prefetch_lines(factor.rows, factor.rank * 32, thread, threads);
    }
}

__device__ __forceinline__ int rank_tiles(const Params& p) {
    return (p.lora.width + 15) / 16;
}

__device__ __forceinline__ void poll(const int* counter, int wanted) {
    int found;
    do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(found) : "l"(counter) : "memory");
    while (found != wanted);
}

// Slices first .. last - 1 of a rank tile and eight tokens, summed in their order: rows are ranks, columns are tokens.
__device__ __forceinline__ float4 sum_slices_of_u(const Lora& l, int place, int places, int first, int last, int lane) {
    const float4* from = (const float4*)l.partial + ((long long)first * places + place) * 32 + lane;
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
    for (int s = first; s < last; s++, from += (long long)places * 32) {
        const float4 f = __ldcg(from);
        v.x += f.x, v.y += f.y, v.z += f.z, v.w += f.w;
    }
    return v;
}

// One such sum, rounded, to rows of u `pitch` apart.
__device__ __forceinline__ void store_u(const Params& p, uint16_t* u, int pitch, int tile, int token0, int lane,
                                        const float4& v) {
    const float values[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int rank = tile * 16 + (lane >> 2) + (i >> 1) * 8, token = token0 + 2 * (lane & 3) + (i & 1);
        if (rank < p.lora.width && token < p.m) u[token * pitch + rank] = (uint16_t)pack_bf16(values[i], 0.0f);
    }
}

// One thread of each block, when it needs no counter any more: the last one clears them all.
__device__ __forceinline__ void leave_counters(const Params& p) {
    if (atomicAdd(p.lora.counters + 1, 1) != (int)gridDim.x - 1) return;
    for (int i = 0; i < 2 + rank_tiles(p); i++) p.lora.counters[i] = 0;
}

// Many rows: every block sums its share of u, once `arrivals` parts of each rank tile are there.
template <int WORKERS, int BARRIER>
__device__ __forceinline__ void sum_u(const Params& p, int arrivals, float4* sums, int worker, int lane) {
    const int tiles = rank_tiles(p), places = tiles * ((p.m + 7) / 8), slices = p.lora.slices;
    int done = 0;
#pragma unroll 1
    for (int item = blockIdx.x; item < places; item += gridDim.x, done++) {
        const int tile = item % tiles, b = item / tiles;
        if (lane == 0) poll(p.lora.counters + 2 + tile, arrivals);
        __syncwarp();
        sums[worker * 32 + lane] = sum_slices_of_u(p.lora, tile * (places / tiles) + b, places,
                                                   slices * worker / WORKERS, slices * (worker + 1) / WORKERS, lane);
        sync_warps<BARRIER, WORKERS * 32>();
        if (worker == 0) {
            float4 v = sums[lane];
#pragma unroll
            for (int w = 1; w < WORKERS; w++) {
                const float4 f = sums[w * 32 + lane];
                v.x += f.x, v.y += f.y, v.z += f.z, v.w += f.w;
            }
            store_u(p, p.lora.u, p.lora.width, tile, b * 8, lane, v);
        }
        sync_warps<BARRIER, WORKERS * 32>();
    }
    if (worker || !done) return;
    asm volatile("fence.proxy.async;" ::: "memory");  // u is read by tensor copies
    __threadfence();
    __syncwarp();
    if (lane == 0) atomicAdd(p.lora.counters, done);
}

// One thread of each block: returns when all of u is there.
__device__ __forceinline__ void await_u(const Params& p) {
    poll(p.lora.counters, rank_tiles(p) * ((p.m + 7) / 8));
    asm volatile("fence.proxy.async;" ::: "memory");
    leave_counters(p);
}
