#include "cpu/avx512_kernels.h"

namespace speq::cpu {

const MicroKernels avx512_vnni_kernels = {
    dot_int4, dot_exact<float>, dot_exact<BFloat16>, dot_exact<Float16>, round_block, read_sum,
};

} // namespace speq::cpu
