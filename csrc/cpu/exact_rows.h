// Rows of inputs as the exact products take them: float32, or bfloat16 where a processor multiplies
// pairs of those and both sides are; padded with zeros.
#pragma once

#include <algorithm>
#include <cstddef>

#include "cpu/buffer.h"
#include "cpu/isa.h"

namespace speq::cpu {

enum class Word { float32, bfloat16, float16 };

constexpr std::int64_t bytes_of(Word word) { return word == Word::float32 ? 4 : 2; }

// Calls body with a value of the type that a word is stored in.
template <typename Body> void with_type(Word word, const Body &body) {
  switch (word) {
  case Word::bfloat16:
    return body(BFloat16{});
  case Word::float16:
    return body(Float16{});
  default:
    return body(float{});
  }
}

// The product of weights with inputs that are stored as float32, or as bfloat16 for pairs.
inline DotExact dot_exact_for(Word weights, Word stored) {
  const MicroKernels &kernels = micro_kernels();
  switch (weights) {
  case Word::bfloat16:
    return stored == Word::bfloat16 ? kernels.dot_bfloat16_pairs : kernels.dot_bfloat16;
  case Word::float16:
    return kernels.dot_float16;
  default:
    return kernels.dot_float32;
  }
}

// Rows of inputs, all of one kind.
struct Inputs {
  const void *const *rows;
  std::int64_t count;
  Word stored; // bfloat16 where pairs are multiplied
};

class ExactRows {
public:
  // weights and values are the dtypes of the two sides.
  ExactRows(std::int64_t rows, std::int64_t columns, Word weights, Word values)
      : columns_(columns), stride_((columns + kExactColumns - 1) / kExactColumns * kExactColumns),
        weights_(weights), stored_(stored_as(weights, values)),
        buffer_(rows * stride_ * bytes_of(stored_)) {
    const std::int64_t used = columns * bytes_of(stored_), row_bytes = stride_ * bytes_of(stored_);
    for (std::int64_t row = 0; row < rows; ++row) {
      std::fill_n(buffer_.data() + row * row_bytes + used, row_bytes - used, std::byte{0});
    }
  }

  static Word stored_as(Word weights, Word values) {
    const bool pairs = weights == Word::bfloat16 && values == Word::bfloat16 &&
                       micro_kernels().dot_bfloat16_pairs != nullptr && !sums_in_order();
    return pairs ? Word::bfloat16 : Word::float32;
  }

  // Whether rows of values are stored as they are, so that no copy of them is needed.
  static bool as_they_are(std::int64_t columns, Word weights, Word values) {
    return stored_as(weights, values) == values && columns % kExactColumns == 0;
  }

  const void *row(std::int64_t row) const {
    return buffer_.data() + row * stride_ * bytes_of(stored_);
  }

  // Fill a row from `words`.
  template <typename Type> void fill(std::int64_t row, const Type *words) {
    put(row, 0, columns_, [&](std::int64_t i) { return to_float(words[i]); });
  }

  // Fill `count` columns of a row from `first` on.
  void fill(std::int64_t row, std::int64_t first, std::int64_t count, const float *values) {
    put(row, first, count, [&](std::int64_t i) { return values[i]; });
  }

  // Fill a row from words in the order of a perm.
  template <typename Type>
  void fill(std::int64_t row, const Type *words, const std::int32_t *perm) {
    put(row, 0, columns_, [&](std::int64_t i) { return to_float(words[perm[i]]); });
  }

  Word stored() const { return stored_; }
  // The product of such rows with weights.
  DotExact dot() const { return dot_exact_for(weights_, stored_); }

private:
  template <typename Value>
  void put(std::int64_t row, std::int64_t first, std::int64_t count, const Value &value) {
    with_type(stored_, [&](auto type) {
      auto *out = reinterpret_cast<decltype(type) *>(buffer_.data()) + row * stride_ + first;
      for (std::int64_t i = 0; i < count; ++i) {
        store(value(i), out[i]);
      }
    });
  }

  std::int64_t columns_, stride_;
  Word weights_, stored_;
  Buffer<std::byte> buffer_;
};

} // namespace speq::cpu
