// Head norm and rotary embedding on the way into attention, and the newest token's keys and values: what kernels/rotary
// does to a row of qkv, in the same roundings (no product is fused into a sum; a norm's sum of squares alone runs in
// another order). Every frequency turns two columns half a head apart.
#pragma once
#include "steps.cuh"

struct Rotation {
    const float* rope;   // [P, DIM]: the cosines of a position, then its sines
    const void* q_norm;  // [DIM] in bf16 or fp32; null: heads without norms
    const void* k_norm;
    float eps;
    int wide_norms;  // whether the norms are fp32
};

// Two neighbouring columns in bf16, the lower one in the lower half.
__device__ __forceinline__ float2 columns_of(uint32_t pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000));
}

// Of columns c and c + 1, whose partners are c + DIM / 2 and c + 1 + DIM / 2.
template <int DIM>
struct Angles {
    float2 cosine, sine;

    __device__ __forceinline__ void load(const float* angles, int c) {
        cosine = *(const float2*)(angles + c), sine = *(const float2*)(angles + DIM / 2 + c);
    }
    __device__ __forceinline__ void turn(uint32_t& first, uint32_t& second) const {
        const float2 a = columns_of(first), b = columns_of(second);
        first = pack<false>(__fsub_rn(__fmul_rn(a.x, cosine.x), __fmul_rn(b.x, sine.x)),
                            __fsub_rn(__fmul_rn(a.y, cosine.y), __fmul_rn(b.y, sine.y)));
        second = pack<false>(__fadd_rn(__fmul_rn(b.x, cosine.x), __fmul_rn(a.x, sine.x)),
                             __fadd_rn(__fmul_rn(b.y, cosine.y), __fmul_rn(a.y, sine.y)));
    }
};

// Columns c and c + 1 of a norm's weights.
__device__ __forceinline__ float2 weights_at(const Rotation& r, const void* norm, int c) {
    if (r.wide_norms) return *(const float2*)((const float*)norm + c);
    return columns_of(*(const uint32_t*)((const uint16_t*)norm + c));
}

// Two columns of a head, normalized; `inverse` of the root of its mean square.
__device__ __forceinline__ uint32_t normalized(uint32_t pair, float2 weight, float inverse) {
    const float2 x = columns_of(pair);
    return pack<false>(__fmul_rn(weight.x, __fmul_rn(x.x, inverse)), __fmul_rn(weight.y, __fmul_rn(x.y, inverse)));
}

__device__ __forceinline__ float squares(uint32_t first, uint32_t second) {
    const float2 a = columns_of(first), b = columns_of(second);
    return __fadd_rn(__fadd_rn(__fmul_rn(a.x, a.x), __fmul_rn(b.x, b.x)),
                     __fadd_rn(__fmul_rn(a.y, a.y), __fmul_rn(b.y, b.y)));
}

// From a lane's part of a head's sum of squares; LANES neighbours have the others.
template <int DIM, int LANES>
__device__ __forceinline__ float inverse_root(float sum, float eps) {
#pragma unroll
    for (int flip = LANES / 2; flip; flip /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, flip));
    return divide(1.0f, __fsqrt_rn(__fadd_rn(divide(sum, DIM), eps)));
}

template <int DIM, int STEP>
__device__ __forceinline__ void normalize_query(uint32_t (&query)[DIM / 16][4], const Rotation& r, int c) {
    constexpr int HALF = DIM / 32;
    float2 weights[DIM / 16][2];
#pragma unroll
    for (int kk = 0; kk < DIM / 16; kk++)
#pragma unroll
        for (int pair = 0; pair < 2; pair++) weights[kk][pair] = weights_at(r, r.q_norm, c + kk * 16 + STEP * pair);
#pragma unroll
    for (int row = 0; row < 2; row++) {
        float sum = 0.0f;
#pragma unroll
        for (int kk = 0; kk < HALF; kk++)
#pragma unroll
            for (int i = row; i < 4; i += 2) sum = __fadd_rn(sum, squares(query[kk][i], query[kk + HALF][i]));
        const float inverse = inverse_root<DIM, 4>(sum, r.eps);
#pragma unroll
        for (int kk = 0; kk < DIM / 16; kk++)
#pragma unroll
            for (int i = row; i < 4; i += 2) query[kk][i] = normalized(query[kk][i], weights[kk][i >> 1], inverse);
    }
}

// The fragments of q before their scaling, in place. A column and its partner are the same lane's, DIM / 32 apart. What
// is loaded is loaded at once: one load after another would wait as long as the keys take to come.
template <int DIM, bool FP8>
__device__ __forceinline__ void rotate_query(uint32_t (&query)[DIM / 16][4], const Rotation& r, const float* angles,
                                             int group, int lane) {
    constexpr int HALF = DIM / 32, STEP = FP8 ? 2 : 8;
    const int c = (FP8 ? 4 : 2) * (lane & 3);
    Angles<DIM> at[HALF][2];
#pragma unroll
    for (int kk = 0; kk < HALF; kk++)
#pragma unroll
        for (int pair = 0; pair < 2; pair++) at[kk][pair].load(angles, c + kk * 16 + STEP * pair);
    if (r.q_norm) normalize_query<DIM, STEP>(query, r, c);
#pragma unroll
    for (int kk = 0; kk < HALF; kk++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (8 * (i & 1) < group) at[kk][i >> 1].turn(query[kk][i], query[kk + HALF][i]);
}

// Keys and values of a token as its row of a cache has them: of each, columns 2 lane, 2 lane + 1 and their partners.
// Lanes from DIM / 4 on repeat the others.
template <int DIM, bool FP8>
struct NewToken {
    uint32_t key[2], value[2];

    __device__ __forceinline__ void load(const uint16_t* k, const uint16_t* v, const Rotation& r, const float* angles,
                                         int lane) {
        const int pair = lane % (DIM / 4);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            key[half] = *(const uint32_t*)(k + half * DIM / 2 + 2 * pair);
            value[half] = *(const uint32_t*)(v + half * DIM / 2 + 2 * pair);
        }
        Angles<DIM> at;
        at.load(angles, 2 * pair);
        if (r.k_norm) {
            const float inverse = inverse_root<DIM, DIM / 4>(squares(key[0], key[1]), r.eps);
#pragma unroll
            for (int half = 0; half < 2; half++)
                key[half] = normalized(key[half], weights_at(r, r.k_norm, half * DIM / 2 + 2 * pair), inverse);
        }
        at.turn(key[0], key[1]);
        if constexpr (FP8)
#pragma unroll
            for (int half = 0; half < 2; half++) key[half] = narrow(key[half]), value[half] = narrow(value[half]);
    }
    static __device__ __forceinline__ uint32_t narrow(uint32_t pair) {
        const float2 x = columns_of(pair);
        return pack_e4m3(x.x, x.y);
    }
    // Rows in global or shared memory.
    __device__ __forceinline__ void store(unsigned char* key_row, unsigned char* value_row, int lane) const {
        if (lane >= DIM / 4) return;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            put(key_row, half * DIM / 4 + lane, key[half]);
            put(value_row, half * DIM / 4 + lane, value[half]);
        }
    }
    static __device__ __forceinline__ void put(unsigned char* row, int pair, uint32_t bits) {
        if (FP8) ((uint16_t*)row)[pair] = (uint16_t)bits;
        else ((uint32_t*)row)[pair] = bits;
    }
};
