// u = x A^T of LoRA inside the product that adds u B^T: parts of u, some ranks by some tokens by a slice of k, are
// dealt out to the blocks. Of few rows, warps without other work make them while the weights stream; of many, the
// product's warps (u_part.cuh).
//
// Slices are summed in their order: same input, same bits; few rows by every block for itself, many rows by all blocks
// together. All blocks of a launch are resident (the host launches no more than fit), so that waiting for u, which
// needs all of them, ends.
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

// Few rows: u is made in slices of k, of 16 ranks; this one is the `index`-th.
struct UPart {
    int tile, slice, begin, end;  // chunks of 32 columns
    __device__ __forceinline__ UPart(const Params& p, int index) {
        const int tiles = rank_tiles(p), chunks = p.k / 32;
        tile = index % tiles, slice = index / tiles;
        begin = chunks * slice / p.lora.slices, end = chunks * (slice + 1) / p.lora.slices;
    }
    __device__ __forceinline__ static int count(const Params& p) { return rank_tiles(p) * p.lora.slices; }
};

// What this block reads of A for its first part of u, on the way into the L2 cache.
__device__ __forceinline__ void prefetch_a(const Params& p, int thread, int threads) {
    const int index = blockIdx.x;
    if (!p.lora.a || index >= UPart::count(p)) return;
    const UPart part(p, index);
    const int ranks = min(16, p.lora.width - part.tile * 16);
    for (int i = thread; i < ranks * (part.end - part.begin); i += threads)
        prefetch(p.lora.a + (long long)(part.tile * 16 + i % ranks) * p.k + (part.begin + i / ranks) * 32);
}

