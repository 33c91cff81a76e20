// Decode attention on a CPU, one cluster after the other; see ptx.cuh. Built beside the kernel's own decode.cuh.
#include "decode.cuh"

Machine machine;
static std::function<void()> body;

static bool out_of_range;

static void run_fiber() {
    try {
        body();
    } catch (const std::out_of_range&) {
        out_of_range = true;
    }
    machine.current->done = true;
    switch_fiber();
}

// Fibers take turns in order, or in reverse. Whether all came to an end.
static bool run_cluster(int cluster, int shared_bytes, bool reverse) {
    const int count = cluster * WARPS * 32;
    machine.cluster = Barrier{count};
    machine.blocks.assign(cluster, Block{});
    for (Block& block : machine.blocks) {
        block.shared.assign(shared_bytes, 0xff);  // NaN
        block.warps.assign(WARPS, Warp{Barrier{32}});
        block.barrier.expected = WARPS * 32;
    }
    machine.fibers.resize(count);
    for (int i = 0; i < count; i++) {
        Fiber& fiber = machine.fibers[i];
        fiber.stack.resize(1 << 16);
        fiber.rank = i / (WARPS * 32), fiber.thread = i % (WARPS * 32), fiber.done = false;
        fiber.open.clear(), fiber.groups.clear();
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = fiber.stack.size();
        makecontext(&fiber.context, run_fiber, 0);
    }
    int left = count;
    for (int round = 0; left; round++) {
        if (out_of_range || round == 1 << 20) return false;
        for (int i = 0; i < count; i++) {
            machine.current = &machine.fibers[reverse ? count - 1 - i : i];
            if (machine.current->done) continue;
            swapcontext(&machine.scheduler, &machine.current->context);
            left -= machine.current->done;
        }
    }
    return !out_of_range;
}

// 0: done; 1: deadlock; 2: no such kernel; 3: an address outside shared memory, or not aligned.
extern "C" int emulate(int dim, int fp8, int cluster, const Params* params, int sequences, int shared_bytes, int eager,
                       int reverse) {
    const Params& p = *params;
    machine.eager = eager, out_of_range = false;
#undef KERNEL
#define KERNEL(PREFIX, FP8, D, C) \
    if (dim == D && fp8 == FP8 && cluster == C) body = [&p] { decode<D, FP8, C>(p); };
    body = nullptr;
    KERNELS(, 0, 64) KERNELS(, 0, 128) KERNELS(, 1, 64) KERNELS(, 1, 128) if (!body) return 2;
    for (machine.row = 0; machine.row < sequences; machine.row++)
        for (int head = 0; head < p.kv_heads; head++) {
            machine.first_block = head * cluster;
            if (!run_cluster(cluster, shared_bytes, reverse)) return out_of_range ? 3 : 1;
        }
    return 0;
}
