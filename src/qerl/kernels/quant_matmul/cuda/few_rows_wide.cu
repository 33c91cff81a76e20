// The few-row kernels (few_rows.cuh) with an fp32 result, apart because few models need them: they are compiled at
// their first use.
#include "few_rows.cuh"

#define KERNEL(W, S)                                                      \
    extern "C" __global__ void __launch_bounds__((W + SHRINKERS) * 32, 1) \
        few_rows_##W##_##S##_wide(const __grid_constant__ Params p) {     \
        few_rows<W, S, false, true>(p);                                   \
    }
#define PAIRED_KERNEL(W, S)                                                                         \
    extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__((W + SHRINKERS) * 32, 1) \
        few_rows_##W##_##S##_pair_wide(const __grid_constant__ Params p) {                          \
        few_rows<W, S, true, true>(p);                                                              \
    }
#ifndef KERNELS  // the host may ask for one
#define KERNELS FEW_ROWS_KERNELS(KERNEL, PAIRED_KERNEL)
#endif
KERNELS
