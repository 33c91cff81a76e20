// dx = dy W as dx^T = W^T dy^T: wgmma with W^T, decoded in registers, as the left operand; the sum runs over channels.
//
// A block computes tiles of (64 x GROUPS) columns of dx by TOKENS rows. A stage holds one step of the sum, 64 channels:
// four row tiles of weights and a box of dy, all by tensor copies, which fill what lies past the end of either with
// zeros. Step i + 1 is decoded while the products of step i run.
//
// Blocks compute waves of whole tiles first. The tiles left over would keep only some of them busy, so all share their
// steps (stream-K, as in many_rows.cuh): same input, same bits.
//
// The transposition costs no shuffles. Lane (g, t) of warp w holds, as A fragment of W^T, two columns of dx by channels
// 2t, 2t + 1, 2t + 8, 2t + 9. It reads the words j = g / 2 of two lanes of the layout, (2t, w) and (2t + 1, w): they
// hold the codes of these channels for columns 16 j + 2 w + {0, 1, 8, 9}, the odd ones in the upper halves. The halves
// g % 2 of both words, side by side, are a word that decodes as any other (but for a sign, see decode_transposed), and
// so the rows of the fragment are columns 16 (g / 2) + 2 w + g % 2 (row g) and eight further on (row g + 8).
// The four warps read a quarter of the window each: the 64-byte swizzle keeps that free of bank conflicts.
#pragma once
#include "many_rows.cuh"

constexpr int STEP_TILES = 4;  // row tiles of 16 channels in a step
constexpr int SCALE_BYTES = WINDOW_BYTES - CODE_BYTES;
// Sums on their way from registers to whole rows: so many tokens of 64 columns at a time, in rows of so many bytes.
constexpr int STAGED_TOKENS = 64;
constexpr int STAGED_PITCH = 160;

// Codes as [row tile][window][8 rows of 64 bytes], from dimension 3 to 0; scales are the ninth row of each window.
__device__ __forceinline__ void load_codes(uint32_t dst, const TensorMap* map, int window, int tile, uint32_t bar) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
        "[%1, {%2, %2, %3, %4}], [%5];" ::"r"(dst),
        "l"(map), "r"(0), "r"(window), "r"(tile), "r"(bar)
        : "memory");
}
__device__ __forceinline__ void load_scales(uint32_t dst, const TensorMap* map, int window, int tile, uint32_t bar) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
        "[%1, {%2, %3, %4}], [%5];" ::"r"(dst),
        "l"(map), "r"(0), "r"(window), "r"(tile), "r"(bar)
        : "memory");
}
__device__ __forceinline__ void group_sync(int group) {
    asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
}

