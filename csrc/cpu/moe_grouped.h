// Exact experts out of slots, rows grouped by expert (MoE-SpeQ 3.4.4). Its two parts run one after
// the other, each over a range that threads may share.
#pragma once

#include <span>
#include <vector>

#include "activation.h"
#include "cpu/expert_weights.h"
#include "cpu/panel_inputs.h"
#include "cpu/routing.h"

namespace speq::cpu {

// Of experts that have biases: gate_up [E, gate_up_rows], gate before up, and down [E,
// hidden_size]. Null where there are none.
struct ExpertBiases {
  const void *gate_up = nullptr, *down = nullptr;
};

struct MoeGroupedProblem {
  std::int64_t rows, top_k;
  const void *hidden_states; // [rows, hidden_size] of `dtype`, which `out` has as well
  Word dtype;
  std::span<const std::int64_t> ids;   // [rows * top_k]
  std::span<const std::int64_t> slots; // [E], negative where an expert is in none
  const ExpertWeights &weights;
  Activation activation;
  void *out;           // [rows, top_k, hidden_size]
  ExpertBiases biases; // of `dtype`
};

class MoeGrouped {
public:
  // Throws std::out_of_range for ids or slots that do not exist.
  explicit MoeGrouped(const MoeGroupedProblem &problem);

  // Weight rows that a thread takes at a time: few enough to stay in its cache while all rows of
  // the expert pass over them.
  std::int64_t width_tile() const { return width_tile_; }
  std::int64_t hidden_tile() const { return hidden_tile_; }

  // Tiles of act(gate) * up, or of act(up) without a gate, over all experts.
  std::int64_t inner_tiles() const;
  void gate_up(std::int64_t begin, std::int64_t end);

  // Tiles of the result, over all experts.
  std::int64_t out_tiles() const;
  void down(std::int64_t begin, std::int64_t end);

private:
  const void *input(std::int64_t place) const;
  // Rows [first, first + rows) of each projection by the inputs, which have all of its columns.
  void dot(std::span<const Projection> projections, const ExpertRows &group, std::int64_t first,
           std::int64_t rows, const Inputs &inputs, std::span<float *const *const> outs) const;

  MoeGroupedProblem problem_;
  std::vector<ExpertRows> groups_;
  bool in_panels_; // whether experts have so many rows that panels pay
  std::int64_t width_tile_, hidden_tile_;
  bool direct_;      // whether hidden states are multiplied where they lie
  ExactRows inputs_; // of hidden_size, a row each, or a place where experts have an order of them
  ExactRows inner_;  // of expert_width, a place each
};

} // namespace speq::cpu
