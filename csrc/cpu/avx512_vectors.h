// The vectors of AVX-512 (F, BW, VL, DQ), for tiles.h. Compiled twice, with and without VNNI;
// everything here has internal linkage.
#pragma once

#include <immintrin.h>

#include "cpu/tiles.h"

namespace speq::cpu {
namespace {

struct Avx512 {
  using Floats = __m512;
  using Bytes = __m512i;
  static constexpr int kLanes = 16, kBytes = 64, kRegisters = 32;

  static Floats zero() { return _mm512_setzero_ps(); }
  static Floats all(float value) { return _mm512_set1_ps(value); }
  static void store(Floats v, float *values) { _mm512_storeu_ps(values, v); }
  static Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  static Floats fmadd(Floats a, Floats b, Floats sum) { return _mm512_fmadd_ps(a, b, sum); }
  static float sum(Floats v) { return _mm512_reduce_add_ps(v); }

  static Floats load(const float *words) { return _mm512_loadu_ps(words); }
  static Floats load(const BFloat16 *words) { return widened(_mm256_loadu_epi16(words)); }
  static Floats load(const Float16 *words) { return _mm512_cvtph_ps(_mm256_loadu_epi16(words)); }

  static Floats load_part(const float *words, std::int64_t count) {
    return _mm512_maskz_loadu_ps(first(count), words);
  }
  static Floats load_part(const BFloat16 *words, std::int64_t count) {
    return widened(_mm256_maskz_loadu_epi16(first(count), words));
  }
  static Floats load_part(const Float16 *words, std::int64_t count) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(count), words));
  }

  static Floats load_apart(const float *words) {
    return beside(_mm256_loadu_ps(words), _mm256_loadu_ps(words + kSegmentColumns));
  }
  static Floats load_apart(const BFloat16 *words) { return widened(halves_apart(words)); }
  static Floats load_apart(const Float16 *words) { return _mm512_cvtph_ps(halves_apart(words)); }

  static Bytes load_bytes(const std::uint8_t *bytes) { return _mm512_loadu_si512(bytes); }

  struct Nibbles {
    explicit Nibbles(Bytes bytes)
        : low(_mm512_and_si512(bytes, _mm512_set1_epi8(0xF))),
          high(_mm512_and_si512(_mm512_srli_epi16(bytes, 4), _mm512_set1_epi8(0xF))) {}
    Floats dot(const std::int8_t *even, const std::int8_t *odd, const std::int32_t *start) const {
      const Bytes sum = dot_bytes(_mm512_load_si512(start), low, _mm512_load_si512(even));
      return _mm512_cvtepi32_ps(dot_bytes(sum, high, _mm512_load_si512(odd)));
    }
    Bytes low, high;
  };

  template <int kPerStep> static Floats spread(const Float16 *scales) {
    if constexpr (kPerStep == 1) {
      return _mm512_cvtph_ps(_mm256_set1_epi16(short(scales->bits)));
    } else if constexpr (kPerStep == 2) {
      std::int32_t pair;
      std::memcpy(&pair, scales, sizeof pair);
      return _mm512_permutexvar_ps(_mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0),
                                   _mm512_cvtph_ps(_mm256_set1_epi32(pair)));
    } else {
      std::int64_t four;
      std::memcpy(&four, scales, sizeof four);
      return _mm512_permutexvar_ps(_mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0),
                                   _mm512_cvtph_ps(_mm256_set1_epi64x(four)));
    }
  }

  static Floats widened(__m256i words) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
  }

private:
  static __mmask16 first(std::int64_t count) { return __mmask16((1u << count) - 1); }

  static Floats beside(__m256 low, __m256 high) {
    return _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
  }
  static __m256i halves_apart(const void *words) {
    const auto *first = static_cast<const std::uint16_t *>(words);
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_epi16(first)),
                                   _mm_loadu_epi16(first + kSegmentColumns), 1);
  }

  // sum + u8 . s8 over the four bytes of each lane. Codes are below 16, so that the 16-bit sums of
  // the detour without VNNI, at most 2 * 15 * 127 each, cannot overflow.
  static Bytes dot_bytes(Bytes sum, Bytes codes, Bytes inputs) {
#ifdef __AVX512VNNI__
    return _mm512_dpbusd_epi32(sum, codes, inputs);
#else
    const Bytes pairs = _mm512_maddubs_epi16(codes, inputs);
    return _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
#endif
  }
};

} // namespace
} // namespace speq::cpu
