// Tensor copies: boxes of a matrix that a tensor map describes, into shared memory.
#pragma once
#include "tiles.cuh"

struct TensorMap {
    alignas(64) unsigned char opaque[128];
};

__device__ __forceinline__ void tensor_load(uint32_t dst, const TensorMap* map, int column, int row, uint32_t bar) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
        "[%4];" ::"r"(dst),
        "l"(map), "r"(column), "r"(row), "r"(bar)
        : "memory");
}

// A box of three dimensions: windows of x, or row tiles of weights. `once`: nobody else will want it.
__device__ __forceinline__ void tensor_load(uint32_t dst, const TensorMap* map, int inner, int middle, int outer,
                                            uint32_t bar) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
        "[%5];" ::"r"(dst),
        "l"(map), "r"(inner), "r"(middle), "r"(outer), "r"(bar)
        : "memory");
}
__device__ __forceinline__ void tensor_load_once(uint32_t dst, const TensorMap* map, int inner, int middle, int outer,
                                                 uint32_t bar, uint64_t policy) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, "
        "{%2, %3, %4}], [%5], %6;" ::"r"(dst),
        "l"(map), "r"(inner), "r"(middle), "r"(outer), "r"(bar), "l"(policy)
        : "memory");
}
