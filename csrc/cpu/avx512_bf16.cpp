// AVX-512 with VNNI, VBMI and VBMI2, and with products of pairs of bfloat16.
#include "cpu/decode_scaled_vbmi2.h"

namespace speq::cpu {
namespace {

// The sums of four vectors' lanes, each in the order of _mm512_reduce_add_ps.
__m128 totals(__m512 a, __m512 b, __m512 c, __m512 d) {
  const auto quarter = [](__m512 v) {
    const __m256 half = _mm256_add_ps(_mm512_extractf32x8_ps(v, 1), _mm512_castps512_ps256(v));
    return _mm_add_ps(_mm256_extractf128_ps(half, 1), _mm256_castps256_ps128(half));
  };
  const auto pairs = [](__m128 first, __m128 second) {
    return _mm_add_ps(_mm_movelh_ps(first, second), _mm_movehl_ps(second, first));
  };
  const __m128 ab = pairs(quarter(a), quarter(b)), cd = pairs(quarter(c), quarter(d));
  return _mm_add_ps(_mm_shuffle_ps(ab, cd, _MM_SHUFFLE(2, 0, 2, 0)),
                    _mm_shuffle_ps(ab, cd, _MM_SHUFFLE(3, 1, 3, 1)));
}

// Weights and inputs in bfloat16, 32 of each to a product, accumulated in float32.
struct PairTile {
  const BFloat16 *weights;
  std::int64_t columns;
  const void *const *inputs;
  float *const *outs;

  template <int R> static constexpr int rows_at_once = 4;
  static constexpr int kMostInputs = most_inputs(Avx512::kRegisters);
  static constexpr std::int64_t kPairColumns = 32;

  template <int N, int R> void run(std::int64_t row, std::int64_t input) const {
    const BFloat16 *first = weights + row * columns;
    __m512 sums[N][R];
    SPEQ_UNROLL
    for (int n = 0; n < N; ++n) {
      SPEQ_UNROLL
      for (int r = 0; r < R; ++r) {
        sums[n][r] = _mm512_setzero_ps();
      }
    }
    const auto add = [&](std::int64_t k, const auto &load) {
      __m512bh words[N];
      SPEQ_UNROLL
      for (int n = 0; n < N; ++n) {
        words[n] = (__m512bh)load(first + n * columns + k);
      }
      SPEQ_UNROLL
      for (int r = 0; r < R; ++r) {
        const auto *values = static_cast<const BFloat16 *>(inputs[input + r]) + k;
        const __m512bh x = (__m512bh)_mm512_loadu_si512(values);
        SPEQ_UNROLL
        for (int n = 0; n < N; ++n) {
          sums[n][r] = _mm512_dpbf16_ps(sums[n][r], words[n], x);
        }
      }
    };
    std::int64_t k = 0;
    for (; k + kPairColumns <= columns; k += kPairColumns) {
      SPEQ_UNROLL
      for (int n = 0; n < N; ++n) {
        fetch_ahead(first + (N + n) * columns + k);
      }
      add(k, [](const BFloat16 *words) { return _mm512_loadu_si512(words); });
    }
    if (k < columns) {
      const __mmask32 present = (1u << (columns - k)) - 1;
      add(k, [&](const BFloat16 *words) { return _mm512_maskz_loadu_epi16(present, words); });
    }
    SPEQ_UNROLL
    for (int r = 0; r < R; ++r) {
      if constexpr (N == 4) {
        _mm_storeu_ps(outs[input + r] + row,
                      totals(sums[0][r], sums[1][r], sums[2][r], sums[3][r]));
      } else {
        SPEQ_UNROLL
        for (int n = 0; n < N; ++n) {
          outs[input + r][row + n] = _mm512_reduce_add_ps(sums[n][r]);
        }
      }
    }
  }
};
static_assert(kExactColumns % PairTile::kPairColumns == 0);

void dot_pairs(const void *weights, std::int64_t columns, std::int64_t rows,
               const void *const *inputs, std::int64_t count, float *const *outs) {
  in_tiles(rows, count, PairTile{static_cast<const BFloat16 *>(weights), columns, inputs, outs});
}

// PairTile's sums over blocks of compact matrices.
struct PairProduct {
  using Sum = __m512;
  static constexpr int kMostInputs = PairTile::kMostInputs;
  static void clear(Sum &sum) { sum = _mm512_setzero_ps(); }
  static float total(Sum sum) { return _mm512_reduce_add_ps(sum); }

