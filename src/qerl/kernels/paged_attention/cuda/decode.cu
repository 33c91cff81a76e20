// Paged decode attention for sm_90: one query token a sequence, bf16, all query heads of a KV head together.
//
// A cluster of CLUSTER blocks owns one sequence and KV head; each block takes a contiguous part of the context, each of
// its warps every fourth step of 16 tokens, through a private ring of asynchronous copies. Partial results are merged
// in warp order through shared memory and in block order through the cluster's shared memory: no workspace, no second
// launch, same input, same bits. Lengths are read on the device, so captured graphs stay right as contexts grow.
typedef unsigned int uint32_t;
typedef unsigned short uint16_t;

struct Params {
    const uint16_t* q;      // [S, Hq, DIM], rows q_stride apart
    const uint16_t* k;      // [blocks, block_size, Hkv, DIM]
    const uint16_t* v;
    const int* table;       // [S, max_blocks]
    const int* lens;        // [S]
    uint16_t* out;          // [S, Hq, DIM] contiguous
    long long q_stride, block_stride, token_stride, head_stride, table_stride;   // in elements
    float scale;            // times log2(e)
    int block_shift, kv_heads, group;
};

constexpr int WARPS = 4, STAGES = 3, TOKENS = 16;
#define MINUS_INFINITY __int_as_float(0xff800000)

__device__ __forceinline__ uint32_t smem_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void copy16(uint32_t dst, const void* src, bool present) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(present ? 16 : 0) : "memory");
}
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ uint32_t pack_bf16(float lower, float upper) {
    uint32_t d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(upper), "f"(lower));
    return d;
}
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ uint32_t address_in(uint32_t address, int rank) {
    uint32_t mapped;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
    return mapped;
}
__device__ __forceinline__ float2 load2_in(uint32_t mapped) {
    float2 value;
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(mapped) : "memory");
    return value;
}

template <int DIM, int CLUSTER>
__device__ __forceinline__ void decode(const Params& p) {
    constexpr int PITCH = DIM * 2 + 16;              // bytes of a row in shared memory: ldmatrix without bank conflicts
    constexpr int TILE = TOKENS * PITCH, STAGE = 2 * TILE;
    constexpr int CHUNKS = DIM / 8, ROWS_AT_ONCE = 32 / CHUNKS;
    extern __shared__ __align__(128) unsigned char shared[];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int kv_head = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER, sequence = blockIdx.y;
    const uint32_t ring = smem_address(shared) + warp * STAGES * STAGE;

    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const int length = p.lens[sequence];
    const int steps = (length + TOKENS - 1) / TOKENS;
    const int begin = steps * rank / CLUSTER, end = steps * (rank + 1) / CLUSTER;
    const int mine = end - begin > warp ? (end - begin - warp + WARPS - 1) / WARPS : 0;   // steps of this warp
    const int* table = p.table + (long long)sequence * p.table_stride;
    auto step_of = [&](int i) { return begin + warp + i * WARPS; };
    auto block_of = [&](int i) { return i < mine ? table[(step_of(i) * TOKENS) >> p.block_shift] : 0; };
    int ids = block_of(lane);   // of the next 32 steps, one a lane

    auto issue = [&](int i) {
        if (i < mine) {
            if (i && (i & 31) == 0) ids = block_of(i + lane);
            const int token0 = step_of(i) * TOKENS, id = __shfl_sync(~0u, ids, i & 31);
            const long long place = id * p.block_stride + (token0 & ((1 << p.block_shift) - 1)) * p.token_stride + kv_head * p.head_stride;
            const int chunk = lane % CHUNKS;
            const uint32_t to = ring + i % STAGES * STAGE + chunk * 16;
#pragma unroll
            for (int r = 0; r < TOKENS; r += ROWS_AT_ONCE) {
                const int row = r + lane / CHUNKS;
                const bool present = token0 + row < length;
                const long long from = place + (present ? row : 0) * p.token_stride + chunk * 8;
                copy16(to + row * PITCH, p.k + from, present);
                copy16(to + TILE + row * PITCH, p.v + from, present);
            }
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) issue(s);

    uint32_t query[DIM / 16][4];
    const uint16_t* q = p.q + sequence * p.q_stride + kv_head * p.group * DIM + 2 * t;
#pragma unroll
    for (int kk = 0; kk < DIM / 16; kk++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = g + 8 * (i & 1);
            query[kk][i] = row < p.group ? *(const uint32_t*)(q + row * DIM + kk * 16 + 8 * (i >> 1)) : 0;
        }

    float o[DIM / 8][4] = {}, maximum[2] = {MINUS_INFINITY, MINUS_INFINITY}, total[2] = {0.0f, 0.0f};
    const uint32_t k_row = ((lane & 7) + (lane >> 4) * 8) * PITCH + ((lane >> 3) & 1) * 16;
    const uint32_t v_row = ((lane & 7) + ((lane >> 3) & 1) * 8) * PITCH + (lane >> 4) * 16;
    for (int i = 0; i < mine; i++) {
        issue(i + STAGES - 1);
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
        __syncwarp();
        const uint32_t stage = ring + i % STAGES * STAGE;
        float s[2][4] = {};
#pragma unroll
        for (int kk = 0; kk < DIM / 16; kk++) {
            uint32_t f[4];
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                         : "=r"(f[0]), "=r"(f[1]), "=r"(f[2]), "=r"(f[3]) : "r"(stage + k_row + kk * 32) : "memory");
            mma(s[0], query[kk], f[0], f[1]);
            mma(s[1], query[kk], f[2], f[3]);
        }
        const int token0 = step_of(i) * TOKENS + 2 * t;
        float next[2] = {maximum[0], maximum[1]};
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                s[n][e] = token0 + n * 8 + (e & 1) < length ? s[n][e] * p.scale : MINUS_INFINITY;
                next[e >> 1] = fmaxf(next[e >> 1], s[n][e]);
            }
        float sum[2] = {0.0f, 0.0f}, correction[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {   // the four lanes of a row; its first token is always there, so `next` is finite
            next[r] = fmaxf(next[r], __shfl_xor_sync(~0u, next[r], 1));
            next[r] = fmaxf(next[r], __shfl_xor_sync(~0u, next[r], 2));
            correction[r] = exp2_fast(maximum[r] - next[r]);
            maximum[r] = next[r];
        }
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                s[n][e] = exp2_fast(s[n][e] - maximum[e >> 1]);
                sum[e >> 1] += s[n][e];
            }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
            sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
            total[r] = total[r] * correction[r] + sum[r];
        }
        const uint32_t weights[4] = {pack_bf16(s[0][0], s[0][1]), pack_bf16(s[0][2], s[0][3]), pack_bf16(s[1][0], s[1][1]),
                                     pack_bf16(s[1][2], s[1][3])};
