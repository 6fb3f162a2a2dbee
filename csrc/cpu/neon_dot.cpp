#include "cpu/decode_neon.h"
#include "cpu/neon_vectors.h"

namespace speq::cpu {

const MicroKernels neon_dot_kernels =
    with_coded<Neon, PortableEncoders, NeonScaled, NeonLossless, PortableResidual>();

} // namespace speq::cpu
