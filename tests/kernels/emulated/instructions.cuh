// The instructions of the products, one a function, named as emulation.py names them. They are as late as they may be,
// and strict: what the hardware would hang on, trap, or silently compute wrongly, ends the run with a message.
//
// Copies land after a random time; from their start on, what was in their place is gone (NaN). A product (wgmma) reads
// shared memory and writes its sums as the wait for it ends, which ends when all four warps have come to it. What
// st.global.cg stores is seen after the thread's next fence, or that of a thread to which a barrier has told of it. The
// kernel before this one ends at a random time: until then, x is NaN.
#pragma once
#include <cstdint>
#include <map>
#include <vector>

struct Product {
    float* sums;
    const uint32_t* fragment;  // must stay as it is while the product runs
    uint32_t held[4];
    uint64_t descriptor;
    int blocks, group;
};
struct Store {
    float* to;
    float value[4];
};
struct ThreadState {
    std::vector<Product> products;  // begun, not ended
    std::vector<Store> stores;      // not seen by others yet
    int committed = 0;              // groups of products
    bool fenced = false, after_predecessors = false;
};
struct WarpState {
    int commits = 0;  // of all lanes
};
struct MemoryBarrier {
    int count, pending;
    long bytes;  // on their way
    unsigned phase;
    std::vector<Store> stores, told;  // of those that arrived in this phase; in phases that are over
};
struct BlockState {
    std::map<uint32_t, MemoryBarrier> barriers;
    unsigned commit_events = 0;
    struct {
        unsigned arrived, phase;
        bool any, said;  // by the threads that have come; by all of the last phase
    } named[16] = {};
};
#include "machine.cuh"

#define __shared__
#define __align__(bytes)

struct Map {  // what the test puts in place of a tensor map: innermost dimension first, strides of the others in bytes
    const unsigned char* base;
    long element, swizzled, sizes[3], strides[2], box[3];
};
struct Landing {
    unsigned due;
    int rank;
    uint32_t to, bar;
    std::vector<const unsigned char*> rows;  // null: zeros
    int row_bytes, present, bytes;           // bytes of a row, those of it that are in memory, of all rows
    bool swizzled;
    std::vector<unsigned char> data;
};
struct Span {
    unsigned char* base;
    size_t bytes;
};
struct Hidden {  // NaN until the kernels before have ended: what they may still write
    Span place;
    std::vector<unsigned char> bytes;
    Hidden(const void* base, size_t size) : place{(unsigned char*)base, size}, bytes(place.base, place.base + size) {
        std::memset(place.base, 0xff, size);
    }
};
struct Outside {  // of the blocks
    std::vector<Landing> landings;
    int longest, elected;       // longest time of a copy; which lane elect.sync chooses
    unsigned predecessors_end;  // round
    unsigned predecessors = 0;  // whether they have ended
    std::vector<Hidden> hidden;
    Span x, tiles;
};
extern Outside outside;

inline void need_predecessors(const char* what) {
    if (!machine.current->after_predecessors) fail(std::string(what) + " before the wait for predecessors");
}

