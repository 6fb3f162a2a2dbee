// Rows of inputs as the INT4 products take them.
#pragma once

#include <algorithm>
#include <cstring>

#include "cpu/buffer.h"
#include "cpu/isa.h"

namespace speq::cpu {

class Int8Rows {
public:
  Int8Rows(std::int64_t rows, std::int64_t columns)
      : columns_(columns), steps_(steps_of(columns)), buffer_(rows * steps_) {
    for (std::int64_t row = 0; row < rows; ++row) { // blocks past a row's end are zero
      std::memset(&buffer_[row * steps_ + steps_ - 1], 0, sizeof(Int8Step));
    }
  }

  const Int8Step *row(std::int64_t row) const { return buffer_.data() + row * steps_; }

  // Round values [begin, begin + count) of a row; begin is a multiple of the block.
  void round(std::int64_t row, std::int64_t begin, std::int64_t count, const float *values) {
    for (std::int64_t at = 0; at < count; at += kInt8Block) {
      micro_kernels().round_block(values + at, std::min<std::int64_t>(kInt8Block, count - at),
                                  buffer_.data() + row * steps_, (begin + at) / kInt8Block);
    }
  }

  // Round a whole row; column c of it is values[perm[c]] where there is a perm.
  void round_row(std::int64_t row, const float *values, const std::int32_t *perm) {
    if (perm == nullptr) {
      return round(row, 0, columns_, values);
    }
    float block[kInt8Block];
    for (std::int64_t begin = 0; begin < columns_; begin += kInt8Block) {
      const std::int64_t count = std::min<std::int64_t>(kInt8Block, columns_ - begin);
      for (std::int64_t i = 0; i < count; ++i) {
        block[i] = values[perm[begin + i]];
      }
      round(row, begin, count, block);
    }
  }

private:
  std::int64_t columns_, steps_;
  Buffer<Int8Step> buffer_;
};

} // namespace speq::cpu
