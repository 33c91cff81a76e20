// Stands in for the ptx.cuh of the decode attention, so that a C++ compiler can build it for a CPU.
//
// Asynchronous copies happen as late as the kernel's waits allow, or at once (`eager`): a copy not waited for, and one
// into a place still in use, are both seen.
#pragma once
#include <cstdint>
#include <vector>

struct Copy {
    unsigned char* to;
    const void* from;
    bool present;
};
struct ThreadState {
    std::vector<Copy> open;
    std::vector<std::vector<Copy>> groups;
};
struct WarpState {};
struct BlockState {};
#include "machine.cuh"
extern bool eager;

inline uint32_t smem_address(const void* p) {
    return __cvta_generic_to_shared(p);
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
    if ((uintptr_t)from % 16) fail("a copy from an address that is no multiple of 16");
    const Copy copy{place_of_address(to, 16), from, present};
    if (eager) perform(copy);
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

inline void load_matrices(uint32_t (&f)[4], uint32_t address) {
    load_matrices_as(f, address, false);
}
inline void load_transposed(uint32_t (&f)[4], uint32_t address) {
    load_matrices_as(f, address, true);
}
template <bool HALF>
inline void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    multiply_tile<HALF>(c, a, b0, b1);
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
inline uint32_t e4m3_of(float value) {
    if (value != value) return 0x7f;
    const uint32_t sign = std::signbit(value) ? 0x80 : 0;
    const float magnitude = min(std::fabs(value), 448.0f);
    int exponent;
    std::frexp(magnitude, &exponent);  // magnitude < 2^exponent
    const int step = max(exponent - 4, -9);
    const float rounded = std::nearbyint(std::ldexp(magnitude, -step));  // nearest even, in units of 2^step
    if (rounded < 8) return sign | (uint32_t)rounded;                    // below 2^-6, and 0
    return sign | (uint32_t)((step + 9) * 8 + rounded);                  // 16 carries into the exponent
}
inline uint32_t pack_e4m3(float lower, float upper) {
    return e4m3_of(upper) << 8 | e4m3_of(lower);
}
// Rounded each: emulation.py forbids the compiler to fuse them.
inline float __fmul_rn(float a, float b) {
    return a * b;
}
inline float __fadd_rn(float a, float b) {
    return a + b;
}
inline float __fsub_rn(float a, float b) {
    return a - b;
}
inline float __fsqrt_rn(float x) {
    return std::sqrt(x);
}
inline float divide(float x, float y) {
    return x / y;
}
inline float exp2_fast(float x) {
    return std::exp2(x);
}

inline void launch_dependents() {}
inline void wait_for_predecessors() {}
inline void cluster_announce() {
    cluster_arrive();
}
