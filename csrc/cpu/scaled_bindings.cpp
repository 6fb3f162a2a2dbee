// Binds the ops over experts that were published as codes with scales; the others are in
// bindings.cpp, which says how.

#include "cpu/grouped_binding.h"
#include "cpu/op_list.h"
#include "cpu/record_binding.h"

namespace {

using namespace speq;
using namespace speq::cpu;
using OptionalTensor = std::optional<Tensor>;

template <typename Format> void check_sizes(const Format &format, const ExpertShape &shape) {
  STD_TORCH_CHECK(shape.hidden_size % format.columns == 0 &&
                      shape.expert_width % format.columns == 0,
                  "experts of this format must have sizes that are multiples of ", format.columns);
  STD_TORCH_CHECK(shape.gated || !Format::in_turns, "experts of this format must have a gate");
}

template <typename Format>
void decode_record(const Format &format, const Tensor &record, Tensor &gate_up_proj,
                   Tensor &down_proj) {
  const ExpertShape shape = exact_expert(gate_up_proj, down_proj).shape;
  check_sizes(format, shape);
  const ScaledWeights weights(shape, format, only_slot(record, format.layout(shape).nbytes));
  decode([&](Projection projection) { return weights.rows(projection, 0); }, gate_up_proj,
         down_proj);
}

template <typename Format>
void run_slots(const Format &format, const Grouped &tensors, const Tensor &slots,
               std::int64_t expert_width, const Activation &act) {
  const Tensor &hidden_states = tensors.hidden_states;
  STD_TORCH_CHECK(hidden_states.dim() == 2 && expert_width > 0,
                  "hidden_states must be [T, H] and expert_width above 0");
  const ExpertShape shape{hidden_states.size(1), expert_width, has_gate(act)};
  check_sizes(format, shape);
  const RecordSlots records = record_slots(slots, format.layout(shape).nbytes);
  run_grouped(tensors, ScaledWeights(shape, format, records), act);
}

Fp8Format fp8_format(std::int64_t block_rows, std::int64_t block_columns) {
  const Fp8Blocks blocks{block_rows, block_columns};
  STD_TORCH_CHECK(blocks.valid(), "blocks of FP8 are ", block_rows, " by ", block_columns,
                  " and must have 1 row or multiples of ", kQuadRows, ", and multiples of ",
                  kBlockColumns, " columns");
  return {blocks};
}

void decode_fp8_out(Tensor record, std::int64_t block_rows, std::int64_t block_columns,
                    Tensor gate_up_proj, Tensor down_proj) {
  decode_record(fp8_format(block_rows, block_columns), record, gate_up_proj, down_proj);
}

void moe_grouped_fp8_out(Tensor hidden_states, Tensor topk_ids, Tensor slot_table, Tensor slots,
                         std::int64_t expert_width, std::int64_t block_rows,
                         std::int64_t block_columns, std::int64_t activation, double limit,
                         Tensor out, OptionalTensor gate_up_bias, OptionalTensor down_bias) {
  run_slots(fp8_format(block_rows, block_columns),
            {hidden_states, topk_ids, slot_table, out, gate_up_bias, down_bias}, slots,
            expert_width, activation_of(activation, limit));
}

void decode_mxfp4_out(Tensor record, Tensor gate_up_proj, Tensor down_proj) {
  decode_record(Mxfp4Format{}, record, gate_up_proj, down_proj);
}

void moe_grouped_mxfp4_out(Tensor hidden_states, Tensor topk_ids, Tensor slot_table, Tensor slots,
                           std::int64_t expert_width, std::int64_t activation, double limit,
                           Tensor out, OptionalTensor gate_up_bias, OptionalTensor down_bias) {
  run_slots(Mxfp4Format{}, {hidden_states, topk_ids, slot_table, out, gate_up_bias, down_bias},
            slots, expert_width, activation_of(activation, limit));
}

Int4Format int4_format(std::int64_t group_size, bool zeros, bool halves) {
  STD_TORCH_CHECK(group_size > 0 && group_size % kInt4Columns == 0, "group_size is ", group_size,
                  " and must be one of the multiples of ", kInt4Columns);
  return {{group_size, zeros, halves}};
}

void decode_int4_out(Tensor record, std::int64_t group_size, bool zeros, bool halves,
                     Tensor gate_up_proj, Tensor down_proj) {
  decode_record(int4_format(group_size, zeros, halves), record, gate_up_proj, down_proj);
}

void moe_grouped_int4_out(Tensor hidden_states, Tensor topk_ids, Tensor slot_table, Tensor slots,
                          std::int64_t expert_width, std::int64_t group_size, bool zeros,
                          bool halves, std::int64_t activation, double limit, Tensor out,
                          OptionalTensor gate_up_bias, OptionalTensor down_bias) {
  run_slots(int4_format(group_size, zeros, halves),
            {hidden_states, topk_ids, slot_table, out, gate_up_bias, down_bias}, slots,
            expert_width, activation_of(activation, limit));
}

void decode_nvfp4_out(Tensor record, bool divides, Tensor gate_up_proj, Tensor down_proj) {
  decode_record(Nvfp4Format{divides}, record, gate_up_proj, down_proj);
}

void moe_grouped_nvfp4_out(Tensor hidden_states, Tensor topk_ids, Tensor slot_table, Tensor slots,
                           std::int64_t expert_width, bool divides, std::int64_t activation,
                           double limit, Tensor out, OptionalTensor gate_up_bias,
                           OptionalTensor down_bias) {
  run_slots(Nvfp4Format{divides},
            {hidden_states, topk_ids, slot_table, out, gate_up_bias, down_bias}, slots,
            expert_width, activation_of(activation, limit));
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(speq, CPU, m) {
  m.impl("decode_fp8_out", SPEQ_BOX(decode_fp8_out));
  m.impl("moe_grouped_fp8_out", SPEQ_BOX(moe_grouped_fp8_out));
  m.impl("decode_mxfp4_out", SPEQ_BOX(decode_mxfp4_out));
  m.impl("moe_grouped_mxfp4_out", SPEQ_BOX(moe_grouped_mxfp4_out));
  m.impl("decode_int4_out", SPEQ_BOX(decode_int4_out));
  m.impl("moe_grouped_int4_out", SPEQ_BOX(moe_grouped_int4_out));
  m.impl("decode_nvfp4_out", SPEQ_BOX(decode_nvfp4_out));
  m.impl("moe_grouped_nvfp4_out", SPEQ_BOX(moe_grouped_nvfp4_out));
}
