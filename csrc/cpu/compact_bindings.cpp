// Binds the ops over compact experts; the others are in bindings.cpp, which says how.

#include <torch/csrc/stable/library.h>

#include "cpu/encode.h"
#include "cpu/grouped_binding.h"

namespace {

using namespace speq;
using namespace speq::cpu;

// Quads that a thread takes at a time when records are undone.
constexpr std::int64_t kGrainQuads = 16;

ExactExpert exact_expert(const Tensor &gate_up_proj, const Tensor &down_proj) {
  check(gate_up_proj, "gate_up_proj", 2, ScalarType::BFloat16);
  check(down_proj, "down_proj", 2, ScalarType::BFloat16);
  const std::int64_t hidden_size = down_proj.size(0), width = down_proj.size(1);
  STD_TORCH_CHECK(gate_up_proj.size(0) == 2 * width && gate_up_proj.size(1) == hidden_size,
                  "gate_up_proj must be [2F, H] and down_proj [H, F]");
  return {static_cast<const BFloat16 *>(gate_up_proj.const_data_ptr()),
          static_cast<const BFloat16 *>(down_proj.const_data_ptr()), hidden_size, width};
}

// Makes a record, where it has room for it, and says how large that is. In the calling thread
// alone: whoever has many experts encodes several at a time, and many do so while others compute.
void encode(CompactEncoder &encoder, Tensor &record, Tensor &nbytes) {
  check(record, "record", 1, ScalarType::Byte);
  check(nbytes, "nbytes", 1, ScalarType::Long);
  STD_TORCH_CHECK(nbytes.numel() == 1, "nbytes must hold one number");
  encoder.measure(0, encoder.quads());
  const std::int64_t wanted = encoder.finish();
  *static_cast<std::int64_t *>(nbytes.mutable_data_ptr()) = wanted;
  if (wanted <= record.numel()) {
    encoder.write(0, encoder.quads(), static_cast<std::uint8_t *>(record.mutable_data_ptr()));
  }
}

void encode_lossless_out(Tensor gate_up_proj, Tensor down_proj, Tensor record, Tensor nbytes) {
  LosslessEncoder encoder(exact_expert(gate_up_proj, down_proj));
  encode(encoder, record, nbytes);
}

void encode_residual_out(Tensor gate_up_proj, Tensor down_proj, Tensor gate_up_qweight,
                         Tensor gate_up_scales, Tensor down_qweight, Tensor down_scales,
                         Tensor record, Tensor nbytes) {
  const ExactExpert expert = exact_expert(gate_up_proj, down_proj);
  const std::int64_t hidden_size = expert.hidden_size, width = expert.expert_width;
  ResidualEncoder encoder(
      expert,
      int4_slots(gate_up_qweight, gate_up_scales, 2 * width, hidden_size, "gate_up").matrix(0),
      int4_slots(down_qweight, down_scales, hidden_size, width, "down").matrix(0));
  encode(encoder, record, nbytes);
}

RecordSlots checked(const RecordSlots &slots, std::int64_t fixed_bytes, const char *name) {
  constexpr std::int64_t kEntry = alignof(std::uint32_t);
  STD_TORCH_CHECK(slots.slot_bytes >= fixed_bytes && slots.stride % kEntry == 0 &&
                      reinterpret_cast<std::uintptr_t>(slots.records) % kEntry == 0,
                  name, " must hold records of at least ", fixed_bytes, " bytes, aligned to four");
  return slots;
}

RecordSlots record_slots(const Tensor &slots, std::int64_t fixed_bytes) {
  STD_TORCH_CHECK(slots.dim() == 2 && slots.scalar_type() == ScalarType::Byte &&
                      slots.stride(1) == 1,
                  "slots must be [S, slot_bytes] of uint8");
  return checked({static_cast<const std::uint8_t *>(slots.const_data_ptr()), slots.size(0),
                  slots.size(1), slots.stride(0)},
                 fixed_bytes, "slots");
}

RecordSlots only_slot(const Tensor &record, std::int64_t fixed_bytes) {
  check(record, "record", 1, ScalarType::Byte);
  // A stride that nobody steps by.
  return checked({static_cast<const std::uint8_t *>(record.const_data_ptr()), 1, record.numel(), 0},
                 fixed_bytes, "record");
}

BaseExperts base_experts(const Tensor &base_slots, const Tensor &gate_up_qweight,
                         const Tensor &gate_up_scales, const Tensor &down_qweight,
                         const Tensor &down_scales, const std::optional<Tensor> &input_perm) {
  check(base_slots, "base_slots", 1, ScalarType::Long);
  STD_TORCH_CHECK(gate_up_qweight.dim() == 3 && down_qweight.dim() == 3 &&
                      gate_up_qweight.size(0) == down_qweight.size(0),
                  "gate_up and down must hold experts in as many base slots");
  const std::int64_t count = down_qweight.size(0), hidden_size = down_qweight.size(1);
  const std::int64_t width = down_qweight.size(2) * 2;
  const Int4Slots gate_up =
      int4_slots(gate_up_qweight, gate_up_scales, 2 * width, hidden_size, "gate_up");
  const Int4Slots down = int4_slots(down_qweight, down_scales, hidden_size, width, "down");
  return {ids_of(base_slots), count,           gate_up.qweight,
          down.qweight,       gate_up.scales,  down.scales,
          gate_up.group_size, down.group_size, perm_of(input_perm, count, hidden_size)};
}

// Words of all rows of an expert; rows_of(projection) are the matrices.
template <typename RowsOf, typename Rows>
void decode(const RowsOf &rows_of, const CodedKernels<Rows> &kernels, Tensor &gate_up_proj,
            Tensor &down_proj) {
  exact_expert(gate_up_proj, down_proj);
  auto *gate_up = static_cast<BFloat16 *>(gate_up_proj.mutable_data_ptr());
  auto *down = static_cast<BFloat16 *>(down_proj.mutable_data_ptr());
  for (const Projection projection : {Projection::gate, Projection::up, Projection::down}) {
    const Rows rows = rows_of(projection);
    BFloat16 *words = projection == Projection::down ? down
                      : projection == Projection::up ? gate_up + rows.rows * rows.columns
                                                     : gate_up;
    parallel_for(0, quads_of(rows.rows), kGrainQuads, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t quad = begin; quad < end; ++quad) {
        kernels.decode(rows, quad, words + quad * kQuadRows * rows.columns);
      }
    });
  }
}

