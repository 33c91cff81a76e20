// Parts of u = x A^T that the many-row kernels make on their way, and where they come and go.
#pragma once
#include "shrink.cuh"

constexpr int A_BYTES = 64 * 128;  // of 64 ranks in a window

// A part of u = x A^T: 64 BOXES ranks, TOKENS rows, a slice of k; at most one a block (the host sees to it). The first
// steps through the ring bring x and, where there is room for it beside one window of x, A; both as the tensor copies
// swizzle them.
template <int TOKENS, int BOXES>
struct UPart {
    int slice, group, token_block, first, last;  // windows
    __device__ __forceinline__ static int token_blocks(const Params& p) { return (p.m + TOKENS - 1) / TOKENS; }
    __device__ __forceinline__ static int rank_groups(const Params& p) {
        return (p.lora.width + 64 * BOXES - 1) / (64 * BOXES);
    }
    __device__ __forceinline__ static int count(const Params& p) {
        return p.lora.a ? p.lora.slices * rank_groups(p) * token_blocks(p) : 0;
    }
    __device__ __forceinline__ explicit UPart(const Params& p) {
        const int windows = p.k / 64;
        int index = blockIdx.x;
        if (index >= count(p)) {
            slice = group = token_block = first = last = 0;
            return;
        }
        group = index % rank_groups(p), index /= rank_groups(p);
        token_block = index % token_blocks(p), slice = index / token_blocks(p);
        first = windows * slice / p.lora.slices, last = windows * (slice + 1) / p.lora.slices;
    }
    __device__ __forceinline__ int steps() const { return last - first; }
};

// Steps through the ring that the part of u of this block takes.
template <int TOKENS, int BOXES>
__device__ __forceinline__ int steps_of_u(const Params& p) {
    if constexpr (TOKENS == 256) return 0;
    else return UPart<TOKENS, BOXES>(p).steps();
}

// Where A lies in a stage.
template <int TOKENS, int WARPS, int UNIT>
__device__ __forceinline__ uint32_t a_place(uint32_t x_base, uint32_t w_base, int stage) {
    static_assert(UNIT == 4 || TOKENS * 128 >= 2 * A_BYTES, "A takes the place of weights, or of a window of x");
    return UNIT == 4 ? w_base + stage * WARPS * UNIT * WINDOW_BYTES : x_base + (stage * UNIT + 1) * TOKENS * 128;
}

// Fragments of 16 ranks (of this warp) and 64 columns out of a box of A.
__device__ __forceinline__ void load_a(uint32_t (&a)[4][4], uint32_t box, int warp, int lane) {
    const int row = (warp & 3) * 16 + (lane & 15);
#pragma unroll
    for (int j = 0; j < 4; j++) load_matrices(a[j], box + row * 128 + (((2 * j + (lane >> 4)) ^ (row & 7)) << 4));
}

// A warp's 16 ranks of a part, to the workspace.
template <int TOKENS, int BOXES>
__device__ __forceinline__ void leave_u(const Params& p, const UPart<TOKENS, BOXES>& part, int warp, int lane,
                                        const float (&c)[TOKENS / 8][4]) {
    const int tile = part.group * BOXES * 4 + warp, blocks = (p.m + 7) / 8, first = part.token_block * (TOKENS / 8);
    if (tile >= rank_tiles(p)) return;
    float4* to =
        (float4*)p.lora.partial + ((long long)(part.slice * rank_tiles(p) + tile) * blocks + first) * 32 + lane;
#pragma unroll
    for (int b = 0; b < TOKENS / 8; b++)
        if (first + b < blocks) __stcg(to + b * 32, make_float4(c[b][0], c[b][1], c[b][2], c[b][3]));
    __threadfence();
    __syncwarp();
    if (lane == 0) atomicAdd(p.lora.counters + 2 + tile, 1);
}
