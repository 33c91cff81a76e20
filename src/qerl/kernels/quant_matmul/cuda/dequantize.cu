// Tiles -> row-major weights without the global scale. A warp turns one unit (16 rows x up to 256 columns) around in
// shared memory, so that both its loads and its stores are whole rows of 512 bytes.
#include "tiles.cuh"

struct Dequantize {
    const unsigned char* tiles;
    void* out;  // [N, K]
    int n, k;
};

constexpr int ROW_BYTES = UNIT_WINDOWS * 128 + 16;
constexpr int WARPS = 4;

template <bool FP32>
__device__ __forceinline__ void dequantize(const Dequantize& p) {
    __shared__ __align__(16) unsigned char staged[WARPS][16 * ROW_BYTES];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int windows = p.k / 64, units = (windows + UNIT_WINDOWS - 1) / UNIT_WINDOWS;
    const int unit = blockIdx.x * WARPS + warp, tile = blockIdx.y;
    if (unit >= units) return;
    const int count = min(UNIT_WINDOWS, windows - unit * UNIT_WINDOWS);
    const unsigned char* source = p.tiles + ((long long)tile * windows + unit * UNIT_WINDOWS) * WINDOW_BYTES;
    unsigned char* mine = staged[warp];
    Packed packed[UNIT_WINDOWS];
#pragma unroll
    for (int w = 0; w < UNIT_WINDOWS; w++)
        if (w < count) packed[w] = read_window(source + w * WINDOW_BYTES, lane);
#pragma unroll
    for (int w = 0; w < UNIT_WINDOWS; w++) {
        if (w >= count) break;
        uint32_t a[4][4];
        decode_window(packed[w], a);
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                *(uint32_t*)(mine + (g + 8 * (i & 1)) * ROW_BYTES + w * 128 + j * 32 + (i >> 1) * 16 + t * 4) =
                    multiply_by_half<0>(a[j][i], 0x4400u);  // x 2^9
    }
    __syncwarp();
    if (lane >= count * 8) return;
    const long long first = (long long)tile * 16 * p.k + unit * UNIT_WINDOWS * 64 + lane * 8;
#pragma unroll
    for (int row = 0; row < 16; row++) {
        const uint4 v = *(const uint4*)(mine + row * ROW_BYTES + lane * 16);
        if (FP32) {
            float4* to = (float4*)((float*)p.out + first + (long long)row * p.k);
            to[0] = make_float4(__uint_as_float(v.x << 16), __uint_as_float(v.x & 0xFFFF0000u),
                                __uint_as_float(v.y << 16), __uint_as_float(v.y & 0xFFFF0000u));
            to[1] = make_float4(__uint_as_float(v.z << 16), __uint_as_float(v.z & 0xFFFF0000u),
                                __uint_as_float(v.w << 16), __uint_as_float(v.w & 0xFFFF0000u));
        } else {
            *(uint4*)((uint16_t*)p.out + first + (long long)row * p.k) = v;
        }
    }
}

extern "C" __global__ void dequantize_bf16(const __grid_constant__ Dequantize p) {
    dequantize<false>(p);
}
extern "C" __global__ void dequantize_fp32(const __grid_constant__ Dequantize p) {
    dequantize<true>(p);
}
