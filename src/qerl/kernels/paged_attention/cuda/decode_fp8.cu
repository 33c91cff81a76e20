// Paged decode attention over an E4M3 cache: kernels decode_fp8_<head size>_<blocks of a cluster>_<warps of one>.
#include "decode.cuh"

#ifndef KERNELS  // the host may ask for one
#define KERNELS                                  \
    DECODE_KERNELS(KERNEL, decode_fp8, true, 64) \
    DECODE_KERNELS(KERNEL, decode_fp8, true, 128)
#endif
KERNELS