__device__ __forceinline__ uint32_t multiply_pairs(uint32_t a, uint32_t b) {
    uint32_t d;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

// Which bytes of two words a lane takes (selectors of __byte_perm).
struct Selectors {
    uint32_t mine, other;  // the halves of its column, and of the neighbouring one
    uint32_t scale;        // the scales of its block
    __device__ __forceinline__ explicit Selectors(int lane) {
        mine = lane & 4 ? 0x7632u : 0x5410u;
        other = lane & 4 ? 0x5410u : 0x7632u;
        // A left rotation by 8 j brings the scale of block j to where decode_window masks it.
        const uint32_t first = (0u - (lane >> 3)) & 3, second = (1u - (lane >> 3)) & 3;
        scale = first | second << 4 | (first + 4) << 8 | (second + 4) << 12;
    }
};

// The A fragment of W^T for 16 channels, values code x scale x 2^-9. Words and scales of channels 2t (and 2t + 8) and
// of channels 2t + 1 (and 2t + 9).
__device__ __forceinline__ void decode_transposed(uint32_t even, uint32_t odd, const uint4& scales,
                                                  const Selectors& select, uint32_t (&a)[4]) {
    const uint32_t mask = 0x81C081C0u, scale_mask = 0x0FF00FF0u, exponent = 0x70007000u;
    const uint32_t w = __byte_perm(even, odd, select.mine), other = __byte_perm(even, odd, select.other);
    const uint32_t upper = (__byte_perm(scales.x, scales.z, select.scale) & scale_mask) | exponent;
    const uint32_t lower = (__byte_perm(scales.y, scales.w, select.scale) & scale_mask) | exponent;
    // As decode(), whose registers are (channel, column), (channel + 8, column), (channel, column + 8), both + 8. Its
    // rotation takes the sign of a half from the other half of the word, which belongs to the neighbouring column.
    uint32_t rotated;  // signs of other * 2^13, the rest of w / 2^3
    asm("lop3.b32 %0, %1, %2, 0x80008000, 0xE4;" : "=r"(rotated) : "r"(other * 8192u), "r"(w >> 3));
    a[0] = multiply_pairs(w & mask, upper);
    a[1] = multiply_pairs(((w * 2u) ^ (w * 64u)) & mask, upper);
    a[2] = multiply_pairs((w * 8u) & mask, lower);
    a[3] = multiply_pairs(((w * 4u) ^ rotated) & mask, lower);
}

// Which tiles and steps a block computes: p.slices waves of whole tiles, then its run of what is left.
template <int TOKENS, int GROUPS>
struct Schedule {
    Work shared;  // the tiles after the whole ones, counted from zero
    int whole, begin;
    int left;  // steps
    int tile, unit;
    __device__ __forceinline__ explicit Schedule(const Params& p) {
        shared.row_blocks = (p.k / 64 + GROUPS - 1) / GROUPS;
        shared.token_blocks = (p.m + TOKENS - 1) / TOKENS;
        shared.units = (p.n / 16 + STEP_TILES - 1) / STEP_TILES;
        shared.whole = false;
        const int tiles = shared.row_blocks * shared.token_blocks, block = blockIdx.x, blocks = gridDim.x;
        whole = min(p.slices * blocks, tiles);
        shared.total = (tiles - whole) * shared.units;
        begin = shared.begin(block);
        left = shared.begin(block + 1) - begin;
        tile = block, unit = 0;
        if (block < whole) left += (whole - block + blocks - 1) / blocks * (int)shared.units;
        else share();
    }
    __device__ __forceinline__ void share() { tile = whole + begin / shared.units, unit = begin % shared.units; }
    __device__ __forceinline__ void next_tile() {
        unit = 0;
        if (tile >= whole) tile++;
        else if ((tile += gridDim.x) >= whole) share();
    }
    __device__ __forceinline__ int row_block() const { return tile % shared.row_blocks; }
    __device__ __forceinline__ int token0() const { return tile / shared.row_blocks * TOKENS; }
    __device__ __forceinline__ bool parted() const { return tile >= whole && shared.contributors(tile - whole) > 1; }
};

// As sum_parts, for the four warps of a group together: all of them sum, or none.
template <int TOKENS, int WARPS>
__device__ __forceinline__ bool sum_parts_of_group(const Params& p, const Work& work, int tile, bool begins, int warp,
                                                   int lane, volatile int* last, float (&c)[TOKENS / 8][4]) {
    const int group = warp >> 2;
    leave_part<TOKENS, WARPS>(p, begins, warp, lane, c);
    group_sync(group);
    int* counter = p.arrivals + tile * (WARPS / 4) + group;
    if ((threadIdx.x & 127) == 0) {
        const bool all = atomicAdd(counter, 1) == work.contributors(tile) - 1;
        if (all) *counter = 0;
        last[group] = all;
    }
    group_sync(group);
    if (!last[group]) return false;
    __threadfence();
    add_parts<TOKENS, WARPS>(p, work, tile, warp, lane, c);
    return true;
}

// A group's 64 columns by TOKENS rows, scaled, rounded and stored to dx: through shared memory, because a warp's
// columns are pairs that lie apart.
template <int TOKENS>
__device__ __forceinline__ void store_columns(const Params& p, uint32_t staged, int group, int warp, int lane,
                                              int column0, int token0, const float (&c)[TOKENS / 8][4]) {
    const float scale = p.global_scale ? 512.0f / *p.global_scale : p.scale;
    // Of the four matrices of 8 tokens x 8 columns that a warp writes at once, this lane addresses a row.
    const uint32_t to =
        staged + ((lane >> 4) * 8 + (lane & 7)) * STAGED_PITCH + ((warp & 3) * 2 + (lane >> 3 & 1)) * 16;
    const int place = threadIdx.x & 127, token = place >> 3, piece = place & 7;
    // Eight columns are four pairs, each written by another warp.
    const uint32_t from = staged + token * STAGED_PITCH + (piece & 1) * 16 + (piece >> 1) * 4;
    uint16_t* dx = p.y + (long long)(token0 + token) * p.k + column0 + piece * 8;
#pragma unroll
    for (int first = 0; first < TOKENS; first += STAGED_TOKENS) {
        group_sync(group);  // the rows before have been read
#pragma unroll
        for (int b = 0; b < STAGED_TOKENS / 8; b += 2) {
            const float (&low)[4] = c[first / 8 + b], (&high)[4] = c[first / 8 + b + 1];
            asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                             to + b * 8 * STAGED_PITCH),
                         "r"(pack_bf16(low[0] * scale, low[1] * scale)), "r"(pack_bf16(low[2] * scale, low[3] * scale)),
                         "r"(pack_bf16(high[0] * scale, high[1] * scale)),
                         "r"(pack_bf16(high[2] * scale, high[3] * scale))
                         : "memory");
        }
        group_sync(group);
#pragma unroll
        for (int i = 0; i < STAGED_TOKENS; i += 16) {
            uint32_t pairs[4];
#pragma unroll
            for (int w = 0; w < 4; w++)
                asm volatile("ld.shared.b32 %0, [%1];" : "=r"(pairs[w]) : "r"(from + i * STAGED_PITCH + w * 32));
            if (token0 + first + i + token < p.m)
                *(uint4*)(dx + (long long)(first + i) * p.k) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        }
    }
}

