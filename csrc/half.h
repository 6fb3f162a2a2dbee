// Scalar conversions between float and the 16-bit formats, round to nearest even.
#pragma once

#include <cstdint>
#include <cstring>

#include "portable.h"

namespace speq {

// std::bit_cast, which device code may not call.
template <typename To, typename From> SPEQ_INLINE To bits_as(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  std::memcpy(&result, &value, sizeof result);
  return result;
}

struct BFloat16 {
  std::uint16_t bits;
};

struct Float16 {
  std::uint16_t bits;
};

SPEQ_INLINE float to_float(float value) { return value; }

SPEQ_INLINE float to_float(BFloat16 value) {
  return bits_as<float>(std::uint32_t(value.bits) << 16);
}

SPEQ_INLINE float to_float(Float16 value) {
  const std::uint32_t sign = std::uint32_t(value.bits & 0x8000) << 16;
  const std::uint32_t magnitude = value.bits & 0x7FFF;
  if (magnitude >= 0x7C00) { // infinity or NaN: keep the payload
    return bits_as<float>(sign | 0x7F800000u | ((magnitude & 0x3FF) << 13));
  }
  // Shifting the exponent field and rescaling by 2^112 treats normals and subnormals alike.
  const float scaled = bits_as<float>(magnitude << 13) * 0x1p112f;
  return bits_as<float>(sign | bits_as<std::uint32_t>(scaled));
}

SPEQ_INLINE BFloat16 to_bfloat16(float value) {
  const std::uint32_t bits = bits_as<std::uint32_t>(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) {
    return {std::uint16_t((bits >> 16) | 0x40)};
  }
  return {std::uint16_t((bits + 0x7FFFu + ((bits >> 16) & 1)) >> 16)};
}

SPEQ_INLINE Float16 to_float16(float value) {
  const std::uint32_t bits = bits_as<std::uint32_t>(value);
  const std::uint16_t sign = std::uint16_t((bits >> 16) & 0x8000);
  const std::uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) {
    return {std::uint16_t(sign | 0x7E00)};
  }
  if (magnitude >= 0x477FF000u) { // rounds to 65536 or beyond
    return {std::uint16_t(sign | 0x7C00)};
  }
  if (magnitude < 0x38800000u) { // below the smallest normal: let the adder round
    const float shifted = bits_as<float>(magnitude) + 0.5f;
    return {std::uint16_t(sign | (bits_as<std::uint32_t>(shifted) - 0x3F000000u))};
  }
  const std::uint32_t rounded = magnitude + 0xFFFu + ((magnitude >> 13) & 1);
  return {std::uint16_t(sign | ((rounded - 0x38000000u) >> 13))};
}

SPEQ_INLINE float to_float(double value) { return float(value); }

SPEQ_INLINE void store(float value, float &out) { out = value; }
SPEQ_INLINE void store(float value, double &out) { out = value; }
SPEQ_INLINE void store(float value, BFloat16 &out) { out = to_bfloat16(value); }
SPEQ_INLINE void store(float value, Float16 &out) { out = to_float16(value); }

// value as it is after a visit to Out.
template <typename Out> SPEQ_INLINE float rounded_to(float value) {
  Out word;
  store(value, word);
  return to_float(word);
}

} // namespace speq
