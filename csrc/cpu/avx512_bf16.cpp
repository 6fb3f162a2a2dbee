// AVX-512 with VNNI, VBMI and VBMI2, and with products of pairs of bfloat16.
#include "cpu/decode_scaled_vbmi2.h"
#include "cpu/encode_vbmi2.h"
#include "cpu/pairs.h"

namespace speq::cpu {
namespace {

struct Avx512Pairs {
  using Vectors = Avx512;
  using Words = __m512bh;
  using Floats = __m512;
  static constexpr std::int64_t kWords = 32;

  static Words load(const BFloat16 *words) { return (__m512bh)_mm512_loadu_si512(words); }
  static Words all(const BFloat16 *at) {
    std::int32_t pair;
    std::memcpy(&pair, at, sizeof pair);
    return (__m512bh)_mm512_set1_epi32(pair);
  }
  static Words words(const VectorBlock &block, std::int64_t at) {
    return (__m512bh)block.halves[at / kWords];
  }

  static Floats zero() { return _mm512_setzero_ps(); }
  static Floats load_sums(const float *sums) { return _mm512_loadu_ps(sums); }
  static void store(Floats v, float *sums) { _mm512_storeu_ps(sums, v); }
  static Floats dot(Words a, Words b, Floats sums) { return _mm512_dpbf16_ps(sums, a, b); }

  static float sum(Floats v) { return _mm512_reduce_add_ps(v); }
  // Each in the order of _mm512_reduce_add_ps.
  static void store_sums(Floats a, Floats b, Floats c, Floats d, float *out) {
    const auto quarter = [](__m512 v) {
      const __m256 half = _mm256_add_ps(_mm512_extractf32x8_ps(v, 1), _mm512_castps512_ps256(v));
      return _mm_add_ps(_mm256_extractf128_ps(half, 1), _mm256_castps256_ps128(half));
    };
    const auto pairs = [](__m128 first, __m128 second) {
      return _mm_add_ps(_mm_movelh_ps(first, second), _mm_movehl_ps(second, first));
    };
    const __m128 ab = pairs(quarter(a), quarter(b)), cd = pairs(quarter(c), quarter(d));
    _mm_storeu_ps(out, _mm_add_ps(_mm_shuffle_ps(ab, cd, _MM_SHUFFLE(2, 0, 2, 0)),
                                  _mm_shuffle_ps(ab, cd, _MM_SHUFFLE(3, 1, 3, 1))));
  }
};

constexpr MicroKernels by_vectors() {
  MicroKernels kernels = with_pairs<Avx512Pairs, VectorEncoders, VectorScaled, VectorLossless,
                                    VectorResidual, Avx2Residual, PortableResidual>();
  kernels.panel_pairs = vector_pairs;
  // 0.84 to 0.91 of the time on Zen 5; a Xeon takes as long, and at half as many so does Zen 5.
  kernels.panel_pair_inputs = 128;
  return kernels;
}

constexpr MicroKernels by_tiles() {
  MicroKernels kernels = by_vectors();
  kernels.panel_pairs = tile_pairs;
  kernels.panel_pair_inputs = 1;
  return kernels;
}

} // namespace

void vector_pairs(const PanelRows &rows, const Panels &panels, const PanelSums &sums) {
  panel_product<PairStep<Avx512Pairs>>(rows, panels, sums);
}

const MicroKernels avx512_bf16_kernels = by_vectors();
const MicroKernels avx512_amx_kernels = by_tiles();

} // namespace speq::cpu
