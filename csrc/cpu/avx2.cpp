// The inner loops for AVX2 with FMA and F16C. Everything here has internal linkage but the table.
#include <immintrin.h>

#include "cpu/blocks.h"

namespace speq::cpu {
namespace {

// Bytes of codes in a register: half a step.
constexpr std::int64_t kBytes = 32;
constexpr int kLanes = 8;

inline float sum_of(__m256 lanes) {
  __m128 sum = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1));
  sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
  return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

// Weight scales of a half step, spread over its lanes: scales points at the first of them.
//   kPerStep = 1 or 2: one scale, 4: two of them
template <int kPerStep> inline __m256 spread_scales(const Float16 *scales) {
  if constexpr (kPerStep != 4) {
    return _mm256_cvtph_ps(_mm_set1_epi16(short(scales->bits)));
  } else {
    std::int32_t pair;
    std::memcpy(&pair, scales, sizeof pair);
    const __m256 both = _mm256_cvtph_ps(_mm_set1_epi32(pair));
    return _mm256_permutevar8x32_ps(both, _mm256_set_epi32(1, 1, 1, 1, 0, 0, 0, 0));
  }
}

template <int kPerStep> struct Int4Tile {
  const Int4Matrix &matrix;
  std::int64_t begin;
  const Int8Step *const *inputs;
  float *const *outs;

  template <int R> static constexpr int rows_at_once = R == 1 ? 1 : 2; // one row is one stream

  // The first scale of a half step in a row of them.
  std::int64_t scale_at(std::int64_t half) const {
    if constexpr (kPerStep == 1) {
      return half * 2 * kBytes / matrix.group_size;
    } else {
      return half * (kPerStep / 2);
    }
  }

  template <int N, int R> void run(std::int64_t row, std::int64_t input) const {
    const std::int64_t row_bytes = matrix.row_bytes(), row_groups = matrix.row_groups();
    const std::uint8_t *codes = matrix.qweight + (begin + row) * row_bytes;
    const Float16 *scales = matrix.scales + (begin + row) * row_groups;
    const std::int64_t whole = row_bytes / kBytes;
    __m256 sums[N][R];
    SPEQ_UNROLL
    for (int n = 0; n < N; ++n) {
      SPEQ_UNROLL
      for (int r = 0; r < R; ++r) {
        sums[n][r] = _mm256_setzero_ps();
      }
    }
    for (std::int64_t half = 0; half < whole; ++half) {
      const Float16 *at = scales + scale_at(half);
      SPEQ_UNROLL
      for (int n = 0; n < N; ++n) {
        fetch_ahead(codes + n * row_bytes + half * kBytes + kAheadBytes);
        add_half<R>(sums[n],
                    _mm256_loadu_si256(
                        reinterpret_cast<const __m256i *>(codes + n * row_bytes + half * kBytes)),
                    spread_scales<kPerStep>(at + n * row_groups), input, half);
      }
    }
    if (const std::int64_t rest = row_bytes % kBytes; rest != 0) {
      SPEQ_UNROLL
      for (int n = 0; n < N; ++n) {
        alignas(32) std::uint8_t bytes[kBytes] = {};
        Float16 last[2] = {};
        std::memcpy(bytes, codes + n * row_bytes + whole * kBytes, rest);
        const std::int64_t first = scale_at(whole);
        const std::int64_t left = row_groups - first;
        std::memcpy(last, scales + n * row_groups + first, (left < 2 ? left : 2) * sizeof last[0]);
        add_half<R>(sums[n], _mm256_load_si256(reinterpret_cast<const __m256i *>(bytes)),
                    spread_scales<kPerStep>(last), input, whole);
      }
    }
    SPEQ_UNROLL
    for (int n = 0; n < N; ++n) {
      SPEQ_UNROLL
      for (int r = 0; r < R; ++r) {
        outs[input + r][row + n] = sum_of(sums[n][r]);
      }
    }
  }

  template <int R>
  void add_half(__m256 *sums, __m256i bytes, __m256 weight_scales, std::int64_t input,
                std::int64_t half) const {
    const __m256i mask = _mm256_set1_epi8(0xF);
    const __m256i low = _mm256_and_si256(bytes, mask);
    const __m256i high = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), mask);
    const auto words = [](const void *at) {
      return _mm256_load_si256(static_cast<const __m256i *>(at));
    };
    SPEQ_UNROLL
    for (int r = 0; r < R; ++r) {
      const Int8Step &x = inputs[input + r][half / 2];
      const std::int64_t part = half % 2;
      // Codes are below 16: four products of at most 15 * 127 fit into 16 bits.
      const __m256i pairs =
          _mm256_add_epi16(_mm256_maddubs_epi16(low, words(x.even + part * kBytes)),
                           _mm256_maddubs_epi16(high, words(x.odd + part * kBytes)));
      const __m256i sum = _mm256_add_epi32(words(x.start + part * kLanes),
                                           _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
      const __m256 scale = _mm256_mul_ps(weight_scales, _mm256_load_ps(x.scale + part * kLanes));
      sums[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), scale, sums[r]);
    }
  }
};

