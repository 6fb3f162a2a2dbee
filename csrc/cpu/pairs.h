// Products of pairs of bfloat16, over those of an instruction set, accumulated in float32. Their
// sums have an order of their own, and processors flush what is subnormal in them: weights are not
// multiplied so where sum_order.h is asked for.
//
// A set of pairs P has
//
//   - Vectors: the set of vectors (tiles.h) of all other kernels.
//   - Words: kWords words. load(const BFloat16 *), unaligned; all(const BFloat16 *), a pair again
//     and again.
//   - Floats: a sum for each pair of Words. zero(); load_sums(const float *); store(v, float *);
//     dot(words, words, sums), which adds the products of both words of a pair.
//   - sum(v), of all lanes; store_sums(a, b, c, d, float *), of four vectors, in the same order.
#pragma once

#include "cpu/coded_kernels.h"
#include "cpu/panels.h"

namespace speq::cpu {
namespace {

// Rows of weights by rows of inputs.
template <typename P> struct PairTile {
  const BFloat16 *weights;
  std::int64_t columns;
  const void *const *inputs;
  float *const *outs;

  template <int R> static constexpr int rows_at_once = 4;
  static constexpr int kMostInputs = most_inputs(P::Vectors::kRegisters);

  template <int N, int R> void run(std::int64_t row, std::int64_t input) const {
    const BFloat16 *first = weights + row * columns;
    typename P::Floats sums[N][R];
    SPEQ_UNROLL
    for (int n = 0; n < N; ++n) {
      SPEQ_UNROLL
      for (int r = 0; r < R; ++r) {
        sums[n][r] = P::zero();
      }
    }
    // The products of kExactColumns columns from k on, of rows that lie `stride` apart.
    const auto add = [&](std::int64_t k, const BFloat16 *from, std::int64_t stride) {
      SPEQ_UNROLL
      for (std::int64_t at = 0; at < kExactColumns; at += P::kWords) {
        typename P::Words words[N];
        SPEQ_UNROLL
        for (int n = 0; n < N; ++n) {
          words[n] = P::load(from + n * stride + at);
        }
        SPEQ_UNROLL
        for (int r = 0; r < R; ++r) {
          const auto x = P::load(static_cast<const BFloat16 *>(inputs[input + r]) + k + at);
          SPEQ_UNROLL
          for (int n = 0; n < N; ++n) {
            sums[n][r] = P::dot(words[n], x, sums[n][r]);
          }
        }
      }
    };
    std::int64_t k = 0;
    for (; k + kExactColumns <= columns; k += kExactColumns) {
      SPEQ_UNROLL
      for (int n = 0; n < N; ++n) {
        fetch_ahead(first + (N + n) * columns + k);
      }
      add(k, first + k, columns);
    }
    if (k < columns) {
      BFloat16 last[N][kExactColumns] = {};
      for (int n = 0; n < N; ++n) {
        std::memcpy(last[n], first + n * columns + k, (columns - k) * sizeof last[n][0]);
      }
      add(k, last[0], kExactColumns);
    }
    SPEQ_UNROLL
    for (int r = 0; r < R; ++r) {
      if constexpr (N == 4) {
        P::store_sums(sums[0][r], sums[1][r], sums[2][r], sums[3][r], outs[input + r] + row);
      } else {
        SPEQ_UNROLL
        for (int n = 0; n < N; ++n) {
          outs[input + r][row + n] = P::sum(sums[n][r]);
        }
      }
    }
  }
};

template <typename P>
void dot_pairs(const void *weights, std::int64_t columns, std::int64_t rows,
               const void *const *inputs, std::int64_t count, float *const *outs) {
  in_tiles(rows, count, PairTile<P>{static_cast<const BFloat16 *>(weights), columns, inputs, outs});
}

// PairTile's sums over blocks of compact matrices.
template <typename P> struct PairProduct {
  using Sum = typename P::Floats;
  static constexpr int kMostInputs = PairTile<P>::kMostInputs;
  static void clear(Sum &sum) { sum = P::zero(); }
  static float total(Sum sum) { return P::sum(sum); }

  static typename P::Words words(const WordBlock &block, std::int64_t at) {
    return P::load(block.words + at);
  }
  template <typename Block> static typename P::Words words(const Block &block, std::int64_t at) {
    return P::words(block, at);
  }

  template <bool kWhole, typename Block>
  static void add(Sum *sums, const Block *blocks, const void *input, std::int64_t,
                  std::int64_t present) {
    const auto *values = static_cast<const BFloat16 *>(input);
    SPEQ_UNROLL
    for (std::int64_t at = 0; at < kBlockColumns; at += P::kWords) {
      if (kWhole || at / kExactColumns * kExactColumns < present) {
        const auto x = P::load(values + at);
        SPEQ_UNROLL
        for (int n = 0; n < kQuadRows; ++n) {
          sums[n] = P::dot(words(blocks[n], at), x, sums[n]);
        }
      }
    }
  }
  static const void *at(const void *input, std::int64_t first) {
    return static_cast<const BFloat16 *>(input) + first;
  }
};

// Steps of panels whose rows and columns are pairs.
template <typename P> struct PairStep {
  using Word = BFloat16;
  using Floats = typename P::Floats;
  using Columns = typename P::Words;
  static constexpr int kDepth = 2, kVectors = kPanelColumns * kDepth / P::kWords;
  static constexpr int kRows = 6, kPanels = 4 / kVectors;

  static Floats load(const float *sums) { return P::load_sums(sums); }
  static void store(Floats v, float *sums) { P::store(v, sums); }
  static Floats zero() { return P::zero(); }
  static Columns row(const BFloat16 *at) { return P::all(at); }
  static Columns columns(const BFloat16 *at, int vector) {
    return P::load(at + vector * P::kWords);
  }
  static Floats fmadd(Columns columns, Columns row, Floats sum) {
    return P::dot(columns, row, sum);
  }
};

// All kernels with pairs but those of panels, with encoders and decoders as with_coded takes them.
template <typename P, typename Encoders, typename Scaled, typename Lossless, typename... Residual>
constexpr MicroKernels with_pairs() {
  MicroKernels kernels = with_coded<typename P::Vectors, Encoders, Scaled, Lossless, Residual...>();
  using Product = PairProduct<P>;
  constexpr DotExact kDot = dot_pairs<P>;
  kernels.dot_bfloat16_pairs = kDot;
  kernels.lossless.dot_pairs = dot_coded<Product, Lossless, kDot, LosslessRows>;
  kernels.residual.dot_pairs = dot_residual<Product, kDot, Residual...>;
  kernels.fp8.dot_pairs = dot_coded<Product, typename Scaled::OfFp8, kDot, Fp8Rows>;
  kernels.mxfp4.dot_pairs = dot_coded<Product, typename Scaled::OfMxfp4, kDot, Mxfp4Rows>;
  kernels.int4.dot_pairs = dot_coded<Product, typename Scaled::OfInt4, kDot, Int4Rows>;
  kernels.nvfp4.dot_pairs = dot_coded<Product, typename Scaled::OfNvfp4, kDot, Nvfp4Rows>;
  return kernels;
}

} // namespace
} // namespace speq::cpu
