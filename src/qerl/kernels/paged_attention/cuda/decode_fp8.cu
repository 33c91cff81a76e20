// Paged decode attention over an E4M3 cache: kernels decode_fp8_<head size>_<blocks of a cluster>_<warps of one>.
#include "decode.cuh"

KERNELS(KERNEL, decode_fp8, true, 64)
KERNELS(KERNEL, decode_fp8, true, 128)
