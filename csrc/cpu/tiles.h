// The products of weight rows by rows of inputs, over the vectors of an instruction set. Each file
// of inner loops brings its own vectors and compiles its own copy.
//
// A set of vectors V has
//
//   - Floats: kLanes floats. zero(), all(float), mul(a, b), fmadd(a, b, sum), sum(v), of all lanes,
//     and store(v, float *); unaligned.
//   - load(const Word *): kLanes words (float, BFloat16 or Float16) as Floats; unaligned.
//   - load_part(const Word *, count): fewer than kLanes words, and zeros behind them.
//   - Bytes: kBytes bytes, of two codes each. load_bytes(const uint8_t *); unaligned.
//   - Nibbles(Bytes).dot(even, odd, start): Floats; in each lane its element of start, and the
//     products of its codes: low nibbles by even, high nibbles by odd. All three are aligned.
//   - spread<n>(const Float16 *): the scales of a load of codes as Floats, in the codes' lanes.
//     n is the number of scales to a step: 1, 2 or 4.
//   - kRegisters: how many vectors the processor holds.
//
// Sets of 16 lanes have more, for the order of sums (sum_order.h):
//
//   - load_apart(const Word *): eight words, and eight from kSegmentColumns behind them on.
//
// So have blocks that decoders of compact experts leave in vectors (coded_kernels.h):
// load_apart(at) is theirs from column `at` on.
#pragma once

#include <type_traits>

#include "cpu/blocks.h"
#include "cpu/delta_step.h"
#include "cpu/panels.h"
#include "sum_order.h"

