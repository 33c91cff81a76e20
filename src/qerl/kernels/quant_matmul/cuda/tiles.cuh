// Device side of the tile layout (qerl/kernels/quant_matmul/tiles.py): decoding, asynchronous copies, barriers.
//
// A window is 16 output channels x 64 columns: 512 bytes of codes, then 64 bytes of block scales. Lane (g = lane / 4,
// t = lane % 4) owns 16 bytes of codes; word j holds the eight codes of the A fragment of mma.m16n8k16 (and of one
// warp of wgmma.m64nNk16) for columns 16 j .. 16 j + 15:
//   register 0: (row g, 2t and 2t+1)   1: (row g+8, same)   2: (row g, 2t+8 and 2t+9)   3: (row g+8, same)
// The word at 8 g holds the scales of row g, the next one those of row g + 8; bytes as decode_window wants them.
#pragma once
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
typedef unsigned short uint16_t;

constexpr int WINDOW_BYTES = 576;
constexpr int CODE_BYTES = 512;
constexpr int UNIT_WINDOWS = 4;
constexpr int UNIT_BYTES = UNIT_WINDOWS * WINDOW_BYTES;
constexpr int MAX_SEGMENTS = 4;

struct Lora {           // y[:, segment s] += u[:, column[s] : column[s] + rank[s]] b_s^T
    uint16_t* u;        // bf16 [M, width], or null
    const uint16_t* b;  // bf16, segment s is [rows, rank[s]] at b + offset[s]
    int width;
    int column[MAX_SEGMENTS];
    int rank[MAX_SEGMENTS];  // multiples of 8, 0: no adapter
    int offset[MAX_SEGMENTS];
    // Where the product makes u = x A^T on its way (shrink.cuh, u_part.cuh); a: null where an earlier kernel makes u.
    const uint16_t* a;  // bf16 [width, K]
    float* partial;     // workspace for sums of slices of k
    int* counters;      // zero between launches: sums of u done, blocks that have seen it, parts of each rank tile
    int slices;
    int sharers;  // warps of a block that share each sum of slices of many rows: all that sum, or 1
};

struct Params {
    const unsigned char* tiles;
    const uint16_t* x;          // bf16 [M, K]
    uint16_t* y;                // bf16 [M, N]; fp32 in the wide kernels
    const uint16_t* bias;       // bf16 [N] or null
    const float* global_scale;  // of each segment (device), or null where all share it and `scale` holds
    float* partial;             // workspace for sums of k slices
    int* arrivals;              // zero between launches
    float scale;                // 2^9 / global scale where all segments share it
    int m, n, k;
    // Few rows: parts of k. Many rows: 1 where blocks take whole tiles, 0 where they share them, more where so many
    // blocks of a cluster share each. Gradient of the input: waves of whole tiles before blocks share the others.
    int slices;
    int segments;
    int segment_end[MAX_SEGMENTS];  // in row tiles of 16
    Lora lora;
};

__device__ __forceinline__ uint32_t smem_address(const void* p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

__device__ __forceinline__ void barrier_init(uint32_t bar, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_expect(uint32_t bar, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t bar, int parity) {
    asm volatile(
        "{\n.reg .pred p;\nWAIT:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1, 0x989680;\n@p bra DONE;\nbra "
        "WAIT;\nDONE:\n}" ::"r"(bar),
        "r"(parity)
        : "memory");
}
__device__ __forceinline__ uint64_t evict_first_policy() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ __forceinline__ void bulk_load(uint32_t dst, const void* src, int bytes, uint32_t bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst),
                 "l"(src), "r"(bytes), "r"(bar)
                 : "memory");
}
__device__ __forceinline__ void bulk_load_once(uint32_t dst, const void* src, int bytes, uint32_t bar,
                                               uint64_t policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(dst),
        "l"(src), "r"(bytes), "r"(bar), "l"(policy)
        : "memory");
}

