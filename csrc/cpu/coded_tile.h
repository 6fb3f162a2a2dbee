// The products of compact matrices: blocks rebuilt by a decoder of the instruction set, multiplied
// in the order in which tiles.h multiplies words, so that the sums are the same bit for bit.
#pragma once

#include <type_traits>
#include <vector>

#include "cpu/blocks.h"
#include "cpu/decode_portable.h"

namespace speq::cpu {
namespace {

// A product has sums of type Sum: zero(), total(sum), at(input, first) for where a row of inputs
// goes on, and add<whole>(sums, blocks, input, present), which adds the products of a block of each
// row of a quad by `present` inputs. Whether a block is whole is known where it is compiled.

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
      sums[r][n] = Product::zero();
    }
  }
  const auto add = [&](auto whole, std::int64_t first, std::int64_t present) {
    typename Decoder::Block blocks[kQuadRows];
    decoder.begin(first);
    SPEQ_UNROLL
    for (int n = 0; n < kQuadRows; ++n) {
      blocks[n] = decoder.next(n, first, present);
    }
    SPEQ_UNROLL
    for (int r = 0; r < R; ++r) {
      Product::template add<decltype(whole)::value>(sums[r], blocks, Product::at(inputs[r], first),
                                                    present);
    }
  };
  std::int64_t first = 0;
  for (; first + kBlockColumns <= matrix.columns; first += kBlockColumns) {
    add(std::true_type(), first, kBlockColumns);
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
  for (std::int64_t first = 0; first < matrix.columns; first += kBlockColumns) {
    const std::int64_t rest = matrix.columns - first;
    const std::int64_t present = rest < kBlockColumns ? rest : kBlockColumns;
    decoder.begin(first);
    for (int n = 0; n < rows; ++n) {
      const auto block = decoder.next(n, first, present);
      alignas(64) BFloat16 out[kBlockColumns];
      static_assert(sizeof out == sizeof block);
      std::memcpy(out, &block, sizeof out);
      std::memcpy(words + n * matrix.columns + first, out, present * sizeof(BFloat16));
    }
  }
}

// Inputs that rows are rebuilt for as they pass; for more, rows are rebuilt into the cache, once.
constexpr std::int64_t kPassingInputs = 4;

// kDot: the product of plain words, with the same inputs.
template <typename Product, typename Decoder, DotExact kDot, typename Rows>
void dot_coded(const Rows &matrix, std::int64_t begin, std::int64_t end, const void *const *inputs,
               std::int64_t count, float *const *outs) {
  std::vector<BFloat16> words;
  float *quad_outs[kPassingInputs];
  std::vector<float *> all_outs;
  for (std::int64_t row = begin; row < end; row += kQuadRows) {
    const std::int64_t rows = end - row < kQuadRows ? end - row : kQuadRows;
    if (rows == kQuadRows && count <= kPassingInputs) {
      for (std::int64_t r = 0; r < count; ++r) {
        quad_outs[r] = outs[r] + row - begin;
      }
      const auto dot = count == 1   ? dot_quad<Product, Decoder, 1, Rows>
                       : count == 2 ? dot_quad<Product, Decoder, 2, Rows>
                       : count == 3 ? dot_quad<Product, Decoder, 3, Rows>
                                    : dot_quad<Product, Decoder, 4, Rows>;
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

// Group sizes whose tables a vector decoder has, a table to sixteen columns: all others go block by
// block through plain C++.
inline bool takes_tables(const Int4Matrix &codes) {
  return codes.group_size == codes.columns || codes.group_size % kBlockColumns == 0 ||
         codes.group_size == 32 || codes.group_size == 16;
}

template <typename Product, typename Decoder, DotExact kDot>
void dot_residual(const ResidualRows &matrix, std::int64_t begin, std::int64_t end,
                  const void *const *inputs, std::int64_t count, float *const *outs) {
  const auto dot = takes_tables(matrix.codes)
                       ? dot_coded<Product, Decoder, kDot, ResidualRows>
                       : dot_coded<Product, PortableResidual, kDot, ResidualRows>;
  dot(matrix, begin, end, inputs, count, outs);
}

template <typename Decoder>
void decode_residual(const ResidualRows &matrix, std::int64_t quad, BFloat16 *words) {
  const auto decode = takes_tables(matrix.codes) ? decode_quad<Decoder, ResidualRows>
                                                 : decode_quad<PortableResidual, ResidualRows>;
  decode(matrix, quad, words);
}

} // namespace
} // namespace speq::cpu