void dot_int4(const Int4Matrix &matrix, std::int64_t begin, std::int64_t end,
              const Int8Step *const *inputs, std::int64_t count, float *const *outs) {
  const auto product = [&](const auto &tile) { in_tiles(end - begin, count, tile); };
  if (matrix.group_size == matrix.columns || matrix.group_size % kStepColumns == 0) {
    product(Int4Tile<1>{matrix, begin, inputs, outs});
  } else if (matrix.group_size == 64) {
    product(Int4Tile<2>{matrix, begin, inputs, outs});
  } else {
    product(Int4Tile<4>{matrix, begin, inputs, outs});
  }
}

inline __m256 load8(const float *words) { return _mm256_loadu_ps(words); }

inline __m256 load8(const BFloat16 *words) {
  const __m128i narrow = _mm_loadu_si128(reinterpret_cast<const __m128i *>(words));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(narrow), 16));
}

inline __m256 load8(const Float16 *words) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(words)));
}

template <typename Word> struct ExactTile {
  const Word *weights;
  std::int64_t columns;
  const float *const *inputs;
  float *const *outs;

  template <int R> static constexpr int rows_at_once = R == 1 ? 4 : 2;

  template <int N, int R> void run(std::int64_t row, std::int64_t input) const {
    const Word *first = weights + row * columns;
    __m256 sums[N][R];
    SPEQ_UNROLL
    for (int n = 0; n < N; ++n) {
      SPEQ_UNROLL
      for (int r = 0; r < R; ++r) {
        sums[n][r] = _mm256_setzero_ps();
      }
    }
    const auto add = [&](const Word *const *rows, std::int64_t k, std::int64_t offset) {
      __m256 words[N];
      SPEQ_UNROLL
      for (int n = 0; n < N; ++n) {
        words[n] = load8(rows[n] + offset);
      }
      SPEQ_UNROLL
      for (int r = 0; r < R; ++r) {
        const __m256 x = _mm256_loadu_ps(inputs[input + r] + k);
        SPEQ_UNROLL
        for (int n = 0; n < N; ++n) {
          sums[n][r] = _mm256_fmadd_ps(words[n], x, sums[n][r]);
        }
      }
    };
    const Word *rows[N];
    SPEQ_UNROLL
    for (int n = 0; n < N; ++n) {
      rows[n] = first + n * columns;
    }
    std::int64_t k = 0;
    for (; k + kLanes <= columns; k += kLanes) {
      SPEQ_UNROLL
      for (int n = 0; n < N; ++n) {
        fetch_ahead(rows[n] + N * columns + k);
      }
      add(rows, k, k);
    }
    if (k < columns) {
      Word rest[N][kLanes] = {};
      SPEQ_UNROLL
      for (int n = 0; n < N; ++n) {
        std::memcpy(rest[n], rows[n] + k, (columns - k) * sizeof(Word));
        rows[n] = rest[n];
      }
      add(rows, k, 0);
    }
    SPEQ_UNROLL
    for (int n = 0; n < N; ++n) {
      SPEQ_UNROLL
      for (int r = 0; r < R; ++r) {
        outs[input + r][row + n] = sum_of(sums[n][r]);
      }
    }
  }
};

template <typename Word>
void dot_exact(const void *weights, std::int64_t columns, std::int64_t rows,
               const float *const *inputs, std::int64_t count, float *const *outs) {
  const ExactTile<Word> tile{static_cast<const Word *>(weights), columns, inputs, outs};
  in_tiles(rows, count, tile);
}

} // namespace

const MicroKernels avx2_kernels = {
    dot_int4, dot_exact<float>, dot_exact<BFloat16>, dot_exact<Float16>, round_block, read_sum,
};

} // namespace speq::cpu
