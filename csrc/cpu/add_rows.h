// Which of the kernels that add up weighted rows takes rows of a word.
#pragma once

#include "cpu/exact_rows.h"

namespace speq::cpu {

inline AddRows add_rows_for(Word word) {
  const MicroKernels &kernels = micro_kernels();
  switch (word) {
  case Word::bfloat16:
    return kernels.add_bfloat16;
  case Word::float16:
    return kernels.add_float16;
  default:
    return kernels.add_float32;
  }
}

} // namespace speq::cpu
