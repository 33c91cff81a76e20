// The many-row kernels (many_rows.cuh) that round to bf16.
#include "many_rows.cuh"

#define KERNEL(T, G, U, S)                                                                                  \
    extern "C" __global__ void __launch_bounds__(Beside<T, G>::THREADS, 1) many_rows_##T##_##G##_##U##_##S( \
        const __grid_constant__ Params p, const __grid_constant__ TensorMap w_map,                          \
        const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap u_map) {                 \
        many_rows<T, G, U, S>(p, &w_map, &x_map, &u_map);                                                   \
    }
#ifndef KERNELS  // the host may ask for one
#define KERNELS MANY_ROWS_KERNELS(KERNEL)
#endif
KERNELS
