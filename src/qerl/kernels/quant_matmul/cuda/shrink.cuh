// u = x A^T of LoRA inside the product that adds u B^T: warps without other work compute it while the weights stream.
//
// Parts of u, 16 ranks by some tokens by a slice of k, are dealt out to the blocks. Slices are summed in their order:
// same input, same bits; few rows by every block for itself, many rows by all blocks together. All blocks of a launch
// are resident (the host launches no more than fit), so that waiting for u, which needs all of them, ends.
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

// What this block will read of the factors of row tiles first .. last - 1, on the way into the L2 cache.
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

// u is made in slices of k, of 16 ranks and 8 BLOCKS tokens; this one is the `index`-th.
template <int BLOCKS>
struct UPart {
    int tile, group, slice, begin, end;  // of tokens; chunks of 32 columns
    __device__ __forceinline__ static int groups(const Params& p) { return (p.m + 8 * BLOCKS - 1) / (8 * BLOCKS); }
    __device__ __forceinline__ static int count(const Params& p) { return rank_tiles(p) * groups(p) * p.lora.slices; }
    __device__ __forceinline__ UPart(const Params& p, int index) {
        const int tiles = rank_tiles(p), chunks = p.k / 32;
        tile = index % tiles, index /= tiles;
        group = index % groups(p), slice = index / groups(p);
        begin = chunks * slice / p.lora.slices, end = chunks * (slice + 1) / p.lora.slices;
    }
};

// What this block reads of A for its first part of u, on the way into the L2 cache.
template <int BLOCKS>
__device__ __forceinline__ void prefetch_a(const Params& p, int thread, int threads) {
    const int index = blockIdx.x;
    if (!p.lora.a || index >= UPart<BLOCKS>::count(p)) return;
    const UPart<BLOCKS> part(p, index);
    const int ranks = min(16, p.lora.width - part.tile * 16);
    for (int i = thread; i < ranks * (part.end - part.begin); i += threads)
        prefetch(p.lora.a + (long long)(part.tile * 16 + i % ranks) * p.k + (part.begin + i / ranks) * 32);
}

// The parts of u that fall to this block: WORKERS warps beside the product cut them again and add up through shared
// memory, `sums` [WORKERS - 1, BLOCKS, 32]. The loads of CHUNKS chunks of 32 columns are on their way together.
template <int WORKERS, int BARRIER, int BLOCKS, int CHUNKS>
__device__ __forceinline__ void make_parts_of_u(const Params& p, float4* sums, int worker, int lane) {
    const Lora& l = p.lora;
    const int g = lane >> 2, t = lane & 3, token_blocks = (p.m + 7) / 8;
#pragma unroll 1
    for (int index = blockIdx.x; index < UPart<BLOCKS>::count(p); index += gridDim.x) {
        const UPart<BLOCKS> part(p, index);
        // Offsets, because addresses take twice the registers.
        const uint32_t column = part.begin * 32 + worker * 32 + 8 * t, last = l.width - 1;
        const uint32_t upper = min(part.tile * 16u + g, last) * p.k, lower = min(part.tile * 16u + g + 8, last) * p.k;
        uint32_t row[BLOCKS];
        float c[BLOCKS][4];
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
            row[b] = min((part.group * BLOCKS + b) * 8 + g, p.m - 1) * p.k;
            c[b][0] = c[b][1] = c[b][2] = c[b][3] = 0.0f;
        }
#pragma unroll 1
        for (uint32_t at = column; at < part.end * 32; at += CHUNKS * WORKERS * 32) {
            uint4 high[CHUNKS], low[CHUNKS], v[CHUNKS][BLOCKS];
#pragma unroll
            for (int i = 0; i < CHUNKS; i++) {
                const uint32_t from = at + i * WORKERS * 32;
                const bool present = from < part.end * 32;
                high[i] = low[i] = uint4{};
                if (present)
                    high[i] = *(const uint4*)(l.a + upper + from), low[i] = *(const uint4*)(l.a + lower + from);
#pragma unroll
                for (int b = 0; b < BLOCKS; b++) {
                    v[i][b] = uint4{};
                    if (present) v[i][b] = *(const uint4*)(p.x + row[b] + from);
                }
            }
#pragma unroll
            for (int i = 0; i < CHUNKS; i++) {
                const uint32_t even[4] = {high[i].x, low[i].x, high[i].y, low[i].y},
                               odd[4] = {high[i].z, low[i].z, high[i].w, low[i].w};
#pragma unroll
                for (int b = 0; b < BLOCKS; b++) {
                    mma(c[b], even, v[i][b].x, v[i][b].y);
                    mma(c[b], odd, v[i][b].z, v[i][b].w);
                }
            }
        }
        if (worker > 0)
#pragma unroll
            for (int b = 0; b < BLOCKS; b++)
                sums[((worker - 1) * BLOCKS + b) * 32 + lane] = make_float4(c[b][0], c[b][1], c[b][2], c[b][3]);
        sync_warps<BARRIER, WORKERS * 32>();
        if (worker == 0) {
            const int first = part.group * BLOCKS;
            float4* const to =
                (float4*)l.partial + ((long long)(part.slice * rank_tiles(p) + part.tile) * token_blocks + first) * 32;
#pragma unroll
            for (int b = 0; b < BLOCKS; b++) {
                float4 v = make_float4(c[b][0], c[b][1], c[b][2], c[b][3]);
#pragma unroll
                for (int w = 0; w < WORKERS - 1; w++) {
                    const float4 f = sums[(w * BLOCKS + b) * 32 + lane];
                    v.x += f.x, v.y += f.y, v.z += f.z, v.w += f.w;
                }
                if (first + b < token_blocks) __stcg(to + b * 32 + lane, v);
            }
            __threadfence();
            __syncwarp();
            if (lane == 0) atomicAdd(l.counters + 2 + part.tile, 1);
        }
        sync_warps<BARRIER, WORKERS * 32>();  // the sums were read
    }
}

__device__ __forceinline__ void poll(const int* counter, int wanted) {
    int found;
    do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(found) : "l"(counter) : "memory");
    while (found != wanted);
}

// Slices first .. last - 1 of a rank tile and eight tokens, summed in their order: rows are ranks, columns are tokens.
__device__ __forceinline__ float4 sum_slices_of_u(const Lora& l, int place, int places, int first, int last, int lane) {
    constexpr int AT_ONCE = 8;  // loads on their way together: a loop of as many as there are would wait for each
    const float4* from = (const float4*)l.partial + place * 32 + lane;
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
    for (; first < last; first += AT_ONCE) {
        float4 f[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            f[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (first + i < last) f[i] = __ldcg(from + (long long)(first + i) * places * 32);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) v.x += f[i].x, v.y += f[i].y, v.z += f[i].z, v.w += f[i].w;
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
