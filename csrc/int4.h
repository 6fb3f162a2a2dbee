// The formats of the draft's arithmetic. Plain C++ without torch headers, so that every backend and
// every test can include it.
//
// Weights: INT4 codes, two to the byte, low nibble first, zero point 8, a float16 scale for each
// group of a row. Inputs: INT8 codes in blocks of 32 columns, each with a float32 scale.
#pragma once

#include <cstdint>

#include "portable.h"

namespace speq {

constexpr int kInt4ZeroPoint = 8;
constexpr int kInt8Block = 32;
constexpr float kInt8Max = 127.0f;
// Below it a block is zero: the inverse of its scale would overflow.
constexpr float kInt8Smallest = 1e-30f;

SPEQ_INLINE int low_code(std::uint8_t byte) { return (byte & 0xF) - kInt4ZeroPoint; }
SPEQ_INLINE int high_code(std::uint8_t byte) { return (byte >> 4) - kInt4ZeroPoint; }

// Scale of a block of inputs, and what to multiply an input by to find its code.
struct Int8Scale {
  float scale, inverse;
};

// largest is the greatest magnitude of the block; infinite or NaN, the whole block is NaN.
SPEQ_INLINE Int8Scale int8_scale(float largest) {
  if (!(largest <= 3.402823466e38f)) {
    return {largest - largest, 0.0f}; // NaN either way; codes are to be zero
  }
  if (largest < kInt8Smallest) {
    return {largest / kInt8Max, 0.0f};
  }
  return {largest / kInt8Max, kInt8Max / largest};
}

} // namespace speq
