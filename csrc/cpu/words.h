// Words of 16 or 32 bits whose type is known at run time only.
#pragma once

#include <algorithm>
#include <cstddef>

#include "cpu/isa.h"

namespace speq::cpu {

enum class Word { float32, bfloat16, float16 };

constexpr std::int64_t bytes_of(Word word) { return word == Word::float32 ? 4 : 2; }

// Calls body with a value of the type that a word is stored in.
template <typename Body> void with_type(Word word, const Body &body) {
  switch (word) {
  case Word::bfloat16:
    return body(BFloat16{});
  case Word::float16:
    return body(Float16{});
  default:
    return body(float{});
  }
}

inline DotExact dot_for(Word word) {
  const MicroKernels &kernels = micro_kernels();
  switch (word) {
  case Word::bfloat16:
    return kernels.dot_bfloat16;
  case Word::float16:
    return kernels.dot_float16;
  default:
    return kernels.dot_float32;
  }
}

constexpr std::int64_t padded(std::int64_t columns) {
  return (columns + kExactColumns - 1) / kExactColumns * kExactColumns;
}

// Rows of words as the exact products take them: float32, padded with zeros.
inline void widen_rows(const void *words, Word word, std::int64_t rows, std::int64_t columns,
                       float *out) {
  const std::int64_t stride = padded(columns);
  with_type(word, [&](auto type) {
    const auto *from = static_cast<const decltype(type) *>(words);
    for (std::int64_t row = 0; row < rows; ++row) {
      float *values = out + row * stride;
      for (std::int64_t i = 0; i < columns; ++i) {
        values[i] = to_float(from[row * columns + i]);
      }
      std::fill(values + columns, values + stride, 0.0f);
    }
  });
}

} // namespace speq::cpu
