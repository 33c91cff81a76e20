// A tile whose k is cut among the blocks of a cluster: its parts are summed through distributed shared memory.
//
// Each warp leaves its part in its block's ring, which has been read to the end by then. Block r of the cluster sums
// and stores the r-th share of the tokens, parts in block order: same input, same bits. Only warps that hold the same
// channels wait for each other, on two barriers of theirs: the parts are there; they have been read.
#pragma once
#include "shrink.cuh"

constexpr int MOST_OF_CLUSTER = 4, TILE_BARRIER = 4;

__device__ __forceinline__ uint32_t place_in(uint32_t address, int rank) {
    uint32_t mapped;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
    return mapped;
}
__device__ __forceinline__ void barrier_arrive_in(uint32_t mapped) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(mapped) : "memory");
}
__device__ __forceinline__ void barrier_wait_of_cluster(uint32_t bar) {  // of the first phase
    asm volatile(
        "{\n.reg .pred p;\nWAIT:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1, 0x989680;\n@p "
        "bra DONE;\nbra WAIT;\nDONE:\n}" ::"r"(bar),
        "r"(0)
        : "memory");
}
__device__ __forceinline__ void load_in(float (&f)[4], uint32_t mapped) {
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(f[0]), "=f"(f[1]), "=f"(f[2]), "=f"(f[3])
                 : "r"(mapped)
                 : "memory");
}
// All blocks of the cluster run, and what they have initialized is seen by the others. Every thread comes here.
__device__ __forceinline__ void meet_cluster() {
    __syncwarp();
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// Of all parts of a block.
template <int TOKENS, int WARPS>
constexpr int TILE_BYTES = WARPS * TOKENS * 16 * 4;

// `cluster` blocks share the tile; c is this warp's part. ring: where parts may lie, barriers: see above.
template <int TOKENS, int WARPS, bool WIDE>
__device__ __forceinline__ void store_shared_tile(const Params& p, const Epilogue& e, int row_tile, int token0,
                                                  int cluster, unsigned char* ring, uint32_t barriers, int warp,
                                                  int lane, const float (&c)[TOKENS / 8][4]) {
    constexpr int BLOCKS = TOKENS / 8;
    sync_warps<TILE_BARRIER, WARPS * 32>();  // no warp of this block reads the ring any more
    float4* const mine = (float4*)ring + warp * BLOCKS * 32 + lane;
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) mine[b * 32] = make_float4(c[b][0], c[b][1], c[b][2], c[b][3]);
    __syncwarp();
    const uint32_t there = barriers + warp * 8, read = there + WARPS * 8;
    if (lane < cluster) barrier_arrive_in(place_in(there, lane));
    barrier_wait_of_cluster(there);

    uint32_t parts[MOST_OF_CLUSTER];
#pragma unroll
    for (int i = 0; i < MOST_OF_CLUSTER; i++) parts[i] = place_in(smem_address(mine), min(i, cluster - 1));
    const int rank = cluster_rank(), last = BLOCKS * (rank + 1) / cluster;
#pragma unroll 2
    for (int b = BLOCKS * rank / cluster; b < last; b++) {
        float sum[1][4];
        load_in(sum[0], parts[0] + b * 512);
#pragma unroll
        for (int i = 1; i < MOST_OF_CLUSTER; i++)
            if (i < cluster) {
                float part[4];
                load_in(part, parts[i] + b * 512);
#pragma unroll
                for (int j = 0; j < 4; j++) sum[0][j] += part[j];
            }
        if (row_tile * 16 < p.n) {
            if constexpr (WIDE) store_wide<1>(p, e, row_tile, token0 + b * 8, lane, sum);
            else store_block(p, e, row_tile, token0 + b * 8, lane, sum[0]);
        }
    }
    __syncwarp();
    if (lane < cluster) barrier_arrive_in(place_in(read, lane));
    barrier_wait_of_cluster(read);  // a block that has ended has no shared memory
}