#pragma unroll
        for (int d = 0; d < DIM / 16; d++) {
            uint32_t f[4];
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                         : "=r"(f[0]), "=r"(f[1]), "=r"(f[2]), "=r"(f[3]) : "r"(stage + TILE + v_row + d * 32) : "memory");
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float (&c)[4] = o[2 * d + half];
                c[0] *= correction[0], c[1] *= correction[0], c[2] *= correction[1], c[3] *= correction[1];
                mma(c, weights, f[2 * half], f[2 * half + 1]);
            }
        }
        __syncwarp();   // every lane has read this stage before it is filled again
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();

    // [warp][row][DIM] sums, then [warp][row] (maximum, total); behind them the same once for the block.
    float* sums = (float*)shared;
    float2* limits = (float2*)(sums + WARPS * 16 * DIM);
    float* block_sums = (float*)(limits + WARPS * 16);
    float2* block_limits = (float2*)(block_sums + 16 * DIM);
#pragma unroll
    for (int n = 0; n < DIM / 8; n++) {
        float* to = sums + (warp * 16 + g) * DIM + n * 8 + 2 * t;
        *(float2*)to = make_float2(o[n][0], o[n][1]);
        *(float2*)(to + 8 * DIM) = make_float2(o[n][2], o[n][3]);
    }
    if (t == 0) {
        limits[warp * 16 + g] = make_float2(maximum[0], total[0]);
        limits[warp * 16 + g + 8] = make_float2(maximum[1], total[1]);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < p.group * DIM / 2; i += WARPS * 32) {
        const int row = i / (DIM / 2), column = i % (DIM / 2) * 2;
        float most = MINUS_INFINITY, all = 0.0f;
        float2 value = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int w = 0; w < WARPS; w++) most = fmaxf(most, limits[w * 16 + row].x);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float2 limit = limits[w * 16 + row];
            const float weight = limit.y > 0.0f ? exp2_fast(limit.x - most) : 0.0f;
            const float2 part = *(const float2*)(sums + (w * 16 + row) * DIM + column);
            all += weight * limit.y, value.x += weight * part.x, value.y += weight * part.y;
        }
        *(float2*)(block_sums + row * DIM + column) = value;
        if (column == 0) block_limits[row] = make_float2(most, all);
    }
    if (CLUSTER > 1) cluster_sync();
    else __syncthreads();
    const uint32_t sums_at = smem_address(block_sums), limits_at = smem_address(block_limits);
    for (int i = rank * WARPS * 32 + threadIdx.x; i < p.group * DIM / 2; i += CLUSTER * WARPS * 32) {
        const int row = i / (DIM / 2), column = i % (DIM / 2) * 2;
        float2 limit[CLUSTER], part[CLUSTER];
#pragma unroll
        for (int c = 0; c < CLUSTER; c++) {
            limit[c] = load2_in(address_in(limits_at + row * 8, c));
            part[c] = load2_in(address_in(sums_at + (row * DIM + column) * 4, c));
        }
        float most = MINUS_INFINITY, all = 0.0f;
        float2 value = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int c = 0; c < CLUSTER; c++) most = fmaxf(most, limit[c].x);
#pragma unroll
        for (int c = 0; c < CLUSTER; c++) {
            const float weight = limit[c].y > 0.0f ? exp2_fast(limit[c].x - most) : 0.0f;
            all += weight * limit[c].y, value.x += weight * part[c].x, value.y += weight * part[c].y;
        }
        const float inverse = all > 0.0f ? 1.0f / all : 0.0f;   // an empty context gives zeros
        uint16_t* out = p.out + ((long long)sequence * p.kv_heads + kv_head) * p.group * DIM + row * DIM + column;
        *(uint32_t*)out = pack_bf16(value.x * inverse, value.y * inverse);
    }
    if (CLUSTER > 1) cluster_sync();   // nobody leaves while others read its sums
}

#define KERNEL(D, C)                                                                                             \
    extern "C" __global__ void __cluster_dims__(C, 1, 1) __launch_bounds__(128) decode_##D##_##C(const __grid_constant__ Params p) { \
        decode<D, C>(p);                                                                                         \
    }
KERNEL(64, 1)
KERNEL(64, 2)
KERNEL(64, 4)
KERNEL(64, 8)
KERNEL(128, 1)
KERNEL(128, 2)
KERNEL(128, 4)
KERNEL(128, 8)
