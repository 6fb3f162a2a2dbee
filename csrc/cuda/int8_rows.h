// Inputs of INT4 products: rows rounded to INT8 in blocks of 32 columns.
//
// A block lies as the dot product reads it: a word of weights holds eight columns, and its low
// nibbles, taken together, are the even ones.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/dtype.h"
#include "int4.h"

namespace speq::cuda {

static_assert(kInt8Block == kLanes, "a lane rounds a column");

// The widest load.
constexpr int kVectorBytes = 16;
constexpr int kPairs = kInt8Block / 2;
static_assert(kPairs == kVectorBytes, "codes of one parity are a load");

// Blocks one after the other are an odd number of vectors apart, which is how the lanes of a row
// of weights, with a block each, read different banks of shared memory.
struct alignas(kVectorBytes) Int8Block {
  signed char even[kPairs], odd[kPairs];
  float scale;
  std::int32_t bias; // what the zero point of the weights adds to a dot product of their codes
};
static_assert(sizeof(Int8Block) / kVectorBytes % 2 == 1);

constexpr SPEQ_INLINE int int8_blocks(int columns) {
  return (columns + kInt8Block - 1) / kInt8Block;
}

// A warp rounds a block; each lane has the value of its column.
SPEQ_DEVICE void round_block(float value, Int8Block &block) {
  // Magnitudes compare as their bits do, and NaN above all.
  const std::uint32_t bits = bits_as<std::uint32_t>(value) & 0x7FFFFFFFu;
  const float largest = bits_as<float>(std::uint32_t(__reduce_max_sync(kAllLanes, bits)));
  const auto [scale, inverse] = int8_scale(largest);
  const int code = inverse > 0.0f ? int(rintf(value * inverse)) : 0;
  const int sum = __reduce_add_sync(kAllLanes, code);
  const int lane = lane_id();
  (lane % 2 == 0 ? block.even : block.odd)[lane / 2] = static_cast<signed char>(code);
  if (lane == 0) {
    block.scale = scale;
    block.bias = -kInt4ZeroPoint * sum;
  }
}

struct Inputs {
  const void *values; // [*, columns]
  Dtype dtype;
  int columns;
};

// Loads that a lane has under way at a time.
constexpr int kInputLoads = 8;

template <typename In>
SPEQ_DEVICE void load_at(const void *values, const int (&index)[kInputLoads],
                         float (&value)[kInputLoads]) {
#pragma unroll
  for (int i = 0; i < kInputLoads; ++i) {
    if (index[i] >= 0) {
      value[i] = to_float(static_cast<const In *>(values)[index[i]]);
    }
  }
}

// All threads round `rows` rows, of which the r-th is inputs' row row_of(r), to `out`.
//
// perm: column c is inputs' column perm[c]; null for the same. A column of no input is NaN.
template <typename RowOf>
SPEQ_DEVICE void round_rows(const Inputs &inputs, const std::int32_t *perm, int rows, RowOf row_of,
                            Int8Block *out) {
  const int blocks = int8_blocks(inputs.columns);
  for (int first = warp_id(); first < rows * blocks; first += kWarps * kInputLoads) {
    int index[kInputLoads];
    float value[kInputLoads];
#pragma unroll
    for (int i = 0; i < kInputLoads; ++i) {
      const int item = first + i * kWarps;
      const int column = item % blocks * kInt8Block + lane_id();
      index[i] = -1;
      value[i] = 0.0f;
      if (item < rows * blocks && column < inputs.columns) {
        const int source = perm == nullptr ? column : perm[column];
        value[i] = not_a_number();
        if (source >= 0 && source < inputs.columns) {
          index[i] = row_of(item / blocks) * inputs.columns + source;
        }
      }
    }
    switch (inputs.dtype) {
    case Dtype::float32:
      load_at<float>(inputs.values, index, value);
      break;
    case Dtype::float64:
      load_at<double>(inputs.values, index, value);
      break;
    case Dtype::bfloat16:
      load_at<BFloat16>(inputs.values, index, value);
      break;
    case Dtype::float16:
      load_at<Float16>(inputs.values, index, value);
      break;
    }
#pragma unroll
    for (int i = 0; i < kInputLoads; ++i) {
      const int item = first + i * kWarps;
      if (item < rows * blocks) {
        round_block(value[i], out[item]);
      }
    }
  }
}

} // namespace speq::cuda