namespace speq::cpu {

template <typename V, int kPerStep> struct Int4Tile {
  const Int4Matrix &matrix;
  std::int64_t begin;
  const Int8Step *const *inputs;
  float *const *outs;

  template <int R> static constexpr int rows_at_once = R == 1 ? 4 : 2;
  static constexpr int kMostInputs = 4;

  // Loads of codes that share a scale, where a step has one: a row of one scale never ends.
  std::int64_t loads_per_scale() const {
    return matrix.group_size == matrix.columns ? matrix.columns
                                               : matrix.group_size / (2 * V::kBytes);
  }

  template <int N, int R> void run(std::int64_t row, std::int64_t input) const {
    const std::int64_t row_bytes = matrix.row_bytes(), row_groups = matrix.row_groups();
    const std::uint8_t *codes = matrix.qweight + (begin + row) * row_bytes;
    const Float16 *scales = matrix.scales + (begin + row) * row_groups;
    const std::int64_t whole = row_bytes / V::kBytes;
    typename V::Floats sums[N][R];
    SPEQ_UNROLL
    for (int n = 0; n < N; ++n) {
      SPEQ_UNROLL
      for (int r = 0; r < R; ++r) {
        sums[n][r] = V::zero();
      }
    }
    // Counted and not divided for: a division takes as long as all else here.
    const std::int64_t per_scale = loads_per_scale();
    constexpr std::int64_t kParts = kStepColumns / 2 / V::kBytes; // loads of a step
    std::int64_t scale = 0, left = per_scale;
    const auto advance = [&](std::int64_t part) {
      if constexpr (kPerStep > 1) {
        scale = (part + 1) * kPerStep / kParts;
      } else if (--left == 0) {
        ++scale;
        left = per_scale;
      }
    };
    for (std::int64_t part = 0; part < whole; advance(part++)) {
      const Float16 *at = scales + scale;
      SPEQ_UNROLL
      for (int n = 0; n < N; ++n) {
        const std::uint8_t *bytes = codes + n * row_bytes + part * V::kBytes;
        fetch_ahead(bytes + kAheadBytes);
        add<R>(sums[n], V::load_bytes(bytes), V::template spread<kPerStep>(at + n * row_groups),
               input, part);
      }
    }
    if (const std::int64_t rest = row_bytes % V::kBytes; rest != 0) {
      SPEQ_UNROLL
      for (int n = 0; n < N; ++n) {
        // A copy that may be read whole: what lies behind the row may not.
        alignas(64) std::uint8_t bytes[V::kBytes] = {};
        Float16 last[4] = {};
        std::memcpy(bytes, codes + n * row_bytes + whole * V::kBytes, rest);
        const std::int64_t present = row_groups - scale < 4 ? row_groups - scale : 4;
        std::memcpy(last, scales + n * row_groups + scale, present * sizeof last[0]);
        add<R>(sums[n], V::load_bytes(bytes), V::template spread<kPerStep>(last), input, whole);
      }
    }
    SPEQ_UNROLL
    for (int n = 0; n < N; ++n) {
      SPEQ_UNROLL
      for (int r = 0; r < R; ++r) {
        outs[input + r][row + n] = V::sum(sums[n][r]);
      }
    }
  }

  template <int R>
  void add(typename V::Floats *sums, typename V::Bytes bytes, typename V::Floats weight_scales,
           std::int64_t input, std::int64_t part) const {
    const typename V::Nibbles nibbles(bytes);
    const std::int64_t at = part * V::kBytes % (kStepColumns / 2);
    SPEQ_UNROLL
    for (int r = 0; r < R; ++r) {
      const Int8Step &x = inputs[input + r][part * V::kBytes / (kStepColumns / 2)];
      const auto sum = nibbles.dot(x.even + at, x.odd + at, x.start + at / 4);
      const auto scale = V::mul(weight_scales, V::load(x.scale + at / 4));
      sums[r] = V::fmadd(sum, scale, sums[r]);
    }
  }
};

template <typename V>
static inline void dot_int4(const Int4Matrix &matrix, std::int64_t begin, std::int64_t end,
                            const Int8Step *const *inputs, std::int64_t count, float *const *outs) {
  const auto product = [&](const auto &tile) { in_tiles(end - begin, count, tile); };
  if (matrix.group_size == matrix.columns || matrix.group_size % kStepColumns == 0) {
    product(Int4Tile<V, 1>{matrix, begin, inputs, outs});
  } else if (matrix.group_size == 64) {
    product(Int4Tile<V, 2>{matrix, begin, inputs, outs});
  } else {
    product(Int4Tile<V, 4>{matrix, begin, inputs, outs});
  }
}

// What a vector has of the columns that it is loaded from: the words of so many segments of
// sum_order.h, beside each other, or a part of eight.
template <typename V> struct Segments {
  static constexpr int kAtOnce = V::kLanes > kVectorColumns ? V::kLanes / kVectorColumns : 1;
  static constexpr int kParts = V::kLanes < kVectorColumns ? kVectorColumns / V::kLanes : 1;
  static constexpr std::int64_t kColumns = kAtOnce * kSegmentColumns;

  template <typename Word> static typename V::Floats load(const Word *words) {
    if constexpr (kAtOnce > 1) {
      return V::load_apart(words);
    } else {
      return V::load(words);
    }
  }

  // Rows of weights whose sums by one input take no more than half of the registers.
  static constexpr int kRowsKept = V::kRegisters * V::kLanes / (2 * kPartialSums);

  // The partial sums [N][kPartialSums] of rows of weights by one input, over all whole steps of
  // `columns`, where there is one. The column behind them is returned. Sums stay in registers.
  // next(at) is called where a segment begins; word(n, at) and value(at) are as below, `at` from
  // the rows' begin.
  template <int N, typename Next, typename Word, typename Value>
  SPEQ_MEMBER static std::int64_t add_steps(float *partial, std::int64_t columns, const Next &next,
                                            const Word &word, const Value &value) {
    constexpr int kVectors = kPartialSums / V::kLanes;
    if (columns < kSumColumns) {
      return 0;
    }
    typename V::Floats sums[N][kVectors];
    SPEQ_UNROLL
    for (int n = 0; n < N; ++n) {
      SPEQ_UNROLL
      for (int i = 0; i < kVectors; ++i) {
        sums[n][i] = V::zero();
      }
    }
    std::int64_t k = 0;
    for (; k + kSumColumns <= columns; k += kSumColumns) {
      SPEQ_UNROLL
      for (int at_once = 0; at_once < kVectors / kParts; ++at_once) {
        const std::int64_t begin = k + at_once * kColumns;
        next(begin);
        SPEQ_UNROLL
        for (std::int64_t i = 0; i < kSegmentVectors; ++i) {
          SPEQ_UNROLL
          for (int part = 0; part < kParts; ++part) {
            const std::int64_t at = begin + i * kVectorColumns + part * V::kLanes;
            const auto x = value(at);
            SPEQ_UNROLL
            for (int n = 0; n < N; ++n) {
              auto &sum = sums[n][at_once * kParts + part];
              sum = V::fmadd(word(n, at), x, sum);
            }
          }
        }
      }
    }
    SPEQ_UNROLL
    for (int n = 0; n < N; ++n) {
      SPEQ_UNROLL
      for (int i = 0; i < kVectors; ++i) {
        V::store(sums[n][i], partial + n * kPartialSums + i * V::kLanes);
      }
    }
    return k;
  }

  // Adds the products of N rows of weights by R inputs to their partial sums [N][R][kPartialSums],
  // from those of the segment on, which are not yet written where kFresh; word(n, at) and
  // value(r, at) are those of the columns from `at` on.
  template <bool kFresh, int N, int R, typename Word, typename Value>
  SPEQ_MEMBER static void add(float *partial, const Word &word, const Value &value) {
    const auto sum_at = [&](int n, int r, int part) {
      return partial + (n * R + r) * kPartialSums + part * V::kLanes;
    };
    SPEQ_UNROLL
    for (int part = 0; part < kParts; ++part) {
      typename V::Floats sums[N][R];
      SPEQ_UNROLL
      for (int n = 0; n < N; ++n) {
        SPEQ_UNROLL
        for (int r = 0; r < R; ++r) {
          sums[n][r] = kFresh ? V::zero() : V::load(sum_at(n, r, part));
        }
      }
      SPEQ_UNROLL
      for (std::int64_t i = 0; i < kSegmentVectors; ++i) {
        const std::int64_t at = i * kVectorColumns + part * V::kLanes;
        typename V::Floats words[N];
        SPEQ_UNROLL
        for (int n = 0; n < N; ++n) {
          words[n] = word(n, at);
        }
        SPEQ_UNROLL
        for (int r = 0; r < R; ++r) {
          const auto x = value(r, at);
          SPEQ_UNROLL
          for (int n = 0; n < N; ++n) {
            sums[n][r] = V::fmadd(words[n], x, sums[n][r]);
          }
        }
      }
      SPEQ_UNROLL
      for (int n = 0; n < N; ++n) {
        SPEQ_UNROLL
        for (int r = 0; r < R; ++r) {
          V::store(sums[n][r], sum_at(n, r, part));
        }
      }
    }
  }
};

template <typename V, typename Word> struct ExactTile {
  const Word *weights;
  std::int64_t columns;
  const void *const *inputs;
  float *const *outs;

  template <int R>
  static constexpr int rows_at_once = R == 1                          ? Segments<V>::kRowsKept
                                      : V::kRegisters >= 32 || R == 2 ? 4
                                                                      : 2;
  static constexpr int kMostInputs = most_inputs(V::kRegisters);
  static constexpr std::int64_t kRowsAhead = 4; // that the cache is asked for

  template <int N, int R> void run(std::int64_t row, std::int64_t input) const {
    using Of = Segments<V>;
    const Word *first = weights + row * columns;
    const float *values[R];
    SPEQ_UNROLL
    for (int r = 0; r < R; ++r) {
      values[r] = static_cast<const float *>(inputs[input + r]);
    }
    alignas(64) float partial[N * R * kPartialSums];
    std::int64_t k = 0;
    const auto fetch_next = [&](std::int64_t begin) {
      constexpr std::int64_t kLine = 64 / sizeof(Word);
      SPEQ_UNROLL
      for (std::int64_t at = 0; at < Of::kColumns; at += kLine) {
        SPEQ_UNROLL
        for (int n = 0; n < N; ++n) {
          fetch_ahead(first + (kRowsAhead + n) * columns + begin + at);
        }
      }
    };
    if constexpr (R == 1) {
      static_assert(N <= Of::kRowsKept);
      k = Of::template add_steps<N>(
          partial, columns, [&](std::int64_t begin) { fetch_next(begin); },
          [&](int n, std::int64_t at) { return Of::load(first + n * columns + at); },
          [&](std::int64_t at) { return Of::load(values[0] + at); });
    }
    const auto add = [&](auto fresh) {
      fetch_next(k);
      Of::template add<decltype(fresh)::value, N, R>(
          partial + first_partial(k),
          [&](int n, std::int64_t at) { return Of::load(first + n * columns + k + at); },
          [&](int r, std::int64_t at) { return Of::load(values[r] + k + at); });
    };
    // What is left of the last columns, with zeros behind it.
    const auto add_last = [&](auto fresh) {
      Word words[N][Of::kColumns] = {};
      float last[R][Of::kColumns] = {};
      const std::int64_t present = columns > k ? columns - k : 0;
      for (int n = 0; n < N; ++n) {
        std::memcpy(words[n], first + n * columns + k, present * sizeof(Word));
      }
      for (int r = 0; r < R; ++r) {
        std::memcpy(last[r], values[r] + k, present * sizeof(float));
      }
      Of::template add<decltype(fresh)::value, N, R>(
          partial + first_partial(k),
          [&](int n, std::int64_t at) { return Of::load(words[n] + at); },
          [&](int r, std::int64_t at) { return Of::load(last[r] + at); });
    };
    for (; k < kSumColumns; k += Of::kColumns) {
      if (k + Of::kColumns <= columns) {
        add(std::true_type());
      } else {
        add_last(std::true_type());
      }
    }
    for (; k + Of::kColumns <= columns; k += Of::kColumns) {
      add(std::false_type());
    }
    if (k < columns) {
      add_last(std::false_type());
    }
    SPEQ_UNROLL
    for (int n = 0; n < N; ++n) {
      SPEQ_UNROLL
      for (int r = 0; r < R; ++r) {
        outs[input + r][row + n] = total_of(partial + (n * R + r) * kPartialSums);
      }
    }
  }
};

template <typename V, typename Word>
static inline void dot_exact(const void *weights, std::int64_t columns, std::int64_t rows,
                             const void *const *inputs, std::int64_t count, float *const *outs) {
  in_tiles(rows, count,
           ExactTile<V, Word>{static_cast<const Word *>(weights), columns, inputs, outs});
}

// N vectors of columns from `first` on, over all rows.
template <typename V, int N, typename Load>
static inline void add_columns(std::int64_t count, const float *weights, float *sums,
                               const Load &load) {
  typename V::Floats totals[N];
  SPEQ_UNROLL
  for (int n = 0; n < N; ++n) {
    totals[n] = V::load(sums + n * V::kLanes);
  }
  for (std::int64_t row = 0; row < count; ++row) {
    const auto weight = V::all(weights[row]);
    SPEQ_UNROLL
    for (int n = 0; n < N; ++n) {
      totals[n] = V::fmadd(weight, load(row, n), totals[n]);
    }
  }
  SPEQ_UNROLL
  for (int n = 0; n < N; ++n) {
    V::store(totals[n], sums + n * V::kLanes);
  }
}

// The columns from k on, for one query.
template <typename V, typename Word>
static inline void add_rows_from(std::int64_t k, const Word *words, std::int64_t columns,
                                 std::int64_t count, const float *weights, float *sums) {
  constexpr int kVectors = 8;
  const auto add = [&](auto vectors) {
    constexpr int N = decltype(vectors)::value;
    for (; k + N * V::kLanes <= columns; k += N * V::kLanes) {
      add_columns<V, N>(count, weights, sums + k, [&](std::int64_t row, int n) {
        return V::load(words + row * columns + k + n * V::kLanes);
      });
    }
  };
  add(std::integral_constant<int, kVectors>{});
  add(std::integral_constant<int, kVectors / 2>{});
  add(std::integral_constant<int, 1>{});
  if (k < columns) {
    float last[V::kLanes] = {};
    std::memcpy(last, sums + k, (columns - k) * sizeof(float));
    add_columns<V, 1>(count, weights, last, [&](std::int64_t row, int) {
      return V::load_part(words + row * columns + k, columns - k);
    });
    std::memcpy(sums + k, last, (columns - k) * sizeof(float));
  }
}

// Some columns for R queries: words are loaded once for all of them.
template <typename V, int R, int N, typename Word>
static inline void add_tile(const Word *words, std::int64_t stride, std::int64_t count,
                            const float *const *weights, float *const *sums, std::int64_t k) {
  typename V::Floats totals[R][N];
  SPEQ_UNROLL
  for (int r = 0; r < R; ++r) {
    SPEQ_UNROLL
    for (int n = 0; n < N; ++n) {
      totals[r][n] = V::load(sums[r] + k + n * V::kLanes);
    }
  }
  for (std::int64_t row = 0; row < count; ++row, words += stride) {
    SPEQ_UNROLL
    for (int n = 0; n < N; ++n) {
      const auto loaded = V::load(words + k + n * V::kLanes);
      SPEQ_UNROLL
      for (int r = 0; r < R; ++r) {
        totals[r][n] = V::fmadd(V::all(weights[r][row]), loaded, totals[r][n]);
      }
    }
  }
  SPEQ_UNROLL
  for (int r = 0; r < R; ++r) {
    SPEQ_UNROLL
    for (int n = 0; n < N; ++n) {
      V::store(totals[r][n], sums[r] + k + n * V::kLanes);
    }
  }
}

template <typename V, typename Word>
static inline void add_rows(const void *words, std::int64_t columns, std::int64_t count,
                            const float *const *weights, std::int64_t queries, float *const *sums) {
  const auto *first = static_cast<const Word *>(words);
  constexpr int R = 4, N = V::kRegisters >= 32 ? 4 : 2;
  std::int64_t query = 0;
  for (; query + R <= queries; query += R) {
    std::int64_t k = 0;
    for (; k + N * V::kLanes <= columns; k += N * V::kLanes) {
      add_tile<V, R, N>(first, columns, count, weights + query, sums + query, k);
    }
    for (int r = 0; r < R && k < columns; ++r) {
      add_rows_from<V>(k, first, columns, count, weights[query + r], sums[query + r]);
    }
  }
  for (; query < queries; ++query) {
    add_rows_from<V>(0, first, columns, count, weights[query], sums[query]);
  }
}

// Measured with AVX2 and AVX-512 on an Intel Xeon and on Zen 5, experts of Qwen3-30B-A3B.
template <typename V> constexpr std::int64_t kPanelInputs = V::kRegisters >= 32 ? 64 : 32;

template <typename V>
constexpr MicroKernels kernels_over = {
    dot_int4<V>,
    dot_exact<V, float>,
    dot_exact<V, BFloat16>,
    dot_exact<V, Float16>,
    nullptr,
    round_block,
    round_group,
    read_sum,
    {},
    {},
    add_rows<V, float>,
    add_rows<V, BFloat16>,
    add_rows<V, Float16>,
    soften,
    {},
    {},
    {},
    {},
    delta_step<V>,
    panel_product<FloatStep<V>>,
    nullptr,
    round_bfloat16,
    widen_bfloat16,
    kPanelInputs<V>,
    kNeverInPanels,
    nullptr,
    nullptr,
};

} // namespace speq::cpu
