// y = x W^T for 9 rows of x and more: wgmma with the weights, decoded in registers, as the left operand.
//
// A block computes tiles of (64 x GROUPS) output channels by TOKENS rows of x. A producer warp streams both through a
// ring of stages, one tensor copy of each a stage (of weights two with SiLU). A copy costs its thread some 130 clocks
// by the fits: with one for every row tile and window of x, that thread set the pace of low tiles. Window i + 1 is
// decoded while the products of window i run. Where whole tiles would leave multiprocessors idle, every block takes an
// equal run of units across tiles (stream-K); the last block to arrive at a tile sums its parts in block order: same
// input, same bits. Or the blocks of a cluster share each tile (cluster_tile.cuh).
//
// LoRA is one more step of a tile: columns of u take the place of x in the ring, rows of b that of the weights. Where u
// does not come from an earlier kernel, blocks make parts of it first, and the warps beside the producer sum them.
#pragma once
#include "cluster_tile.cuh"
#include "shrink.cuh"
#include "silu.cuh"
#include "stream_k.cuh"
#include "tensor_copy.cuh"
#include "u_part.cuh"

template <int TOKENS>
__device__ __forceinline__ void wgmma(float (&c)[TOKENS / 8][4], const uint32_t (&a)[4], uint64_t b);

#include "wgmma.cuh"

__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// K-major operand in shared memory, rows of 128 bytes, 128-byte swizzle, groups of eight rows 1024 bytes apart.
__device__ __forceinline__ uint64_t x_descriptor(uint32_t address) {
    return (uint64_t)((address & 0x3FFFF) >> 4) | (uint64_t)1 << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}
// The warps beside the product's, one of them the producer, and their registers; the rest go to the product.
template <int TOKENS, int GROUPS>
struct Beside {
    static constexpr int GROUPS_BESIDE = TOKENS < 256 && GROUPS == 2 ? 2 : 1;
    static constexpr int REGISTERS = TOKENS == 256 ? 72 : GROUPS == 2 ? 80 : 56;
    static constexpr int PRODUCT_REGISTERS = TOKENS == 256 ? 216 : GROUPS == 2 ? 176 : 152;
    static constexpr int THREADS = 128 * (GROUPS + GROUPS_BESIDE);  // of a block
    static_assert(GROUPS_BESIDE * REGISTERS + GROUPS * PRODUCT_REGISTERS <=
                      (GROUPS_BESIDE + GROUPS) * registers_of_launch<THREADS>,
                  "warps would wait for registers for ever");
    static constexpr int SUMMERS = 4 * GROUPS_BESIDE - 1;  // warps that sum u
    static constexpr int SUM_BYTES = SUMMERS * 512 + 16;   // and the barrier of a part
};
constexpr int SUM_BARRIER = 2, IDLE_BARRIER = 12;  // and the ids after it, one for each warpgroup

// The segments of a tile of WARPS row tiles, each in steps of 64 ranks: what LoRA multiplies, in the order of the ring.
// Pairs of gate and up lie in both segments.
template <int WARPS, bool SILU, typename Step>
__device__ __forceinline__ void for_lora_steps(const Params& p, int row_block, Step step) {
    if (!p.lora.u) return;
    const int last = SILU ? 1 : segment_of(p, min((row_block + 1) * WARPS, p.n / 16) - 1);
    for (int s = SILU ? 0 : segment_of(p, row_block * WARPS); s <= last; s++)
        for (int r = 0; r < p.lora.rank[s]; r += 64) step(s, r);
}

constexpr int EARLY = 2;  // of a tile's factors, 16 ranks each: loaded at its begin

