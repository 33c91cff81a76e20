// Decode attention on a CPU, one cluster after the other; see ptx.cuh. Built beside the kernel's own decode.cuh.
#include "decode.cuh"

Machine machine;
bool eager;

// Null, or what went wrong.
extern "C" const char* emulate(int dim, int fp8, int cluster, int warps, const Params* params, int sequences,
                               int shared_bytes, int early, unsigned seed) {
    const Params& p = *params;
    eager = early, machine.body = nullptr;
#undef KERNEL
#define KERNEL(PREFIX, FP8, D, C, W) \
    if (dim == D && fp8 == FP8 && cluster == C && warps == W) machine.body = [&p] { decode<D, FP8, C, W>(p); };
    KERNELS(, 0, 64) KERNELS(, 0, 128) KERNELS(, 1, 64) KERNELS(, 1, 128) if (!machine.body) return "no such kernel";
    for (machine.row = 0; machine.row < sequences; machine.row++)
        for (int head = 0; head < p.kv_heads; head++) {
            machine.first_block = head * cluster;
            if (const char* problem = run(cluster, warps * 32, shared_bytes, cluster, seed)) return problem;
        }
    return nullptr;
}
