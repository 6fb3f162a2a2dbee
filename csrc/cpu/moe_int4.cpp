#include "cpu/moe_int4.h"

namespace speq::cpu {
namespace {

// Adds columns [first, first + count) of an expert's bias, of [E, size], to as many values.
void add_bias(const void *biases, Word word, std::int64_t size, std::int64_t expert,
              std::int64_t first, std::int64_t count, float *values) {
  if (biases == nullptr) {
    return;
  }
  with_type(word, [&](auto type) {
    const auto *bias = static_cast<const decltype(type) *>(biases) + expert * size + first;
    for (std::int64_t i = 0; i < count; ++i) {
      values[i] += to_float(bias[i]);
    }
  });
}

} // namespace

// With a perm of its own, every expert sees inputs that are rounded for it.
MoeInt4::MoeInt4(const MoeInt4Problem &problem)
    : problem_(problem),
      groups_(group_by_expert(problem.ids, problem.slots, problem.num_slots, false, "base_slots")),
      width_tiles_((problem.expert_width() + kTile - 1) / kTile),
      inputs_(problem.input_perm == nullptr ? problem.rows : std::int64_t(problem.ids.size())),
      input_rows_(inputs_, problem.hidden_size()),
      inner_rows_(std::int64_t(problem.ids.size()), problem.expert_width()) {}

void MoeInt4::round_inputs(std::int64_t begin, std::int64_t end) {
  const std::int64_t hidden_size = problem_.hidden_size();
  for (std::int64_t input = begin; input < end; ++input) {
    if (problem_.input_perm == nullptr) {
      input_rows_.round_row(input, problem_.hidden_states + input * hidden_size, nullptr);
    } else {
      const std::int64_t slot = problem_.slots[problem_.ids[input]];
      input_rows_.round_row(input, problem_.hidden_states + input / problem_.top_k * hidden_size,
                            problem_.input_perm + slot * hidden_size);
    }
  }
}

void MoeInt4::gate_up(std::int64_t begin, std::int64_t end) {
  const std::int64_t width = problem_.expert_width();
  const bool gated = has_gate(problem_.activation);
  const std::int64_t matrix_rows = problem_.gate_up.rows, first_up = gated ? width : 0;
  std::vector<const Int8Step *> inputs;
  std::vector<float> gates, ups;
  std::vector<float *> gate_rows, up_rows;
  for (std::int64_t item = begin; item < end; ++item) {
    const ExpertRows &group = groups_[item / width_tiles_];
    const std::int64_t first = item % width_tiles_ * kTile;
    const std::int64_t last = std::min(first + kTile, width);
    const std::int64_t count = std::int64_t(group.places.size());
    inputs.resize(count), gate_rows.resize(count), up_rows.resize(count);
    gates.resize(count * kTile), ups.resize(count * kTile);
    for (std::int64_t r = 0; r < count; ++r) {
      const std::int64_t place = group.places[r];
      inputs[r] = input_rows_.row(problem_.input_perm == nullptr ? place / problem_.top_k : place);
      gate_rows[r] = &gates[r * kTile];
      up_rows[r] = &ups[r * kTile];
    }
    const Int4Matrix matrix = problem_.gate_up.matrix(group.slot);
    const DotInt4 dot = dot_int4_for(matrix);
    if (gated) {
      dot(matrix, first, last, inputs.data(), count, gate_rows.data());
    }
    dot(matrix, first_up + first, first_up + last, inputs.data(), count, up_rows.data());
    const auto &[biases, of_down, word] = problem_.biases;
    for (std::int64_t r = 0; r < count; ++r) {
      float *up = up_rows[r], *gate = gated ? gate_rows[r] : up;
      add_bias(biases, word, matrix_rows, group.expert, first_up + first, last - first, up);
      if (gated) {
        add_bias(biases, word, matrix_rows, group.expert, first, last - first, gate);
      }
      for (std::int64_t i = 0; i < last - first; ++i) {
        up[i] = activate(problem_.activation, gate[i], up[i], AsIs());
      }
      inner_rows_.round(group.places[r], first, last - first, up);
    }
  }
}

void MoeInt4::down(std::int64_t begin, std::int64_t end, float *out) {
  const std::int64_t hidden_size = problem_.hidden_size();
  const std::int64_t first = begin * kTile, last = std::min(end * kTile, hidden_size);
  const std::int64_t columns = last - first;
  Buffer<float> parts(problem_.ids.size() * columns);
  std::vector<const Int8Step *> inputs;
  std::vector<float *> rows;
  for (const ExpertRows &group : groups_) {
    const Int4Matrix matrix = problem_.down.matrix(group.slot);
    const DotInt4 dot = dot_int4_for(matrix);
    for (std::int64_t tile = first; tile < last; tile += kTile) {
      inputs.clear(), rows.clear();
      for (const std::int64_t place : group.places) {
        inputs.push_back(inner_rows_.row(place));
        rows.push_back(&parts[place * columns + tile - first]);
      }
      const std::int64_t end = std::min(tile + kTile, last);
      dot(matrix, tile, end, inputs.data(), std::int64_t(inputs.size()), rows.data());
      for (float *row : rows) {
        add_bias(problem_.biases.down, problem_.biases.word, hidden_size, group.expert, tile,
                 end - tile, row);
      }
    }
  }
  // In the order of the route, whatever the order of experts was.
  for (std::int64_t row = 0; row < problem_.rows; ++row) {
    float *sums = out + row * hidden_size + first;
    std::fill(sums, sums + columns, 0.0f);
    for (std::int64_t j = 0; j < problem_.top_k; ++j) {
      const std::int64_t place = row * problem_.top_k + j;
      const float weight = problem_.topk_weights[place];
      const float *part = &parts[place * columns];
      for (std::int64_t i = 0; i < columns; ++i) {
        sums[i] += weight * part[i];
      }
    }
  }
}

} // namespace speq::cpu
