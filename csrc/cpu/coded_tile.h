// The products of compact matrices: blocks rebuilt by a decoder of the instruction set, multiplied
// in the order in which tiles.h multiplies words, so that the sums are the same bit for bit.
#pragma once

#include <array>
#include <type_traits>
#include <utility>
#include <vector>

#include "cpu/blocks.h"
#include "cpu/decode_portable.h"

namespace speq::cpu {
namespace {

// A product has sums of type Sum: clear(sum), total(sum), at(input, first) for where a row of
// inputs goes on, and add<whole>(sums, blocks, input, first, present), which adds the products of a
// block of each row of a quad by `present` inputs, from column `first` on. Whether a block is whole
// is known where it is compiled. Rows are rebuilt for kMostInputs as they pass; for more, into the
// cache, once.

// Begin to fetch `bytes` bytes.
inline void fetch_lines(const void *first, std::int64_t bytes) {
  constexpr std::int64_t kLine = 64;
  for (std::int64_t at = 0; at < bytes; at += kLine) {
    fetch_ahead(static_cast<const std::uint8_t *>(first) + at);
  }
}

// Begin to fetch the streams of the quad behind this one: about as many bytes as those of this one.
inline void fetch_streams(const CodedRows &matrix, const QuadStreams &streams) {
  constexpr std::int64_t kMost = 4096;
  const std::int64_t own = streams.back - streams.front, most = streams.end - streams.back;
  const std::int64_t left = own < most ? own : most;
  fetch_lines(matrix.streams + streams.back, left < kMost ? left : kMost);
}

// Begin to fetch what a plane of rows of `stride` bytes has for the quad behind this one, and half
// of the next: as much as a block of this quad takes, which has kWidth bytes in a row, from `at`
// on. Lines one behind the other, whosever rows they are, take few registers.
template <std::int64_t kWidth>
SPEQ_INLINE void fetch_plane(const std::uint8_t *quad, std::int64_t stride, std::int64_t at) {
  constexpr std::int64_t kLine = 64;
  const std::uint8_t *ahead = quad + (kQuadRows + kQuadRows / 2) * stride + kQuadRows * at;
  SPEQ_UNROLL
  for (std::int64_t line = 0; line < kQuadRows * kWidth; line += kLine) {
    fetch_ahead(ahead + line);
  }
}

// A decoder that gives whole blocks in registers, a row after the other: begin(rows, first), then
// segments(n, first, use) calls use(half, segment) for both halves of the block, and a segment adds
// its products to partial sums: add_to(partial, values). Weights do not go through memory.
template <typename Product, typename Decoder>
concept TakesSegments = requires(typename Product::Sum sum, Decoder decoder) {
  sum.partial;
  decoder.begin(1, 0);
};

// Four rows by R inputs.
template <typename Product, typename Decoder, int R, typename Rows>
void dot_quad(const Rows &matrix, std::int64_t quad, const void *const *inputs,
              float *const *outs) {
  Decoder decoder(matrix, quad);
  typename Product::Sum sums[R][kQuadRows];
  SPEQ_UNROLL
  for (int r = 0; r < R; ++r) {
    SPEQ_UNROLL
    for (int n = 0; n < kQuadRows; ++n) {
      Product::clear(sums[r][n]);
    }
  }
  const auto add = [&](auto whole, std::int64_t first, std::int64_t present) {
    typename Decoder::Block blocks[kQuadRows];
    decoder.next(int(kQuadRows), first, present, blocks);
    SPEQ_UNROLL
    for (int r = 0; r < R; ++r) {
      Product::template add<decltype(whole)::value>(sums[r], blocks, Product::at(inputs[r], first),
                                                    first, present);
    }
  };
  std::int64_t first = 0;
  for (; first + kBlockColumns <= matrix.columns; first += kBlockColumns) {
    if constexpr (TakesSegments<Product, Decoder>) {
      decoder.begin(int(kQuadRows), first);
      const float *values[R];
      SPEQ_UNROLL
      for (int r = 0; r < R; ++r) {
        values[r] = static_cast<const float *>(inputs[r]) + first;
      }
      const std::int64_t partial = first_partial(first);
      for (int n = 0; n < kQuadRows; ++n) {
        decoder.segments(n, first, [&](int half, const auto &segment) {
          SPEQ_UNROLL
          for (int r = 0; r < R; ++r) {
            segment.add_to(sums[r][n].partial + partial + half * kVectorColumns,
                           values[r] + half * kSegmentColumns);
          }
        });
      }
    } else {
      add(std::true_type(), first, kBlockColumns);
    }
  }
  if (first < matrix.columns) {
    add(std::false_type(), first, matrix.columns - first);
  }
  SPEQ_UNROLL
  for (int r = 0; r < R; ++r) {
    SPEQ_UNROLL
    for (int n = 0; n < kQuadRows; ++n) {
      outs[r][n] = Product::total(sums[r][n]);
    }
  }
}

template <typename Decoder, typename Rows>
void decode_quad(const Rows &matrix, std::int64_t quad, BFloat16 *words) {
  const std::int64_t left = matrix.rows - quad * kQuadRows;
  const int rows = int(left < kQuadRows ? left : kQuadRows);
  Decoder decoder(matrix, quad);
  const auto store = [&](int count, std::int64_t first, std::int64_t present) {
    typename Decoder::Block blocks[kQuadRows];
    decoder.next(count, first, present, blocks);
    static_assert(sizeof blocks[0] >= kBlockColumns * sizeof(BFloat16));
    SPEQ_UNROLL
    for (int n = 0; n < count; ++n) {
      std::memcpy(words + n * matrix.columns + first, &blocks[n], present * sizeof(BFloat16));
    }
  };
  std::int64_t first = 0;
  if (rows == kQuadRows) {
    for (; first + kBlockColumns <= matrix.columns; first += kBlockColumns) {
      store(int(kQuadRows), first, kBlockColumns);
    }
  }
  for (; first < matrix.columns; first += kBlockColumns) {
    const std::int64_t rest = matrix.columns - first;
    store(rows, first, rest < kBlockColumns ? rest : kBlockColumns);
  }
}

template <typename Product, typename Decoder, typename Rows, int... kLess>
constexpr auto passing_dots(std::integer_sequence<int, kLess...>) {
  return std::array{dot_quad<Product, Decoder, kLess + 1, Rows>...};
}

// kDot: the product of plain weights, with the same inputs.
template <typename Product, typename Decoder, DotExact kDot, typename Rows>
void dot_coded(const Rows &matrix, std::int64_t begin, std::int64_t end, const void *const *inputs,
               std::int64_t count, float *const *outs) {
  std::vector<BFloat16> words;
  float *quad_outs[Product::kMostInputs];
  std::vector<float *> all_outs;
  for (std::int64_t row = begin; row < end; row += kQuadRows) {
    const std::int64_t rows = end - row < kQuadRows ? end - row : kQuadRows;
    if (rows == kQuadRows && count <= Product::kMostInputs) {
      for (std::int64_t r = 0; r < count; ++r) {
        quad_outs[r] = outs[r] + row - begin;
      }
      constexpr auto dots = passing_dots<Product, Decoder, Rows>(
          std::make_integer_sequence<int, Product::kMostInputs>());
      const auto dot = dots[count - 1];
      dot(matrix, row / kQuadRows, inputs, quad_outs);
      continue;
    }
    words.resize(kQuadRows * matrix.columns);
    all_outs.assign(outs, outs + count);
    for (float *&out : all_outs) {
      out += row - begin;
    }
    decode_quad<Decoder>(matrix, row / kQuadRows, words.data());
    kDot(words.data(), matrix.columns, rows, inputs, count, all_outs.data());
  }
}

// A decoder of vectors says which groups it takes; the next one that does takes the others.
template <typename Product, DotExact kDot, typename Decoder, typename... Others>
void dot_residual(const ResidualRows &matrix, std::int64_t begin, std::int64_t end,
                  const void *const *inputs, std::int64_t count, float *const *outs) {
  if constexpr (sizeof...(Others) > 0) {
    if (!Decoder::takes(matrix.codes)) {
      return dot_residual<Product, kDot, Others...>(matrix, begin, end, inputs, count, outs);
    }
  }
  dot_coded<Product, Decoder, kDot>(matrix, begin, end, inputs, count, outs);
}

template <typename Decoder, typename... Others>
void decode_residual(const ResidualRows &matrix, std::int64_t quad, BFloat16 *words) {
  if constexpr (sizeof...(Others) > 0) {
    if (!Decoder::takes(matrix.codes)) {
      return decode_residual<Others...>(matrix, quad, words);
    }
  }
  decode_quad<Decoder>(matrix, quad, words);
}

} // namespace
} // namespace speq::cpu
