// Asynchronous copies into shared memory, bulk and tensor ones, of the emulated machine: part of instructions.cuh.
#pragma once

// Products of a block's warps that have begun and not ended must not lose what they read.
inline void check_place(int rank, uint32_t to, int bytes) {
    const auto overlap = [&](uint32_t from, int size) {
        return (from & 0xffffff) < (to & 0xffffff) + bytes && (to & 0xffffff) < (from & 0xffffff) + size;
    };
    for (const auto& [address, barrier] : machine.blocks[rank].barriers)
        if (overlap(address, 8)) fail("a copy over a barrier");
    for (const Landing& other : outside.landings)
        if (other.rank == rank && overlap(other.to, other.bytes)) fail("two copies into one place at once");
    for (int thread = 0; thread < machine.threads; thread += 32)
        for (const Product& product : machine.fibers[rank * machine.threads + thread].products)
            if (overlap((product.descriptor & 0x3FC0) << 4, product.blocks * 1024))
                fail("a copy over what a product still reads");
}
inline uint32_t swizzled(uint32_t address) {
    return address ^ (address >> 7 & 7) << 4;
}
inline void fetch(Landing& copy) {
    copy.data.assign(copy.bytes, 0);
    for (size_t i = 0; i < copy.rows.size(); i++)
        if (copy.rows[i]) std::memcpy(&copy.data[i * copy.row_bytes], copy.rows[i], copy.present);
}
inline void begin_copy(Landing copy) {
    copy.rank = (copy.to >> 24) - 1, copy.bytes = copy.row_bytes * copy.rows.size();
    unsigned char* place = place_of_address(copy.to, copy.bytes,
                                            copy.swizzled          ? 1024
                                            : copy.rows.size() > 1 ? 128
                                                                   : 16);
    check_place(copy.rank, copy.to, copy.bytes);
    std::memset(place, 0xff, copy.bytes);
    barrier_at(copy.bar);
    copy.due = machine.round + machine.below(outside.longest);
    if (machine.below(2)) fetch(copy);  // what it reads may be read at once, or at the end
    outside.landings.push_back(std::move(copy));
}
inline void land(Landing& copy) {
    if (copy.data.empty()) fetch(copy);
    Block& block = machine.blocks[copy.rank];
    for (int at = 0; at < copy.bytes; at += 16) {
        const uint32_t to = copy.to + at;
        std::memcpy(block.shared + ((copy.swizzled ? swizzled(to) : to) & 0xffffff) - SHARED_BASE, &copy.data[at], 16);
    }
    MemoryBarrier& barrier = block.barriers.at(copy.bar);
    barrier.bytes -= copy.bytes;
    // Those that the other block of a cluster sends may come before they are expected.
    if (barrier.bytes < 0 && machine.cluster_size == 1) machine.problem = "more bytes than expected";
    settle(barrier);
    const Fiber* fiber = &machine.fibers[copy.rank * machine.threads];
    if (std::all_of(fiber, fiber + machine.threads, [](const Fiber& f) { return f.done; }))
        machine.problem = "a copy into a block that has ended";
}
inline void bulk_copy(uint32_t to, const void* from, int bytes, uint32_t bar) {
    const unsigned char* first = (const unsigned char*)from;
    if ((uintptr_t)from % 16 || bytes % 16 || bytes <= 0) fail("a bulk copy of no multiple of 16 bytes");
    const auto inside = [&](const Span& span) { return first >= span.base && first + bytes <= span.base + span.bytes; };
    if (inside(outside.x)) need_predecessors("x");
    else if (!inside(outside.tiles)) fail("a bulk copy from outside the weights and x");
    begin_copy({0, 0, to, bar, {first}, bytes, bytes, 0, false, {}});
}
inline void cp_async_bulk_shared_cluster_global_mbarrier_complete_tx_bytes(uint32_t to, const void* from, int bytes,
                                                                           uint32_t bar) {
    bulk_copy(to, from, bytes, bar);
}
inline void cp_async_bulk_shared_cluster_global_mbarrier_complete_tx_bytes_L2_cache_hint(uint32_t to, const void* from,
                                                                                         int bytes, uint32_t bar,
                                                                                         uint64_t) {
    bulk_copy(to, from, bytes, bar);
}
inline void cp_async_bulk_shared_cluster_global_mbarrier_complete_tx_bytes_multicast_cluster(uint32_t to,
                                                                                             const void* from,
                                                                                             int bytes, uint32_t bar,
                                                                                             int mask) {
    const int first = machine.current->rank / machine.cluster_size * machine.cluster_size;
    for (int i = 0; i < machine.cluster_size; i++)
        if (mask >> i & 1) bulk_copy(address_in(to, first + i), from, bytes, address_in(bar, first + i));
}
inline void tensor_copy(uint32_t to, const void* tensor_map, int inner, int middle, int outer, uint32_t bar) {
    const Map& map = *(const Map*)tensor_map;
    if (map.base != outside.tiles.base) need_predecessors("a tensor copy");
    const int row_bytes = map.box[0] * map.element;
    const int present = max(0L, min((long)row_bytes, (map.sizes[0] - inner) * map.element));
    Landing copy{0, 0, to, bar, {}, row_bytes, present, 0, map.swizzled != 0, {}};
    for (long k = outer; k < outer + map.box[2]; k++)
        for (long j = middle; j < middle + map.box[1]; j++) {
            const unsigned char* row = map.base + k * map.strides[1] + j * map.strides[0] + inner * map.element;
            copy.rows.push_back(k < map.sizes[2] && j < map.sizes[1] ? row : nullptr);
        }
    begin_copy(std::move(copy));
}
inline void cp_async_bulk_tensor_2d_shared_cluster_global_tile_mbarrier_complete_tx_bytes(uint32_t to,
                                                                                          const void* tensor_map,
                                                                                          int inner, int middle,
                                                                                          uint32_t bar) {
    tensor_copy(to, tensor_map, inner, middle, 0, bar);
}
inline void cp_async_bulk_tensor_3d_shared_cluster_global_tile_mbarrier_complete_tx_bytes(uint32_t to,
                                                                                          const void* tensor_map,
                                                                                          int inner, int middle,
                                                                                          int outer, uint32_t bar) {
    tensor_copy(to, tensor_map, inner, middle, outer, bar);
}
inline void cp_async_bulk_tensor_3d_shared_cluster_global_tile_mbarrier_complete_tx_bytes_L2_cache_hint(
    uint32_t to, const void* tensor_map, int inner, int middle, int outer, uint32_t bar, uint64_t) {
    tensor_copy(to, tensor_map, inner, middle, outer, bar);
}
