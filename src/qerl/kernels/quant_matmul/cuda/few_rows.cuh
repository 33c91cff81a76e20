// y = x W^T for up to 8 rows of x: weights are the left operand of mma.sync, streamed once, decoded in registers.
//
// A block owns a range of row tiles and a slice of k; its warps share that work as contiguous runs of units (four
// windows, one bulk copy), each warp with its own ring of stages and no block-wide barrier in the loop. Partial tiles
// are summed through shared memory in warp order, slices of k by the last block to arrive, in slice order: same input,
// same bits. With LoRA, SHRINKERS more warps make u and bring it into shared memory.
#pragma once
#include "shrink.cuh"
#include "silu.cuh"

constexpr int X_CHUNKS = 8;
constexpr int SHRINKERS = 4, SHRINK_BYTES = (SHRINKERS - 1) * 512;  // warps that make u; their sums in shared memory
constexpr int COMPUTE_BARRIER = 1, SHRINK_BARRIER = 2;

// The last block to bring its slice of a tile sums all slices in their order, and returns true.
__device__ __forceinline__ bool sum_slices(const Params& p, int slice, int tile, int tiles, int lane, float (&v)[4]) {
    __stcg((float4*)(p.partial + (long long)(slice * tiles + tile) * 128 + lane * 4),
           make_float4(v[0], v[1], v[2], v[3]));
    __threadfence();
    __syncwarp();
    int arrived = 0;
    if (lane == 0) arrived = atomicAdd(p.arrivals + tile, 1);
    if (__shfl_sync(~0u, arrived, 0) != p.slices - 1) return false;
    __threadfence();
    if (lane == 0) p.arrivals[tile] = 0;
    v[0] = v[1] = v[2] = v[3] = 0.0f;
#pragma unroll 4
    for (int s = 0; s < p.slices; s++) {
        const float4 f = __ldcg((const float4*)(p.partial + (long long)(s * tiles + tile) * 128 + lane * 4));
        v[0] += f.x, v[1] += f.y, v[2] += f.z, v[3] += f.w;
    }
    return true;
}

// What is loaded for a tile besides its weights: scale, bias and the factors of the first 32 ranks.
struct Ending {
    Epilogue e;
    uint32_t factors[2][4];
    Ending() = default;
    __device__ __forceinline__ Ending(const Params& p, int tile, int lane) : e(p, tile, lane), factors{} {
        const Factor factor(p, e.segment, tile);
#pragma unroll
        for (int j = 0; j < 2; j++)
            if (j * 16 < factor.rank) factor.load(factors[j], j * 16, lane);
    }
};

// v += u b^T for 16 channels and up to 8 tokens; rows of u lie `pitch` apart, in shared or global memory.
__device__ __forceinline__ void add_lora(const Params& p, const Ending& ending, int tile, const uint16_t* u, int pitch,
                                         int lane, float (&v)[4]) {
    const Factor factor(p, ending.e.segment, tile);
    const uint16_t* row = u + min(lane >> 2, p.m - 1) * pitch + factor.column + 2 * (lane & 3);
    auto add = [&](const uint32_t (&a)[4], int r) {
        mma(v, a, *(const uint32_t*)(row + r), r + 8 < factor.rank ? *(const uint32_t*)(row + r + 8) : 0);
    };
#pragma unroll
    for (int j = 0; j < 2; j++)
        if (j * 16 < factor.rank) add(ending.factors[j], j * 16);
#pragma unroll 2
    for (int r = 32; r < factor.rank; r += 16) {
        uint32_t a[4];
        factor.load(a, r, lane);
        add(a, r);
    }
}

