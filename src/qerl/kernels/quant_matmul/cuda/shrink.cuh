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

template <int WORKERS, int BLOCKS>
constexpr int shrink_bytes = WORKERS * BLOCKS * 512;

// Few rows: the slices of u that fall to this block, by WORKERS warps, BLOCKS times eight tokens and UNROLL steps at a
// time. sums: float4 [WORKERS][BLOCKS][32] in shared memory.
template <int WORKERS, int BLOCKS, int UNROLL, int BARRIER>
__device__ __forceinline__ void make_slices(const Params& p, float4* sums, int worker, int lane) {
    const Lora& l = p.lora;
    const int g = lane >> 2, t = lane & 3, tiles = rank_tiles(p), chunks = p.k / 32;
    const int token_blocks = (p.m + 7) / 8, places = tiles * token_blocks;
    for (int item = blockIdx.x; item < tiles * l.slices; item += gridDim.x) {
        const int tile = item % tiles, slice = item / tiles;
        const int begin = chunks * slice / l.slices, end = chunks * (slice + 1) / l.slices;
        // Offsets of 32 bits, because registers are few: up to 256 rows of x are made here.
        const int upper = min(tile * 16 + g, l.width - 1) * p.k + 8 * t;
        const int lower = min(tile * 16 + g + 8, l.width - 1) * p.k + 8 * t;
        float4* const partial = (float4*)l.partial + (long long)tile * token_blocks * 32 + lane;
#pragma unroll 1
        for (int first = 0; first < token_blocks; first += BLOCKS) {
            int x[BLOCKS];
#pragma unroll
            for (int b = 0; b < BLOCKS; b++) x[b] = min((first + b) * 8 + g, p.m - 1) * p.k + 8 * t;
            float c[BLOCKS][4] = {};
#pragma unroll UNROLL
            for (int chunk = begin + worker; chunk < end; chunk += WORKERS) {
                const uint4 high = *(const uint4*)(l.a + upper + chunk * 32);
                const uint4 low = *(const uint4*)(l.a + lower + chunk * 32);
                const uint32_t even[4] = {high.x, low.x, high.y, low.y}, odd[4] = {high.z, low.z, high.w, low.w};
#pragma unroll
                for (int b = 0; b < BLOCKS; b++) {
                    const uint4 v = *(const uint4*)(p.x + x[b] + chunk * 32);
                    mma(c[b], even, v.x, v.y);
                    mma(c[b], odd, v.z, v.w);
                }
            }
#pragma unroll
            for (int b = 0; b < BLOCKS; b++)
                sums[(worker * BLOCKS + b) * 32 + lane] = make_float4(c[b][0], c[b][1], c[b][2], c[b][3]);
            sync_warps<BARRIER, WORKERS * 32>();
#pragma unroll 1
            for (int b = worker; b < BLOCKS && first + b < token_blocks; b += WORKERS) {
                float4 v = sums[b * 32 + lane];
#pragma unroll
                for (int w = 1; w < WORKERS; w++) {
                    const float4 f = sums[(w * BLOCKS + b) * 32 + lane];
                    v.x += f.x, v.y += f.y, v.z += f.z, v.w += f.w;
                }
                __stcg(partial + ((long long)slice * places + first + b) * 32, v);
            }
            sync_warps<BARRIER, WORKERS * 32>();
        }
        __threadfence();
        sync_warps<BARRIER, WORKERS * 32>();
        if (worker == 0 && lane == 0) atomicAdd(l.counters + 2 + tile, 1);
    }
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
