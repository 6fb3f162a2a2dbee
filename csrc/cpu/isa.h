// Which instruction set the CPU kernels use: the best that the processor has, or a lesser one that
// tests and benchmarks ask for.
#pragma once

#include "cpu/micro_kernels.h"

namespace speq::cpu {

// In the order of ISAS in speq/kernels/library.py, best first.
enum class Isa : int {
  avx512_amx,
  avx512_bf16,
  avx512_vbmi2,
  avx512_vnni,
  avx512,
  avx2,
  neon_bf16,
  neon_dot,
  neon,
  portable
};

Isa best_isa();
Isa current_isa();
const MicroKernels &micro_kernels();

// Whether ops of this thread keep the order of sum_order.h, for which pairs of bfloat16 are not
// multiplied.
bool sums_in_order();

// The product of an INT4 matrix: the vectorised one where it takes the matrix's groups.
DotInt4 dot_int4_for(const Int4Matrix &matrix);

} // namespace speq::cpu
