// The few-row kernels (few_rows.cuh) that round to bf16.
#include "few_rows.cuh"

#define KERNEL(W, S)                                                      \
    extern "C" __global__ void __launch_bounds__((W + SHRINKERS) * 32, 1) \
        few_rows_##W##_##S(const __grid_constant__ Params p) {            \
        few_rows<W, S, false>(p);                                         \
    }
#define PAIRED_KERNEL(W, S)                                                                         \
    extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__((W + SHRINKERS) * 32, 1) \
        few_rows_##W##_##S##_pair(const __grid_constant__ Params p) {                               \
        few_rows<W, S, true>(p);                                                                    \
    }
#ifndef KERNELS  // the host may ask for one
#define KERNELS FEW_ROWS_KERNELS(KERNEL, PAIRED_KERNEL)
#endif
KERNELS
