// AVX-512 with VNNI, VBMI and VBMI2.
#include "cpu/decode_scaled_avx2.h"
#include "cpu/decode_vbmi2.h"

namespace speq::cpu {

const MicroKernels avx512_vbmi2_kernels =
    with_coded<Avx512, Avx2Scaled, VectorLossless, VectorResidual, Avx2Residual,
               PortableResidual>();

} // namespace speq::cpu
