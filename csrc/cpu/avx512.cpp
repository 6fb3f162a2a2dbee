#include "cpu/avx512_vectors.h"

namespace speq::cpu {

const MicroKernels avx512_kernels = kernels_over<Avx512>;

} // namespace speq::cpu
