// A machine for CUDA C++ that a C++ compiler built: every thread of every block is a fiber.
//
// What a warp does together (shuffles, ldmatrix, mma.sync) and the barriers switch fibers until all have come. Which
// warp runs next, for how long, and which one sleeps for a while, is drawn from a seed. Memory is sequentially
// consistent: a missing fence is not seen. Includers first define what they keep of each thread and block
// (ThreadState, WarpState, BlockState).
#pragma once
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __global__
#define __cluster_dims__(...)
#define __launch_bounds__(...)
#define __grid_constant__

using std::max;
using std::min;

struct float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct uint2 {
    uint32_t x, y;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
inline float2 make_float2(float x, float y) {
    return {x, y};
}
inline float4 make_float4(float x, float y, float z, float w) {
    return {x, y, z, w};
}
inline uint2 make_uint2(uint32_t x, uint32_t y) {
    return {x, y};
}

template <class To, class From>
inline To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From), "");
    To to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
}
inline float __int_as_float(int bits) {
    return bits_as<float>(bits);
}
inline float __uint_as_float(uint32_t bits) {
    return bits_as<float>(bits);
}

// A fiber runs again once `word` has changed.
struct Wait {
    const unsigned* word = nullptr;
    unsigned value = 0;
    const char* what = "";
    bool over() const { return !word || *word != value; }
};
struct Barrier {
    unsigned expected = 0, arrived = 0, phase = 0;
    unsigned arrive() {  // the phase to wait for the end of
        const unsigned mine = phase;
        if (++arrived == expected) arrived = 0, phase++;
        return mine;
    }
};
struct Warp : WarpState {
    Barrier barrier{32};
    uint32_t words[2][32][6];
    unsigned asleep_until = 0;
};
struct Block : BlockState {
    unsigned char* shared;
    std::vector<Warp> warps;
    Barrier barrier;
};
struct Fiber : ThreadState {
    ucontext_t start;
    jmp_buf resume;
    bool started = false, done = false;
    int rank, thread;  // the block's index among those that run together, and the thread's inside the block
    unsigned exchanges = 0, cluster_phase = 0, meetings = 0;  // meetings: barriers that it came to
    Wait wait;
};
constexpr unsigned NEVER = ~0u;
constexpr int STACK_BYTES = 1 << 16, SHARED_BASE = 0x380;  // no more aligned than __align__(128) promises
struct Machine {
    std::vector<Block> blocks;
    std::vector<Fiber> fibers;
    std::vector<Barrier> clusters;
    int first_block, row, threads, cluster_size, shared_bytes;
    unsigned round;  // the time
    std::vector<unsigned char> shared;
    char* stacks = nullptr;
    size_t stack_count = 0;
    Fiber* current;
    jmp_buf scheduler;
    std::string problem;
    std::function<void()> body;
    // What happens by itself as time goes by, whether anything did; and when the next such thing is due.
    std::function<bool()> elapse = [] { return false; };
    std::function<unsigned()> due = [] { return NEVER; };
    uint64_t seed;
    unsigned below(unsigned n) {  // random
        seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
        return (seed >> 20) % n;
    }
};
extern Machine machine;

struct Index {
    unsigned x, y;
};
#define threadIdx (Index{(unsigned)machine.current->thread, 0})
#define blockIdx (Index{(unsigned)(machine.first_block + machine.current->rank), (unsigned)machine.row})
#define blockDim (Index{(unsigned)machine.threads, 1})
#define gridDim (Index{(unsigned)machine.blocks.size(), 1})

// Ends the run.
[[noreturn]] inline void fail(const std::string& problem) {
    machine.problem = problem + " (block " + std::to_string(machine.current->rank) + ", thread " +
                      std::to_string(machine.current->thread) + ", round " + std::to_string(machine.round) + ")";
    _longjmp(machine.scheduler, 1);
}
inline __attribute__((noinline)) void switch_fiber() {
    if (!_setjmp(machine.current->resume)) _longjmp(machine.scheduler, 1);
}
inline void wait_for_change(const unsigned& word, unsigned value, const char* what) {
    if (word != value) return;
    machine.current->wait = {&word, value, what};
    switch_fiber();
    machine.current->wait.word = nullptr;
}
// For a while, before it looks at a place in memory again.
inline void wait_to_poll() {
    wait_for_change(machine.round, machine.round, "a counter");
}
inline void wait_for(const Barrier& barrier, unsigned phase) {
    machine.current->meetings++;
    wait_for_change(barrier.phase, phase, "other threads");
}
inline Block& this_block() {
    return machine.blocks[machine.current->rank];
}
inline Warp& this_warp() {
    return this_block().warps[machine.current->thread / 32];
}
inline int this_lane() {
    return machine.current->thread % 32;
}
inline void __syncwarp() {
    wait_for(this_warp().barrier, this_warp().barrier.arrive());
}
inline void __syncthreads() {
    wait_for(this_block().barrier, this_block().barrier.arrive());
}
inline Barrier& this_cluster() {
    return machine.clusters[machine.current->rank / machine.cluster_size];
}
inline void cluster_arrive() {
    machine.current->cluster_phase = this_cluster().arrive();
}
inline void cluster_wait() {
    wait_for(this_cluster(), machine.current->cluster_phase);
}

