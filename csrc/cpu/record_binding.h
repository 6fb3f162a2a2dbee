// What the ops over compact records have alike: those of experts and those of dense matrices.
#pragma once

#include "cpu/encode.h"
#include "cpu/records.h"
#include "cpu/tensors.h"

namespace speq::cpu {

// Quads that a thread takes at a time when records are made or undone.
constexpr std::int64_t kGrainQuads = 16;
constexpr std::int64_t kEntryBytes = alignof(std::uint32_t);

// Makes a record, where it has room for it, and says how large that is.
inline void encode(CompactEncoder &encoder, Tensor &record, Tensor &nbytes) {
  check(record, "record", 1, ScalarType::Byte);
  check(nbytes, "nbytes", 1, ScalarType::Long);
  STD_TORCH_CHECK(nbytes.numel() == 1, "nbytes must hold one number");
  parallel_for(0, encoder.quads(), kGrainQuads,
               [&](std::int64_t begin, std::int64_t end) { encoder.measure(begin, end); });
  const std::int64_t wanted = encoder.finish();
  *static_cast<std::int64_t *>(nbytes.mutable_data_ptr()) = wanted;
  if (wanted <= record.numel() && encoder.can_write()) {
    auto *bytes = static_cast<std::uint8_t *>(record.mutable_data_ptr());
    parallel_for(0, encoder.quads(), kGrainQuads,
                 [&](std::int64_t begin, std::int64_t end) { encoder.write(begin, end, bytes); });
  }
}

inline void check_record(const Record &record, std::int64_t fixed_bytes, const char *name) {
  STD_TORCH_CHECK(record.nbytes >= fixed_bytes &&
                      reinterpret_cast<std::uintptr_t>(record.bytes) % kEntryBytes == 0,
                  name, " must hold records of at least ", fixed_bytes, " bytes, aligned to four");
}

inline Record record_of(const Tensor &tensor, std::int64_t fixed_bytes) {
  check(tensor, "record", 1, ScalarType::Byte);
  const Record record{static_cast<const std::uint8_t *>(tensor.const_data_ptr()), tensor.numel()};
  check_record(record, fixed_bytes, "record");
  return record;
}

// Words of quads [begin, end) of a matrix; `words` is for the first of them.
template <typename Rows>
void decode_quads(const Rows &matrix, std::int64_t begin, std::int64_t end, BFloat16 *words) {
  const auto decode = coded_kernels(matrix).decode;
  parallel_for(begin, end, kGrainQuads, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t quad = first; quad < last; ++quad) {
      decode(matrix, quad, words + (quad - begin) * kQuadRows * matrix.columns);
    }
  });
}

} // namespace speq::cpu