void decode_lossless_out(Tensor record, Tensor gate_up_proj, Tensor down_proj) {
  const ExactExpert expert = exact_expert(gate_up_proj, down_proj);
  const std::int64_t hidden_size = expert.hidden_size, width = expert.expert_width;
  const LosslessWeights weights(
      hidden_size, width, only_slot(record, LosslessWeights::fixed_bytes(hidden_size, width)));
  decode([&](Projection projection) { return weights.rows(projection, 0); },
         micro_kernels().lossless, gate_up_proj, down_proj);
}

void decode_residual_out(Tensor record, Tensor gate_up_qweight, Tensor gate_up_scales,
                         Tensor down_qweight, Tensor down_scales, Tensor gate_up_proj,
                         Tensor down_proj) {
  const ExactExpert expert = exact_expert(gate_up_proj, down_proj);
  const std::int64_t hidden_size = expert.hidden_size, width = expert.expert_width;
  const Int4Slots gate_up =
      int4_slots(gate_up_qweight, gate_up_scales, 2 * width, hidden_size, "gate_up");
  const Int4Slots down = int4_slots(down_qweight, down_scales, hidden_size, width, "down");
  constexpr std::int64_t kOnlySlot = 0;
  const BaseExperts base{{&kOnlySlot, 1}, 1,           gate_up.qweight,    down.qweight,
                         gate_up.scales,  down.scales, gate_up.group_size, down.group_size,
                         nullptr};
  const ResidualWeights weights(hidden_size, width,
                                only_slot(record, ResidualWeights::fixed_bytes(hidden_size, width)),
                                base);
  decode([&](Projection projection) { return weights.rows(projection, 0, 0); },
         micro_kernels().residual, gate_up_proj, down_proj);
}

void moe_grouped_lossless_out(Tensor hidden_states, Tensor topk_ids, Tensor slot_table,
                              Tensor slots, std::int64_t expert_width, std::int64_t activation,
                              Tensor out) {
  STD_TORCH_CHECK(hidden_states.dim() == 2 && expert_width > 0,
                  "hidden_states must be [T, H] and expert_width above 0");
  const std::int64_t hidden_size = hidden_states.size(1);
  const RecordSlots records =
      record_slots(slots, LosslessWeights::fixed_bytes(hidden_size, expert_width));
  run_grouped({hidden_states, topk_ids, slot_table, out},
              LosslessWeights(hidden_size, expert_width, records), activation);
}

void moe_grouped_residual_out(Tensor hidden_states, Tensor topk_ids, Tensor slot_table,
                              Tensor slots, Tensor base_slots, Tensor gate_up_qweight,
                              Tensor gate_up_scales, Tensor down_qweight, Tensor down_scales,
                              std::optional<Tensor> input_perm, std::int64_t activation,
                              Tensor out) {
  const BaseExperts base = base_experts(base_slots, gate_up_qweight, gate_up_scales, down_qweight,
                                        down_scales, input_perm);
  STD_TORCH_CHECK(base_slots.numel() == slot_table.numel(),
                  "base_slots and slot_table must have an entry for each expert");
  const std::int64_t hidden_size = down_qweight.size(1), width = down_qweight.size(2) * 2;
  const RecordSlots records = record_slots(slots, ResidualWeights::fixed_bytes(hidden_size, width));
  run_grouped({hidden_states, topk_ids, slot_table, out},
              ResidualWeights(hidden_size, width, records, base), activation);
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(speq, CPU, m) {
  m.impl("encode_lossless_out", TORCH_BOX(&encode_lossless_out));
  m.impl("decode_lossless_out", TORCH_BOX(&decode_lossless_out));
  m.impl("moe_grouped_lossless_out", TORCH_BOX(&moe_grouped_lossless_out));
  m.impl("encode_residual_out", TORCH_BOX(&encode_residual_out));
  m.impl("decode_residual_out", TORCH_BOX(&decode_residual_out));
  m.impl("moe_grouped_residual_out", TORCH_BOX(&moe_grouped_residual_out));
}
