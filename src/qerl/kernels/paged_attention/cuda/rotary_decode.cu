// Paged decode attention over a bf16 cache with head norm, rotary embedding and the write of the newest token: kernels
// rotary_decode_<head size>_<blocks of a cluster>_<warps of one>.
#include "decode.cuh"

#ifndef KERNELS  // the host may ask for one
#define KERNELS                                             \
    DECODE_KERNELS(ROTARY_KERNEL, rotary_decode, false, 64) \
    DECODE_KERNELS(ROTARY_KERNEL, rotary_decode, false, 128)
#endif
KERNELS
