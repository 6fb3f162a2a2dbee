// Blocks of compact matrices in plain C++: to read the others by, and for processors and group
// sizes that those do not take.
#pragma once

#include <cstring>

#include "cpu/micro_kernels.h"

namespace speq::cpu {
namespace {

// A decoder gives the blocks of a quad: `next` of each of its rows, for the columns from `first`
// on. `present` columns of a block are in the matrix; the words behind them are zeros.
struct WordBlock {
  // Behind the columns there is room to write what belongs nowhere.
  alignas(64) BFloat16 words[kBlockColumns + 32];
};

// Zeros behind the columns that are in the matrix.
template <typename Block> inline void clear_behind(Block &block, std::int64_t present) {
  if (present < kBlockColumns) {
    std::memset(block.words + present, 0, (kBlockColumns - present) * sizeof block.words[0]);
  }
}

// Value i of 3-bit values that begin at a byte.
inline int class_at(const std::uint8_t *classes, std::int64_t i) {
  const std::int64_t bit = 3 * i;
  const int pair = classes[bit / 8] | classes[bit / 8 + 1] << 8;
  return pair >> bit % 8 & 7;
}

inline BFloat16 word_of(int high, int low) { return {std::uint16_t(high << 8 | low)}; }

class PortableLossless {
public:
  using Block = WordBlock;

  PortableLossless(const LosslessRows &matrix, std::int64_t quad)
      : matrix_(matrix), row_(quad * kQuadRows), streams_(matrix.quad(quad)) {}

  void next(int rows, std::int64_t first, std::int64_t present, Block *blocks) {
    for (int n = 0; n < rows; ++n) {
      blocks[n] = rebuilt(n, first, present);
    }
  }

private:
  Block rebuilt(int n, std::int64_t first, std::int64_t present) {
    const std::int64_t row = row_ + n;
    const std::uint8_t *bytes = matrix_.bytes + row * matrix_.columns + first;
    const std::uint8_t *classes = matrix_.classes + row * class_stride(matrix_.columns);
    int escapes = 0;
    for (std::int64_t i = 0; i < present; ++i) {
      escapes += class_at(classes, first + i) == kEscape;
    }
    const std::uint8_t *escaped = matrix_.streams + streams_.take_back(escapes);
    Block block{};
    for (std::int64_t i = 0; i < present; ++i) {
      const int of = class_at(classes, first + i);
      block.words[i] = word_of(of == kEscape ? *escaped++ : matrix_.high_bytes[of], bytes[i]);
    }
    return block;
  }

  const LosslessRows &matrix_;
  std::int64_t row_;
  QuadStreams streams_;
};

class PortableResidual {
public:
  using Block = WordBlock;

  PortableResidual(const ResidualRows &matrix, std::int64_t quad)
      : matrix_(matrix), row_(quad * kQuadRows), streams_(matrix.quad(quad)) {}

  void next(int rows, std::int64_t first, std::int64_t present, Block *blocks) {
    for (int n = 0; n < rows; ++n) {
      blocks[n] = rebuilt(n, first, present);
    }
  }

private:
  Block rebuilt(int n, std::int64_t first, std::int64_t present) {
    const Int4Matrix &codes = matrix_.codes;
    const std::int64_t row = row_ + n;
    const std::uint8_t *bytes = matrix_.bytes + row * matrix_.columns + first;
    const std::uint8_t *qweight = codes.qweight + row * codes.row_bytes() + first / 2;
    const Float16 *scales = codes.scales + row * codes.row_groups();
    const auto code = [&](std::int64_t i) {
      return i % 2 == 0 ? low_code(qweight[i / 2]) : high_code(qweight[i / 2]);
    };
    int zeros = 0;
    for (std::int64_t i = 0; i < present; ++i) {
      zeros += code(i) == 0;
    }
    const std::uint8_t *classes = matrix_.streams + streams_.take_front(class_bytes(zeros));
    bool escaped[kBlockColumns] = {};
    int escapes = 0;
    for (std::int64_t i = 0, zero = 0; i < present; ++i) {
      if (code(i) == 0) {
        escaped[i] = class_at(classes, zero++) == kEscape;
        escapes += escaped[i];
      }
    }
    if (streams_.has_exceptions) {
      const int count = matrix_.streams[streams_.take_front(1)];
      for (int i = 0; i < count; ++i) {
        bool &at = escaped[matrix_.streams[streams_.take_front(1)] % kBlockColumns];
        escapes += !at;
        at = true;
      }
    }
    const std::uint8_t *high_bytes = matrix_.streams + streams_.take_back(escapes);
    Block block{};
    for (std::int64_t i = 0, zero = 0; i < present; ++i) {
      const float scale = window_scale(scales[(first + i) / codes.group_size]);
      const std::uint16_t start = window_start(code(i), scale);
      int high = high_byte(start, bytes[i]);
      if (code(i) == 0) {
        high = zero_high_byte(start, class_at(classes, zero++));
      }
      block.words[i] = word_of(escaped[i] ? *high_bytes++ : high, bytes[i]);
    }
    return block;
  }

  const ResidualRows &matrix_;
  std::int64_t row_;
  QuadStreams streams_;
};

} // namespace
} // namespace speq::cpu
