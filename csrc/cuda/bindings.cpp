// Binds the CUDA kernels to the schemas of speq/kernels/library.py, through torch's stable ABI.
// Arguments are checked once, in speq/kernels/ops.py; the checks here only guard against memory
// errors when an op is called around it. Compiled for the host too, where kernels run without a
// GPU, for tests.

#include <torch/csrc/stable/library.h>

#include "cuda/tensors.h"

namespace {

using namespace speq::cuda;

void linear_int4_out(Tensor inputs, Tensor qweight, Tensor scales, std::optional<Tensor> input_perm,
                     Tensor out) {
  constexpr const char *op = "linear_int4";
  const auto weights = int4_values(op, qweight, scales, 2);
  STD_TORCH_CHECK(inputs.dim() == 2 && inputs.is_contiguous() && out.dim() == 2 &&
                      out.is_contiguous() && inputs.size(1) == weights.columns &&
                      out.size(0) == inputs.size(0) && out.size(1) == weights.rows &&
                      inputs.size(0) <= kMaxCallRows &&
                      same_device({&inputs, &qweight, &scales, &out}),
                  op, ": inputs or out are too many, not contiguous or not of the matrix");
  STD_TORCH_CHECK(!input_perm || (is(*input_perm, ScalarType::Int, 1) &&
                                  input_perm->size(0) == weights.columns &&
                                  same_device({&inputs, &*input_perm})),
                  op, ": input_perm must be contiguous int32, one for each column");
  if (inputs.size(0) == 0 || weights.rows == 0) {
    return;
  }
  const Call call(inputs);
  check(op, linear_int4(values(op, inputs), inputs.size(0), weights,
                        input_perm ? data<std::int32_t>(*input_perm) : nullptr, values(op, out),
                        call.stream()));
}

void moe_int4_out(Tensor hidden_states, Tensor topk_ids, Tensor topk_weights, Tensor base_slots,
                  Tensor gate_up_qweight, Tensor gate_up_scales, Tensor down_qweight,
                  Tensor down_scales, std::optional<Tensor> input_perm, std::int64_t activation,
                  double limit, Tensor out, std::optional<Tensor> gate_up_bias,
                  std::optional<Tensor> down_bias) {
  constexpr const char *op = "moe_int4";
  const auto route = route_of(op, hidden_states, topk_ids, base_slots);
  const auto gate_up = int4_values(op, gate_up_qweight, gate_up_scales, 3);
  const auto down = int4_values(op, down_qweight, down_scales, 3);
  const std::int64_t hidden_size = hidden_states.size(1), width = down.columns;
  const auto act = activation_of(op, activation, limit);
  const std::int64_t gate_up_rows =
      speq::ExpertShape{hidden_size, width, speq::has_gate(act)}.gate_up_rows();
  STD_TORCH_CHECK(
      gate_up.columns == hidden_size && down.rows == hidden_size && gate_up.rows == gate_up_rows &&
          gate_up.slots == down.slots && is(topk_weights, ScalarType::Float, 2) &&
          topk_weights.size(0) == route.num_rows && topk_weights.size(1) == route.top_k &&
          out.dim() == 2 && out.is_contiguous() && out.size(0) == route.num_rows &&
          out.size(1) == hidden_size,
      op, ": arguments have the wrong shape or dtype");
  STD_TORCH_CHECK(
      same_device({&hidden_states, &topk_ids, &topk_weights, &base_slots, &gate_up_qweight,
                   &gate_up_scales, &down_qweight, &down_scales, &out}),
      op, ": arguments are on different devices");
  STD_TORCH_CHECK(!input_perm ||
                      (is(*input_perm, ScalarType::Int, 2) &&
                       input_perm->size(0) == gate_up.slots && input_perm->size(1) == hidden_size &&
                       same_device({&hidden_states, &*input_perm})),
                  op, ": input_perm must be contiguous int32, one for each slot and column");
  const ExpertBiases biases =
      biases_of(op, gate_up_bias, down_bias, hidden_states, route.experts, gate_up_rows);
  if (route.num_rows == 0) {
    return;
  }
  const Call call(hidden_states);
  Tensor memory = workspace(hidden_states, moe_int4_workspace(route, width));
  check(op, moe_int4(values(op, hidden_states), route, data<float>(topk_weights), gate_up, down,
                     input_perm ? data<std::int32_t>(*input_perm) : nullptr, act, biases,
                     values(op, out), memory.mutable_data_ptr(), call.stream()));
}

// Slots of matrices, of which each is contiguous.
SlotValues slot_values(const char *op, const Tensor &tensor) {
  STD_TORCH_CHECK(tensor.dim() == 3 && (tensor.size(2) <= 1 || tensor.stride(2) == 1) &&
                      (tensor.size(1) <= 1 || tensor.stride(1) == tensor.size(2)),
                  op, ": slots must be contiguous matrices");
  STD_TORCH_CHECK(tensor.size(1) < INT32_MAX && tensor.size(2) < INT32_MAX / kMaxCallPositions, op,
                  ": a matrix is too large");
  return {tensor.const_data_ptr(), dtype_of(op, tensor), tensor.size(0),
          tensor.stride(0),        tensor.size(1),       tensor.size(2)};
}

void moe_grouped_out(Tensor hidden_states, Tensor topk_ids, Tensor slot_table, Tensor gate_up_proj,
                     Tensor down_proj, std::int64_t activation, double limit, Tensor out,
                     std::optional<Tensor> gate_up_bias, std::optional<Tensor> down_bias) {
  constexpr const char *op = "moe_grouped";
  const auto route = route_of(op, hidden_states, topk_ids, slot_table);
  const auto gate_up = slot_values(op, gate_up_proj), down = slot_values(op, down_proj);
  const auto hidden = values(op, hidden_states);
  const auto act = activation_of(op, activation, limit);
  const speq::ExpertShape shape{hidden_states.size(1), down.columns, speq::has_gate(act)};
  STD_TORCH_CHECK(gate_up.columns == hidden_states.size(1) && down.rows == hidden_states.size(1) &&
                      gate_up.rows == shape.gate_up_rows() && gate_up.slots == down.slots &&
                      gate_up.dtype == down.dtype && hidden.dtype != Dtype::float64 &&
                      gate_up.dtype != Dtype::float64,
                  op, ": gate_up_proj or down_proj have the wrong shape or dtype");
  STD_TORCH_CHECK(out.scalar_type() == hidden_states.scalar_type() && out.dim() == 3 &&
                      out.is_contiguous() && out.size(0) == route.num_rows &&
                      out.size(1) == route.top_k && out.size(2) == hidden_states.size(1),
                  op, ": out has the wrong shape or dtype");
  STD_TORCH_CHECK(
      same_device({&hidden_states, &topk_ids, &slot_table, &gate_up_proj, &down_proj, &out}), op,
      ": arguments are on different devices");
  const ExpertBiases biases = same_biases_of(op, gate_up_bias, down_bias, hidden_states,
                                             route.experts, shape.gate_up_rows());
  if (route.num_rows * route.top_k == 0 || hidden_states.size(1) == 0) {
    return;
  }
  const Call call(hidden_states);
  Tensor memory =
      workspace(hidden_states, moe_grouped_workspace(route, down.columns, hidden.dtype));
  check(op, moe_grouped(hidden, route, gate_up, down, act, biases, out.mutable_data_ptr(),
                        memory.mutable_data_ptr(), call.stream()));
}

void read_sum_out(Tensor words, Tensor out) {
  constexpr const char *op = "read_sum";
  STD_TORCH_CHECK(is(words, ScalarType::Long, 1) && is(out, ScalarType::Long, 1) &&
                      out.size(0) == 1 && same_device({&words, &out}),
                  op, ": words and out must be contiguous int64, out of one word");
  const Call call(words);
  Tensor memory = workspace(words, read_sum_workspace());
  check(op, read_sum(data<std::int64_t>(words), words.size(0),
                     static_cast<std::int64_t *>(out.mutable_data_ptr()), memory.mutable_data_ptr(),
                     call.stream()));
}

void bind(torch::stable::detail::StableLibrary &m) {
  m.impl("linear_int4_out", TORCH_BOX(&linear_int4_out));
  m.impl("moe_int4_out", TORCH_BOX(&moe_int4_out));
  m.impl("moe_grouped_out", TORCH_BOX(&moe_grouped_out));
  m.impl("read_sum_out", TORCH_BOX(&read_sum_out));
}

} // namespace

#ifdef USE_CUDA
STABLE_TORCH_LIBRARY_IMPL(speq, CUDA, m) { bind(m); }
#else
STABLE_TORCH_LIBRARY_IMPL(speq_cuda_on_host, CPU, m) { bind(m); }
#endif
