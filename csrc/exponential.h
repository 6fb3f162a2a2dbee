// Exponentials and what follows from them, in products, sums and quotients that processors and
// cards round alike. (Their own functions differ in last bits.)
#pragma once

#include <cstdint>

#include "half.h"

namespace speq {

// Adding and subtracting 1.5 * 2^23 rounds a float to the nearest whole number, ties to even.
constexpr float kRounder = 12582912.0f;

// e^x = mantissa * 2^exponent. The polynomial is that of Cephes' expf.
struct Exponential {
  float mantissa;
  std::int32_t exponent;
};

SPEQ_INLINE Exponential exponential_parts(float x) {
  const float shifted = x * 1.44269504f + kRounder, power = shifted - kRounder;
  const float rest = x - power * 0.693359375f + power * 2.12194440e-4f;
  float sum = 1.9875691500e-4f;
  sum = sum * rest + 1.3981999507e-3f;
  sum = sum * rest + 8.3334519073e-3f;
  sum = sum * rest + 4.1665795894e-2f;
  sum = sum * rest + 1.6666665459e-1f;
  sum = sum * rest + 5.0000001201e-1f;
  return {sum * rest * rest + rest + 1.0f,
          std::int32_t(bits_as<std::uint32_t>(shifted) - bits_as<std::uint32_t>(kRounder))};
}

SPEQ_INLINE float power_of_two(std::int32_t exponent) {
  return bits_as<float>((std::uint32_t(exponent) << 23) + 0x3F800000u);
}

// e^x of any x; NaN of NaN.
SPEQ_INLINE float exponential(float x) {
  const Exponential parts = exponential_parts(x);
  // In two steps: one power of two may be no normal number.
  const std::int32_t half = parts.exponent >> 1;
  const float value = parts.mantissa * power_of_two(half) * power_of_two(parts.exponent - half);
  constexpr float kMost = 89.0f, kLeast = -104.0f;
  return x > kMost ? bits_as<float>(0x7F800000u) : x < kLeast ? 0.0f : value;
}

// x times the share that a sigmoid of y leaves of it.
SPEQ_INLINE float times_sigmoid(float x, float y) { return x / (1.0f + exponential(-y)); }

// The error function, within three units of the last place. Polynomials fitted to it: by x^2 below
// 1; beyond, of what e^-x^2 leaves of 1, by 1 / (1 + x / 2).
SPEQ_INLINE float error_function(float x) {
  const float size = x < 0.0f ? -x : x;
  const float square = x * x;
  if (size < 1.0f) {
    float sum = 7.882497448e-5f;
    sum = sum * square - 8.0188555e-4f;
    sum = sum * square + 5.189312156e-3f;
    sum = sum * square - 2.6854328811e-2f;
    sum = sum * square + 1.1283597350e-1f;
    sum = sum * square - 3.7612625957e-1f;
    sum = sum * square + 1.1283791065f;
    return x * sum;
  }
  const float t = 1.0f / (1.0f + 0.5f * size);
  float sum = -5.3540617228e-2f;
  sum = sum * t - 5.7338733226e-2f;
  sum = sum * t + 4.0383837027e-1f;
  sum = sum * t + 1.0126824677e-1f;
  sum = sum * t + 3.3084067702e-1f;
  sum = sum * t + 2.7361816168e-1f;
  sum = sum * t + 6.0640875017e-4f;
  const float result = 1.0f - exponential(-square) * sum;
  return x < 0.0f ? -result : result;
}

} // namespace speq
