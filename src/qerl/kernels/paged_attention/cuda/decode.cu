// Paged decode attention over a bf16 cache: kernels decode_<head size>_<blocks of a cluster>_<warps of one>.
#include "decode.cuh"

#ifndef KERNELS  // the host may ask for one
#define KERNELS                               \
    DECODE_KERNELS(KERNEL, decode, false, 64) \
    DECODE_KERNELS(KERNEL, decode, false, 128)
#endif
KERNELS
