// Paged decode attention over a bf16 cache: kernels decode_<head size>_<blocks of a cluster>_<warps of one>.
#include "decode.cuh"

KERNELS(KERNEL, decode, false, 64)
KERNELS(KERNEL, decode, false, 128)
