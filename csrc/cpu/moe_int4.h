// The draft's experts in one call: INT4 gate_up, activation, INT4 down, weighted sum (MoE-SpeQ
// 3.4.3). Its three parts run one after the other, each over a range that threads may share.
#pragma once

#include <span>
#include <vector>

#include "activation.h"
#include "cpu/exact_rows.h"
#include "cpu/int8_rows.h"
#include "cpu/routing.h"

namespace speq::cpu {

// Experts in slots: qweight [N, rows, columns / 2], scales [N, rows, columns / group_size].
struct Int4Slots {
  const std::uint8_t *qweight;
  const Float16 *scales;
  std::int64_t rows, columns, group_size;

  Int4Matrix matrix(std::int64_t slot) const {
    return {qweight + slot * rows * (columns / 2), scales + slot * rows * (columns / group_size),
            columns, group_size};
  }
};

// Of experts that have biases: gate_up [E, gate_up rows], gate before up, and down [E,
// hidden_size], of `word`. Null where there are none.
struct Int4Biases {
  const void *gate_up = nullptr, *down = nullptr;
  Word word = Word::float32;
};

struct MoeInt4Problem {
  std::int64_t rows, top_k;
  const float *hidden_states;          // [rows, hidden_size]
  std::span<const std::int64_t> ids;   // [rows * top_k]
  const float *topk_weights;           // [rows * top_k]
  std::span<const std::int64_t> slots; // [E]
  std::int64_t num_slots;
  Int4Slots gate_up, down;
  const std::int32_t *input_perm; // [N, hidden_size] or null
  Activation activation;
  Int4Biases biases;

  std::int64_t hidden_size() const { return gate_up.columns; }
  std::int64_t expert_width() const { return down.columns; }
};

class MoeInt4 {
public:
  // Output columns that a thread computes at a time; one block of down's inputs.
  static constexpr std::int64_t kTile = kInt8Block;

  // Throws std::out_of_range for ids or base slots that do not exist.
  explicit MoeInt4(const MoeInt4Problem &problem);

  // Rows of inputs to round, in all.
  std::int64_t inputs() const { return inputs_; }
  void round_inputs(std::int64_t begin, std::int64_t end);

  // Tiles of expert outputs act(gate) * up, or of act(up) without a gate, over all experts.
  std::int64_t inner_tiles() const { return std::int64_t(groups_.size()) * width_tiles_; }
  void gate_up(std::int64_t begin, std::int64_t end);

  // Tiles of columns of the result; `out` [rows, hidden_size].
  std::int64_t out_tiles() const { return (problem_.hidden_size() + kTile - 1) / kTile; }
  void down(std::int64_t begin, std::int64_t end, float *out);

private:
  MoeInt4Problem problem_;
  std::vector<ExpertRows> groups_;
  std::int64_t width_tiles_, inputs_;
  Int8Rows input_rows_, inner_rows_;
};

} // namespace speq::cpu