// Into the same place of both blocks of a cluster of two, signalled to the barrier at the same place of each.
__device__ __forceinline__ void bulk_multicast(uint32_t dst, const void* src, int bytes, uint32_t bar) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], "
        "%4;" ::"r"(dst),
        "l"(src), "r"(bytes), "r"(bar), "h"((uint16_t)3)
        : "memory");
}
__device__ __forceinline__ int cluster_rank() {
    int rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// The warp's index as a value the compiler knows to be the same in all lanes; one lane of a converged warp.
__device__ __forceinline__ int uniform_warp() {
    return __shfl_sync(~0u, threadIdx.x >> 5, 0);
}
__device__ __forceinline__ bool elect() {
    uint32_t chosen;
    asm volatile("{.reg .pred p; elect.sync _|p, 0xFFFFFFFF; selp.u32 %0, 1, 0, p;}" : "=r"(chosen));
    return chosen;
}

// Registers of a thread that a launch of one block of THREADS a multiprocessor gets; warpgroups may hand them over.
template <int THREADS>
constexpr int registers_of_launch = 65536 / THREADS / 8 * 8;

// Programmatic dependent launch: the next kernel may start (and load its weights) while this one runs; whoever reads
// or writes what an earlier kernel wrote or read waits first.
__device__ __forceinline__ void launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
__device__ __forceinline__ void wait_for_predecessors() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ void prefetch(const void* p) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

__device__ __forceinline__ uint32_t rotate(uint32_t w, int bits) {
    return __funnelshift_l(w, w, bits);
}

// Eight codes -> four bf16x2 registers of code value x 2^-126 (0.5 is a bf16 subnormal). Left shifts run beside the
// pipe of the logical operations as multiplications, so that only five of nine instructions load it.
__device__ __forceinline__ void decode(uint32_t w, uint32_t (&r)[4]) {
    const uint32_t mask = 0x81C081C0u;
    r[0] = w & mask;
    r[1] = (w * 8u) & mask;
    r[2] = ((w * 2u) ^ (w * 64u)) & mask;
    r[3] = ((w * 4u) ^ rotate(w, 29)) & mask;
}
// a times the lower (HALF = 0) or upper half of b; ptxas folds the selection into the multiplication.
template <int HALF>
__device__ __forceinline__ uint32_t multiply_by_half(uint32_t a, uint32_t b) {
    uint32_t d;
    if (HALF)
        asm("{.reg .b16 l, h; .reg .b32 s; mov.b32 {l, h}, %2; mov.b32 s, {h, h}; mul.rn.bf16x2 %0, %1, s;}"
            : "=r"(d)
            : "r"(a), "r"(b));
    else
        asm("{.reg .b16 l, h; .reg .b32 s; mov.b32 {l, h}, %2; mov.b32 s, {l, l}; mul.rn.bf16x2 %0, %1, s;}"
            : "=r"(d)
            : "r"(a), "r"(b));
    return d;
}

// What a lane reads of a window.
struct Packed {
    uint4 codes;
    uint2 scales;
};
__device__ __forceinline__ Packed read_window(const unsigned char* window, int lane) {
    return {*(const uint4*)(window + lane * 16), *(const uint2*)(window + CODE_BYTES + (lane >> 2) * 8)};
}

// A fragments of one window: a[j] for columns 16 j .. 16 j + 15, values code x scale x 2^-9 (exact in bf16).
__device__ __forceinline__ void decode_window(const Packed& packed, uint32_t (&a)[4][4]) {
    const uint32_t codes[4] = {packed.codes.x, packed.codes.y, packed.codes.z, packed.codes.w};
    // Scale bytes lie in the word where one mask makes bf16 pairs of s x 2^117: blocks (0, 2), rotated blocks (1, 3).
    const uint32_t mask = 0x0FF00FF0u, exponent = 0x70007000u;
    const uint32_t upper[2] = {(packed.scales.x & mask) | exponent, (rotate(packed.scales.x, 8) & mask) | exponent};
    const uint32_t lower[2] = {(packed.scales.y & mask) | exponent, (rotate(packed.scales.y, 8) & mask) | exponent};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        decode(codes[j], a[j]);
        if (j & 2) {
            a[j][0] = multiply_by_half<1>(a[j][0], upper[j & 1]);
            a[j][1] = multiply_by_half<1>(a[j][1], lower[j & 1]);
            a[j][2] = multiply_by_half<1>(a[j][2], upper[j & 1]);
            a[j][3] = multiply_by_half<1>(a[j][3], lower[j & 1]);
        } else {
            a[j][0] = multiply_by_half<0>(a[j][0], upper[j & 1]);
            a[j][1] = multiply_by_half<0>(a[j][1], lower[j & 1]);
            a[j][2] = multiply_by_half<0>(a[j][2], upper[j & 1]);
            a[j][3] = multiply_by_half<0>(a[j][3], lower[j & 1]);
        }
    }
}