template <int TOKENS, int GROUPS, int STAGES>
__device__ __forceinline__ void input_grad(const Params& p, const TensorMap* dy_map, const TensorMap* codes_map,
                                           const TensorMap* scales_map) {
    constexpr int WARPS = GROUPS * 4, DY_BYTES = TOKENS * 128;
    constexpr int CODES = STEP_TILES * GROUPS * CODE_BYTES, SCALES = STEP_TILES * GROUPS * SCALE_BYTES;
    extern __shared__ __align__(1024) unsigned char shared[];
    const int warp = uniform_warp(), lane = threadIdx.x & 31;
    Schedule<TOKENS, GROUPS> at(p);

    const uint32_t base = smem_address(shared), dy_base = (base + 1023) & ~1023u;
    const uint32_t codes_base = dy_base + STAGES * DY_BYTES, scales_base = codes_base + STAGES * CODES;
    const uint32_t staged = scales_base + STAGES * SCALES;
    const uint32_t full = staged + GROUPS * STAGED_TOKENS * STAGED_PITCH, empty = full + STAGES * 8;
    volatile int* const last = (volatile int*)(shared + (empty + STAGES * 8 - base));

    launch_dependents();
    if (threadIdx.x == 0)
        for (int s = 0; s < STAGES; s++) {
            barrier_init(full + s * 8, 1);
            barrier_init(empty + s * 8, GROUPS);
        }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();

    constexpr int ITS_REGISTERS = GROUPS == 3 ? 32 : 24, REGISTERS = GROUPS == 2 ? 240 : 160;
    static_assert(ITS_REGISTERS + GROUPS * REGISTERS <= (GROUPS + 1) * registers_of_launch<128 * (GROUPS + 1)>,
                  "warps would wait for registers for ever");
    if (warp >= WARPS) {  // a whole warpgroup, because registers are handed over by warpgroups
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(ITS_REGISTERS));
        if (warp == WARPS && elect()) {
            int row_block = at.row_block(), token0 = at.token0();
            auto load_weights = [&](int stage) {
                const uint32_t bar = full + stage * 8;
                barrier_expect(bar, DY_BYTES + CODES + SCALES);
                load_codes(codes_base + stage * CODES, codes_map, row_block * GROUPS, at.unit * STEP_TILES, bar);
                load_scales(scales_base + stage * SCALES, scales_map, row_block * GROUPS, at.unit * STEP_TILES, bar);
            };
            auto load_dy = [&](int stage) {
                tensor_load(dy_base + stage * DY_BYTES, dy_map, at.unit * 64, token0, full + stage * 8);
            };
            auto advance = [&]() {
                if (++at.unit < (int)at.shared.units) return;
                at.next_tile();
                row_block = at.row_block(), token0 = at.token0();
            };
            // The weights of the first stages are on their way before the kernel that makes dy has ended.
            const int early = min(STAGES, at.left);
            const Schedule<TOKENS, GROUPS> start = at;
            for (int s = 0; s < early; s++) load_weights(s), advance();
            wait_for_predecessors();
            at = start;
            row_block = at.row_block(), token0 = at.token0();
            for (int s = 0; s < early; s++) load_dy(s), advance();
            int stage = 0, phase = 0;
            for (int i = early; i < at.left; i++) {
                barrier_wait(empty + stage * 8, phase);
                load_weights(stage);
                load_dy(stage);
                advance();
                if (++stage == STAGES) stage = 0, phase ^= 1;
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
        const int group = warp >> 2, t = lane & 3;
        const Selectors select(lane);
        // Word lane / 8 of the 16 bytes of lane (2t, warp & 3) of the layout; those of lane (2t + 1, ..) are 64
        // further.
        const unsigned char* const codes =
            shared + (codes_base - base) + group * CODE_BYTES + t * 128 + ((warp & 3) ^ t) * 16 + (lane >> 3) * 4;
        const unsigned char* const scales = shared + (scales_base - base) + group * SCALE_BYTES + t * 16;
        float c[TOKENS / 8][4];
        uint32_t a[2][STEP_TILES][4];
        int stage = 0, phase = 0;
        while (at.left > 0) {
            const bool begins = at.unit == 0;
            const int stop = min((int)at.shared.units, at.unit + at.left);
            at.left -= stop - at.unit;
#pragma unroll
            for (int b = 0; b < TOKENS / 8; b++) c[b][0] = c[b][1] = c[b][2] = c[b][3] = 0.0f;
            int held = -1;  // stage whose products may still run
            auto step = [&](uint32_t (&fragments)[STEP_TILES][4]) {
                barrier_wait(full + stage * 8, phase);
#pragma unroll
                for (int i = 0; i < STEP_TILES; i++) {
                    const unsigned char* words = codes + stage * CODES + i * GROUPS * CODE_BYTES;
                    decode_transposed(*(const uint32_t*)words, *(const uint32_t*)(words + 64),
                                      *(const uint4*)(scales + stage * SCALES + i * GROUPS * SCALE_BYTES), select,
                                      fragments[i]);
                }
                const uint64_t dy = x_descriptor(dy_base + stage * DY_BYTES);
                wgmma_fence();
#pragma unroll
                for (int i = 0; i < STEP_TILES; i++) wgmma<TOKENS>(c, fragments[i], dy + i * 2);
                wgmma_commit();
                wgmma_wait<1>();
                if (held >= 0 && (threadIdx.x & 127) == 0) barrier_arrive(empty + held * 8);
                held = stage;
                if (++stage == STAGES) stage = 0, phase ^= 1;
            };
            while (true) {
                step(a[0]);
                if (++at.unit == stop) break;
                step(a[1]);
                if (++at.unit == stop) break;
            }
            wgmma_wait<0>();
            if ((threadIdx.x & 127) == 0) barrier_arrive(empty + held * 8);
#pragma unroll
            for (int b = 0; b < TOKENS / 8; b++)  // the sums are read after the wait
#pragma unroll
                for (int i = 0; i < 4; i++) asm volatile("" : "+f"(c[b][i])::"memory");

            wait_for_predecessors();  // from here on: the workspace, dx
            bool finished = true;
            if (at.parted())
                finished =
                    sum_parts_of_group<TOKENS, WARPS>(p, at.shared, at.tile - at.whole, begins, warp, lane, last, c);
            const int window = at.row_block() * GROUPS + group;
            if (finished && window * 64 < p.k)
                store_columns<TOKENS>(p, staged + group * STAGED_TOKENS * STAGED_PITCH, group, warp, lane, window * 64,
                                      at.token0(), c);
            if (at.unit == (int)at.shared.units) at.next_tile();
        }
    }
}
