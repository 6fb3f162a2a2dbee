// Binds the ops over experts that were published as codes with scales; the others are in
// bindings.cpp, which says how.

#include "cpu/grouped_binding.h"
#include "cpu/op_list.h"
#include "cpu/record_binding.h"

namespace {

using namespace speq;
using namespace speq::cpu;

void check_blocks(std::int64_t hidden_size, std::int64_t expert_width) {
  STD_TORCH_CHECK(hidden_size % kMxfp4Block == 0 && expert_width % kMxfp4Block == 0,
                  "experts of MXFP4 must have sizes that are multiples of ", kMxfp4Block);
}

void decode_fp8_out(Tensor record, Tensor gate_up_proj, Tensor down_proj) {
  const ExactExpert expert = exact_expert(gate_up_proj, down_proj);
  const std::int64_t hidden_size = expert.hidden_size, width = expert.expert_width;
  const Fp8Weights weights(hidden_size, width,
                           only_slot(record, Fp8Weights::fixed_bytes(hidden_size, width)));
  decode([&](Projection projection) { return weights.rows(projection, 0); }, gate_up_proj,
         down_proj);
}

void moe_grouped_fp8_out(Tensor hidden_states, Tensor topk_ids, Tensor slot_table, Tensor slots,
                         std::int64_t expert_width, std::int64_t activation, Tensor out,
                         std::optional<Tensor> gate_up_bias, std::optional<Tensor> down_bias) {
  STD_TORCH_CHECK(hidden_states.dim() == 2 && expert_width > 0,
                  "hidden_states must be [T, H] and expert_width above 0");
  const std::int64_t hidden_size = hidden_states.size(1);
  const RecordSlots records =
      record_slots(slots, Fp8Weights::fixed_bytes(hidden_size, expert_width));
  run_grouped({hidden_states, topk_ids, slot_table, out, gate_up_bias, down_bias},
              Fp8Weights(hidden_size, expert_width, records), activation);
}

void decode_mxfp4_out(Tensor record, Tensor gate_up_proj, Tensor down_proj) {
  const ExactExpert expert = exact_expert(gate_up_proj, down_proj);
  const std::int64_t hidden_size = expert.hidden_size, width = expert.expert_width;
  check_blocks(hidden_size, width);
  const Mxfp4Weights weights(hidden_size, width,
                             only_slot(record, Mxfp4Weights::fixed_bytes(hidden_size, width)));
  decode([&](Projection projection) { return weights.rows(projection, 0); }, gate_up_proj,
         down_proj);
}

void moe_grouped_mxfp4_out(Tensor hidden_states, Tensor topk_ids, Tensor slot_table, Tensor slots,
                           std::int64_t expert_width, std::int64_t activation, Tensor out,
                           std::optional<Tensor> gate_up_bias, std::optional<Tensor> down_bias) {
  STD_TORCH_CHECK(hidden_states.dim() == 2 && expert_width > 0,
                  "hidden_states must be [T, H] and expert_width above 0");
  const std::int64_t hidden_size = hidden_states.size(1);
  check_blocks(hidden_size, expert_width);
  const RecordSlots records =
      record_slots(slots, Mxfp4Weights::fixed_bytes(hidden_size, expert_width));
  run_grouped({hidden_states, topk_ids, slot_table, out, gate_up_bias, down_bias},
              Mxfp4Weights(hidden_size, expert_width, records), activation);
}

// Groups of a size that both widths are multiples of.
Int4Groups groups_of(std::int64_t hidden_size, std::int64_t expert_width, std::int64_t group_size,
                     bool zeros, bool halves) {
  STD_TORCH_CHECK(group_size > 0 && group_size % kInt4Columns == 0 &&
                      hidden_size % group_size == 0 && expert_width % group_size == 0,
                  "experts of INT4 must have sizes that are multiples of group_size, and that of ",
                  kInt4Columns);
  return {group_size, zeros, halves};
}

void decode_int4_out(Tensor record, std::int64_t group_size, bool zeros, bool halves,
                     Tensor gate_up_proj, Tensor down_proj) {
  const ExactExpert expert = exact_expert(gate_up_proj, down_proj);
  const std::int64_t hidden_size = expert.hidden_size, width = expert.expert_width;
  const Int4Groups groups = groups_of(hidden_size, width, group_size, zeros, halves);
  const Int4Weights weights(
      hidden_size, width, groups,
      only_slot(record, Int4Weights::fixed_bytes(hidden_size, width, groups)));
  decode([&](Projection projection) { return weights.rows(projection, 0); }, gate_up_proj,
         down_proj);
}

void moe_grouped_int4_out(Tensor hidden_states, Tensor topk_ids, Tensor slot_table, Tensor slots,
                          std::int64_t expert_width, std::int64_t group_size, bool zeros,
                          bool halves, std::int64_t activation, Tensor out,
                          std::optional<Tensor> gate_up_bias, std::optional<Tensor> down_bias) {
  STD_TORCH_CHECK(hidden_states.dim() == 2 && expert_width > 0,
                  "hidden_states must be [T, H] and expert_width above 0");
  const std::int64_t hidden_size = hidden_states.size(1);
  const Int4Groups groups = groups_of(hidden_size, expert_width, group_size, zeros, halves);
  const RecordSlots records =
      record_slots(slots, Int4Weights::fixed_bytes(hidden_size, expert_width, groups));
  run_grouped({hidden_states, topk_ids, slot_table, out, gate_up_bias, down_bias},
              Int4Weights(hidden_size, expert_width, groups, records), activation);
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(speq, CPU, m) {
  m.impl("decode_fp8_out", SPEQ_BOX(decode_fp8_out));
  m.impl("moe_grouped_fp8_out", SPEQ_BOX(moe_grouped_fp8_out));
  m.impl("decode_mxfp4_out", SPEQ_BOX(decode_mxfp4_out));
  m.impl("moe_grouped_mxfp4_out", SPEQ_BOX(moe_grouped_mxfp4_out));
  m.impl("decode_int4_out", SPEQ_BOX(decode_int4_out));
  m.impl("moe_grouped_int4_out", SPEQ_BOX(moe_grouped_int4_out));
}