// ---- barriers in shared memory
inline MemoryBarrier& barrier_at(uint32_t address) {
    place_of_address(address, 8);
    auto& barriers = machine.blocks[(address >> 24) - 1].barriers;
    const auto found = barriers.find(address);
    if (found == barriers.end()) fail("no barrier at this address");
    return found->second;
}
inline void hand_over(std::vector<Store>& from, std::vector<Store>& to) {
    to.insert(to.end(), from.begin(), from.end());
    from.clear();
}
inline void settle(MemoryBarrier& barrier) {
    if (barrier.pending || barrier.bytes) return;
    barrier.phase++, barrier.pending = barrier.count;
    hand_over(barrier.stores, barrier.told);
}
inline void mbarrier_init_shared_cta_b64(uint32_t address, int count) {
    place_of_address(address, 8);
    if (!this_block().barriers.emplace(address, MemoryBarrier{count, count, 0, 0, {}, {}}).second) fail("initialized twice");
}
inline void mbarrier_arrive_shared_cta_b64(uint32_t address) {
    MemoryBarrier& barrier = barrier_at(address);
    if (--barrier.pending < 0) fail("one arrival too many in a phase of a barrier");
    hand_over(machine.current->stores, barrier.stores);
    settle(barrier);
}
inline void mbarrier_arrive_expect_tx_shared_cta_b64(uint32_t address, int bytes) {
    MemoryBarrier& barrier = barrier_at(address);
    if (barrier.pending == 0) fail("bytes expected while those before are on their way");
    barrier.bytes += bytes;
    mbarrier_arrive_shared_cta_b64(address);
}
inline void mbarrier_try_wait_parity_shared_cta_b64(uint32_t address, int parity) {
    MemoryBarrier& barrier = barrier_at(address);
    while ((int)(barrier.phase & 1) == parity)
        wait_for_change(barrier.phase, barrier.phase, parity ? "parity 1" : "parity 0");
    hand_over(barrier.told, machine.current->stores);
}
inline void mapa_shared_cluster_u32(uint32_t& mapped, uint32_t address, int rank) {
    const int first = machine.current->rank / machine.cluster_size * machine.cluster_size;
    if (rank < 0 || rank >= machine.cluster_size) fail("a block outside the cluster");
    mapped = address_in(address, first + rank);
}
inline void need_running(uint32_t mapped) {
    const Fiber* fiber = &machine.fibers[((mapped >> 24) - 1) * machine.threads];
    if (std::all_of(fiber, fiber + machine.threads, [](const Fiber& f) { return f.done; }))
        fail("shared memory of a block that has ended");
}
inline void mbarrier_arrive_release_cluster_shared_cluster_b64(uint32_t mapped) {
    need_running(mapped);
    mbarrier_arrive_shared_cta_b64(mapped);
}
inline void mbarrier_try_wait_parity_acquire_cluster_shared_cta_b64(uint32_t address, int parity) {
    mbarrier_try_wait_parity_shared_cta_b64(address, parity);
}
inline void ld_shared_cluster_v4_f32(float& x, float& y, float& z, float& w, uint32_t mapped) {
    need_running(mapped);
    float values[4];
    std::memcpy(values, place_of_address(mapped, 16), 16);
    x = values[0], y = values[1], z = values[2], w = values[3];
}
inline void bar_sync(int index, unsigned threads) {
    auto& barrier = this_block().named[index];
    if (barrier.arrived >= threads) fail("a barrier of warps for other numbers of threads at once");
    const unsigned phase = barrier.phase;
    if (++barrier.arrived == threads) barrier.arrived = 0, barrier.phase++;
    wait_for_change(barrier.phase, phase, "other warps");
}
inline void bar_red_or_pred(uint32_t mine, int index, unsigned threads, uint32_t& any) {
    auto& barrier = this_block().named[index];
    barrier.any |= mine != 0;
    if (barrier.arrived + 1 == threads) barrier.said = barrier.any, barrier.any = false;
    bar_sync(index, threads);
    any = barrier.said;
}
inline void barrier_cluster_arrive_aligned() {
    cluster_arrive();
}
inline void barrier_cluster_wait_aligned() {
    cluster_wait();
}

#include "copies.cuh"

// ---- products
inline void wgmma_fence_sync_aligned() {
    machine.current->fenced = true;
}
inline void wgmma_commit_group_sync_aligned() {
    Fiber& fiber = *machine.current;
    fiber.committed++, fiber.fenced = false;
    if (++this_block().warps[fiber.thread / 32].commits % 32 == 0) this_block().commit_events++;
}
// Operands: the sums, four registers of the left operand, the descriptor of the right one.
template <int COUNT>
inline void begin_product(float* const (&sums)[COUNT], const uint32_t* const (&fragment)[4], uint64_t descriptor) {
    Fiber& fiber = *machine.current;
    for (int i = 0; i < COUNT; i++)
        if (sums[i] != sums[0] + i) fail("sums of a product in a wrong order");
    for (int i = 0; i < 4; i++)
        if (fragment[i] != fragment[0] + i) fail("registers of a product in a wrong order");
    if (!fiber.fenced) fail("a product without a fence");
    const bool right = descriptor >> 62 == 1 && (descriptor >> 32 & 0x3fff) == 64 && (descriptor >> 16 & 0x3fff) == 1;
    if (!right) fail("a wrong descriptor");
    Product product{sums[0], fragment[0], {}, descriptor, COUNT / 4, fiber.committed};
    std::copy(fragment[0], fragment[0] + 4, product.held);
    fiber.products.push_back(product);
}
#define WGMMA(N)                                                                                 \
    template <class... Operands>                                                                 \
    inline void wgmma_mma_async_sync_aligned_m64n##N##k16_f32_bf16_bf16(Operands&... operands) { \
        static_assert(sizeof...(operands) == N / 2 + 5, "");                                     \
        const void* const list[] = {&operands...};                                               \
        float* sums[N / 2];                                                                      \
        const uint32_t* fragment[4];                                                             \
        for (int i = 0; i < N / 2; i++) sums[i] = (float*)list[i];                               \
        for (int i = 0; i < 4; i++) fragment[i] = (const uint32_t*)list[N / 2 + i];              \
        begin_product(sums, fragment, *(const uint64_t*)list[N / 2 + 4]);                        \
    }
WGMMA(16)
WGMMA(32)
WGMMA(64)
WGMMA(128)
WGMMA(256)