  static __m512i words(const VectorBlock &block, int half) { return block.halves[half]; }
  static __m512i words(const WordBlock &block, int half) {
    return _mm512_load_si512(block.words + half * PairTile::kPairColumns);
  }

  template <bool kWhole, typename Block>
  static void add(Sum *sums, const Block *blocks, const void *input, std::int64_t,
                  std::int64_t present) {
    const auto *values = static_cast<const BFloat16 *>(input);
    SPEQ_UNROLL
    for (int half = 0; half < 2; ++half) {
      if (kWhole || half * PairTile::kPairColumns < present) {
        const __m512bh x = (__m512bh)_mm512_loadu_si512(values + half * PairTile::kPairColumns);
        SPEQ_UNROLL
        for (int n = 0; n < kQuadRows; ++n) {
          sums[n] = _mm512_dpbf16_ps(sums[n], (__m512bh)words(blocks[n], half), x);
        }
      }
    }
  }
  static const void *at(const void *input, std::int64_t first) {
    return static_cast<const BFloat16 *>(input) + first;
  }
};

// Steps of panels whose rows and columns are pairs of bfloat16.
struct PairStep {
  using Word = BFloat16;
  using Floats = __m512;
  using Columns = __m512bh;
  static constexpr int kDepth = 2, kVectors = 1, kRows = 6, kPanels = 4;

  static Floats load(const float *sums) { return _mm512_loadu_ps(sums); }
  static void store(Floats v, float *sums) { _mm512_storeu_ps(sums, v); }
  static Floats zero() { return _mm512_setzero_ps(); }
  static __m512bh row(const BFloat16 *at) {
    std::int32_t pair;
    std::memcpy(&pair, at, sizeof pair);
    return (__m512bh)_mm512_set1_epi32(pair);
  }
  static Columns columns(const BFloat16 *at, int) { return (__m512bh)_mm512_loadu_si512(at); }
  static Floats fmadd(Columns columns, __m512bh row, Floats sum) {
    return _mm512_dpbf16_ps(sum, columns, row);
  }
};

constexpr MicroKernels with_pairs() {
  MicroKernels kernels = with_coded<Avx512, VectorScaled, VectorLossless, VectorResidual,
                                    Avx2Residual, PortableResidual>();
  kernels.dot_bfloat16_pairs = dot_pairs;
  kernels.panel_pairs = vector_pairs;
  // 0.84 to 0.91 of the time on Zen 5; a Xeon takes as long, and at half as many so does Zen 5.
  kernels.panel_pair_inputs = 128;
  kernels.lossless.dot_pairs = dot_coded<PairProduct, VectorLossless, dot_pairs, LosslessRows>;
  kernels.residual.dot_pairs =
      dot_residual<PairProduct, dot_pairs, VectorResidual, Avx2Residual, PortableResidual>;
  kernels.fp8.dot_pairs = dot_coded<PairProduct, VectorFp8, dot_pairs, Fp8Rows>;
  kernels.mxfp4.dot_pairs = dot_coded<PairProduct, VectorMxfp4, dot_pairs, Mxfp4Rows>;
  kernels.int4.dot_pairs = dot_coded<PairProduct, VectorInt4, dot_pairs, Int4Rows>;
  kernels.nvfp4.dot_pairs = dot_coded<PairProduct, VectorNvfp4, dot_pairs, Nvfp4Rows>;
  return kernels;
}

constexpr MicroKernels with_tiles() {
  MicroKernels kernels = with_pairs();
  kernels.panel_pairs = tile_pairs;
  kernels.panel_pair_inputs = 1;
  return kernels;
}

} // namespace

void vector_pairs(const PanelRows &rows, const Panels &panels, const PanelSums &sums) {
  panel_product<PairStep>(rows, panels, sums);
}

const MicroKernels avx512_bf16_kernels = with_pairs();
const MicroKernels avx512_amx_kernels = with_tiles();

} // namespace speq::cpu
