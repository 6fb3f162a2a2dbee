// Binds the ops over compact experts; the others are in bindings.cpp, which says how.

#include <torch/csrc/stable/library.h>

#include "compact.h"
#include "cuda/record_binding.h"

namespace {

using namespace speq::cuda;
using speq::ExpertShape;

std::int64_t fixed_bytes(const ExpertShape &shape, bool lossless) {
  return speq::compact_layout(shape, lossless).fixed_bytes();
}

ExpertShape base_shape(const char *op, const BaseExperts &base) {
  return shape_of(op, base.down.rows, base.down.columns, base.gate_up.rows != base.down.columns);
}

BaseExperts base_experts(const char *op, const Tensor &gate_up_qweight,
                         const Tensor &gate_up_scales, const Tensor &down_qweight,
                         const Tensor &down_scales, std::int64_t dim) {
  const BaseExperts base{nullptr, int4_values(op, gate_up_qweight, gate_up_scales, dim),
                         int4_values(op, down_qweight, down_scales, dim), nullptr};
  STD_TORCH_CHECK(base.gate_up.rows == base_shape(op, base).gate_up_rows() &&
                      base.gate_up.columns == base.down.rows &&
                      base.gate_up.slots == base.down.slots,
                  op, ": gate_up and down are not of the same experts");
  return base;
}

void moe_grouped_lossless_out(Tensor hidden_states, Tensor topk_ids, Tensor slot_table,
                              Tensor slots, std::int64_t expert_width, std::int64_t activation,
                              double limit, Tensor out, std::optional<Tensor> gate_up_bias,
                              std::optional<Tensor> down_bias) {
  constexpr const char *op = "moe_grouped_lossless";
  const auto act = activation_of(op, activation, limit);
  STD_TORCH_CHECK(hidden_states.dim() == 2, op, ": hidden_states must be [T, H]");
  const ExpertShape shape = shape_of(op, hidden_states.size(1), expert_width, speq::has_gate(act));
  const Records records = records_of(op, slots, fixed_bytes(shape, true));
  const Grouped grouped =
      grouped_of(op, hidden_states, topk_ids, slot_table, slots, shape.hidden_size, out);
  const ExpertBiases biases = same_biases_of(op, gate_up_bias, down_bias, hidden_states,
                                             grouped.route.experts, shape.gate_up_rows());
  if (grouped.route.num_rows * grouped.route.top_k == 0) {
    return;
  }
  const Call call(hidden_states);
  Tensor memory = workspace(hidden_states, moe_compact_workspace(grouped.route, shape));
  check(op, moe_grouped_lossless(grouped.hidden_states, grouped.route, records, shape, act, biases,
                                 grouped.out, memory.mutable_data_ptr(), call.stream()));
}

void moe_grouped_residual_out(Tensor hidden_states, Tensor topk_ids, Tensor slot_table,
                              Tensor slots, Tensor base_slots, Tensor gate_up_qweight,
                              Tensor gate_up_scales, Tensor down_qweight, Tensor down_scales,
                              std::optional<Tensor> input_perm, std::int64_t activation,
                              double limit, Tensor out, std::optional<Tensor> gate_up_bias,
                              std::optional<Tensor> down_bias) {
  constexpr const char *op = "moe_grouped_residual";
  const auto act = activation_of(op, activation, limit);
  BaseExperts base =
      base_experts(op, gate_up_qweight, gate_up_scales, down_qweight, down_scales, 3);
  const ExpertShape shape = base_shape(op, base);
  STD_TORCH_CHECK(shape.gated == speq::has_gate(act), op, ": activation ", activation,
                  " is not of such experts");
  const Records records = records_of(op, slots, fixed_bytes(shape, false));
  const Grouped grouped =
      grouped_of(op, hidden_states, topk_ids, slot_table, slots, shape.hidden_size, out);
  STD_TORCH_CHECK(is(base_slots, ScalarType::Long, 1) &&
                      base_slots.size(0) == grouped.route.experts &&
                      same_device({&slots, &base_slots, &gate_up_qweight, &gate_up_scales,
                                   &down_qweight, &down_scales}),
                  op, ": base_slots must be int64, one for each expert, where the codes are");
  STD_TORCH_CHECK(!input_perm || (is(*input_perm, ScalarType::Int, 2) &&
                                  input_perm->size(0) == base.gate_up.slots &&
                                  input_perm->size(1) == shape.hidden_size &&
                                  same_device({&slots, &*input_perm})),
                  op, ": input_perm must be contiguous int32, one for each slot and column");
  const ExpertBiases biases = same_biases_of(op, gate_up_bias, down_bias, hidden_states,
                                             grouped.route.experts, shape.gate_up_rows());
  if (grouped.route.num_rows * grouped.route.top_k == 0) {
    return;
  }
  base.base_slots = data<std::int64_t>(base_slots);
  base.input_perm = input_perm ? data<std::int32_t>(*input_perm) : nullptr;
  const Call call(hidden_states);
  Tensor memory = workspace(hidden_states, moe_compact_workspace(grouped.route, shape));
  check(op, moe_grouped_residual(grouped.hidden_states, grouped.route, records, base, act, biases,
                                 grouped.out, memory.mutable_data_ptr(), call.stream()));
}

void decode_lossless_out(Tensor record, Tensor gate_up_proj, Tensor down_proj) {
  constexpr const char *op = "decode_lossless";
  const ExpertShape shape = exact_shape(op, gate_up_proj, down_proj);
  STD_TORCH_CHECK(record.dim() == 1 && same_device({&record, &gate_up_proj, &down_proj}), op,
                  ": arguments are on different devices, or many records");
  const Records records = records_of(op, record, fixed_bytes(shape, true));
  const Call call(record);
  check(op, decode_lossless(records, shape, gate_up_proj.mutable_data_ptr(),
                            down_proj.mutable_data_ptr(), call.stream()));
}

void decode_residual_out(Tensor record, Tensor gate_up_qweight, Tensor gate_up_scales,
                         Tensor down_qweight, Tensor down_scales, Tensor gate_up_proj,
                         Tensor down_proj) {
  constexpr const char *op = "decode_residual";
  const ExpertShape shape = exact_shape(op, gate_up_proj, down_proj);
  const BaseExperts base =
      base_experts(op, gate_up_qweight, gate_up_scales, down_qweight, down_scales, 2);
  STD_TORCH_CHECK(record.dim() == 1 && base.down.rows == shape.hidden_size &&
                      base.down.columns == shape.expert_width &&
                      base.gate_up.rows == shape.gate_up_rows() &&
                      same_device({&record, &gate_up_qweight, &gate_up_scales, &down_qweight,
                                   &down_scales, &gate_up_proj, &down_proj}),
                  op, ": arguments are on different devices, or codes not of the matrices");
  const Records records = records_of(op, record, fixed_bytes(shape, false));
  const Call call(record);
  check(op, decode_residual(records, base, gate_up_proj.mutable_data_ptr(),
                            down_proj.mutable_data_ptr(), call.stream()));
}

void bind(torch::stable::detail::StableLibrary &m) {
  m.impl("decode_lossless_out", TORCH_BOX(&decode_lossless_out));
  m.impl("moe_grouped_lossless_out", TORCH_BOX(&moe_grouped_lossless_out));
  m.impl("decode_residual_out", TORCH_BOX(&decode_residual_out));
  m.impl("moe_grouped_residual_out", TORCH_BOX(&moe_grouped_residual_out));
}

} // namespace

#ifdef USE_CUDA
STABLE_TORCH_LIBRARY_IMPL(speq, CUDA, m) { bind(m); }
#else
STABLE_TORCH_LIBRARY_IMPL(speq_cuda_on_host, CPU, m) { bind(m); }
#endif
