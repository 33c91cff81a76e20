// The instructions that C++ has no word for, one a function. tests/kernels/emulated replaces this file, and only this
// one, to run the kernels on a CPU.
#pragma once
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;

__device__ __forceinline__ unsigned char* dynamic_shared() {
    extern __shared__ __align__(128) unsigned char shared[];
    return shared;
}
__device__ __forceinline__ uint32_t smem_address(const void* p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

// 16 bytes on their way to shared memory; zeros instead where they are not `present`.
__device__ __forceinline__ void copy16(uint32_t dst, const void* src, bool present) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(present ? 16 : 0)
                 : "memory");
}
__device__ __forceinline__ void copies_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int PENDING>
__device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
// Only asks for the bytes to be in the L2 cache: no value is read.
__device__ __forceinline__ void hint_l2(const void* src) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(src) : "memory");
}
// Past the L1 cache, so that a value read before the wait for predecessors is not found again behind it.
__device__ __forceinline__ int load_l2(const int* src) {
    int value;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(src) : "memory");
    return value;
}

// Four 8x8 matrices of 16-bit units, one row address a lane: lane (g, t) gets units 2t, 2t+1 of row g ...
__device__ __forceinline__ void load_matrices(uint32_t (&f)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(f[0]), "=r"(f[1]), "=r"(f[2]), "=r"(f[3])
                 : "r"(address)
                 : "memory");
}
// ... or unit g of rows 2t, 2t+1.
__device__ __forceinline__ void load_transposed(uint32_t (&f)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(f[0]), "=r"(f[1]), "=r"(f[2]), "=r"(f[3])
                 : "r"(address)
                 : "memory");
}

// c += a b of 16-bit floats: fp16 or bf16.
template <bool HALF>
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if (HALF)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <bool HALF>
__device__ __forceinline__ uint32_t pack(float lower, float upper) {
    uint32_t d;
    if (HALF) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(upper), "f"(lower));
    else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(upper), "f"(lower));
    return d;
}
// Four E4M3 bytes as fp16, two a register: exact.
__device__ __forceinline__ void widen(uint32_t bytes, uint32_t& lower, uint32_t& upper) {
    asm("{.reg .b16 l, u; mov.b32 {l, u}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, u;}"
        : "=r"(lower), "=r"(upper)
        : "r"(bytes));
}
// To E4M3, nearest even, saturating at 448; NaN becomes 0x7f.
__device__ __forceinline__ uint32_t pack_e4m3(float lower, float upper) {
    uint16_t d;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(d) : "f"(upper), "f"(lower));
    return d;
}
// As Triton divides.
__device__ __forceinline__ float divide(float x, float y) {
    float d;
    asm("div.full.f32 %0, %1, %2;" : "=f"(d) : "f"(x), "f"(y));
    return d;
}
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Programmatic dependent launch: the next kernel may start; whoever reads or writes what others touch waits first.
__device__ __forceinline__ void launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
__device__ __forceinline__ void wait_for_predecessors() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Barrier of a cluster in two halves; an announcement brings no earlier writes with it.
__device__ __forceinline__ void cluster_announce() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The place in the shared memory of block `rank` of the cluster.
__device__ __forceinline__ uint32_t address_in(uint32_t address, int rank) {
    uint32_t mapped;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
    return mapped;
}
__device__ __forceinline__ void store_in(uint32_t mapped, float4 value) {
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(mapped), "f"(value.x), "f"(value.y),
                 "f"(value.z), "f"(value.w)
                 : "memory");
}
__device__ __forceinline__ void store_in(uint32_t mapped, float2 value) {
    asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(mapped), "f"(value.x), "f"(value.y) : "memory");
}
