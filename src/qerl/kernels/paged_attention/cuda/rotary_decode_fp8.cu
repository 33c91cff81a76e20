// Paged decode attention over an E4M3 cache with head norm, rotary embedding and the write of the newest token: kernels
// rotary_decode_fp8_<head size>_<blocks of a cluster>_<warps of one>.
#include "decode.cuh"

#ifndef KERNELS  // the host may ask for one
#define KERNELS                                                \
    DECODE_KERNELS(ROTARY_KERNEL, rotary_decode_fp8, true, 64) \
    DECODE_KERNELS(ROTARY_KERNEL, rotary_decode_fp8, true, 128)
#endif
KERNELS
