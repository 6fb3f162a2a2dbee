// Norms of rows: what layers do before their products, and attention to its heads.
#pragma once

#include <cmath>
#include <type_traits>

#include "half.h"

namespace speq::cpu {

// Added up in an order that depends on the columns alone.
template <typename Type> float sum_of_squares(const Type *values, std::int64_t columns) {
  constexpr std::int64_t kLanes = 16; // sums side by side, so that vectors take them
  float sums[kLanes] = {};
  std::int64_t k = 0;
  for (; k + kLanes <= columns; k += kLanes) {
    for (std::int64_t i = 0; i < kLanes; ++i) {
      const float value = to_float(values[k + i]);
      sums[i] += value * value;
    }
  }
  for (std::int64_t i = 0; k + i < columns; ++i) {
    const float value = to_float(values[k + i]);
    sums[i] += value * value;
  }
  float sum = 0.0f;
  for (const float lane : sums) {
    sum += lane;
  }
  return sum;
}

// values to their RMS norm: divided by the root of their mean square, rounded to Type, times
// weight, rounded again, as transformers rounds them. A weight of float32 has the norm rounded
// once, at its end. May work in place.
template <typename Type, typename Weight>
void rms_norm(const Type *values, const Weight *weight, std::int64_t columns, float eps,
              Type *out) {
  const float scale = 1.0f / std::sqrt(sum_of_squares(values, columns) / float(columns) + eps);
  for (std::int64_t k = 0; k < columns; ++k) {
    float normed = to_float(values[k]) * scale;
    if constexpr (std::is_same_v<Type, Weight>) {
      normed = rounded_to<Type>(normed);
    }
    store(to_float(weight[k]) * normed, out[k]);
  }
}

} // namespace speq::cpu
