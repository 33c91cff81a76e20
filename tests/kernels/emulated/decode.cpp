// Decode attention on a CPU, one cluster after the other; see ptx.cuh. Built beside the kernel's own decode.cuh.
#include "decode.cuh"

Machine machine;
bool eager;

// Null, or what went wrong. Without a rotation, the kernels that only attend.
extern "C" const char* emulate(int dim, int fp8, int cluster, int warps, const Params* params, const Rotation* rotation,
                               int sequences, int shared_bytes, int early, unsigned seed) {
    const Params& p = *params;
    eager = early, machine.body = nullptr;
#define CHOOSE(PREFIX, FP8, D, C, W)                                                                                  \
    if (dim == D && fp8 == FP8 && cluster == C && warps == W)                                                         \
        machine.body = rotation ? std::function<void()>([&p, rotation] { decode<D, FP8, C, W, true>(p, *rotation); }) \
                                : std::function<void()>([&p] { decode<D, FP8, C, W, false>(p, {}); });
    DECODE_KERNELS(CHOOSE, , 0, 64)
    DECODE_KERNELS(CHOOSE, , 0, 128)
    DECODE_KERNELS(CHOOSE, , 1, 64)
    DECODE_KERNELS(CHOOSE, , 1, 128)
    if (!machine.body) return "no such kernel";
    for (machine.row = 0; machine.row < sequences; machine.row++)
        for (int head = 0; head < p.kv_heads; head++) {
            machine.first_block = head * cluster;
            if (const char* problem = run(cluster, warps * 32, shared_bytes, cluster, seed)) return problem;
        }
    return nullptr;
}
