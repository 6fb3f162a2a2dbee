// Rebuilds the words of lossless records.
#pragma once

#include "cuda/compact_matrix.h"

namespace speq::cuda {

struct LosslessMatrix : CompactMatrix {
  const std::uint8_t *exponents, *classes;
};

class LosslessDecoder {
public:
  const LosslessMatrix &matrix;

  SPEQ_DEVICE LosslessDecoder(const LosslessMatrix &matrix, int quad, const float *)
      : matrix(matrix), row_(quad * kRows), streams_(matrix, quad),
        exponents_{load_word(matrix.exponents), load_word(matrix.exponents + 4)} {}

  SPEQ_DEVICE void prefetch(int column) const {
    prefetch_rows(matrix.bytes + row_ * matrix.columns, matrix.columns, column);
    const int stride = int(class_stride(matrix.columns));
    prefetch_rows(matrix.classes + row_ * stride, stride, column / 8 * 3);
  }

  SPEQ_DEVICE void begin(int column) {
    const int present = present_columns(matrix, column);
    RowCounts escapes = 0;
#pragma unroll
    for (int n = 0; n < kRows; ++n) {
      const int row = row_ + n, count = row < matrix.rows ? present : 0;
      const std::uint8_t *bytes = matrix.bytes + row * matrix.columns + column;
      const std::uint8_t *classes =
          matrix.classes + row * int(class_stride(matrix.columns)) + column / 8 * 3;
      bytes_[n] = load_bytes<std::uint64_t>(bytes, count, matrix.vectors);
      classes_[n] = count > 0 ? load_word(classes) & ((1u << 3 * count) - 1) : 0;
      const std::uint32_t each = classes_[n] & classes_[n] >> 1 & classes_[n] >> 2 & 0x249249;
      escapes |= RowCounts(__popc(each)) << 8 * n;
    }
    streams_.take_back(BlockCounts(escapes), escaped_);
  }

  SPEQ_DEVICE void next(int, float (&words)[kRows]) {
#pragma unroll
    for (int n = 0; n < kRows; ++n) {
      const std::uint32_t of = classes_[n] & 7, byte = bytes_[n] & 0xFF;
      std::uint32_t exponent = __byte_perm(exponents_[0], exponents_[1], of) & 0xFF;
      if (of == kEscape) {
        exponent = matrix.streams[escaped_[n]++];
      }
      words[n] = bits_as<float>((byte & 0x80) << 24 | exponent << 23 | (byte & 0x7F) << 16);
      classes_[n] >>= 3;
      bytes_[n] >>= 8;
    }
  }

private:
  int row_;
  StreamEnds streams_;
  std::uint32_t exponents_[2]; // of the classes, a byte each
  // Of the step's columns that are left.
  std::uint64_t bytes_[kRows];
  std::uint32_t classes_[kRows];
  int escaped_[kRows]; // where the exponents of the next escapes lie
};

// The experts of a call.
struct LosslessSlots : RecordSlots {
  using Matrix = LosslessMatrix;
  using Decoder = LosslessDecoder;

  SPEQ_DEVICE bool has(std::int64_t, std::int64_t slot) const { return slot < slots; }

  SPEQ_DEVICE LosslessMatrix matrix(int m, std::int64_t, std::int64_t slot) const {
    const std::uint8_t *record = records + slot * stride;
    return {compact_matrix(*this, m, slot), record + m * kClasses, record + layout.classes[m]};
  }

  SPEQ_DEVICE static void fill_starts(float *) {}
};

} // namespace speq::cuda
