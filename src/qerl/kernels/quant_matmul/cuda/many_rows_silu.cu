// The many-row kernels (many_rows.cuh) that store silu(gate) * up, apart because only the engine needs them: they are
// compiled at their first use.
#include "many_rows.cuh"

#define KERNEL(T, G, U, S)                                                                                         \
    extern "C" __global__ void __launch_bounds__(Beside<T, G>::THREADS, 1) many_rows_##T##_##G##_##U##_##S##_silu( \
        const __grid_constant__ Params p, const __grid_constant__ TensorMap w_map,                                 \
        const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap u_map) {                        \
        many_rows<T, G, U, S, false, true>(p, &w_map, &x_map, &u_map);                                             \
    }
#ifndef KERNELS  // the host may ask for one
#define KERNELS MANY_ROWS_KERNELS(KERNEL)
#endif
KERNELS
