// Arguments of ops as the launchers take them: checks that guard memory, and views.
#pragma once

#include <initializer_list>
#include <optional>

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include "cuda/launchers.h"

namespace speq::cuda {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The device of a call, made current, and its stream.
class Call {
public:
#ifdef USE_CUDA
  explicit Call(const Tensor &tensor) : guard_(tensor.get_device_index()) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream_));
  }
#else
  explicit Call(const Tensor &) {}
#endif

  void *stream() const { return stream_; }

private:
#ifdef USE_CUDA
  torch::stable::accelerator::DeviceGuard guard_;
#endif
  void *stream_ = nullptr;
};

// From torch's allocator, which keeps it from other streams and knows graphs being captured.
inline Tensor workspace(const Tensor &like, std::size_t bytes) {
  return torch::stable::new_empty(like, {static_cast<std::int64_t>(bytes)}, ScalarType::Byte);
}

inline Dtype dtype_of(const char *op, const Tensor &tensor) {
  switch (tensor.scalar_type()) {
  case ScalarType::Float:
    return Dtype::float32;
  case ScalarType::Double:
    return Dtype::float64;
  case ScalarType::BFloat16:
    return Dtype::bfloat16;
  case ScalarType::Half:
    return Dtype::float16;
  default:
    STD_TORCH_CHECK(false, op, ": values must be float32, float64, bfloat16 or float16");
  }
}

inline Values values(const char *op, const Tensor &tensor) {
  return {tensor.data_ptr(), dtype_of(op, tensor)};
}

inline bool is(const Tensor &tensor, ScalarType dtype, std::int64_t dim) {
  return tensor.scalar_type() == dtype && tensor.dim() == dim && tensor.is_contiguous();
}

inline bool same_device(std::initializer_list<const Tensor *> tensors) {
  const Tensor &first = **tensors.begin();
  for (const Tensor *tensor : tensors) {
    if (tensor->device() != first.device()) {
      return false;
    }
  }
  return true;
}

template <typename Item> const Item *data(const Tensor &tensor) {
  return static_cast<const Item *>(tensor.const_data_ptr());
}

inline void check(const char *op, const char *error) {
  STD_TORCH_CHECK(error == nullptr, op, ": ", error);
}

// A matrix [rows, columns], or slots of them, as codes and scales describe it.
inline Int4Values int4_values(const char *op, const Tensor &qweight, const Tensor &scales,
                              std::int64_t dim) {
  STD_TORCH_CHECK(is(qweight, ScalarType::Byte, dim) && is(scales, ScalarType::Half, dim), op,
                  ": qweight must be contiguous uint8 and scales contiguous float16");
  const std::int64_t slots = dim == 3 ? qweight.size(0) : 1;
  const std::int64_t rows = qweight.size(dim - 2), columns = 2 * qweight.size(dim - 1);
  const std::int64_t groups = scales.size(dim - 1);
  STD_TORCH_CHECK((dim < 3 || scales.size(0) == slots) && scales.size(dim - 2) == rows &&
                      groups > 0 && columns > 0 && columns % groups == 0 &&
                      (columns / groups) % 2 == 0,
                  op, ": qweight and scales do not describe one matrix");
  STD_TORCH_CHECK(columns <= kMaxInt4Columns && slots * rows < INT32_MAX, op,
                  ": a matrix is too large");
  return {qweight.const_data_ptr(), scales.const_data_ptr(), slots, rows, columns, groups};
}

inline Route route_of(const char *op, const Tensor &hidden_states, const Tensor &topk_ids,
                      const Tensor &slots) {
  STD_TORCH_CHECK(hidden_states.dim() == 2 && hidden_states.is_contiguous() &&
                      is(topk_ids, ScalarType::Long, 2) && is(slots, ScalarType::Long, 1) &&
                      topk_ids.size(0) == hidden_states.size(0),
                  op, ": hidden_states, topk_ids or slots have the wrong shape or dtype");
  const std::int64_t num_rows = topk_ids.size(0), top_k = topk_ids.size(1);
  STD_TORCH_CHECK(num_rows <= kMaxCallRows && num_rows * top_k <= kMaxCallPositions, op,
                  ": takes at most ", kMaxCallRows, " rows and ", kMaxCallPositions,
                  " places of routes");
  return {data<std::int64_t>(topk_ids), num_rows, top_k, data<std::int64_t>(slots), slots.size(0)};
}

// Biases of experts, in the dtype of both; without any where there are none.
inline ExpertBiases biases_of(const char *op, const std::optional<Tensor> &gate_up,
                              const std::optional<Tensor> &down, const Tensor &hidden_states,
                              std::int64_t experts, std::int64_t gate_up_rows) {
  STD_TORCH_CHECK(gate_up.has_value() == down.has_value(), op,
                  ": gate_up_bias and down_bias must both be there, or neither");
  if (!gate_up.has_value()) {
    return {};
  }
  STD_TORCH_CHECK(is(*gate_up, down->scalar_type(), 2) && is(*down, down->scalar_type(), 2) &&
                      gate_up->size(0) == experts && gate_up->size(1) == gate_up_rows &&
                      down->size(0) == experts && down->size(1) == hidden_states.size(1) &&
                      same_device({&hidden_states, &*gate_up, &*down}),
                  op, ": gate_up_bias or down_bias have the wrong shape, dtype or device");
  return {gate_up->const_data_ptr(), down->const_data_ptr(), dtype_of(op, *down)};
}

// As biases_of, of the dtype of the rows.
inline ExpertBiases same_biases_of(const char *op, const std::optional<Tensor> &gate_up,
                                   const std::optional<Tensor> &down, const Tensor &hidden_states,
                                   std::int64_t experts, std::int64_t gate_up_rows) {
  STD_TORCH_CHECK(!down.has_value() || down->scalar_type() == hidden_states.scalar_type(), op,
                  ": biases must be of the dtype of hidden_states");
  return biases_of(op, gate_up, down, hidden_states, experts, gate_up_rows);
}

inline Activation activation_of(const char *op, std::int64_t activation, double limit) {
  STD_TORCH_CHECK(activation >= 0 && activation < kActivations, op, ": no activation ", activation);
  return {static_cast<ActivationName>(activation), static_cast<float>(limit)};
}

} // namespace speq::cuda
