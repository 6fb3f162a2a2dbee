// Exact experts out of slots, rows grouped by expert (MoE-SpeQ 3.4.4). Its two parts run one after
// the other, each over a range that threads may share.
#pragma once

#include <span>
#include <vector>

#include "activation.h"
#include "cpu/exact_rows.h"
#include "cpu/routing.h"

namespace speq::cpu {

// Matrices [rows, columns] in slots that lie slot_bytes apart.
struct ExactSlots {
  const std::byte *words;
  std::int64_t slot_bytes, rows, columns;
  Word word;

  const std::byte *row(std::int64_t slot, std::int64_t row) const {
    return words + slot * slot_bytes + row * columns * bytes_of(word);
  }
};

struct MoeGroupedProblem {
  std::int64_t rows, top_k;
  const void *hidden_states; // [rows, hidden_size] of `dtype`, which `out` has as well
  Word dtype;
  std::span<const std::int64_t> ids;   // [rows * top_k]
  std::span<const std::int64_t> slots; // [E], negative where an expert is in none
  std::int64_t num_slots;
  ExactSlots gate_up, down;
  Activation activation;
  void *out; // [rows, top_k, hidden_size]

  std::int64_t hidden_size() const { return gate_up.columns; }
  std::int64_t expert_width() const { return down.columns; }
};

class MoeGrouped {
public:
  // Throws std::out_of_range for ids or slots that do not exist.
  explicit MoeGrouped(const MoeGroupedProblem &problem);

  // Weight rows that a thread takes at a time: few enough to stay in its cache while all rows of
  // the expert pass over them.
  std::int64_t width_tile() const { return width_tile_; }
  std::int64_t hidden_tile() const { return hidden_tile_; }

  // Tiles of act(gate) * up, over all experts.
  std::int64_t inner_tiles() const;
  void gate_up(std::int64_t begin, std::int64_t end);

  // Tiles of the result, over all experts.
  std::int64_t out_tiles() const;
  void down(std::int64_t begin, std::int64_t end);

private:
  MoeGroupedProblem problem_;
  std::vector<ExpertRows> groups_;
  std::int64_t width_tile_, hidden_tile_;
  ExactRows inputs_; // of hidden_size, a row each
  ExactRows inner_;  // of expert_width, a place each
};

} // namespace speq::cpu