// One product of a whole warp, the `index`-th of those that have not ended.
void end_product(Fiber* lanes, int index);
// The groups of products before `last` of a whole warpgroup.
inline void end_products(int last) {
    Fiber* const group = machine.current - machine.current->thread % 128;
    for (Fiber* lanes = group; lanes < group + 128; lanes += 32)
        while (!lanes->products.empty() && lanes->products[0].group < last) {
            end_product(lanes, 0);
            for (int lane = 0; lane < 32; lane++) lanes[lane].products.erase(lanes[lane].products.begin());
        }
}
inline void wgmma_wait_group_sync_aligned(int pending) {
    Fiber& fiber = *machine.current;
    Block& block = this_block();
    const int last = fiber.committed - pending, first_warp = fiber.thread / 128 * 4;
    __syncwarp();
    for (int warp = first_warp; warp < first_warp + 4; warp++)
        while (block.warps[warp].commits / 32 < last)
            wait_for_change(block.commit_events, block.commit_events, "products");
    end_products(last);  // by the first that comes here: the four tensor cores share what they read
}

// ---- the rest
inline void ldmatrix_sync_aligned_m8n8_x4_shared_b16(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d,
                                                     uint32_t address) {
    uint32_t found[4];
    load_matrices_as(found, address, false);
    a = found[0], b = found[1], c = found[2], d = found[3];
}
inline void mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(float& c0, float& c1, float& c2, float& c3, uint32_t a0,
                                                                uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                                                uint32_t b1) {
    float c[4] = {c0, c1, c2, c3};
    multiply_tile<false>(c, {a0, a1, a2, a3}, b0, b1);
    c0 = c[0], c1 = c[1], c2 = c[2], c3 = c[3];
}
inline void movmatrix_sync_aligned_m8n8_trans_b16(uint32_t& value) {
    const auto& words = exchange({value});
    const int g = this_lane() / 4, t = this_lane() % 4;
    const auto unit = [&](int row, int column) { return words[row * 4 + column / 2][0] >> 16 * (column & 1) & 0xffff; };
    value = unit(2 * t + 1, g) << 16 | unit(2 * t, g);
}
inline void cvt_rn_bf16x2_f32(uint32_t& result, float upper, float lower) {
    result = pack<false>(lower, upper);
}
inline void ex2_approx_f32(float& result, float x) {
    result = std::exp2(x);
}
inline void div_full_f32(float& result, float x, float y) {
    result = x / y;
}
inline uint32_t multiply_pairs(uint32_t a, uint16_t b) {
    return pack<false>(widened<false>(a) * widened<false>(b), widened<false>(a >> 16) * widened<false>(b));
}
inline void mul_rn_bf16x2_l(uint32_t b, uint32_t& result, uint32_t a) {
    result = multiply_pairs(a, b);
}
inline void mul_rn_bf16x2_h(uint32_t b, uint32_t& result, uint32_t a) {
    result = multiply_pairs(a, b >> 16);
}
inline uint32_t __funnelshift_l(uint32_t lower, uint32_t upper, int bits) {
    return upper << bits | lower >> (32 - bits);
}
inline void elect_sync(uint32_t& chosen) {
    chosen = this_lane() == outside.elected;
}
inline void mov_u32(int& cluster_rank) {
    cluster_rank = machine.current->rank % machine.cluster_size;
}
inline void griddepcontrol_wait() {
    wait_for_change(outside.predecessors, 0, "predecessors");
    machine.current->after_predecessors = true;
}
inline int atomicAdd(int* counter, int value) {
    need_predecessors("an atomic operation");
    const int before = *counter;
    *counter += value;
    return before;
}
inline void ld_acquire_gpu_global_s32(int& found, const int* counter) {
    need_predecessors("a read of a counter");
    wait_to_poll();
    found = *counter;
}
inline void __stcg(float4* to, float4 value) {
    need_predecessors("a store");
    machine.current->stores.push_back({&to->x, {value.x, value.y, value.z, value.w}});
}
inline float4 __ldcg(const float4* from) {
    return *from;
}
inline void __threadfence() {
    for (const Store& store : machine.current->stores) std::copy(store.value, store.value + 4, store.to);
    machine.current->stores.clear();
}
inline void prefetch_global_L2(const void* from) {  // reads it, for a sanitizer or a fault to tell of a wrong address
    (void)*(const volatile unsigned char*)from;
}
inline void createpolicy_fractional_L2_evict_first_b64(uint64_t&) {}
inline void griddepcontrol_launch_dependents() {}
inline void fence_mbarrier_init_release_cluster() {}
inline void fence_proxy_async_shared_cta() {}
inline void fence_proxy_async() {}
inline void setmaxnreg_inc_sync_aligned_u32(int) {}
inline void setmaxnreg_dec_sync_aligned_u32(int) {}
