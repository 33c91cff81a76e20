// The kernels of the gradient of the input (input_grad.cuh).
#include "input_grad.cuh"

#define KERNEL(T, G, S)                                                                              \
    extern "C" __global__ void __launch_bounds__(G * 128 + 128, 1) input_grad_##T##_##G##_##S(       \
        const __grid_constant__ Params p, const __grid_constant__ TensorMap dy_map,                  \
        const __grid_constant__ TensorMap codes_map, const __grid_constant__ TensorMap scales_map) { \
        input_grad<T, G, S>(p, &dy_map, &codes_map, &scales_map);                                    \
    }
#ifndef KERNELS  // the host may ask for one
#define KERNELS KERNEL(64, 2, 12) KERNEL(64, 3, 10) KERNEL(128, 2, 8) KERNEL(128, 3, 8) KERNEL(256, 2, 5)
#endif
KERNELS
