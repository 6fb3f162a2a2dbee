// What the ops over exact experts in slots have alike, whatever code those are in.
#pragma once

#include <optional>

#include "cpu/moe_grouped.h"
#include "cpu/tensors.h"

namespace speq::cpu {

// hidden_states [T, H], topk_ids [T, K], slot_table [E], out [T, K, H].
struct Grouped {
  const Tensor &hidden_states, &topk_ids, &slot_table;
  Tensor &out;
  const std::optional<Tensor> &gate_up_bias, &down_bias;
};

inline void run_grouped(const Grouped &tensors, const ExpertWeights &given, const Activation &act) {
  const Word dtype = word_of(tensors.hidden_states, "hidden_states");
  const RoundedWeights rounded(given, dtype);
  const ExpertWeights &weights = RoundedWeights::loses_bits(given.word, dtype)
                                     ? static_cast<const ExpertWeights &>(rounded)
                                     : given;
  const auto &[hidden_states, topk_ids, slot_table, out, gate_up_bias, down_bias] = tensors;
  STD_TORCH_CHECK(hidden_states.dim() == 2 && hidden_states.is_contiguous() && out.dim() == 3 &&
                      out.is_contiguous() && out.scalar_type() == hidden_states.scalar_type(),
                  "hidden_states [T, H] and out [T, K, H] must be contiguous and of one dtype");
  check(topk_ids, "topk_ids", 2, ScalarType::Long);
  check(slot_table, "slot_table", 1, ScalarType::Long);
  const auto &[hidden_size, expert_width, gated] = weights.shape;
  const std::int64_t rows = hidden_states.size(0);
  STD_TORCH_CHECK(has_gate(act) == gated, "activation ", std::int64_t(act.name),
                  " is not of such experts");
  STD_TORCH_CHECK(hidden_states.size(1) == hidden_size && topk_ids.size(0) == rows &&
                      out.size(0) == rows && out.size(1) == topk_ids.size(1) &&
                      out.size(2) == hidden_size,
                  "topk_ids must be [T, K] and out [T, K, H] of hidden_states [T, H]");
  const std::int64_t experts = slot_table.size(0);
  const ScalarType type = hidden_states.scalar_type();
  const ExpertBiases biases{
      bias_of(gate_up_bias, "gate_up_bias", experts, weights.shape.gate_up_rows(), type),
      bias_of(down_bias, "down_bias", experts, hidden_size, type)};
  if (out.numel() == 0) {
    return;
  }
  MoeGrouped moe({
      rows,
      topk_ids.size(1),
      hidden_states.const_data_ptr(),
      dtype,
      ids_of(topk_ids),
      ids_of(slot_table),
      weights,
      act,
      out.mutable_data_ptr(),
      biases,
  });
  const std::int64_t word_bytes = bytes_of(weights.word);
  parallel_for(0, moe.inner_tiles(),
               grain((gated ? 2 : 1) * moe.width_tile() * hidden_size * word_bytes),
               [&](std::int64_t begin, std::int64_t end) { moe.gate_up(begin, end); });
  parallel_for(0, moe.out_tiles(), grain(moe.hidden_tile() * expert_width * word_bytes),
               [&](std::int64_t begin, std::int64_t end) { moe.down(begin, end); });
}

} // namespace speq::cpu
