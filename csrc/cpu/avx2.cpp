#include "cpu/avx2_vectors.h"
#include "cpu/decode_scaled_avx2.h"
#include "cpu/encode_avx2.h"

namespace speq::cpu {

const MicroKernels avx2_kernels =
    with_coded<Avx2, Avx2Encoders, Avx2Scaled, Avx2Lossless, Avx2Residual, PortableResidual>();

} // namespace speq::cpu
