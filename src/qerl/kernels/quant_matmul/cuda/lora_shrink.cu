// u = x A^T of LoRA: few output columns, so k is cut over blocks and over the warps of a block. A is the left operand
// of mma.sync. Both operands take the same permutation of k inside 32 columns, which makes every load 16 bytes.
#include "tiles.cuh"

struct Shrink {
    const uint16_t* x;  // bf16 [M, K]
    const uint16_t* a;  // bf16 [R, K]
    uint16_t* u;        // bf16 [M, R]
    float* partial;
    int* arrivals;  // zero between launches
    int m, k, r;
};

template <int BLOCKS, int WARPS>  // blocks of 8 tokens
__device__ __forceinline__ void lora_shrink(const Shrink& p) {
    __shared__ float4 sums[WARPS][BLOCKS][32];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int tile = blockIdx.x, slice = blockIdx.y, slices = gridDim.y, token0 = blockIdx.z * BLOCKS * 8;
    const int chunks = p.k / 32, begin = chunks * slice / slices, end = chunks * (slice + 1) / slices;
    const uint16_t* upper = p.a + (long long)min(tile * 16 + g, p.r - 1) * p.k + 8 * t;
    const uint16_t* lower = p.a + (long long)min(tile * 16 + g + 8, p.r - 1) * p.k + 8 * t;
    const uint16_t* x[BLOCKS];
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) x[b] = p.x + (long long)min(token0 + b * 8 + g, p.m - 1) * p.k + 8 * t;
    launch_dependents();
    // A is on its way into the cache while the kernel before still runs.
    const int lines = (end - begin + 1) / 2;  // of 128 bytes, in each row
    for (int i = threadIdx.x; i < 16 * lines; i += WARPS * 32)
        if (tile * 16 + i / lines < p.r)
            prefetch(p.a + (long long)(tile * 16 + i / lines) * p.k + (begin + 2 * (i % lines)) * 32);
    wait_for_predecessors();

    float c[BLOCKS][4] = {};
#pragma unroll(BLOCKS == 1 ? 8 : BLOCKS == 2 ? 4 : 2)
    for (int chunk = begin + warp; chunk < end; chunk += WARPS) {
        const uint4 high = *(const uint4*)(upper + chunk * 32), low = *(const uint4*)(lower + chunk * 32);
        const uint32_t first[4] = {high.x, low.x, high.y, low.y}, second[4] = {high.z, low.z, high.w, low.w};
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
            const uint4 v = *(const uint4*)(x[b] + chunk * 32);
            mma(c[b], first, v.x, v.y);
            mma(c[b], second, v.z, v.w);
        }
    }
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) sums[warp][b][lane] = make_float4(c[b][0], c[b][1], c[b][2], c[b][3]);
    __syncthreads();
    if (warp >= BLOCKS) return;

    float v[4] = {};
    auto add = [&](const float4& f) { v[0] += f.x, v[1] += f.y, v[2] += f.z, v[3] += f.w; };
    for (int w = 0; w < WARPS; w++) add(sums[w][warp][lane]);
    if (slices > 1) {  // the last slice to arrive adds all of them, in their order
        const int place = (blockIdx.z * gridDim.x + tile) * BLOCKS + warp, places = gridDim.x * gridDim.z * BLOCKS;
        float4* partial = (float4*)p.partial + place * 32 + lane;
        __stcg(partial + (long long)slice * places * 32, make_float4(v[0], v[1], v[2], v[3]));
        __threadfence();
        __syncwarp();
        int arrived = 0;
        if (lane == 0) arrived = atomicAdd(p.arrivals + place, 1);
        if (__shfl_sync(~0u, arrived, 0) != slices - 1) return;
        __threadfence();
        if (lane == 0) p.arrivals[place] = 0;
        v[0] = v[1] = v[2] = v[3] = 0.0f;
#pragma unroll 4
        for (int s = 0; s < slices; s++) add(__ldcg(partial + (long long)s * places * 32));
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {  // rows of the product are ranks, columns are tokens
        const int rank = tile * 16 + g + (i >> 1) * 8, token = token0 + warp * 8 + 2 * t + (i & 1);
        if (rank < p.r && token < p.m) p.u[(long long)token * p.r + rank] = (uint16_t)pack_bf16(v[i], 0.0f);
    }
}

#define KERNEL(B, W)                                                                                         \
    extern "C" __global__ void __launch_bounds__(W * 32) lora_shrink_##B(const __grid_constant__ Shrink p) { \
        lora_shrink<B, W>(p);                                                                                \
    }
KERNEL(1, 16)
KERNEL(2, 16)
KERNEL(4, 16)
KERNEL(8, 8)