__device__ __forceinline__ void load_matrices(uint32_t (&f)[4], uint32_t address) {
    asm("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
        : "=r"(f[0]), "=r"(f[1]), "=r"(f[2]), "=r"(f[3])
        : "r"(address));
}

__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ uint32_t pack_bf16(float lower, float upper) {
    uint32_t d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(upper), "f"(lower));
    return d;
}
__device__ __forceinline__ float bf16_to_float(uint16_t bits) {
    return __uint_as_float((uint32_t)bits << 16);
}

__device__ __forceinline__ int segment_of(const Params& p, int tile) {
    int s = 0;
    while (s < p.segments - 1 && tile >= p.segment_end[s]) s++;
    return s;
}

// What is added to or multiplied into a 16-channel tile after the sum over k: one per tile and lane.
struct Epilogue {
    float scale, bias[2];
    int segment;
    Epilogue() = default;
    __device__ __forceinline__ Epilogue(const Params& p, int tile, int lane) {
        segment = segment_of(p, tile);
        scale = p.global_scale ? 512.0f / p.global_scale[segment] : p.scale;
        const int row = tile * 16 + (lane >> 2);
        bias[0] = p.bias ? bf16_to_float(p.bias[row]) : 0.0f;
        bias[1] = p.bias ? bf16_to_float(p.bias[row + 8]) : 0.0f;
    }
};

// The LoRA factors of a 16-channel tile: where its rows begin, and which columns of u they multiply.
struct Factor {
    const uint16_t* rows;  // [16, rank]
    int column, rank;
    __device__ __forceinline__ Factor(const Params& p, int segment, int tile) {
        const int first = segment ? p.segment_end[segment - 1] : 0;
        column = p.lora.column[segment], rank = p.lora.u ? p.lora.rank[segment] : 0;
        rows = p.lora.b + p.lora.offset[segment] + (long long)(tile - first) * 16 * rank;
    }
    // A fragment of columns r .. r + 15; ranks come in multiples of 8.
    __device__ __forceinline__ void load(uint32_t (&a)[4], int r, int lane) const {
        const uint16_t* from = rows + (lane >> 2) * rank + r + 2 * (lane & 3);
        const bool both = r + 8 < rank;
        a[0] = *(const uint32_t*)from, a[1] = *(const uint32_t*)(from + 8 * rank);
        a[2] = both ? *(const uint32_t*)(from + 8) : 0, a[3] = both ? *(const uint32_t*)(from + 8 * rank + 8) : 0;
    }
};

// Bias, rounding and the store of one 16 channels x 8 tokens block to y.
__device__ __forceinline__ void store_block(const Params& p, const Epilogue& e, int tile, int token0, int lane,
                                            const float (&c)[4]) {
    const int g = lane >> 2, t = lane & 3;
    uint32_t upper = pack_bf16(c[0] + e.bias[0], c[1] + e.bias[0]);
    uint32_t lower = pack_bf16(c[2] + e.bias[1], c[3] + e.bias[1]);
    // Transposed, a lane holds two neighbouring channels of token g: stores of 32 contiguous bytes a token.
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(upper));
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(lower));
    if (token0 + g < p.m) {
        uint16_t* y = p.y + (long long)(token0 + g) * p.n + tile * 16 + 2 * t;
        *(uint32_t*)y = upper;
        *(uint32_t*)(y + 8) = lower;
    }
}

// As store_block, without rounding: bias, and the store of 16 channels x 8 BLOCKS tokens to fp32 y. One running
// address: with one of their own for every block, registers would spill.
template <int BLOCKS>
__device__ __forceinline__ void store_wide(const Params& p, const Epilogue& e, int tile, int token0, int lane,
                                           const float (&c)[BLOCKS][4]) {
    // A lane holds tokens 2t and 2t + 1: a store of a warp fills 32 contiguous bytes of each of four tokens.
    const int token = token0 + 2 * (lane & 3);
    float* y = (float*)p.y + (long long)token * p.n + tile * 16 + (lane >> 2);
    int left = p.m - token;
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
        if (left > 0) y[0] = c[b][0] + e.bias[0], y[8] = c[b][2] + e.bias[1];
        if (left > 1) y[p.n] = c[b][1] + e.bias[0], y[p.n + 8] = c[b][3] + e.bias[1];
        y += 8LL * p.n, left -= 8;
        asm volatile("" : "+l"(y), "+r"(left));
    }
}
