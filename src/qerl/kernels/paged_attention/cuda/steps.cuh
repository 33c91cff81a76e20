// What a warp does with a step of 16 tokens in shared memory, and how partial results are added up.
//
// Fragments of mma.sync: lane (g, t) = (lane / 4, lane % 4) holds rows g and g + 8 of a left operand or a result, and
// column g of a right operand. An E4M3 cache is read in units of 16 bits like bf16, but of two numbers, so that the
// columns of a head come in another order; q and the stores of the sums follow it.
#pragma once
#include "ptx.cuh"

#define MINUS_INFINITY __int_as_float(0xff800000)

// A value that all lanes have, as one the compiler knows to be the same in all lanes.
__device__ __forceinline__ int uniform(int value) {
    return __shfl_sync(~0u, value, 0);
}

// bf16 to fp16, whose range is short: rows are scaled by a power of two that brings their largest element to [1, 2),
// which `factor` undoes. What is 2^25 times smaller than that element is lost.
template <int DIM>
__device__ __forceinline__ void scale_query(uint32_t (&query)[DIM / 16][4], float (&factor)[2]) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        uint32_t most = 0;  // bf16 without their signs are ordered like integers
#pragma unroll
        for (int kk = 0; kk < DIM / 16; kk++)
#pragma unroll
            for (int i = r; i < 4; i += 2) most = __vmaxu2(most, query[kk][i] & 0x7fff7fff);
        most = max(most & 0xffff, most >> 16);
        most = max(most, __shfl_xor_sync(~0u, most, 1));
        most = max(most, __shfl_xor_sync(~0u, most, 2));
        const uint32_t exponent = min(max(most >> 7, 1u), 253u);
        const float up = __uint_as_float((254 - exponent) << 23);
        factor[r] *= __uint_as_float(exponent << 23);
#pragma unroll
        for (int kk = 0; kk < DIM / 16; kk++)
#pragma unroll
            for (int i = r; i < 4; i += 2)
                query[kk][i] = pack<true>(__uint_as_float(query[kk][i] << 16) * up,
                                          __uint_as_float(query[kk][i] & 0xffff0000) * up);
    }
}

// The fragments of q as left operands.
template <int DIM, bool FP8>
__device__ __forceinline__ void load_query(const uint16_t* q, int group, int lane, uint32_t (&query)[DIM / 16][4]) {
    const int g = lane >> 2, t = lane & 3;
    constexpr int STEP = FP8 ? 2 : 8;  // elements between the two pairs of a lane
    q += (FP8 ? 4 : 2) * t;
#pragma unroll
    for (int kk = 0; kk < DIM / 16; kk++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = g + 8 * (i & 1);
            query[kk][i] = row < group ? *(const uint32_t*)(q + row * DIM + kk * 16 + STEP * (i >> 1)) : 0;
        }
}

// Scores of 8 tokens each. Two sets of accumulators: half as long chains of dependent products.
template <int DIM, bool FP8>
__device__ __forceinline__ void multiply_keys(uint32_t address, const uint32_t (&query)[DIM / 16][4],
                                              float (&s)[2][4]) {
    float c[2][2][4] = {};
    if constexpr (FP8) {  // a register holds columns 4t .. 4t+3 of a token: two pairs
#pragma unroll
        for (int j = 0; j < DIM / 32; j++) {
            uint32_t f[4], b[4][2];
            load_matrices(f, address + j * 32);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                widen(f[i], b[i][0], b[i][1]);
                mma<true>(c[i & 1][i >> 1], query[2 * j + (i & 1)], b[i][0], b[i][1]);
            }
        }
    } else {
#pragma unroll
        for (int kk = 0; kk < DIM / 16; kk++) {
            uint32_t f[4];
            load_matrices(f, address + kk * 32);
            mma<false>(c[kk & 1][0], query[kk], f[0], f[1]);
            mma<false>(c[kk & 1][1], query[kk], f[2], f[3]);
        }
    }
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) s[n][e] = c[0][n][e] + c[1][n][e];
}

// o = o * correction + weights V. With E4M3 a unit of the transposed matrices is two columns: their bytes are sorted
// into pairs of tokens, and o[2c], o[2c+1] are the even and the odd ones of columns 16c .. 16c+15.
template <int DIM, bool FP8>
__device__ __forceinline__ void multiply_values(uint32_t address, const uint32_t (&weights)[4],
                                                const float (&correction)[2], float (&o)[DIM / 8][4]) {
#pragma unroll
    for (int n = 0; n < DIM / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) o[n][e] *= correction[e >> 1];
    if constexpr (FP8) {
#pragma unroll
        for (int j = 0; j < DIM / 32; j++) {
            uint32_t f[4], b[4][2];
            load_transposed(f, address + j * 32);
#pragma unroll
            for (int i = 0; i < 4; i++) widen(__byte_perm(f[i], 0, 0x3120), b[i][0], b[i][1]);
#pragma unroll
            for (int i = 0; i < 4; i++) mma<true>(o[4 * j + i], weights, b[i & 2][i & 1], b[(i & 2) + 1][i & 1]);
        }
    } else {
#pragma unroll
        for (int j = 0; j < DIM / 16; j++) {
            uint32_t f[4];
            load_transposed(f, address + j * 32);
            mma<false>(o[2 * j], weights, f[0], f[1]);
            mma<false>(o[2 * j + 1], weights, f[2], f[3]);
        }
    }
}

