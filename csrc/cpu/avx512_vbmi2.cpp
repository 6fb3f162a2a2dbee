// AVX-512 with VNNI, VBMI and VBMI2.
#include "cpu/decode_scaled_vbmi2.h"
#include "cpu/encode_vbmi2.h"

namespace speq::cpu {

const MicroKernels avx512_vbmi2_kernels =
    with_coded<Avx512, VectorEncoders, VectorScaled, VectorLossless, VectorResidual, Avx2Residual,
               PortableResidual>();

} // namespace speq::cpu
