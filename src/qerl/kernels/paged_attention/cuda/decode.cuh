// Paged decode attention for sm_90: one query token a sequence, all query heads of a KV head together, keys and values
// in bf16 or E4M3 (which becomes fp16 in registers, exactly).
//
// A cluster of CLUSTER blocks owns one sequence and KV head. Steps of 16 tokens go round the blocks and their warps;
// each warp has a private ring of asynchronous copies. Partial results are merged in warp order through shared memory,
// then every row in block order by one block, into whose shared memory the others have written: no workspace, no second
// launch, same input, same bits. Lengths are read on the device, so captured graphs stay right as contexts grow.
#pragma once
#include "rotate.cuh"

struct Params {
    const uint16_t* q;  // [S, Hq, DIM], rows q_stride apart
    const void* k;      // [blocks, block_size, Hkv, DIM]
    const void* v;
    const int* table;                                                           // [S, width]
    const int* lens;                                                            // [S]
    uint16_t* out;                                                              // [S, Hq, DIM] contiguous
    long long q_stride, block_stride, token_stride, head_stride, table_stride;  // in elements
    float scale;                                                                // times log2(e)
    int block_shift, kv_heads, group, width, blocks;
    int hints;  // whether the first steps may be asked for before the predecessor has ended
};

constexpr int TOKENS = 16;  // of a step
constexpr int PART = 128;   // sums that a warp sends to one block at once

// Shapes of shared memory: a ring a warp, whose place its sums take afterwards, and what other blocks send.
template <int DIM, bool FP8, int CLUSTER, int WARPS>
struct Layout {
    static constexpr int ROW = DIM * (FP8 ? 1 : 2);  // bytes of keys or values of a token
    static constexpr int STAGES = ROW == 256 ? (WARPS == 8 ? 2 : 3) : ROW == 128 ? 4 : 6;
    static constexpr int PITCH = ROW + 16;  // ldmatrix without bank conflicts
    static constexpr int TILE = TOKENS * PITCH, STAGE = 2 * TILE, RING = STAGES * STAGE;
    static constexpr int SUM_PITCH = DIM + (FP8 ? 16 : 8);  // floats; stores without bank conflicts
    // Parts of 16 rows. As many are sent to a block: its share of them, from every block.
    static constexpr int PARTS = 16 * DIM / PART;
    static_assert(PARTS % CLUSTER == 0, "blocks finish equally many parts");
    static_assert(16 * SUM_PITCH * 4 + 16 * 8 <= RING, "the sums of a warp must fit its ring");
};

// The rows as one run of group * DIM sums, cut into parts of 128: a warp of each block merges part c of the block's
// warps and sends it to block c % CLUSTER, which merges the blocks. The last part may have a row too many, which exists
// (see `store_sums`).
template <int DIM, bool FP8, int CLUSTER, int WARPS>
__device__ __forceinline__ void merge_warps_and_blocks(const Params& p, unsigned char* shared, int kv_head, int rank,
                                                       int sequence) {
    using L = Layout<DIM, FP8, CLUSTER, WARPS>;
    const int warp = uniform(threadIdx.x >> 5), lane = threadIdx.x & 31;
    float* inbox = (float*)(shared + WARPS * L::RING);          // [PARTS][PART]
    float2* inbox_limits = (float2*)(inbox + L::PARTS * PART);  // [PARTS][PART / DIM]
    constexpr int ROWS = PART / DIM;
    const int columns = p.group * DIM, parts = (columns + PART - 1) / PART, column = lane * 4;
    uint16_t* out = p.out + ((long long)sequence * p.kv_heads + kv_head) * columns + column;
    if (CLUSTER > 1) cluster_wait();  // all blocks run
    for (int c = warp; c < parts; c += WARPS) {
        const int row = c * ROWS + column / DIM;
        float4 part[WARPS];
        float2 limit[WARPS], merged;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float* sums = (const float*)(shared + w * L::RING);
            part[w] = *(const float4*)(sums + row * L::SUM_PITCH + column % DIM);
            limit[w] = ((const float2*)(sums + 16 * L::SUM_PITCH))[row];
        }
        const float4 value = merge<WARPS>(part, limit, merged);
        if (CLUSTER == 1) {
            if (c * PART + column < columns) store_output(out + c * PART, value, merged.y);
            continue;
        }
        const int place = c / CLUSTER * CLUSTER + rank;
        store_in(address_in(smem_address(inbox + place * PART + column), c % CLUSTER), value);
        if (column % DIM == 0)
            store_in(address_in(smem_address(inbox_limits + place * ROWS + column / DIM), c % CLUSTER), merged);
    }
    if (CLUSTER == 1) return;
    cluster_arrive();
    cluster_wait();  // everything sent has arrived; nothing is sent to or read from another block any more
    for (int c = warp * CLUSTER + rank; c < parts; c += WARPS * CLUSTER) {
        float4 part[CLUSTER];
        float2 limit[CLUSTER], merged;
#pragma unroll
        for (int b = 0; b < CLUSTER; b++) {
            const int place = c / CLUSTER * CLUSTER + b;
            part[b] = *(const float4*)(inbox + place * PART + column);
            limit[b] = inbox_limits[place * ROWS + column / DIM];
        }
        const float4 value = merge<CLUSTER>(part, limit, merged);
        if (c * PART + column < columns) store_output(out + c * PART, value, merged.y);
    }
}

