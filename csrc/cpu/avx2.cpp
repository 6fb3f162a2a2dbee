// The vectors of AVX2 with FMA and F16C, for tiles.h.
#include <immintrin.h>

#include "cpu/decode_scaled_avx2.h"
#include "cpu/encode_avx2.h"
#include "cpu/tiles.h"

namespace speq::cpu {
namespace {

struct Avx2 {
  using Floats = __m256;
  using Bytes = __m256i;
  static constexpr int kLanes = 8, kBytes = 32, kRegisters = 16;

  static Floats zero() { return _mm256_setzero_ps(); }
  static Floats all(float value) { return _mm256_set1_ps(value); }
  static void store(Floats v, float *values) { _mm256_storeu_ps(values, v); }
  static Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
  static Floats fmadd(Floats a, Floats b, Floats sum) { return _mm256_fmadd_ps(a, b, sum); }
  static float sum(Floats v) {
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
  }

  static Floats load(const float *words) { return _mm256_loadu_ps(words); }
  static Floats load(const BFloat16 *words) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves(words)), 16));
  }
  static Floats load(const Float16 *words) { return _mm256_cvtph_ps(halves(words)); }

  template <typename Word> static Floats load_part(const Word *words, std::int64_t count) {
    Word whole[kLanes] = {};
    std::memcpy(whole, words, count * sizeof(Word));
    return load(whole);
  }

  static Bytes load_bytes(const std::uint8_t *bytes) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(bytes));
  }

  struct Nibbles {
    explicit Nibbles(Bytes bytes)
        : low(_mm256_and_si256(bytes, _mm256_set1_epi8(0xF))),
          high(_mm256_and_si256(_mm256_srli_epi16(bytes, 4), _mm256_set1_epi8(0xF))) {}
    Floats dot(const std::int8_t *even, const std::int8_t *odd, const std::int32_t *start) const {
      // Codes are below 16: four products of at most 15 * 127 fit into 16 bits.
      const Bytes pairs = _mm256_add_epi16(_mm256_maddubs_epi16(low, aligned(even)),
                                           _mm256_maddubs_epi16(high, aligned(odd)));
      const Bytes sums = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
      return _mm256_cvtepi32_ps(_mm256_add_epi32(aligned(start), sums));
    }
    Bytes low, high;
  };

  // A load is half a step: of two scales to a step, it has one.
  template <int kPerStep> static Floats spread(const Float16 *scales) {
    if constexpr (kPerStep != 4) {
      return _mm256_cvtph_ps(_mm_set1_epi16(short(scales->bits)));
    } else {
      std::int32_t pair;
      std::memcpy(&pair, scales, sizeof pair);
      return _mm256_permutevar8x32_ps(_mm256_cvtph_ps(_mm_set1_epi32(pair)),
                                      _mm256_set_epi32(1, 1, 1, 1, 0, 0, 0, 0));
    }
  }

private:
  static __m128i halves(const void *words) {
    return _mm_loadu_si128(static_cast<const __m128i *>(words));
  }
  static Bytes aligned(const void *address) {
    return _mm256_load_si256(static_cast<const __m256i *>(address));
  }
};

} // namespace

const MicroKernels avx2_kernels =
    with_coded<Avx2, Avx2Encoders, Avx2Scaled, Avx2Lossless, Avx2Residual, PortableResidual>();

} // namespace speq::cpu
