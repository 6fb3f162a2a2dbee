// The products of compact matrices: blocks rebuilt by a decoder of the instruction set, multiplied
// in the order in which tiles.h multiplies words, so that the sums are the same bit for bit.
#pragma once

#include <array>
#include <new>
#include <type_traits>
#include <utility>

#include "cpu/blocks.h"
#include "cpu/decode_portable.h"

namespace speq::cpu {
namespace {

// Memory for so many elements. What a template of another header leaves behind has a name outside
// this file: the linker would keep one copy for all, of whatever instruction set.
template <typename T> struct Room {
  explicit Room(std::int64_t count)
      : first(static_cast<T *>(::operator new(count * sizeof(T), kAligned))) {}
  ~Room() { ::operator delete(first, kAligned); }
  Room(const Room &) = delete;
  static constexpr std::align_val_t kAligned{64};
  T *const first;
};

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

// A decoder that gives a block of a quad in an order of its own: next(first, quad), then quad.add
// adds its products to partial sums. Inputs are laid in that order once (Quad::lay), and partial
// sums put back in theirs (Quad::put_in_order).
template <typename Product, typename Decoder>
concept TakesLaid =
    requires(typename Product::Sum sum, Decoder decoder, typename Decoder::Quad quad) {
      sum.partial;
      decoder.next(1, quad);
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
    const float *values[R];
    SPEQ_UNROLL
    for (int r = 0; r < R; ++r) {
      values[r] = static_cast<const float *>(inputs[r]) + first;
    }
    const std::int64_t partial = first_partial(first);
    if constexpr (TakesLaid<Product, Decoder>) {
      typename Decoder::Quad blocks;
      decoder.next(first, blocks);
      blocks.add(values, [&](int r, int n) { return sums[r][n].partial + partial; });
    } else if constexpr (TakesSegments<Product, Decoder>) {
      decoder.begin(int(kQuadRows), first);
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
  if constexpr (TakesLaid<Product, Decoder>) {
    for (int r = 0; r < R; ++r) {
      for (int n = 0; n < kQuadRows; ++n) {
        Decoder::Quad::put_in_order(sums[r][n].partial);
      }
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

// The rows from `row` on by way of their words; outs are of the rows from `begin` on.
template <typename Decoder, DotExact kDot, typename Rows>
void dot_words(const Rows &matrix, std::int64_t begin, std::int64_t row, std::int64_t end,
               const void *const *inputs, std::int64_t count, float *const *outs) {
  const Room<BFloat16> words(kQuadRows * matrix.columns);
  const Room<float *> quad_outs(count);
  for (; row < end; row += kQuadRows) {
    for (std::int64_t r = 0; r < count; ++r) {
      quad_outs.first[r] = outs[r] + row - begin;
    }
    decode_quad<Decoder>(matrix, row / kQuadRows, words.first);
    const std::int64_t rows = end - row < kQuadRows ? end - row : kQuadRows;
    kDot(words.first, matrix.columns, rows, inputs, count, quad_outs.first);
  }
}

// A row of inputs in the order that a decoder's blocks are in.
template <typename Quad> void lay_row(const float *values, std::int64_t columns, float *out) {
  std::int64_t first = 0;
  for (; first + kBlockColumns <= columns; first += kBlockColumns) {
    Quad::lay(values + first, out + first);
  }
  std::memcpy(out + first, values + first, (columns - first) * sizeof(float));
}

// kDot: the product of plain weights, with the same inputs.
template <typename Product, typename Decoder, DotExact kDot, typename Rows>
void dot_coded(const Rows &matrix, std::int64_t begin, std::int64_t end, const void *const *inputs,
               std::int64_t count, float *const *outs) {
  constexpr int kMost = Product::kMostInputs;
  constexpr bool kLaid = TakesLaid<Product, Decoder>;
  std::int64_t row = begin;
  if (count <= kMost && end - begin >= kQuadRows) {
    constexpr auto dots =
        passing_dots<Product, Decoder, Rows>(std::make_integer_sequence<int, kMost>());
    const auto dot = dots[count - 1];
    const Room<float> laid(kLaid ? count * matrix.columns : 0);
    const void *quad_inputs[kMost];
    for (std::int64_t r = 0; r < count; ++r) {
      quad_inputs[r] = inputs[r];
      if constexpr (kLaid) {
        quad_inputs[r] = laid.first + r * matrix.columns;
        lay_row<typename Decoder::Quad>(static_cast<const float *>(inputs[r]), matrix.columns,
                                        laid.first + r * matrix.columns);
      }
    }
    for (; row + kQuadRows <= end; row += kQuadRows) {
      float *quad_outs[kMost];
      for (std::int64_t r = 0; r < count; ++r) {
        quad_outs[r] = outs[r] + row - begin;
      }
      dot(matrix, row / kQuadRows, quad_inputs, quad_outs);
    }
  }
  if (row < end) {
    dot_words<Decoder, kDot>(matrix, begin, row, end, inputs, count, outs);
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