// What the warps beside the product do: their part of the slices of u; then each block sums all of u for itself, in
// shared memory (rows `pitch` apart), which takes less time than passing sums around.
template <bool SILU>
__device__ __forceinline__ void serve_lora(const Params& p, uint16_t* u, int pitch, float4* sums, uint32_t u_full,
                                           int tile_begin, int tile_end) {
    const int worker = uniform_warp() - blockDim.x / 32 + SHRINKERS, lane = threadIdx.x & 31, tiles = rank_tiles(p);
    if constexpr (SILU) prefetch_factors_of_pairs(p, tile_begin / 2, tile_end / 2, worker * 32 + lane, SHRINKERS * 32);
    else prefetch_factors(p, tile_begin, tile_end, worker * 32 + lane, SHRINKERS * 32);
    wait_for_predecessors();
    make_parts_of_u<SHRINKERS, SHRINK_BARRIER, 5>(p, sums, worker, lane);
#pragma unroll 1
    for (int tile = worker; tile < tiles; tile += SHRINKERS) {
        if (lane == 0) poll(p.lora.counters + 2 + tile, p.lora.slices);
        __syncwarp();
        const float4 v = sum_slices_of_u(p.lora, tile, tiles, 0, p.lora.slices, lane);
        store_u(p, u, pitch, tile, 0, lane, v);
        if (tile % gridDim.x == blockIdx.x) store_u(p, p.lora.u, p.lora.width, tile, 0, lane, v);
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(u_full);
    sync_warps<SHRINK_BARRIER, SHRINKERS * 32>();
    if (worker == 0 && lane == 0) leave_counters(p);
}

// PAIR: clusters of two blocks share x. WIDE: y is fp32. SILU: y is silu(gate) * up (silu.cuh); the tiles that blocks
// share out alternate between gate and up. k is not cut.
template <int WARPS, int STAGES, bool PAIR, bool WIDE = false, bool SILU = false>
__device__ __forceinline__ void few_rows(const Params& p) {
    extern __shared__ __align__(128) unsigned char shared[];
    const int warp = uniform_warp(), lane = threadIdx.x & 31;
    const int tiles = p.n / 16, windows = p.k / 64;
    const int group = gridDim.x / p.slices, slice = blockIdx.x / group, member = blockIdx.x % group;
    constexpr int TOGETHER = SILU ? 2 : 1;  // tiles that stay in one block
    const int tile_begin = tiles / TOGETHER * member / group * TOGETHER,
              tile_end = tiles / TOGETHER * (member + 1) / group * TOGETHER;
    const int window_begin = windows * slice / p.slices, window_end = windows * (slice + 1) / p.slices;
    const int depth = window_end - window_begin, units = (depth + UNIT_WINDOWS - 1) / UNIT_WINDOWS;
    const int total = units * (tile_end - tile_begin);
    const int begin = total * warp / WARPS, end = total * (warp + 1) / WARPS;

    const int x_stride = depth * 128 + 16;  // 16 bytes off a multiple of 128: ldmatrix without bank conflicts
    const uint32_t base = smem_address(shared);
    const uint32_t ring = base + warp * STAGES * UNIT_BYTES;
    const uint32_t bars = base + WARPS * STAGES * UNIT_BYTES;
    const uint32_t full = bars + warp * STAGES * 8, x_full = bars + WARPS * STAGES * 8, u_full = x_full + X_CHUNKS * 8;
    const uint32_t x_base = (u_full + 8 + 127) & ~127u;
    unsigned char* const windows_of_warp = shared + warp * STAGES * UNIT_BYTES;
    float* sums = (float*)(shared + (x_base - base) + ((p.m * x_stride + 127) & ~127));
    const int slots = (total / WARPS + 1 + units - 2) / units + 1;  // tiles a warp can touch
    uint16_t* const u_shared = (uint16_t*)((char*)(sums + WARPS * slots * 128) + SHRINK_BYTES);
    const int u_pitch = p.lora.width + 8;  // rows in different banks

    launch_dependents();
    if (warp >= WARPS) prefetch_a(p, threadIdx.x - WARPS * 32, SHRINKERS * 32);  // before the weights, if it can be
    if (threadIdx.x < X_CHUNKS) barrier_init(x_full + threadIdx.x * 8, 1);
    if (warp < WARPS && lane < STAGES) barrier_init(full + lane * 8, 1);
    if (threadIdx.x == 0) barrier_init(u_full, SHRINKERS);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();

    const uint64_t policy = evict_first_policy();
    // Units of a slice are contiguous; from one tile to the next, the other slices are skipped.
    int load_unit = begin % units, loaded = begin;
    const int first_tile = tile_begin + begin / units;
    const unsigned char* source =
        p.tiles + ((long long)(SILU ? tile_of_pair(p, first_tile / 2, first_tile & 1) : first_tile) * windows +
                   window_begin + load_unit * UNIT_WINDOWS) *
                      WINDOW_BYTES;
    const int last_bytes = (depth - (units - 1) * UNIT_WINDOWS) * WINDOW_BYTES,
              skipped = (windows - depth) * WINDOW_BYTES;
    // With SILU, from the end of a tile of gate to that of up, or back to the next one of gate.
    const long long tile_bytes = (long long)windows * WINDOW_BYTES, to_up = (tiles / 2 - 1) * tile_bytes;
    long long jump = first_tile & 1 ? -tile_bytes - to_up : to_up;
    auto load = [&](int stage) {  // one unit into `stage`; all lanes come along, one issues
        const bool last = ++load_unit == units;
        const int bytes = last ? last_bytes : UNIT_BYTES;
        if (elect()) {
            barrier_expect(full + stage * 8, bytes);
            bulk_load_once(ring + stage * UNIT_BYTES, source, bytes, full + stage * 8, policy);
        }
        loaded++;
        if constexpr (SILU) {
            source += bytes;
            if (last) source += jump, jump = -tile_bytes - jump;
        } else {
            source += last ? bytes + skipped : bytes;
        }
        if (last) load_unit = 0;
    };
    if (warp < WARPS)
        for (int s = 0; s < STAGES && loaded < end; s++) load(s);

    // The barriers of x are initialized, in both blocks of a cluster.
    if (PAIR) asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
    else __syncthreads();
    if (warp >= WARPS) {
        float4* const shrink_sums = (float4*)(sums + WARPS * slots * 128);
        return serve_lora<SILU>(p, u_shared, u_pitch, shrink_sums, u_full, tile_begin, tile_end);
    }
    // x arrives in chunks of columns, so that a warp waits only for those it multiplies next. In a pair, every row is
    // fetched by one block and multicast to both: small weights are read in little more time than 132 copies of x.
    const int chunk_units = (units + X_CHUNKS - 1) / X_CHUNKS;
    if (warp < X_CHUNKS) {
        wait_for_predecessors();
        const int first = warp * chunk_units * UNIT_WINDOWS, last = min(depth, first + chunk_units * UNIT_WINDOWS);
        if (last > first) {
            const uint16_t* x = p.x + (long long)lane * p.k + (window_begin + first) * 64;
            const uint32_t to = x_base + lane * x_stride + first * 128;
            const int bytes = (last - first) * 128;
            if (lane == 0) barrier_expect(x_full + warp * 8, p.m * bytes);
            __syncwarp();
            if (!PAIR && lane < p.m) bulk_load(to, x, bytes, x_full + warp * 8);
            if (PAIR && lane < p.m && (lane & 1) == cluster_rank()) bulk_multicast(to, x, bytes, x_full + warp * 8);
        }
    }
    if (PAIR && total == 0)  // without work, but not gone before the other block's copies have landed here
        for (int c = 0; c * chunk_units < units; c++) barrier_wait(x_full + c * 8, 0);
    // A warp ends tiles, or pairs of gate and up, one after the other; what the first needs comes while the sums run.
    const int last_ended = tile_end / TOGETHER, first_ended = tile_begin / TOGETHER + warp;
    auto tile_of = [&](int ended, int up) { return SILU ? tile_of_pair(p, ended, up) : ended; };
    Ending endings[TOGETHER];
    auto load_endings = [&](int ended) {
#pragma unroll
        for (int up = 0; up < TOGETHER; up++)
            if (ended < last_ended) endings[up] = Ending(p, tile_of(ended, up), lane);
    };
    wait_for_predecessors();  // from here on: bias, factors, u, the workspace, y
    load_endings(first_ended);
    // Rows past m feed columns of the product that nobody stores; they only must lie inside the buffer.
    uint32_t x_row = x_base + min(lane & 7, p.m - 1) * x_stride + (lane >> 3) * 16;

    float c[2][4] = {};  // two sets: half as long chains of dependent products
    int unit = begin % units, slot = 0, stage = 0, phase = 0, chunk = unit / chunk_units,
        chunk_left = chunk_units - unit % chunk_units;
    auto store_partial = [&]() {
        *(float4*)(sums + (warp * slots + slot) * 128 + lane * 4) =
            make_float4(c[0][0] + c[1][0], c[0][1] + c[1][1], c[0][2] + c[1][2], c[0][3] + c[1][3]);
#pragma unroll
        for (int i = 0; i < 4; i++) c[0][i] = c[1][i] = 0.0f;
        slot++;
    };
    auto multiply_window = [&](const unsigned char* window, int offset) {
        uint32_t a[4][4], f[2][4];
        decode_window(read_window(window, lane), a);
        load_matrices(f[0], x_row + offset);
        load_matrices(f[1], x_row + offset + 64);
        mma(c[0], a[0], f[0][0], f[0][1]);
        mma(c[1], a[1], f[0][2], f[0][3]);
        mma(c[0], a[2], f[1][0], f[1][1]);
        mma(c[1], a[3], f[1][2], f[1][3]);
    };
    if (begin < end) barrier_wait(x_full + chunk * 8, 0);
    for (int at = begin; at < end; at++) {
        barrier_wait(full + stage * 8, phase);
        asm volatile("" : "+r"(x_row)::"memory");  // x is read after the waits
        const unsigned char* window = windows_of_warp + stage * UNIT_BYTES;
        const int count = min(UNIT_WINDOWS, depth - unit * UNIT_WINDOWS), offset = unit * UNIT_WINDOWS * 128;
        if (count == UNIT_WINDOWS) {
#pragma unroll
            for (int w = 0; w < UNIT_WINDOWS; w++) multiply_window(window + w * WINDOW_BYTES, offset + w * 128);
        } else {
            for (int w = 0; w < count; w++) multiply_window(window + w * WINDOW_BYTES, offset + w * 128);
        }
#pragma unroll
        for (int i = 0; i < 4; i++)  // the products, and so the reads, of this stage are issued before its refill
            asm volatile("" : "+f"(c[0][i]), "+f"(c[1][i])::"memory");
        __syncwarp();
        if (loaded < end) load(stage);
        if (++stage == STAGES) stage = 0, phase ^= 1;
        if (++unit == units) {
            unit = 0;
            store_partial();
            chunk = -1, chunk_left = 1;
        }
        if (--chunk_left == 0) {
            chunk++, chunk_left = chunk_units;
            if (at + 1 < end) barrier_wait(x_full + chunk * 8, 0);
        }
    }
    if (unit && begin < end) store_partial();
    sync_warps<COMPUTE_BARRIER, WARPS * 32>();
    const bool u_nearby = p.lora.a != nullptr;
    if (u_nearby) barrier_wait(u_full, 0);

    // The sum of a tile over the warps that share it, in their order.
    auto sum_tile = [&](int tile, float (&v)[4]) {
        const int first = (tile - tile_begin) * units, last = first + units - 1;  // units of this tile
        for (int w = ((first + 1) * WARPS - 1) / total; w <= ((last + 1) * WARPS - 1) / total; w++) {
            const int w_begin = total * w / WARPS;
            if (w_begin == total * (w + 1) / WARPS) continue;
            const float* from = sums + (w * slots + (tile - tile_begin - w_begin / units)) * 128 + lane * 4;
#pragma unroll
            for (int i = 0; i < 4; i++) v[i] += from[i];
        }
    };
    auto scale_and_add_lora = [&](const Ending& ending, int tile, float (&v)[4]) {
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] *= ending.e.scale;
        if (u_nearby) add_lora(p, ending, tile, u_shared, u_pitch, lane, v);
        else add_lora(p, ending, tile, p.lora.u, p.lora.width, lane, v);
    };
    for (int ended = first_ended; ended < last_ended; ended += WARPS) {
        if constexpr (SILU) {
            uint2 rounded[2];
#pragma unroll
            for (int up = 0; up < 2; up++) {
                float v[4] = {};
                sum_tile(2 * ended + up, v);
                scale_and_add_lora(endings[up], tile_of(ended, up), v);
                rounded[up] = rounded_block(endings[up].e, v);
            }
            store_silu_mul(p, ended, 0, lane, rounded[0], rounded[1]);
        } else {
            float sum[1][4] = {};
            float (&v)[4] = sum[0];
            sum_tile(ended, v);
            if (p.slices == 1 || sum_slices(p, slice, ended, tiles, lane, v)) {
                scale_and_add_lora(endings[0], ended, v);
                if constexpr (WIDE) store_wide<1>(p, endings[0].e, ended, 0, lane, sum);
                else store_block(p, endings[0].e, ended, 0, lane, v);
            }
        }
        load_endings(ended + WARPS);
    }
}

// What is compiled: KERNEL(warps, stages), and the same with blocks in pairs.
#define FEW_ROWS_KERNELS(KERNEL, PAIRED_KERNEL) \
    KERNEL(8, 2) KERNEL(12, 2) KERNEL(16, 2) PAIRED_KERNEL(8, 2) PAIRED_KERNEL(12, 2)
