// The inner loops for AVX-512 (F, BW, VL, DQ). Compiled twice, with and without VNNI; everything
// here has internal linkage.
#pragma once

#include <immintrin.h>

#include "cpu/blocks.h"

namespace speq::cpu {
namespace {

// sum + u8 . s8 over the four bytes of each lane. Codes are below 16, so that the 16-bit sums of
// the detour without VNNI, at most 2 * 15 * 127 each, cannot overflow.
inline __m512i dot_bytes(__m512i sum, __m512i codes, __m512i inputs) {
#ifdef __AVX512VNNI__
  return _mm512_dpbusd_epi32(sum, codes, inputs);
#else
  const __m512i pairs = _mm512_maddubs_epi16(codes, inputs);
  return _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
#endif
}

// A step's weight scales, spread over its lanes.
//   kPerStep = 1, 2 or 4 scales in a step; group_steps is the number of steps to a scale.
template <int kPerStep>
inline __m512 spread_scales(const Float16 *scales, std::int64_t step, std::int64_t group_steps) {
  if constexpr (kPerStep == 1) {
    return _mm512_cvtph_ps(_mm256_set1_epi16(short(scales[step / group_steps].bits)));
  } else if constexpr (kPerStep == 2) {
    std::int32_t pair;
    std::memcpy(&pair, scales + 2 * step, sizeof pair);
    const __m512 both = _mm512_cvtph_ps(_mm256_set1_epi32(pair));
    return _mm512_permutexvar_ps(_mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0),
                                 both);
  } else {
    std::int64_t four;
    std::memcpy(&four, scales + 4 * step, sizeof four);
    const __m512 all = _mm512_cvtph_ps(_mm256_set1_epi64x(four));
    return _mm512_permutexvar_ps(_mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0),
                                 all);
  }
}

template <int kPerStep> struct Int4Tile {
  const Int4Matrix &matrix;
  std::int64_t begin;
  const Int8Step *const *inputs;
  float *const *outs;

  template <int R> static constexpr int rows_at_once = R == 1 ? 1 : 2; // one row is one stream

  template <int N, int R> void run(std::int64_t row, std::int64_t input) const {
    const std::int64_t row_bytes = matrix.row_bytes(), row_groups = matrix.row_groups();
    const std::uint8_t *codes = matrix.qweight + (begin + row) * row_bytes;
    const Float16 *scales = matrix.scales + (begin + row) * row_groups;
    const std::int64_t whole = matrix.columns / kStepColumns;
    // One scale to a row need not end where a step does.
    const std::int64_t group_steps =
        matrix.group_size == matrix.columns ? whole + 1 : matrix.group_size / kStepColumns;
    __m512 sums[N][R];
    SPEQ_UNROLL
    for (int n = 0; n < N; ++n) {
      SPEQ_UNROLL
      for (int r = 0; r < R; ++r) {
        sums[n][r] = _mm512_setzero_ps();
      }
    }
    for (std::int64_t step = 0; step < whole; ++step) {
      SPEQ_UNROLL
      for (int n = 0; n < N; ++n) {
        fetch_ahead(codes + n * row_bytes + step * 64 + kAheadBytes);
        add_step<R>(sums[n], _mm512_loadu_si512(codes + n * row_bytes + step * 64),
                    spread_scales<kPerStep>(scales + n * row_groups, step, group_steps), input,
                    step);
      }
    }
    if (const std::int64_t rest = matrix.columns % kStepColumns; rest != 0) {
      SPEQ_UNROLL
      for (int n = 0; n < N; ++n) {
        const __mmask64 present = (__mmask64(1) << (rest / 2)) - 1;
        Float16 last[4] = {};
        const std::int64_t done = kPerStep == 1 ? 0 : whole * kPerStep;
        std::memcpy(last, scales + n * row_groups + done,
                    (kPerStep == 1 ? 1 : row_groups - done) * sizeof(Float16));
        add_step<R>(sums[n], _mm512_maskz_loadu_epi8(present, codes + n * row_bytes + whole * 64),
                    spread_scales<kPerStep>(last, 0, 1), input, whole);
      }
    }
    SPEQ_UNROLL
    for (int n = 0; n < N; ++n) {
      SPEQ_UNROLL
      for (int r = 0; r < R; ++r) {
        outs[input + r][row + n] = _mm512_reduce_add_ps(sums[n][r]);
      }
    }
  }

  template <int R>
  void add_step(__m512 *sums, __m512i bytes, __m512 weight_scales, std::int64_t input,
                std::int64_t step) const {
    const __m512i mask = _mm512_set1_epi8(0xF);
    const __m512i low = _mm512_and_si512(bytes, mask);
    const __m512i high = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), mask);
    SPEQ_UNROLL
    for (int r = 0; r < R; ++r) {
      const Int8Step &x = inputs[input + r][step];
      __m512i sum = _mm512_load_si512(x.start);
      sum = dot_bytes(sum, low, _mm512_load_si512(x.even));
      sum = dot_bytes(sum, high, _mm512_load_si512(x.odd));
      const __m512 scale = _mm512_mul_ps(weight_scales, _mm512_load_ps(x.scale));
      sums[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, sums[r]);
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

inline __m512 load16(const float *words, __mmask16 present) {
  return _mm512_maskz_loadu_ps(present, words);
}

inline __m512 load16(const BFloat16 *words, __mmask16 present) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(present, words));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

inline __m512 load16(const Float16 *words, __mmask16 present) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(present, words));
}

constexpr __mmask16 kAll = 0xFFFF;

template <typename Word> struct ExactTile {
  const Word *weights;
  std::int64_t columns;
  const float *const *inputs;
  float *const *outs;

  template <int R> static constexpr int rows_at_once = 4;

  template <int N, int R> void run(std::int64_t row, std::int64_t input) const {
    const Word *first = weights + row * columns;
    __m512 sums[N][R];
    SPEQ_UNROLL
    for (int n = 0; n < N; ++n) {
      SPEQ_UNROLL
      for (int r = 0; r < R; ++r) {
        sums[n][r] = _mm512_setzero_ps();
      }
    }
    const auto add = [&](std::int64_t k, __mmask16 present) {
      __m512 words[N];
      SPEQ_UNROLL
      for (int n = 0; n < N; ++n) {
        words[n] = load16(first + n * columns + k, present);
      }
      SPEQ_UNROLL
      for (int r = 0; r < R; ++r) {
        const __m512 x = _mm512_loadu_ps(inputs[input + r] + k);
        SPEQ_UNROLL
        for (int n = 0; n < N; ++n) {
          sums[n][r] = _mm512_fmadd_ps(words[n], x, sums[n][r]);
        }
      }
    };
    constexpr std::int64_t kLine = 64 / sizeof(Word);
    std::int64_t k = 0;
    for (; k + kLine <= columns; k += kLine) {
      SPEQ_UNROLL
      for (int n = 0; n < N; ++n) {
        fetch_ahead(first + (N + n) * columns + k);
      }
      for (std::int64_t at = 0; at < kLine; at += kExactColumns) {
        add(k + at, kAll);
      }
    }
    for (; k + kExactColumns <= columns; k += kExactColumns) {
      add(k, kAll);
    }
    if (k < columns) {
      add(k, __mmask16((1u << (columns - k)) - 1));
    }
    SPEQ_UNROLL
    for (int n = 0; n < N; ++n) {
      SPEQ_UNROLL
      for (int r = 0; r < R; ++r) {
        outs[input + r][row + n] = _mm512_reduce_add_ps(sums[n][r]);
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
} // namespace speq::cpu