// The parts of u that fall to this block: WORKERS warps beside the product cut them again and add up through shared
// memory, `sums` [WORKERS - 1, 32]. The loads of CHUNKS chunks of 32 columns are on their way together.
template <int WORKERS, int BARRIER, int CHUNKS>
__device__ __forceinline__ void make_parts_of_u(const Params& p, float4* sums, int worker, int lane) {
    const Lora& l = p.lora;
    const int g = lane >> 2, t = lane & 3;
#pragma unroll 1
    for (int index = blockIdx.x; index < UPart::count(p); index += gridDim.x) {
        const UPart part(p, index);
        // Offsets, because addresses take twice the registers.
        const uint32_t column = part.begin * 32 + worker * 32 + 8 * t, last = l.width - 1;
        const uint32_t upper = min(part.tile * 16u + g, last) * p.k, lower = min(part.tile * 16u + g + 8, last) * p.k;
        const uint32_t row = min(g, p.m - 1) * p.k;
        float c[4] = {};
#pragma unroll 1
        for (uint32_t at = column; at < part.end * 32; at += CHUNKS * WORKERS * 32) {
            uint4 high[CHUNKS], low[CHUNKS], v[CHUNKS];
#pragma unroll
            for (int i = 0; i < CHUNKS; i++) {
                const uint32_t from = at + i * WORKERS * 32;
                high[i] = low[i] = v[i] = uint4{};
                if (from < part.end * 32) {
                    high[i] = *(const uint4*)(l.a + upper + from), low[i] = *(const uint4*)(l.a + lower + from);
                    v[i] = *(const uint4*)(p.x + row + from);
                }
            }
#pragma unroll
            for (int i = 0; i < CHUNKS; i++) {
                const uint32_t even[4] = {high[i].x, low[i].x, high[i].y, low[i].y},
                               odd[4] = {high[i].z, low[i].z, high[i].w, low[i].w};
                mma(c, even, v[i].x, v[i].y);
                mma(c, odd, v[i].z, v[i].w);
            }
        }
        if (worker > 0) sums[(worker - 1) * 32 + lane] = make_float4(c[0], c[1], c[2], c[3]);
        sync_warps<BARRIER, WORKERS * 32>();
        if (worker == 0) {
            float4 v = make_float4(c[0], c[1], c[2], c[3]);
#pragma unroll
            for (int w = 0; w < WORKERS - 1; w++) {
                const float4 f = sums[w * 32 + lane];
                v.x += f.x, v.y += f.y, v.z += f.z, v.w += f.w;
            }
            __stcg((float4*)l.partial + (long long)index * 32 + lane, v);
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

constexpr int SLICES_AT_ONCE = 8;  // loads on their way together: a loop of as many as there are would wait for each

// Slices first .. last - 1 of a rank tile and eight tokens, summed in their order: rows are ranks, columns are tokens.
__device__ __forceinline__ float4 sum_slices_of_u(const Lora& l, int place, int places, int first, int last, int lane) {
    const float4* from = (const float4*)l.partial + (first * places + place) * 32 + lane;
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
    for (; first < last; first += SLICES_AT_ONCE) {
        float4 f[SLICES_AT_ONCE];
#pragma unroll
        for (int i = 0; i < SLICES_AT_ONCE; i++) {
            f[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (first + i < last) f[i] = __ldcg(from);
            from += places * 32;
        }
#pragma unroll
        for (int i = 0; i < SLICES_AT_ONCE; i++) v.x += f[i].x, v.y += f[i].y, v.z += f[i].z, v.w += f[i].w;
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

// Many rows: every block sums its share of u. `sharers` of its WORKERS warps share out the slices of each sum: all, or
// one, which leaves the other sums to the others. What takes divisions is known before u is.
template <int WORKERS, int BARRIER>
struct SumOfU {
    int tiles, blocks, item, step, first, last, tile, block;  // of ranks, of tokens; slices; where the item lies
    bool together;
    __device__ __forceinline__ SumOfU(const Params& p, int worker) {
        tiles = rank_tiles(p), blocks = (p.m + 7) / 8, together = p.lora.sharers > 1;
        const int slices = p.lora.slices;
        first = together ? slices * worker / WORKERS : 0, last = together ? slices * (worker + 1) / WORKERS : slices;
        item = blockIdx.x + (together ? 0 : worker * gridDim.x), step = gridDim.x * (together ? 1 : WORKERS);
        tile = item % tiles, block = item / tiles;
        asm volatile("" : "+r"(tile), "+r"(block), "+r"(first), "+r"(last));  // now, not when they are needed
    }
    // Once `arrivals` parts of each rank tile are there.
    __device__ __forceinline__ void run(const Params& p, int arrivals, float4* sums, int worker, int lane) {
        const int places = tiles * blocks;
        if (item >= places) return;
        int done = 0;
#pragma unroll 1
        while (true) {
            if (lane == 0) poll(p.lora.counters + 2 + tile, arrivals);
            __syncwarp();
            float4 v = sum_slices_of_u(p.lora, tile * blocks + block, places, first, last, lane);
            if (together) {
                sums[worker * 32 + lane] = v;
                sync_warps<BARRIER, WORKERS * 32>();
                if (worker == 0)
#pragma unroll
                    for (int w = 1; w < WORKERS; w++) {
                        const float4 f = sums[w * 32 + lane];
                        v.x += f.x, v.y += f.y, v.z += f.z, v.w += f.w;
                    }
            }
            if (!together || worker == 0) store_u(p, p.lora.u, p.lora.width, tile, block * 8, lane, v), done++;
            item += step;
            if (item >= places) break;
            tile = item % tiles, block = item / tiles;
            if (together) sync_warps<BARRIER, WORKERS * 32>();  // the sums were read
        }
        if (!done) return;
        asm volatile("fence.proxy.async;" ::: "memory");  // u is read by tensor copies
        __threadfence();
        __syncwarp();
        if (lane == 0) atomicAdd(p.lora.counters, done);
    }
};

// One thread of each block: returns when all of u is there.
__device__ __forceinline__ void await_u(const Params& p) {
    poll(p.lora.counters, rank_tiles(p) * ((p.m + 7) / 8));
    asm volatile("fence.proxy.async;" ::: "memory");
    leave_counters(p);
}