// All lanes' words. They stay until the next but one exchange: nobody comes there before all have read them.
template <size_t N>
inline const uint32_t (&exchange(const uint32_t (&mine)[N]))[32][6] {
    auto& words = this_warp().words[machine.current->exchanges++ & 1];
    std::copy(mine, mine + N, words[this_lane()]);
    __syncwarp();
    return words;
}
template <class T>
inline T __shfl_sync(unsigned, T value, int lane) {
    return bits_as<T>(exchange({bits_as<uint32_t>(value)})[lane & 31][0]);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int flip) {
    return __shfl_sync(mask, value, this_lane() ^ flip);
}
inline uint32_t __byte_perm(uint32_t lower, uint32_t upper, uint32_t selector) {
    const uint64_t bytes = (uint64_t)upper << 32 | lower;
    uint32_t result = 0;
    for (int i = 0; i < 4; i++) result |= (uint32_t)(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return result;
}
inline uint32_t __vmaxu2(uint32_t a, uint32_t b) {
    return max(a >> 16, b >> 16) << 16 | max(a & 0xffff, b & 0xffff);
}

// An address in shared memory: the block's rank + 1 in the top byte.
inline unsigned char* dynamic_shared() {
    return this_block().shared;
}
inline uint32_t address_in(uint32_t address, int rank) {
    return (address & 0xffffff) | (uint32_t)(rank + 1) << 24;
}
inline size_t __cvta_generic_to_shared(const void* p) {
    return address_in((const unsigned char*)p - dynamic_shared() + SHARED_BASE, machine.current->rank);
}
inline unsigned char* place_of_address(uint32_t address, int size, int alignment) {
    const uint32_t rank = (address >> 24) - 1, offset = (address & 0xffffff) - SHARED_BASE;
    if (rank >= machine.blocks.size() || offset + size > (uint32_t)machine.shared_bytes || address % alignment)
        fail("a wrong address in shared memory");
    return machine.blocks[rank].shared + offset;
}
inline unsigned char* place_of_address(uint32_t address, int size) {
    return place_of_address(address, size, size);
}

inline void load_matrices_as(uint32_t (&f)[4], uint32_t address, bool transposed) {
    const auto& words = exchange({address});
    const int g = this_lane() / 4, t = this_lane() % 4;
    for (int matrix = 0; matrix < 4; matrix++) {
        uint16_t units[2];
        for (int i = 0; i < 2; i++) {
            const int row = transposed ? 2 * t + i : g, unit = transposed ? g : 2 * t + i;
            std::memcpy(&units[i], place_of_address(words[8 * matrix + row][0], 16) + 2 * unit, 2);
        }
        f[matrix] = (uint32_t)units[1] << 16 | units[0];
    }
    __syncwarp();
}

template <bool HALF>
inline float widened(uint16_t bits) {
    return HALF ? (float)bits_as<_Float16>(bits) : bits_as<float>((uint32_t)bits << 16);
}
template <bool HALF>
inline uint32_t narrowed(float value) {
    if (HALF) return bits_as<uint16_t>((_Float16)value);
    if (value != value) return 0x7fff;
    const uint32_t bits = bits_as<uint32_t>(value);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
template <bool HALF>
inline uint32_t pack(float lower, float upper) {
    return narrowed<HALF>(upper) << 16 | narrowed<HALF>(lower);
}

// c += a b of mma.m16n8k16.
template <bool HALF>
inline void multiply_tile(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    const auto& words = exchange({a[0], a[1], a[2], a[3], b0, b1});
    const int g = this_lane() / 4, t = this_lane() % 4;
    auto number = [&](int owner, int word, int k) { return widened<HALF>(words[owner][word] >> 16 * (k & 1)); };
    for (int e = 0; e < 4; e++)
        for (int k = 0; k < 16; k++) {
            const int upper_k = k / 8, owner = k % 8 / 2;
            c[e] += number(4 * g + owner, e / 2 + 2 * upper_k, k) * number(4 * (2 * t + e % 2) + owner, 4 + upper_k, k);
        }
}

// Runs a warp for a while; whether it moved.
inline bool run_warp(int block, int warp) {
    bool moved = false;
    for (int turns = 1 + machine.below(4); turns; turns--) {
        const int first = block * machine.threads + warp * 32, turn = machine.below(32);
        bool any = false;
        for (int i = 0; i < 32; i++) {
            Fiber& fiber = machine.fibers[first + (i + turn) % 32];
            if (fiber.done || !fiber.wait.over()) continue;
            const bool polled = fiber.wait.word == &machine.round;
            const unsigned meetings = fiber.meetings;
            machine.current = &fiber;
            if (!_setjmp(machine.scheduler)) {
                if (fiber.started) _longjmp(fiber.resume, 1);
                fiber.started = true;
                setcontext(&fiber.start);
            }
            if (!machine.problem.empty()) return true;
            any |= !polled || fiber.wait.word != &machine.round || fiber.meetings != meetings;
        }
        if (!any) break;
        moved = true;
    }
    return moved;
}
inline void run_body() {
    machine.body();
    machine.current->done = true;
    switch_fiber();
}
inline void prepare(int blocks, int threads, int shared_bytes, int cluster_size) {
    const size_t count = (size_t)blocks * threads;
    if (count > machine.stack_count) {
        if (machine.stacks) munmap(machine.stacks, machine.stack_count * STACK_BYTES);
        machine.stacks = (char*)mmap(nullptr, count * STACK_BYTES, PROT_READ | PROT_WRITE,
                                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        machine.stack_count = count;
    }
    machine.threads = threads, machine.cluster_size = cluster_size, machine.shared_bytes = shared_bytes;
    machine.round = 0, machine.problem.clear();
    const size_t pitch = (shared_bytes + 1023) / 1024 * 1024;
    machine.shared.assign(blocks * pitch + 1024, 0xff);  // NaN
    unsigned char* const shared = (unsigned char*)(((uintptr_t)machine.shared.data() + 1023) & ~(uintptr_t)1023);
    machine.blocks.assign(blocks, Block{});
    for (int i = 0; i < blocks; i++) {
        machine.blocks[i].shared = shared + i * pitch;
        machine.blocks[i].warps.resize(threads / 32);
        machine.blocks[i].barrier.expected = threads;
    }
    machine.clusters.assign(blocks / cluster_size, Barrier{(unsigned)(cluster_size * threads)});
    machine.fibers.assign(count, Fiber{});
    for (size_t i = 0; i < count; i++) {
        Fiber& fiber = machine.fibers[i];
        fiber.rank = i / threads, fiber.thread = i % threads;
        getcontext(&fiber.start);
        fiber.start.uc_stack.ss_sp = machine.stacks + i * STACK_BYTES;
        fiber.start.uc_stack.ss_size = STACK_BYTES;
        fiber.start.uc_link = nullptr;
        makecontext(&fiber.start, run_body, 0);
    }
}
// Nobody can run: go to the time when a warp wakes up or something happens. Whether there is one.
inline bool skip_time() {
    unsigned next = machine.due();
    for (const Block& block : machine.blocks)
        for (const Warp& warp : block.warps)
            if (warp.asleep_until > machine.round) next = min(next, warp.asleep_until);
    if (next == NEVER) return false;
    machine.round = max(machine.round, next - 1);
    return true;
}
// What each warp waits for.
inline std::string who_waits() {
    std::map<std::string, std::string> warps;
    for (const Fiber& fiber : machine.fibers) {
        std::string& list = warps[fiber.done ? "" : fiber.wait.what];
        const std::string name = " " + std::to_string(fiber.rank) + "." + std::to_string(fiber.thread / 32);
        if (list.size() < name.size() || list.compare(list.size() - name.size(), name.size(), name)) list += name;
    }
    std::string text;
    for (const auto& [what, list] : warps)
        if (!what.empty()) text += " for " + what + " wait (block.warp)" + list + ";";
    return text;
}
// Runs machine.body in every thread of blocks that are resident together. Null, or what went wrong.
inline const char* run(int blocks, int threads, int shared_bytes, int cluster_size, unsigned seed) {
    prepare(blocks, threads, shared_bytes, cluster_size);
    machine.seed = 0x9E3779B97F4A7C15u * (seed + 1);
    const int warps = threads / 32, longest_sleep = seed % 2 ? 400 : 40;
    std::vector<int> order(blocks * warps);
    for (size_t i = 0; i < order.size(); i++) order[i] = i;
    for (int i = 0; i < blocks; i++) {
        const int late = machine.below(longest_sleep);
        for (Warp& warp : machine.blocks[i].warps) warp.asleep_until = late;
    }
    for (;;) {
        machine.round++;
        bool moved = machine.elapse();
        for (size_t i = order.size(); i > 1; i--) std::swap(order[i - 1], order[machine.below(i)]);
        for (int at : order) {
            Warp& warp = machine.blocks[at / warps].warps[at % warps];
            if (warp.asleep_until > machine.round) continue;
            if (!run_warp(at / warps, at % warps)) continue;
            if (!machine.problem.empty()) return machine.problem.c_str();
            moved = true;
            if (machine.below(100)) continue;
            const unsigned longest = machine.below(8) ? longest_sleep : 20 * longest_sleep;
            warp.asleep_until = machine.round + machine.below(longest);
        }
        if (moved) continue;
        if (std::all_of(machine.fibers.begin(), machine.fibers.end(), [](const Fiber& f) { return f.done; }))
            return nullptr;
        if (skip_time()) continue;
        machine.problem = "deadlock:" + who_waits();
        return machine.problem.c_str();
    }
}
