// Stands in for the ptx.cuh of the kernels, so that a C++ compiler can build them for a CPU.
//
// Every thread of a cluster is a fiber. What a warp does together (shuffles, ldmatrix, mma.sync) and the barriers
// switch fibers until all have come. Asynchronous copies happen as late as the kernel's waits allow, or at once
// (`eager`): a copy not waited for, and one into a place still in use, are both seen.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <stdexcept>
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

struct Copy {
    unsigned char* to;
    const void* from;
    bool present;
};
struct Barrier {
    int expected = 0, arrived = 0;
    unsigned phase = 0;
    unsigned arrive() {  // the phase to wait for the end of
        const unsigned mine = phase;
        if (++arrived == expected) arrived = 0, phase++;
        return mine;
    }
};
struct Warp {
    Barrier barrier;
    uint32_t words[32][6];
};
struct Block {
    std::vector<unsigned char> shared;
    std::vector<Warp> warps;
    Barrier barrier;
};
struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    int rank, thread;
    bool done;
    unsigned cluster_phase;
    std::vector<Copy> open;
    std::vector<std::vector<Copy>> groups;
};
struct Machine {
    std::vector<Block> blocks;
    std::vector<Fiber> fibers;
    Fiber* current;
    ucontext_t scheduler;
    Barrier cluster;
    bool eager;
    int first_block, row;  // blockIdx of the cluster's first block
};
extern Machine machine;

struct Index {
    int x, y;
};
#define threadIdx (Index{machine.current->thread, 0})
#define blockIdx (Index{machine.first_block + machine.current->rank, machine.row})

inline void switch_fiber() {
    swapcontext(&machine.current->context, &machine.scheduler);
}
inline void wait_for(Barrier& barrier, unsigned phase) {
    while (barrier.phase == phase) switch_fiber();
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

template <class T>
inline T __shfl_sync(unsigned, T value, int lane) {
    Warp& warp = this_warp();
    warp.words[this_lane()][0] = bits_as<uint32_t>(value);
    __syncwarp();
    const T found = bits_as<T>(warp.words[lane & 31][0]);
    __syncwarp();
    return found;
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
    return this_block().shared.data();
}
inline uint32_t address_in(uint32_t address, int rank) {
    return (address & 0xffffff) | (uint32_t)(rank + 1) << 24;
}
inline uint32_t smem_address(const void* p) {
    return address_in((uint32_t)((const unsigned char*)p - dynamic_shared()), machine.current->rank);
}
inline unsigned char* place_of_address(uint32_t address, int size) {
    Block& block = machine.blocks.at((address >> 24) - 1);
    const uint32_t offset = address & 0xffffff;
    if (offset + size > block.shared.size() || offset % size) throw std::out_of_range("shared memory");
    return block.shared.data() + offset;
}
template <class T>
inline void store_in(uint32_t address, T value) {
    std::memcpy(place_of_address(address, sizeof(T)), &value, sizeof(T));
}

inline void perform(const Copy& copy) {
    if (copy.present) std::memcpy(copy.to, copy.from, 16);
    else std::memset(copy.to, 0, 16);
}
inline void copy16(uint32_t to, const void* from, bool present) {
    if ((uintptr_t)from % 16) throw std::out_of_range("global memory");
    const Copy copy{place_of_address(to, 16), from, present};
    if (machine.eager) perform(copy);
    else machine.current->open.push_back(copy);
}
inline void copies_commit() {
    machine.current->groups.push_back(std::move(machine.current->open));
    machine.current->open.clear();
}
template <int PENDING>
inline void copies_wait() {
    auto& groups = machine.current->groups;
    while (groups.size() > PENDING) {
        for (const Copy& copy : groups.front()) perform(copy);
        groups.erase(groups.begin());
    }
}
inline void hint_l2(const void* from) {  // reads it, for a sanitizer or a fault to tell of a wrong address
    (void)*(const volatile unsigned char*)from;
}
inline int load_l2(const int* from) {
    return *from;
}

inline void load_matrices_as(uint32_t (&f)[4], uint32_t address, bool transposed) {
    Warp& warp = this_warp();
    warp.words[this_lane()][0] = address;
    __syncwarp();
    const int g = this_lane() / 4, t = this_lane() % 4;
    for (int matrix = 0; matrix < 4; matrix++) {
        uint16_t units[2];
        for (int i = 0; i < 2; i++) {
            const int row = transposed ? 2 * t + i : g, unit = transposed ? g : 2 * t + i;
            std::memcpy(&units[i], place_of_address(warp.words[8 * matrix + row][0], 16) + 2 * unit, 2);
        }
        f[matrix] = (uint32_t)units[1] << 16 | units[0];
    }
    __syncwarp();
}
inline void load_matrices(uint32_t (&f)[4], uint32_t address) {
    load_matrices_as(f, address, false);
}
inline void load_transposed(uint32_t (&f)[4], uint32_t address) {
    load_matrices_as(f, address, true);
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

template <bool HALF>
inline void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    Warp& warp = this_warp();
    const int lane = this_lane(), g = lane / 4, t = lane % 4;
    std::copy(a, a + 4, warp.words[lane]);
    warp.words[lane][4] = b0, warp.words[lane][5] = b1;
    __syncwarp();
    auto number = [&](int owner, int word, int k) { return widened<HALF>(warp.words[owner][word] >> 16 * (k & 1)); };
    for (int e = 0; e < 4; e++)
        for (int k = 0; k < 16; k++) {
            const int upper_k = k / 8, owner = k % 8 / 2;
            c[e] += number(4 * g + owner, e / 2 + 2 * upper_k, k) * number(4 * (2 * t + e % 2) + owner, 4 + upper_k, k);
        }
    __syncwarp();
}
inline uint32_t half_of_e4m3(uint32_t byte) {
    const int exponent = byte >> 3 & 15, mantissa = byte & 7;
    float value = exponent ? std::ldexp(1 + mantissa / 8.0f, exponent - 7) : std::ldexp(mantissa / 8.0f, -6);
    if ((byte & 0x7f) == 0x7f) value = NAN;
    return narrowed<true>(byte & 0x80 ? -value : value);
}
inline void widen(uint32_t bytes, uint32_t& lower, uint32_t& upper) {
    lower = half_of_e4m3(bytes & 0xff) | half_of_e4m3(bytes >> 8 & 0xff) << 16;
    upper = half_of_e4m3(bytes >> 16 & 0xff) | half_of_e4m3(bytes >> 24) << 16;
}
inline float exp2_fast(float x) {
    return std::exp2(x);
}

inline void launch_dependents() {}
inline void wait_for_predecessors() {}
inline void cluster_arrive() {
    machine.current->cluster_phase = machine.cluster.arrive();
}
inline void cluster_announce() {
    cluster_arrive();
}
inline void cluster_wait() {
    wait_for(machine.cluster, machine.current->cluster_phase);
}
