// Binds the ops over compact experts; the others are in bindings.cpp, which says how.

#include "cpu/grouped_binding.h"
#include "cpu/op_list.h"
#include "cpu/record_binding.h"

namespace {

using namespace speq;
using namespace speq::cpu;

// nbytes: of the record with the matrices before `first`, if there are any.
RecordPart record_part(const CompactLayout &layout, std::int64_t first, std::int64_t end,
                       Tensor &nbytes) {
  const std::int64_t before = first == 0 ? 0 : number_in(nbytes) - layout.fixed_bytes();
  STD_TORCH_CHECK(0 <= first && first < end && end <= layout.matrices && before >= 0, "matrices ",
                  first, " to ", end, " must be of ", layout.matrices,
                  ", and nbytes of a record with those before");
  return {first, end, before};
}

void encode_lossless_out(Tensor gate_up_proj, Tensor down_proj, Tensor record, Tensor nbytes,
                         std::int64_t first, std::int64_t end) {
  const ExactExpert expert = exact_expert(gate_up_proj, down_proj);
  const CompactLayout layout = compact_layout(expert.shape, true);
  LosslessEncoder encoder(layout, expert.words(), record_part(layout, first, end, nbytes));
  encode(encoder, record, nbytes);
}

void encode_residual_out(Tensor gate_up_proj, Tensor down_proj, Tensor gate_up_qweight,
                         Tensor gate_up_scales, Tensor down_qweight, Tensor down_scales,
                         Tensor record, Tensor nbytes, std::int64_t first, std::int64_t end) {
  const ExactExpert expert = exact_expert(gate_up_proj, down_proj);
  const auto &[hidden_size, width, gated] = expert.shape;
  const std::int64_t gate_up_rows = expert.shape.gate_up_rows();
  STD_TORCH_CHECK(gate_up_qweight.numel() > 0 && down_qweight.numel() > 0,
                  "a residual record needs the codes of its expert");
  const Int4Matrix gate =
      int4_slots(gate_up_qweight, gate_up_scales, gate_up_rows, hidden_size, "gate_up").matrix(0);
  const Int4Matrix down =
      int4_slots(down_qweight, down_scales, hidden_size, width, "down").matrix(0);
  Int4Matrix up = gate;
  const std::int64_t gate_rows = expert.shape.rows(int(Projection::gate));
  up.qweight += gate_rows * gate.row_bytes();
  up.scales += gate_rows * gate.row_groups();
  const CompactLayout layout = compact_layout(expert.shape, false);
  ResidualEncoder encoder(layout, expert.words(), {gate, up, down},
                          record_part(layout, first, end, nbytes));
  encode(encoder, record, nbytes);
}

ExpertShape base_shape(const Tensor &gate_up_qweight, const Tensor &down_qweight) {
  STD_TORCH_CHECK(gate_up_qweight.dim() == 3 && down_qweight.dim() == 3 &&
                      gate_up_qweight.size(0) == down_qweight.size(0),
                  "gate_up and down must hold experts in as many base slots");
  return shape_of(gate_up_qweight.size(1), 2 * gate_up_qweight.size(2), down_qweight.size(1),
                  2 * down_qweight.size(2));
}

BaseExperts base_experts(const ExpertShape &shape, const Tensor &base_slots,
                         const Tensor &gate_up_qweight, const Tensor &gate_up_scales,
                         const Tensor &down_qweight, const Tensor &down_scales,
                         const std::optional<Tensor> &input_perm) {
  check(base_slots, "base_slots", 1, ScalarType::Long);
  const std::int64_t count = down_qweight.size(0), hidden_size = shape.hidden_size;
  const Int4Slots gate_up =
      int4_slots(gate_up_qweight, gate_up_scales, shape.gate_up_rows(), hidden_size, "gate_up");
  const Int4Slots down =
      int4_slots(down_qweight, down_scales, hidden_size, shape.expert_width, "down");
  return {ids_of(base_slots), count,           gate_up.qweight,
          down.qweight,       gate_up.scales,  down.scales,
          gate_up.group_size, down.group_size, perm_of(input_perm, count, hidden_size)};
}

void decode_lossless_out(Tensor record, Tensor gate_up_proj, Tensor down_proj) {
  const ExpertShape shape = exact_expert(gate_up_proj, down_proj).shape;
  const LosslessWeights weights(shape, only_slot(record, LosslessWeights::fixed_bytes(shape)));
  decode([&](Projection projection) { return weights.rows(projection, 0); }, gate_up_proj,
         down_proj);
}

void decode_residual_out(Tensor record, Tensor gate_up_qweight, Tensor gate_up_scales,
                         Tensor down_qweight, Tensor down_scales, Tensor gate_up_proj,
                         Tensor down_proj) {
  const ExpertShape shape = exact_expert(gate_up_proj, down_proj).shape;
  const auto &[hidden_size, width, gated] = shape;
  const Int4Slots gate_up =
      int4_slots(gate_up_qweight, gate_up_scales, shape.gate_up_rows(), hidden_size, "gate_up");
  const Int4Slots down = int4_slots(down_qweight, down_scales, hidden_size, width, "down");
  STD_TORCH_CHECK(gate_up_qweight.numel() > 0 && down_qweight.numel() > 0,
                  "a residual record needs the codes of its expert");
  constexpr std::int64_t kOnlySlot = 0;
  const BaseExperts base{{&kOnlySlot, 1}, 1,           gate_up.qweight,    down.qweight,
                         gate_up.scales,  down.scales, gate_up.group_size, down.group_size,
                         nullptr};
  const ResidualWeights weights(shape, only_slot(record, ResidualWeights::fixed_bytes(shape)),
                                base);
  decode([&](Projection projection) { return weights.rows(projection, 0, 0); }, gate_up_proj,
         down_proj);
}

void moe_grouped_lossless_out(Tensor hidden_states, Tensor topk_ids, Tensor slot_table,
                              Tensor slots, std::int64_t expert_width, std::int64_t activation,
                              double limit, Tensor out, std::optional<Tensor> gate_up_bias,
                              std::optional<Tensor> down_bias) {
  STD_TORCH_CHECK(hidden_states.dim() == 2 && expert_width > 0,
                  "hidden_states must be [T, H] and expert_width above 0");
  const Activation act = activation_of(activation, limit);
  const ExpertShape shape{hidden_states.size(1), expert_width, has_gate(act)};
  const RecordSlots records = record_slots(slots, LosslessWeights::fixed_bytes(shape));
  run_grouped({hidden_states, topk_ids, slot_table, out, gate_up_bias, down_bias},
              LosslessWeights(shape, records), act);
}

void moe_grouped_residual_out(Tensor hidden_states, Tensor topk_ids, Tensor slot_table,
                              Tensor slots, Tensor base_slots, Tensor gate_up_qweight,
                              Tensor gate_up_scales, Tensor down_qweight, Tensor down_scales,
                              std::optional<Tensor> input_perm, std::int64_t activation,
                              double limit, Tensor out, std::optional<Tensor> gate_up_bias,
                              std::optional<Tensor> down_bias) {
  const ExpertShape shape = base_shape(gate_up_qweight, down_qweight);
  const BaseExperts base = base_experts(shape, base_slots, gate_up_qweight, gate_up_scales,
                                        down_qweight, down_scales, input_perm);
  STD_TORCH_CHECK(base_slots.numel() == slot_table.numel(),
                  "base_slots and slot_table must have an entry for each expert");
  const RecordSlots records = record_slots(slots, ResidualWeights::fixed_bytes(shape));
  run_grouped({hidden_states, topk_ids, slot_table, out, gate_up_bias, down_bias},
              ResidualWeights(shape, records, base), activation_of(activation, limit));
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(speq, CPU, m) {
  m.impl("encode_lossless_out", SPEQ_BOX(encode_lossless_out));
  m.impl("decode_lossless_out", SPEQ_BOX(decode_lossless_out));
  m.impl("moe_grouped_lossless_out", SPEQ_BOX(moe_grouped_lossless_out));
  m.impl("encode_residual_out", SPEQ_BOX(encode_residual_out));
  m.impl("decode_residual_out", SPEQ_BOX(decode_residual_out));
  m.impl("moe_grouped_residual_out", SPEQ_BOX(moe_grouped_residual_out));
}