// Online softmax of a step: scores become weights (left operand), `first` the step's first token of this lane.
template <bool FP8>
__device__ __forceinline__ void softmax_step(float (&s)[2][4], int first, int length, const float (&factor)[2],
                                             float (&maximum)[2], float (&total)[2], float (&correction)[2],
                                             uint32_t (&weights)[4]) {
    float next[2] = {maximum[0], maximum[1]};
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            s[n][e] = first + n * 8 + (e & 1) < length ? s[n][e] * factor[e >> 1] : MINUS_INFINITY;
            next[e >> 1] = fmaxf(next[e >> 1], s[n][e]);
        }
#pragma unroll
    for (int r = 0; r < 2; r++) {  // the four lanes of a row; its first token is always there, so `next` is finite
        next[r] = fmaxf(next[r], __shfl_xor_sync(~0u, next[r], 1));
        next[r] = fmaxf(next[r], __shfl_xor_sync(~0u, next[r], 2));
        correction[r] = exp2_fast(maximum[r] - next[r]);
        maximum[r] = next[r];
        total[r] *= correction[r];
    }
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            s[n][e] = exp2_fast(s[n][e] - maximum[e >> 1]);
            total[e >> 1] += s[n][e];  // of this lane's tokens
        }
#pragma unroll
    for (int i = 0; i < 4; i++) weights[i] = pack<FP8>(s[i >> 1][2 * (i & 1)], s[i >> 1][2 * (i & 1) + 1]);
}

// The sum of partial results (value, maximum, total), in the order of their index.
template <int COUNT>
__device__ __forceinline__ float4 merge(const float4 (&part)[COUNT], const float2 (&limit)[COUNT], float2& merged) {
    float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    merged = make_float2(MINUS_INFINITY, 0.0f);
#pragma unroll
    for (int c = 0; c < COUNT; c++) merged.x = fmaxf(merged.x, limit[c].x);
#pragma unroll
    for (int c = 0; c < COUNT; c++) {
        const float weight = limit[c].y == 0.0f ? 0.0f : exp2_fast(limit[c].x - merged.x);  // 0: had no token
        merged.y += weight * limit[c].y;
        value.x += weight * part[c].x, value.y += weight * part[c].y;
        value.z += weight * part[c].z, value.w += weight * part[c].w;
    }
    return value;
}

// The sums of a warp in its part of shared memory: [16][SUM_PITCH], then 16 x (maximum, total).
template <int DIM, bool FP8, int SUM_PITCH>
__device__ __forceinline__ void store_sums(float* sums, const float (&o)[DIM / 8][4], const float (&maximum)[2],
                                           float (&total)[2], int group, int lane) {
    const int g = lane >> 2, t = lane & 3;
    float2* limits = (float2*)(sums + 16 * SUM_PITCH);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        total[r] += __shfl_xor_sync(~0u, total[r], 1);
        total[r] += __shfl_xor_sync(~0u, total[r], 2);
        if (8 * r >= group) continue;
        float* row = sums + (g + 8 * r) * SUM_PITCH;
#pragma unroll
        for (int n = 0; n < DIM / 8; n += 2) {
            if (FP8) {
                *(float4*)(row + n * 8 + 4 * t) =
                    make_float4(o[n][2 * r], o[n + 1][2 * r], o[n][2 * r + 1], o[n + 1][2 * r + 1]);
            } else {
                *(float2*)(row + n * 8 + 2 * t) = make_float2(o[n][2 * r], o[n][2 * r + 1]);
                *(float2*)(row + n * 8 + 8 + 2 * t) = make_float2(o[n + 1][2 * r], o[n + 1][2 * r + 1]);
            }
        }
        if (t == 0) limits[g + 8 * r] = make_float2(maximum[r], total[r]);
    }
}

__device__ __forceinline__ void store_output(uint16_t* out, float4 value, float total) {
    const float inverse = total == 0.0f ? 0.0f : 1.0f / total;  // an empty context gives zeros, NaN stays NaN
    *(uint2*)out = make_uint2(pack<false>(value.x * inverse, value.y * inverse),
                              pack<false>(value.z * inverse, value.w * inverse));
}
