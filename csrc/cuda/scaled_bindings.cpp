// Binds the ops over experts that were published as codes with scales; the others are in
// bindings.cpp, which says how.

#include <torch/csrc/stable/library.h>

#include "cuda/record_binding.h"
#include "scaled.h"

namespace {

using namespace speq::cuda;

void check_blocks(const char *op, const ExpertShape &shape) {
  STD_TORCH_CHECK(shape.hidden_size % speq::kMxfp4Block == 0 &&
                      shape.expert_width % speq::kMxfp4Block == 0,
                  op, ": experts must have sizes that are multiples of ", speq::kMxfp4Block);
}

void decode_fp8_out(Tensor record, Tensor gate_up_proj, Tensor down_proj) {
  constexpr const char *op = "decode_fp8";
  const ExpertShape shape = exact_shape(op, gate_up_proj, down_proj);
  STD_TORCH_CHECK(record.dim() == 1 && same_device({&record, &gate_up_proj, &down_proj}), op,
                  ": arguments are on different devices, or many records");
  const std::int64_t nbytes = speq::fp8_layout(shape.hidden_size, shape.expert_width).nbytes;
  const Records records = records_of(op, record, nbytes);
  const Call call(record);
  check(op, decode_fp8(records, shape, gate_up_proj.mutable_data_ptr(),
                       down_proj.mutable_data_ptr(), call.stream()));
}

void moe_grouped_fp8_out(Tensor hidden_states, Tensor topk_ids, Tensor slot_table, Tensor slots,
                         std::int64_t expert_width, std::int64_t activation, Tensor out,
                         std::optional<Tensor> gate_up_bias, std::optional<Tensor> down_bias) {
  constexpr const char *op = "moe_grouped_fp8";
  STD_TORCH_CHECK(hidden_states.dim() == 2, op, ": hidden_states must be [T, H]");
  const ExpertShape shape = shape_of(op, hidden_states.size(1), expert_width);
  const std::int64_t nbytes = speq::fp8_layout(shape.hidden_size, shape.expert_width).nbytes;
  const Records records = records_of(op, slots, nbytes);
  const Grouped grouped =
      grouped_of(op, hidden_states, topk_ids, slot_table, slots, shape.hidden_size, out);
  const ExpertBiases biases = same_biases_of(op, gate_up_bias, down_bias, hidden_states,
                                             grouped.route.experts, shape.expert_width);
  if (grouped.route.num_rows * grouped.route.top_k == 0) {
    return;
  }
  const Call call(hidden_states);
  Tensor memory = workspace(hidden_states, moe_compact_workspace(grouped.route, shape));
  check(op, moe_grouped_fp8(grouped.hidden_states, grouped.route, records, shape,
                            activation_of(op, activation), biases, grouped.out,
                            memory.mutable_data_ptr(), call.stream()));
}

void decode_mxfp4_out(Tensor record, Tensor gate_up_proj, Tensor down_proj) {
  constexpr const char *op = "decode_mxfp4";
  const ExpertShape shape = exact_shape(op, gate_up_proj, down_proj);
  check_blocks(op, shape);
  STD_TORCH_CHECK(record.dim() == 1 && same_device({&record, &gate_up_proj, &down_proj}), op,
                  ": arguments are on different devices, or many records");
  const std::int64_t nbytes = speq::mxfp4_layout(shape.hidden_size, shape.expert_width).nbytes;
  const Records records = records_of(op, record, nbytes);
  const Call call(record);
  check(op, decode_mxfp4(records, shape, gate_up_proj.mutable_data_ptr(),
                         down_proj.mutable_data_ptr(), call.stream()));
}

void moe_grouped_mxfp4_out(Tensor hidden_states, Tensor topk_ids, Tensor slot_table, Tensor slots,
                           std::int64_t expert_width, std::int64_t activation, Tensor out,
                           std::optional<Tensor> gate_up_bias, std::optional<Tensor> down_bias) {
  constexpr const char *op = "moe_grouped_mxfp4";
  STD_TORCH_CHECK(hidden_states.dim() == 2, op, ": hidden_states must be [T, H]");
  const ExpertShape shape = shape_of(op, hidden_states.size(1), expert_width);
  check_blocks(op, shape);
  const std::int64_t nbytes = speq::mxfp4_layout(shape.hidden_size, shape.expert_width).nbytes;
  const Records records = records_of(op, slots, nbytes);
  const Grouped grouped =
      grouped_of(op, hidden_states, topk_ids, slot_table, slots, shape.hidden_size, out);
  const ExpertBiases biases = same_biases_of(op, gate_up_bias, down_bias, hidden_states,
                                             grouped.route.experts, shape.expert_width);
  if (grouped.route.num_rows * grouped.route.top_k == 0) {
    return;
  }
  const Call call(hidden_states);
  Tensor memory = workspace(hidden_states, moe_compact_workspace(grouped.route, shape));
  check(op, moe_grouped_mxfp4(grouped.hidden_states, grouped.route, records, shape,
                              activation_of(op, activation), biases, grouped.out,
                              memory.mutable_data_ptr(), call.stream()));
}

// Groups of a size that both widths are multiples of.
speq::Int4Groups groups_of(const char *op, const ExpertShape &shape, std::int64_t group_size,
                           bool zeros) {
  STD_TORCH_CHECK(group_size > 0 && group_size % speq::kInt4Columns == 0 &&
                      shape.hidden_size % group_size == 0 && shape.expert_width % group_size == 0,
                  op, ": experts must have sizes that are multiples of group_size, and that of ",
                  speq::kInt4Columns);
  return {group_size, zeros};
}

void decode_int4_out(Tensor record, std::int64_t group_size, bool zeros, Tensor gate_up_proj,
                     Tensor down_proj) {
  constexpr const char *op = "decode_int4";
  const ExpertShape shape = exact_shape(op, gate_up_proj, down_proj);
  const speq::Int4Groups groups = groups_of(op, shape, group_size, zeros);
  STD_TORCH_CHECK(record.dim() == 1 && same_device({&record, &gate_up_proj, &down_proj}), op,
                  ": arguments are on different devices, or many records");
  const std::int64_t nbytes =
      speq::int4_layout(shape.hidden_size, shape.expert_width, groups).nbytes;
  const Records records = records_of(op, record, nbytes);
  const Call call(record);
  check(op, decode_int4(records, shape, groups, gate_up_proj.mutable_data_ptr(),
                        down_proj.mutable_data_ptr(), call.stream()));
}

void moe_grouped_int4_out(Tensor hidden_states, Tensor topk_ids, Tensor slot_table, Tensor slots,
                          std::int64_t expert_width, std::int64_t group_size, bool zeros,
                          std::int64_t activation, Tensor out, std::optional<Tensor> gate_up_bias,
                          std::optional<Tensor> down_bias) {
  constexpr const char *op = "moe_grouped_int4";
  STD_TORCH_CHECK(hidden_states.dim() == 2, op, ": hidden_states must be [T, H]");
  const ExpertShape shape = shape_of(op, hidden_states.size(1), expert_width);
  const speq::Int4Groups groups = groups_of(op, shape, group_size, zeros);
  const std::int64_t nbytes =
      speq::int4_layout(shape.hidden_size, shape.expert_width, groups).nbytes;
  const Records records = records_of(op, slots, nbytes);
  const Grouped grouped =
      grouped_of(op, hidden_states, topk_ids, slot_table, slots, shape.hidden_size, out);
  const ExpertBiases biases = same_biases_of(op, gate_up_bias, down_bias, hidden_states,
                                             grouped.route.experts, shape.expert_width);
  if (grouped.route.num_rows * grouped.route.top_k == 0) {
    return;
  }
  const Call call(hidden_states);
  Tensor memory = workspace(hidden_states, moe_compact_workspace(grouped.route, shape));
  check(op, moe_grouped_int4(grouped.hidden_states, grouped.route, records, shape, groups,
                             activation_of(op, activation), biases, grouped.out,
                             memory.mutable_data_ptr(), call.stream()));
}

void bind(torch::stable::detail::StableLibrary &m) {
  m.impl("decode_fp8_out", TORCH_BOX(&decode_fp8_out));
  m.impl("moe_grouped_fp8_out", TORCH_BOX(&moe_grouped_fp8_out));
  m.impl("decode_mxfp4_out", TORCH_BOX(&decode_mxfp4_out));
  m.impl("moe_grouped_mxfp4_out", TORCH_BOX(&moe_grouped_mxfp4_out));
  m.impl("decode_int4_out", TORCH_BOX(&decode_int4_out));
  m.impl("moe_grouped_int4_out", TORCH_BOX(&moe_grouped_int4_out));
}

} // namespace

#ifdef USE_CUDA
STABLE_TORCH_LIBRARY_IMPL(speq, CUDA, m) { bind(m); }
#else
STABLE_TORCH_LIBRARY_IMPL(speq_cuda_on_host, CPU, m) { bind(m); }
#endif
