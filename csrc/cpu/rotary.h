// Rotary embeddings of a head of queries or keys.
#pragma once

#include <cstdint>

#include "half.h"

namespace speq::cpu {

// Rotates column i with column i + rotary / 2; transformers rounds after each operation.
template <typename Type>
void rotate_halves(Type *head, const Type *cos, const Type *sin, std::int64_t rotary) {
  const auto round = [](float value) { return rounded_to<Type>(value); };
  const std::int64_t half = rotary / 2;
  for (std::int64_t i = 0; i < half; ++i) {
    const float first = to_float(head[i]), second = to_float(head[half + i]);
    store(round(first * to_float(cos[i])) + round(-second * to_float(sin[i])), head[i]);
    store(round(second * to_float(cos[half + i])) + round(first * to_float(sin[half + i])),
          head[half + i]);
  }
}

// Rotates neighbours as complex numbers in float32, by cos and sin [rotary / 2] of each pair.
template <typename Type>
void rotate_pairs(Type *head, const float *cos, const float *sin, std::int64_t rotary) {
  for (std::int64_t i = 0; i < rotary / 2; ++i) {
    const float real = to_float(head[2 * i]), imaginary = to_float(head[2 * i + 1]);
    store(real * cos[i] - imaginary * sin[i], head[2 * i]);
    store(real * sin[i] + imaginary * cos[i], head[2 * i + 1]);
  }
}

// Puts the first of all neighbours before the second of all: [0, 2, 4, ..., 1, 3, 5, ...].
template <typename Type> void part_pairs(const Type *head, std::int64_t rotary, Type *out) {
  for (std::int64_t i = 0; i < rotary / 2; ++i) {
    out[i] = head[2 * i];
    out[rotary / 2 + i] = head[2 * i + 1];
  }
}

} // namespace speq::cpu
