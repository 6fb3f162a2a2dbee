// What the ops over records have alike: those of experts and those of dense matrices.
#pragma once

#include "cpu/encode.h"
#include "cpu/expert_weights.h"
#include "cpu/records.h"
#include "cpu/tensors.h"

namespace speq::cpu {

// Quads that a thread takes at a time when records are undone.
constexpr std::int64_t kGrainQuads = 16;
constexpr std::int64_t kEntryBytes = alignof(std::uint32_t);

inline std::int64_t &number_in(Tensor &nbytes) {
  check(nbytes, "nbytes", 1, ScalarType::Long);
  STD_TORCH_CHECK(nbytes.numel() == 1, "nbytes must hold one number");
  return *static_cast<std::int64_t *>(nbytes.mutable_data_ptr());
}

// Encodes matrices into a record, where it has room for them, and says how large it is with them.
// In the calling thread alone: whoever has many matrices encodes several at a time, and many do so
// while others compute.
inline void encode(const CompactEncoder &encoder, Tensor &record, Tensor &nbytes) {
  check(record, "record", 1, ScalarType::Byte);
  number_in(nbytes) = encoder.nbytes();
  if (encoder.nbytes() <= record.numel() && encoder.can_write()) {
    encoder.write(static_cast<std::uint8_t *>(record.mutable_data_ptr()));
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
  parallel_for(begin, end, kGrainQuads, [&](std::int64_t first, std::int64_t last) {
    decode_rows(matrix, first * kQuadRows, last * kQuadRows,
                words + (first - begin) * kQuadRows * matrix.columns);
  });
}

// Plain words of an expert.
struct ExactExpert {
  const BFloat16 *gate_up, *down;
  ExpertShape shape;

  ExactWords words() const {
    return {gate_up, gate_up + shape.rows(int(Projection::gate)) * shape.hidden_size, down};
  }
};

inline ExactExpert exact_expert(const Tensor &gate_up_proj, const Tensor &down_proj) {
  check(gate_up_proj, "gate_up_proj", 2, ScalarType::BFloat16);
  check(down_proj, "down_proj", 2, ScalarType::BFloat16);
  const ExpertShape shape =
      shape_of(gate_up_proj.size(0), gate_up_proj.size(1), down_proj.size(0), down_proj.size(1));
  return {static_cast<const BFloat16 *>(gate_up_proj.const_data_ptr()),
          static_cast<const BFloat16 *>(down_proj.const_data_ptr()), shape};
}

inline RecordSlots record_slots(const Tensor &slots, std::int64_t fixed_bytes) {
  STD_TORCH_CHECK(slots.dim() == 2 && slots.scalar_type() == ScalarType::Byte &&
                      slots.stride(1) == 1 && slots.stride(0) % kEntryBytes == 0,
                  "slots must be [S, slot_bytes] of uint8, ", kEntryBytes, " bytes aligned");
  const auto *records = static_cast<const std::uint8_t *>(slots.const_data_ptr());
  check_record({records, slots.size(1)}, fixed_bytes, "slots");
  return {records, slots.size(0), slots.size(1), slots.stride(0)};
}

inline RecordSlots only_slot(const Tensor &tensor, std::int64_t fixed_bytes) {
  const Record record = record_of(tensor, fixed_bytes);
  return {record.bytes, 1, record.nbytes, 0}; // a stride that nobody steps by
}

// Words of all rows of an expert; rows_of(projection) are the matrices.
template <typename RowsOf>
void decode(const RowsOf &rows_of, Tensor &gate_up_proj, Tensor &down_proj) {
  const ExpertShape shape = exact_expert(gate_up_proj, down_proj).shape;
  auto *gate_up = static_cast<BFloat16 *>(gate_up_proj.mutable_data_ptr());
  auto *down = static_cast<BFloat16 *>(down_proj.mutable_data_ptr());
  for (const Projection projection : {Projection::gate, Projection::up, Projection::down}) {
    const auto rows = rows_of(projection);
    const std::int64_t above = projection == Projection::up ? shape.rows(0) : 0;
    BFloat16 *words = projection == Projection::down ? down : gate_up + above * rows.columns;
    decode_quads(rows, 0, quads_of(rows.rows), words);
  }
}

} // namespace speq::cpu
