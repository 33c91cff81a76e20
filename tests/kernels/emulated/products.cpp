// Runs an entry point of the products; see instructions.cuh.
#include "tiles.cuh"

Machine machine;
Outside outside;

struct TensorMap {
    alignas(64) unsigned char opaque[128];
};

__attribute__((optimize("O3"))) void end_product(Fiber* lanes, int index) {
    const Product& first = lanes->products[index];
    const int rank = lanes->rank;
    const uint32_t base = (first.descriptor & 0x3fff) << 4;
    float a[16][16];  // [k][row]
    for (int lane = 0; lane < 32; lane++) {
        const Product& product = lanes[lane].products.at(index);
        if (product.descriptor != first.descriptor) fail("lanes that disagree about a product");
        for (int i = 0; i < 4; i++) {
            if (product.fragment[i] != product.held[i]) fail("a register changed while a product reads it");
            for (int half = 0; half < 2; half++)
                a[lane % 4 * 2 + i / 2 * 8 + half][lane / 4 + i % 2 * 8] = widened<false>(product.held[i] >> 16 * half);
        }
    }
    for (int token = 0; token < first.blocks * 8; token++) {
        float b[16];
        for (int k = 0; k < 16; k += 8) {
            const uint32_t address = swizzled(base + token / 8 * 1024 + token % 8 * 128 + k * 2);
            const unsigned char* units = place_of_address(address_in(address, rank), 16);
            for (int i = 0; i < 8; i++) b[k + i] = widened<false>(units[2 * i] | units[2 * i + 1] << 8);
        }
        float sums[16] = {};
        for (int k = 0; k < 16; k++)
            for (int row = 0; row < 16; row++) sums[row] += a[k][row] * b[k];
        for (int row = 0; row < 16; row++) {
            const int lane = row % 8 * 4 + token % 8 / 2;
            lanes[lane].products[index].sums[token / 8 * 4 + row / 8 * 2 + token % 2] += sums[row];
        }
    }
}

static bool elapse() {
    bool any = false;
    if (!outside.predecessors && machine.round >= outside.predecessors_end) {
        for (const Hidden& of : outside.hidden) std::copy(of.bytes.begin(), of.bytes.end(), of.place.base);
        outside.predecessors = any = 1;
    }
    for (size_t i = 0; i < outside.landings.size();) {
        if (outside.landings[i].due > machine.round) {
            i++;
            continue;
        }
        land(outside.landings[i]);
        outside.landings.erase(outside.landings.begin() + i), any = true;
    }
    return any;
}
// All that a kernel reads but weights: x, the factors of LoRA, bias, scales.
static void hide(const Params& p) {
    outside.hidden.emplace_back(outside.x.base, outside.x.bytes);
    if (p.bias) outside.hidden.emplace_back(p.bias, p.n * 2);
    if (p.global_scale) outside.hidden.emplace_back(p.global_scale, p.segments * 4);
    if (p.lora.a) outside.hidden.emplace_back(p.lora.a, (size_t)p.lora.width * p.k * 2);
    for (int s = 0; p.lora.u && s < p.segments; s++) {
        const size_t rows = (p.segment_end[s] - (s ? p.segment_end[s - 1] : 0)) * 16;
        if (p.lora.rank[s]) outside.hidden.emplace_back(p.lora.b + p.lora.offset[s], rows * p.lora.rank[s] * 2);
    }
}
static unsigned next_due() {
    unsigned next = outside.predecessors ? NEVER : outside.predecessors_end;
    for (const Landing& copy : outside.landings) next = min(next, copy.due);
    return next;
}
// What must hold when all threads have ended.
static const char* check_the_end() {
    for (const Block& block : machine.blocks)
        for (const auto& [address, barrier] : block.barriers)
            if (barrier.bytes) return "bytes expected that never came";
            else if (!barrier.stores.empty() || !barrier.told.empty()) return "stores that a barrier told nobody of";
    for (const Fiber& fiber : machine.fibers)
        if (!fiber.products.empty() || !fiber.stores.empty()) return "products or stores that nobody waited for";
    return nullptr;
}
// Null, or what went wrong. maps: of weights, x and u, or null. An odd seed makes copies slow and sleeps long.
extern "C" const char* emulate(void* entry, const Params* params, const TensorMap* maps, int grid, int cluster,
                               int threads, int shared_bytes, unsigned seed) {
    const Params p = *params;
    outside = Outside{};
    outside.x = {(unsigned char*)p.x, (size_t)p.m * p.k * 2};
    outside.tiles = {(unsigned char*)p.tiles, (size_t)(p.n / 16) * (p.k / 64) * WINDOW_BYTES};
    hide(p);
    outside.longest = seed % 2 ? 100 : 1 + seed % 8 * 4, outside.elected = seed % 32;
    outside.predecessors_end = seed * 37 % 100;
    machine.elapse = elapse, machine.due = next_due, machine.first_block = machine.row = 0;
    if (maps)
        machine.body = [=] {
            ((void (*)(Params, TensorMap, TensorMap, TensorMap))entry)(p, maps[0], maps[1], maps[2]);
        };
    else machine.body = [=] { ((void (*)(Params))entry)(p); };
    const char* problem = run(grid, threads, shared_bytes, cluster, seed);
    return problem ? problem : check_the_end();
}