// UNIT windows of all channels and of x are one stage, filled by one producer warp. WIDE: y is fp32. SILU: y is
// silu(gate) * up (silu.cuh); the first half of the warps holds tiles of gate, the second those of up.
template <int TOKENS, int GROUPS, int UNIT, int STAGES, bool WIDE = false, bool SILU = false>
__device__ __forceinline__ void many_rows(const Params& p, const TensorMap* w_map, const TensorMap* x_map,
                                          const TensorMap* u_map) {
    constexpr int WARPS = GROUPS * 4, X_BYTES = TOKENS * 128, W_BYTES = UNIT * WINDOW_BYTES;
    constexpr int PAIRS = WARPS / 2;
    using Beside = Beside<TOKENS, GROUPS>;
    using Part = RingPart<TOKENS, GROUPS, UNIT>;
    extern __shared__ __align__(1024) unsigned char shared[];
    const int warp = uniform_warp(), lane = threadIdx.x & 31;
    const int tiles = p.n / 16, windows = p.k / 64;
    Work work;
    work.row_blocks = (tiles + WARPS - 1) / WARPS;
    work.token_blocks = (p.m + TOKENS - 1) / TOKENS;
    work.units = (windows + UNIT - 1) / UNIT;
    work.whole = p.slices == 1;
    work.cluster = SILU ? 1 : max(1, p.slices);
    work.total = work.row_blocks * work.token_blocks * work.units;
    const int begin = work.begin(blockIdx.x), end = work.begin(blockIdx.x + 1);

    const uint32_t base = smem_address(shared), x_base = (base + 1023) & ~1023u;
    const uint32_t w_base = x_base + STAGES * UNIT * X_BYTES;
    const uint32_t full = w_base + STAGES * WARPS * W_BYTES, empty = full + STAGES * 8;
    const uint32_t of_u = empty + STAGES * 8, sums_of_u = of_u + 16;
    const uint32_t of_tile = of_u + Beside::SUM_BYTES;  // or what pairs of warps exchange
    static_assert(TILE_BYTES<TOKENS, WARPS> <= STAGES * UNIT * X_BYTES, "parts lie where x was");

    launch_dependents();
    // Before the weights ask for all that memory can give: A comes from memory, and u waits for it.
    if (warp > WARPS) prefetch_a(p, Part(p), threadIdx.x - (WARPS + 1) * 32, Beside::SUMMERS * 32);
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(full + s * 8, 1);
            barrier_init(empty + s * 8, GROUPS);
        }
        barrier_init(of_u, WARPS * 32);
    }
    if (work.cluster > 1 && threadIdx.x < 2 * WARPS) barrier_init(of_tile + threadIdx.x * 8, work.cluster);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    if (work.cluster > 1) meet_cluster();
    else __syncthreads();

    if (warp >= WARPS) {  // a whole warpgroup, because registers are handed over by warpgroups
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Beside::REGISTERS));
        if (warp > WARPS && p.lora.a) {
            const int thread = threadIdx.x - (WARPS + 1) * 32, worker = warp - WARPS - 1;
            auto prefetch_tile = [&](int tile) {
                if constexpr (SILU) {
                    const int first = tile % work.row_blocks * PAIRS;
                    prefetch_factors_of_pairs(p, first, min(first + PAIRS, tiles / 2), thread, Beside::SUMMERS * 32);
                } else {
                    const int first = tile % work.row_blocks * WARPS;
                    prefetch_factors(p, first, min(first + WARPS, tiles), thread, Beside::SUMMERS * 32);
                }
            };
            int tile = begin / work.units;
            prefetch_tile(tile);
            const Part part(p);
            SumOfU<Beside::SUMMERS, SUM_BARRIER> sum(p, worker);
            const int arrivals = p.lora.slices * part.token_blocks(p);
            wait_for_predecessors();
            if (worker == 0) publish_u(p, part, of_u, lane);
            sum.run(p, arrivals, (float4*)(shared + (sums_of_u - base)), worker, lane);
            while (++tile * (int)work.units < end) prefetch_tile(tile);
        }
        // One thread, and values the compiler can see to be uniform: copies take their operands from uniform registers.
        if (warp == WARPS && elect()) {
            const uint64_t policy = evict_first_policy();
            int tile = begin / work.units, unit = begin % work.units;
            int row_block = tile % work.row_blocks, token0 = tile / work.row_blocks * TOKENS;
            constexpr int COPIES = SILU ? 2 : 1, IN_A_COPY = WARPS / COPIES;  // row tiles: those of gate, then of up
            // What lies past the end of k or of the channels comes as zeros.
            auto load_weights = [&](int stage) {
                barrier_expect(full + stage * 8, UNIT * (X_BYTES + WARPS * WINDOW_BYTES));
#pragma unroll
                for (int i = 0; i < COPIES; i++) {
                    const uint32_t to = w_base + (stage * WARPS + i * IN_A_COPY) * W_BYTES;
                    const int first = row_block * IN_A_COPY + i * tiles / 2;
                    if (work.token_blocks == 1)
                        tensor_load_once(to, w_map, 0, unit * UNIT, first, full + stage * 8, policy);
                    else tensor_load(to, w_map, 0, unit * UNIT, first, full + stage * 8);
                }
            };
            auto load_x = [&](int stage) {
                tensor_load(x_base + stage * UNIT * X_BYTES, x_map, 0, token0, unit * UNIT, full + stage * 8);
            };
            auto advance = [&]() {
                if (++unit == work.units) {
                    unit = 0;
                    if (++row_block == work.row_blocks) row_block = 0, token0 += TOKENS;
                }
            };
            int stage = 0, phase = 0;
            auto next_stage = [&]() {
                if (++stage == STAGES) stage = 0, phase ^= 1;
            };
            bool awaited = !p.lora.a;  // u is there
            // After the last unit here of a tile that begins here: the columns of u that LoRA multiplies.
            auto load_u = [&]() {
                for_lora_steps<WARPS, SILU>(p, row_block, [&](int s, int r) {
                    barrier_wait(empty + stage * 8, phase ^ 1);
                    if (!awaited) await_u(p), awaited = true;
                    barrier_expect(full + stage * 8, X_BYTES);
                    tensor_load(x_base + stage * UNIT * X_BYTES, u_map, p.lora.column[s] + r, token0, full + stage * 8);
                    next_stage();
                });
            };
            // The weights of the first stages are on their way before the kernel that makes x has ended; with LoRA,
            // those before the first step that reads u.
            const Part part(p);
            const int taken = part.steps();
            const int plain = p.lora.u ? (int)work.units - unit + (unit ? work.units : 0) : STAGES;
            const int early = max(0, min(min(STAGES - taken, end - begin), plain));
            const int unit0 = unit, row_block0 = row_block, token00 = token0;
            for (int s = 0; s < early; s++) load_weights(taken + s), advance();
            wait_for_predecessors();
            unit = unit0, row_block = row_block0, token0 = token00;
#pragma unroll 1
            for (int i = 0; i < taken; i++) {
                barrier_wait(empty + stage * 8, phase ^ 1);
                barrier_expect(full + stage * 8, UNIT * X_BYTES);
                tensor_load(x_base + stage * UNIT * X_BYTES, x_map, 0, part.token_block * TOKENS,
                            (part.first_unit() + i) * UNIT, full + stage * 8);
                next_stage();
            }
            bool begins = unit == 0;
            for (int at = begin; at < end; at++) {
                if (at >= begin + early) {
                    barrier_wait(empty + stage * 8, phase ^ 1);
                    load_weights(stage);
                }
                load_x(stage);
                next_stage();
                const bool ends = unit + 1 == work.units;
                if (begins && (ends || at + 1 == end)) load_u();
                begins |= ends;
                advance();
            }
            if (!awaited) await_u(p);  // every block must have seen it before the counters are cleared
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Beside::PRODUCT_REGISTERS));
        float c[TOKENS / 8][4];
        uint32_t a[2][4][4];
        int stage = 0, phase = 0, at = begin;
        int tile = begin / work.units, unit = begin % work.units;
        const unsigned char* const w_warp = shared + (w_base - base) + warp * W_BYTES;
        auto release = [&](int of) {  // a stage, to the producer
            if ((threadIdx.x & 127) == 0) barrier_arrive(empty + of * 8);
        };
        const Part part(p);
        if (part.steps()) {
#pragma unroll
            for (int b = 0; b < TOKENS / 8; b++) c[b][0] = c[b][1] = c[b][2] = c[b][3] = 0.0f;
            wait_for_predecessors();  // A, the workspace
            for (int i = 0; i < part.steps(); i++) {
                const int window0 = (part.first_unit() + i) * UNIT;
                if (part.concerns(p, warp >> 2)) {
#pragma unroll
                    for (int w = 0; w < UNIT; w += 2) {
                        if (!part.has(window0 + w)) continue;
#pragma unroll
                        for (int j = 0; j < 2; j++) load_a(a[j], p, part.group * WARPS + warp, window0 + w + j, lane);
                        barrier_wait(full + stage * 8, phase);
                        const uint64_t x = x_descriptor(x_base + (stage * UNIT + w) * X_BYTES);
                        wgmma_fence();
#pragma unroll
                        for (int j = 0; j < 8; j++)
                            wgmma<TOKENS>(c, a[j / 4][j % 4], x + j / 4 * (X_BYTES >> 4) + j % 4 * 2);
                        wgmma_commit();
                        wgmma_wait<0>();
                    }
                } else {
                    barrier_wait(full + stage * 8, phase);
                    sync_warpgroup(IDLE_BARRIER + (warp >> 2));  // as products do: no warp falls a round behind
                }
                release(stage);
                if (++stage == STAGES) stage = 0, phase ^= 1;
            }
#pragma unroll
            for (int b = 0; b < TOKENS / 8; b++)
#pragma unroll
                for (int i = 0; i < 4; i++) asm volatile("" : "+f"(c[b][i])::"memory");
            leave_u(p, part, of_u, warp, lane, c);
        }
        while (at < end) {
            const bool begins = unit == 0;
            const int stop = min((int)work.units, unit + end - at);
            at += stop - unit;
            const int row_block = tile % work.row_blocks, pair = row_block * PAIRS + warp % PAIRS;
            const int row_tile =
                SILU ? tile_of_pair(p, min(pair, tiles / 2 - 1), warp >= PAIRS) : row_block * WARPS + warp;
            wait_for_predecessors();  // from here on: bias, factors, the workspace, y
            // What the tile ends with, and what LoRA multiplies first, is on its way while the sum runs.
            const Epilogue e(p, min(row_tile, tiles - 1), lane);
            uint32_t early[EARLY][4] = {};
            if (begins && p.lora.u) {
                const Factor factor(p, e.segment, min(row_tile, tiles - 1));
#pragma unroll
                for (int j = 0; j < EARLY; j++)
                    if (j * 16 < factor.rank) factor.load(early[j], j * 16, lane);
            }
#pragma unroll
            for (int b = 0; b < TOKENS / 8; b++) c[b][0] = c[b][1] = c[b][2] = c[b][3] = 0.0f;
            int held = -1;  // stage whose last products may still run
            for (; unit < stop; unit++) {
                const int count = min(UNIT, windows - unit * UNIT);
                barrier_wait(full + stage * 8, phase);
                const unsigned char* window = w_warp + stage * WARPS * W_BYTES;
                const uint64_t x = x_descriptor(x_base + stage * UNIT * X_BYTES);
                Packed packed = read_window(window, lane);
#pragma unroll
                for (int w = 0; w < UNIT; w++) {
                    if (w < count) {
                        decode_window(packed, a[w & 1]);
                        if (w + 1 < UNIT) packed = read_window(window + (w + 1) * WINDOW_BYTES, lane);
                        wgmma_fence();
#pragma unroll
                        for (int j = 0; j < 4; j++) wgmma<TOKENS>(c, a[w & 1][j], x + w * (X_BYTES >> 4) + j * 2);
                        wgmma_commit();
                        wgmma_wait<1>();
                        if (w == 0 && held >= 0) release(held);
                    }
                }
                if (count & 1) wgmma_wait<0>();  // the next unit starts with the registers of the last window
                held = stage;
                if (++stage == STAGES) stage = 0, phase ^= 1;
            }
            wgmma_wait<0>();
            release(held);
#pragma unroll
            for (int b = 0; b < TOKENS / 8; b++)  // the sums are read after the wait
#pragma unroll
                for (int i = 0; i < 4; i++) asm volatile("" : "+f"(c[b][i])::"memory");

#pragma unroll
            for (int b = 0; b < TOKENS / 8; b++)
#pragma unroll
                for (int i = 0; i < 4; i++) c[b][i] *= e.scale;
            // Who begins a tile adds LoRA to its part: u has most time to come until the end of that part.
            if (begins)
                for_lora_steps<WARPS, SILU>(p, row_block, [&](int s, int r) {
                    const Factor factor(p, s, min(row_tile, tiles - 1));
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        const bool is_early = j < EARLY && r == 0;
#pragma unroll
                        for (int i = 0; i < 4; i++)
                            a[0][j][i] = is_early && e.segment == s ? early[min(j, EARLY - 1)][i] : 0;
                        if (!is_early && e.segment == s && r + j * 16 < factor.rank)
                            factor.load(a[0][j], r + j * 16, lane);
                    }
                    barrier_wait(full + stage * 8, phase);
                    const uint64_t u = x_descriptor(x_base + stage * UNIT * X_BYTES);
                    wgmma_fence();
#pragma unroll
                    for (int j = 0; j < 4; j++)
                        if (r + j * 16 < p.lora.rank[s]) wgmma<TOKENS>(c, a[0][j], u + j * 2);
                    wgmma_commit();
                    wgmma_wait<0>();
#pragma unroll
                    for (int b = 0; b < TOKENS / 8; b++)
#pragma unroll
                        for (int i = 0; i < 4; i++) asm volatile("" : "+f"(c[b][i])::"memory");
                    release(stage);
                    if (++stage == STAGES) stage = 0, phase ^= 1;
                });
            if constexpr (!SILU)
                if (work.cluster > 1) {
                    store_shared_tile<TOKENS, WARPS, WIDE>(p, e, row_tile, tile / work.row_blocks * TOKENS,
                                                           work.cluster, shared + (x_base - base), of_tile, warp, lane,
                                                           c);
                    return;
                }
            bool finished = true;
            if (work.contributors(tile) > 1) {
                if constexpr (SILU) finished = sum_parts_of_pair<TOKENS, WARPS>(p, work, tile, begins, warp, lane, c);
                else finished = sum_parts<TOKENS, WARPS>(p, work, tile, begins, warp, lane, c);
            }
            if (finished && (SILU ? pair < tiles / 2 : row_tile < tiles)) {
                const int token0 = tile / work.row_blocks * TOKENS;
                if constexpr (SILU) {
                    uint2* const exchange = (uint2*)(shared + (of_tile - base));
                    store_pair<TOKENS, WARPS>(p, e, pair, token0, warp, lane, exchange, c);
                } else if constexpr (WIDE) {
                    store_wide<TOKENS / 8>(p, e, row_tile, token0, lane, c);
                } else {
#pragma unroll
                    for (int b = 0; b < TOKENS / 8; b++) store_block(p, e, row_tile, token0 + b * 8, lane, c[b]);
                }
            }
            if (unit == work.units) unit = 0, tile++;
        }
    }
}

// What is compiled: KERNEL(rows of x in a tile, warpgroups, windows a stage, stages).
#define MANY_ROWS_KERNELS(KERNEL) \
    KERNEL(16, 2, 4, 6)           \
    KERNEL(16, 3, 4, 5)           \
    KERNEL(32, 2, 4, 5)           \
    KERNEL(32, 3, 4, 4)           \
    KERNEL(64, 2, 4, 4)           \
    KERNEL(64, 3, 4, 3)           \
    KERNEL(128, 2, 2, 5)          \
    KERNEL(128, 3, 2, 4)          \
    KERNEL(256, 2, 2, 3)
