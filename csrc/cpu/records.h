// Compact records in memory, and the matrices in them as the micro kernels take those.
#pragma once

#include "cpu/exact_rows.h"

namespace speq::cpu {

// Bytes that hold a record of some layout, at least `fixed_bytes` of it, aligned to an entry of the
// index.
struct Record {
  const std::uint8_t *bytes;
  std::int64_t nbytes;
};

// The part of matrix m that lossless and residual records have alike.
inline CodedRows coded_rows(const CompactLayout &layout, const Record &record, int m) {
  const auto *index = reinterpret_cast<const std::uint32_t *>(record.bytes + layout.index);
  return {layout.rows[m],
          layout.columns[m],
          record.bytes + layout.bytes[m],
          record.bytes + layout.streams,
          index + layout.first_quad[m],
          record.nbytes - layout.fixed_bytes()};
}

inline LosslessRows lossless_rows(const CompactLayout &layout, const Record &record, int m) {
  return {coded_rows(layout, record, m), record.bytes + m * kClasses,
          record.bytes + layout.classes[m]};
}

inline ResidualRows residual_rows(const CompactLayout &layout, const Record &record, int m,
                                  const Int4Matrix &codes) {
  return {coded_rows(layout, record, m), codes};
}

inline const CodedKernels<LosslessRows> &coded_kernels(const LosslessRows &) {
  return micro_kernels().lossless;
}
inline const CodedKernels<ResidualRows> &coded_kernels(const ResidualRows &) {
  return micro_kernels().residual;
}
inline const CodedKernels<Fp8Rows> &coded_kernels(const Fp8Rows &) { return micro_kernels().fp8; }
inline const CodedKernels<Mxfp4Rows> &coded_kernels(const Mxfp4Rows &) {
  return micro_kernels().mxfp4;
}
inline const CodedKernels<Int4Rows> &coded_kernels(const Int4Rows &) {
  return micro_kernels().int4;
}
inline const CodedKernels<Nvfp4Rows> &coded_kernels(const Nvfp4Rows &) {
  return micro_kernels().nvfp4;
}

// Rows [begin, end) of a matrix by inputs; begin is a multiple of a quad.
template <typename Rows>
void dot_rows(const Rows &matrix, std::int64_t begin, std::int64_t end, const Inputs &inputs,
              float *const *outs) {
  const CodedKernels<Rows> &kernels = coded_kernels(matrix);
  const auto dot = inputs.stored == Word::bfloat16 ? kernels.dot_pairs : kernels.dot;
  dot(matrix, begin, end, inputs.rows, inputs.count, outs);
}

// The words of such rows; `words` holds whole quads of them, as far as the matrix has rows.
template <typename Rows>
void decode_rows(const Rows &matrix, std::int64_t begin, std::int64_t end, BFloat16 *words) {
  const auto decode = coded_kernels(matrix).decode;
  for (std::int64_t quad = begin / kQuadRows; quad * kQuadRows < end; ++quad) {
    decode(matrix, quad, words + (quad * kQuadRows - begin) * matrix.columns);
  }
}

// The same, as words of any type.
template <typename Rows>
const void *decode_rows(const Rows &matrix, std::int64_t begin, std::int64_t end, std::byte *room) {
  decode_rows(matrix, begin, end, reinterpret_cast<BFloat16 *>(room));
  return room;
}

} // namespace speq::cpu
