// One many-row kernel with an fp32 result: all of many_rows_wide.cu would take seconds to compile.
#include "many_rows.cuh"

extern "C" void many_rows_64_2_4_4_wide(Params p, TensorMap w_map, TensorMap x_map, TensorMap u_map) {
    many_rows<64, 2, 4, 4, true>(p, &w_map, &x_map, &u_map);
}