// With ROTATE, q is a row of qkv as its matmul left it, [Hq, DIM] before keys [Hkv, DIM] and values, of the token at
// position length - 1: all rows must be of different sequences, whose newest tokens lie in different places. The warp
// that owns the last step writes that token to the cache for later launches, and to its ring itself: no block of this
// launch reads the place in the cache, so that nothing has to be ordered.
template <int DIM, bool FP8, int CLUSTER, int WARPS, bool ROTATE>
__device__ __forceinline__ void decode(const Params& p, const Rotation& rotation) {
    using L = Layout<DIM, FP8, CLUSTER, WARPS>;
    constexpr int STAGES = L::STAGES, CHUNKS = L::ROW / 16, ROWS_AT_ONCE = 32 / CHUNKS, BYTES = FP8 ? 1 : 2;
    unsigned char* const shared = dynamic_shared();
    const int warp = uniform(threadIdx.x >> 5), lane = threadIdx.x & 31, t = lane & 3;
    const int kv_head = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER, sequence = blockIdx.y;
    const uint32_t ring = smem_address(shared) + warp * L::RING;
    const unsigned char *k = (const unsigned char*)p.k, *v = (const unsigned char*)p.v;

    launch_dependents();
    if (CLUSTER > 1) cluster_announce();  // this block runs: others may write to it (see the merge)
    // Which steps a warp does depends on no length, so that table and length are fetched together.
    const int* table = p.table + sequence * p.table_stride;
    auto step_of = [&](int i) { return (i * WARPS + warp) * CLUSTER + rank; };
    auto block_of = [&](int i) {
        const int entry = step_of(i) * TOKENS >> p.block_shift;
        return entry < p.width ? load_l2(table + entry) : 0;
    };
    auto steps_of_warp = [&](int length) {
        return max(0, (length + TOKENS - 1) / TOKENS - step_of(0) + WARPS * CLUSTER - 1) / (WARPS * CLUSTER);
    };
    auto place_of = [&](int i, int id, int row) {  // bytes from the start of a cache
        const int token = (step_of(i) * TOKENS & ((1 << p.block_shift) - 1)) + row;
        return (id * p.block_stride + token * p.token_stride + kv_head * p.head_stride) * BYTES;
    };
    if (p.hints) {
        // Table and length may still be written by a kernel before this one, so what is read here decides nothing but
        // which blocks of the cache (that exist) are asked into L2, where any later write is seen.
        const int id = block_of(lane), length = uniform(load_l2(p.lens + sequence)), row = lane % TOKENS;
        for (int i = 0; i < min(STAGES - 1, steps_of_warp(length)); i++) {
            const int from = __shfl_sync(~0u, id, i);
            if ((unsigned)from >= p.blocks || step_of(i) * TOKENS + row >= length) continue;
            const unsigned char* start = (lane < TOKENS ? k : v) + place_of(i, from, row);
#pragma unroll
            for (int byte = 0; byte < L::ROW; byte += 64) hint_l2(start + byte);
        }
    }
    wait_for_predecessors();
    int ids = block_of(lane);  // of the next 32 steps, one a lane
    const int length = uniform(load_l2(p.lens + sequence)), mine = steps_of_warp(length);

    auto issue = [&](int i) {
        if (i < mine) {
            if (i && (i & 31) == 0) ids = block_of(i + lane);
            const int row = lane / CHUNKS, chunk = lane % CHUNKS;
            const long long place = place_of(i, __shfl_sync(~0u, ids, i & 31), row) + chunk * 16;
            const uint32_t to = ring + i % STAGES * L::STAGE + row * L::PITCH + chunk * 16;
            const int left = length - ROTATE - step_of(i) * TOKENS - row;
#pragma unroll
            for (int r = 0; r < TOKENS; r += ROWS_AT_ONCE) {  // of 16 tokens a block has even the absent ones
                const long long from = place + r * p.token_stride * BYTES;
                copy16(to + r * L::PITCH, k + from, r < left);
                copy16(to + L::TILE + r * L::PITCH, v + from, r < left);
            }
        }
        copies_commit();
    };
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) issue(s);

    uint32_t query[DIM / 16][4];
    float factor[2] = {p.scale, p.scale};
    const uint16_t* const q = p.q + sequence * p.q_stride;
    load_query<DIM, FP8>(q + kv_head * p.group * DIM, p.group, lane, query);
    NewToken<DIM, FP8> token;
    // The step that has it, if it is this warp's (which it never is where length is 0), and its block.
    int newest = -1, newest_block = 0;
    if constexpr (ROTATE) {
        const float* angles = rotation.rope + (long long)max(length - 1, 0) * DIM;
        if (step_of(mine - 1) == (length - 1) / TOKENS) {
            newest = mine - 1, newest_block = block_of(newest);
            const uint16_t* const key = q + (p.kv_heads * p.group + kv_head) * DIM;
            token.load(key, key + p.kv_heads * DIM, rotation, angles, lane);
        }
        rotate_query<DIM, FP8>(query, rotation, angles, p.group, lane);
    }
    if constexpr (FP8) scale_query<DIM>(query, factor);

    float o[DIM / 8][4] = {}, maximum[2] = {MINUS_INFINITY, MINUS_INFINITY}, total[2] = {0.0f, 0.0f};
    const uint32_t k_row = ((lane & 7) + (lane >> 4) * 8) * L::PITCH + ((lane >> 3) & 1) * 16;
    const uint32_t v_row = ((lane & 7) + ((lane >> 3) & 1) * 8) * L::PITCH + (lane >> 4) * 16;
    for (int i = 0; i < mine; i++) {
        issue(i + STAGES - 1);
        copies_wait<STAGES - 1>();
        __syncwarp();
        if (ROTATE && i == newest) {  // zeros have been copied there
            unsigned char* row = shared + warp * L::RING + i % STAGES * L::STAGE + (length - 1) % TOKENS * L::PITCH;
            token.store(row, row + L::TILE, lane);
            __syncwarp();
            // Not before: no load may be moved above a store, and the queries' angles would wait for the token's.
            const long long place = place_of(newest, newest_block, (length - 1) % TOKENS);
            token.store((unsigned char*)p.k + place, (unsigned char*)p.v + place, lane);
        }
        const uint32_t stage = ring + i % STAGES * L::STAGE;
        float s[2][4], correction[2];
        uint32_t weights[4];
        multiply_keys<DIM, FP8>(stage + k_row, query, s);
        softmax_step<FP8>(s, step_of(i) * TOKENS + 2 * t, length, factor, maximum, total, correction, weights);
        multiply_values<DIM, FP8>(stage + L::TILE + v_row, weights, correction, o);
        __syncwarp();  // every lane has read this stage before it is filled again
    }
    copies_wait<0>();
    __syncwarp();
    store_sums<DIM, FP8, L::SUM_PITCH>((float*)(shared + warp * L::RING), o, maximum, total, p.group, lane);
    __syncthreads();
    merge_warps_and_blocks<DIM, FP8, CLUSTER, WARPS>(p, shared, kv_head, rank, sequence);
}

#define KERNEL(PREFIX, FP8, D, C, W)                                               \
    extern "C" __global__ void __cluster_dims__(C, 1, 1) __launch_bounds__(32 * W) \
        PREFIX##_##D##_##C##_##W(const __grid_constant__ Params p) {               \
        decode<D, FP8, C, W, false>(p, {});                                        \
    }
#define ROTARY_KERNEL(PREFIX, FP8, D, C, W)                                                              \
    extern "C" __global__ void __cluster_dims__(C, 1, 1) __launch_bounds__(32 * W)                       \
        PREFIX##_##D##_##C##_##W(const __grid_constant__ Params p, const __grid_constant__ Rotation r) { \
        decode<D, FP8, C, W, true>(p, r);                                                                \
    }
// Head size, blocks of a cluster, warps of a block: blocks that have a multiprocessor to themselves are large.
#define DECODE_KERNELS(KERNEL, PREFIX, FP8, D) \
    KERNEL(PREFIX, FP8, D, 1, 4)               \
    KERNEL(PREFIX, FP8, D, 1, 8)               \
    KERNEL(PREFIX, FP8, D, 2, 8)               \
    KERNEL(PREFIX, FP8, D, 4, 8)               \
    KERNEL(PREFIX, FP8, D, 8, 8)
