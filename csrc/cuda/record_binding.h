// What the ops over experts in records have alike, whatever code those are in.
#pragma once

#include "cuda/tensors.h"

namespace speq::cuda {

inline ExpertShape shape_of(const char *op, std::int64_t hidden_size, std::int64_t expert_width,
                            bool gated) {
  STD_TORCH_CHECK(hidden_size > 0 && expert_width > 0 && hidden_size < kMaxCompactColumns &&
                      expert_width < kMaxCompactColumns,
                  op, ": experts of ", hidden_size, " by ", expert_width,
                  " are empty or too large");
  return {hidden_size, expert_width, gated};
}

// Slots [S, slot_bytes] uint8, or a record [R].
inline Records records_of(const char *op, const Tensor &tensor, std::int64_t fixed_bytes) {
  const bool slots = tensor.dim() == 2;
  STD_TORCH_CHECK((slots || tensor.dim() == 1) && tensor.scalar_type() == ScalarType::Byte &&
                      tensor.stride(tensor.dim() - 1) == 1,
                  op, ": records must be contiguous uint8");
  const Records records{tensor.const_data_ptr(), slots ? tensor.size(0) : 1,
                        slots ? tensor.stride(0) : 0, tensor.size(tensor.dim() - 1)};
  constexpr std::int64_t kEntry = alignof(std::uint32_t);
  STD_TORCH_CHECK(records.slot_bytes >= fixed_bytes && records.slot_bytes < INT32_MAX &&
                      records.slot_stride % kEntry == 0 &&
                      reinterpret_cast<std::uintptr_t>(records.records) % kEntry == 0,
                  op, ": records must have at least ", fixed_bytes, " bytes, aligned to four");
  return records;
}

inline ExpertShape exact_shape(const char *op, const Tensor &gate_up_proj,
                               const Tensor &down_proj) {
  STD_TORCH_CHECK(is(gate_up_proj, ScalarType::BFloat16, 2) &&
                      is(down_proj, ScalarType::BFloat16, 2),
                  op, ": gate_up_proj and down_proj must be matrices of bfloat16");
  const ExpertShape shape =
      shape_of(op, down_proj.size(0), down_proj.size(1), gate_up_proj.size(0) != down_proj.size(1));
  STD_TORCH_CHECK(
      gate_up_proj.size(0) == shape.gate_up_rows() && gate_up_proj.size(1) == shape.hidden_size, op,
      ": gate_up_proj must be [2F, H], or [F, H] without a gate, and down_proj "
      "[H, F]");
  return shape;
}

// What ops over records of all kinds have alike.
struct Grouped {
  Values hidden_states;
  Route route;
  void *out;
};

inline Grouped grouped_of(const char *op, const Tensor &hidden_states, const Tensor &topk_ids,
                          const Tensor &slot_table, const Tensor &slots, std::int64_t hidden_size,
                          const Tensor &out) {
  const Grouped grouped{values(op, hidden_states),
                        route_of(op, hidden_states, topk_ids, slot_table), out.data_ptr()};
  STD_TORCH_CHECK(hidden_states.size(1) == hidden_size &&
                      grouped.hidden_states.dtype != Dtype::float64 &&
                      out.scalar_type() == hidden_states.scalar_type() && out.dim() == 3 &&
                      out.is_contiguous() && out.size(0) == grouped.route.num_rows &&
                      out.size(1) == grouped.route.top_k && out.size(2) == hidden_size,
                  op, ": hidden_states or out have the wrong shape or dtype");
  STD_TORCH_CHECK(same_device({&hidden_states, &topk_ids, &slot_table, &slots, &out}), op,
                  ": arguments are on different devices");
  return grouped;
}

} // namespace speq::cuda
