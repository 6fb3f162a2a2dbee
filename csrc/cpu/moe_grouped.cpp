#include "cpu/moe_grouped.h"

namespace speq::cpu {
namespace {

constexpr std::int64_t kTileBytes = 128 << 10;
// Weight rows that inputs are laid into panels for.
constexpr std::int64_t kPanelTile = 384;

std::int64_t tile_of(const ExpertWeights &weights, Projection projection, bool in_panels) {
  if (in_panels) {
    return kPanelTile;
  }
  const std::int64_t row_bytes = weights.columns(projection) * bytes_of(weights.word);
  return std::clamp<std::int64_t>(kTileBytes / row_bytes / 4 * 4, 4, 32);
}

// Whether experts have so many rows each, on average, that panels pay: what a row becomes does not
// depend on which rows share its experts, nor on which experts a call has.
bool many_rows(const MoeGroupedProblem &problem) {
  constexpr std::int64_t kMost = 16; // rows that are added up in one order everywhere
  if (problem.rows <= kMost || sums_in_order()) {
    return false;
  }
  const ExpertWeights &weights = problem.weights;
  const Word stored = ExactRows::stored_as(weights.word, problem.dtype);
  const MicroKernels &kernels = micro_kernels();
  const std::int64_t least =
      stored == Word::bfloat16 ? kernels.panel_pair_inputs : kernels.panel_inputs;
  const auto experts = std::max<std::int64_t>(std::int64_t(problem.slots.size()), 1);
  return std::int64_t(problem.ids.size()) / experts >= least &&
         PanelInputs::takes(weights.word, stored, weights.shape.hidden_size) &&
         PanelInputs::takes(weights.word, stored, weights.shape.expert_width);
}

std::int64_t tiles(std::int64_t size, std::int64_t tile) { return (size + tile - 1) / tile; }

// An expert's row of biases [E, size]; null where there are none.
template <typename Type>
const Type *bias(const void *biases, std::int64_t size, std::int64_t expert) {
  return biases == nullptr ? nullptr : static_cast<const Type *>(biases) + expert * size;
}

} // namespace

MoeGrouped::MoeGrouped(const MoeGroupedProblem &problem)
    : problem_(problem), groups_(group_by_expert(problem.ids, problem.slots,
                                                 problem.weights.num_slots, true, "slot_table")),
      in_panels_(many_rows(problem)),
      width_tile_(tile_of(problem.weights, Projection::up, in_panels_)),
      hidden_tile_(tile_of(problem.weights, Projection::down, in_panels_)),
      direct_(!problem.weights.has_input_perm() &&
              ExactRows::as_they_are(problem.weights.shape.hidden_size, problem.weights.word,
                                     problem.dtype)),
      inputs_(direct_                            ? 0
              : problem.weights.has_input_perm() ? std::int64_t(problem.ids.size())
                                                 : problem.rows,
              problem.weights.shape.hidden_size, problem.weights.word, problem.dtype),
      inner_(std::int64_t(problem.ids.size()), problem.weights.shape.expert_width,
             problem.weights.word, problem.dtype) {
  if (direct_) {
    return;
  }
  const std::int64_t hidden_size = problem_.weights.shape.hidden_size;
  with_type(problem_.dtype, [&](auto type) {
    const auto *words = static_cast<const decltype(type) *>(problem_.hidden_states);
    std::vector<bool> filled(problem_.rows); // of many rows, a call may have experts of a few
    for (const ExpertRows &group : groups_) {
      const std::int32_t *perm = problem_.weights.input_perm(group.expert);
      for (const std::int64_t place : group.places) {
        const std::int64_t row = place / problem_.top_k;
        if (problem_.weights.has_input_perm()) {
          inputs_.fill(place, words + row * hidden_size, perm);
        } else if (!filled[row]) {
          inputs_.fill(row, words + row * hidden_size);
          filled[row] = true;
        }
      }
    }
  });
}

const void *MoeGrouped::input(std::int64_t place) const {
  const std::int64_t row = place / problem_.top_k;
  if (direct_) {
    const std::int64_t row_bytes = problem_.weights.shape.hidden_size * bytes_of(problem_.dtype);
    return static_cast<const std::byte *>(problem_.hidden_states) + row * row_bytes;
  }
  return inputs_.row(problem_.weights.has_input_perm() ? place : row);
}

std::int64_t MoeGrouped::inner_tiles() const {
  return std::int64_t(groups_.size()) * tiles(problem_.weights.shape.expert_width, width_tile_);
}

std::int64_t MoeGrouped::out_tiles() const {
  return std::int64_t(groups_.size()) * tiles(problem_.weights.shape.hidden_size, hidden_tile_);
}

void MoeGrouped::dot(std::span<const Projection> projections, const ExpertRows &group,
                     std::int64_t first, std::int64_t rows, const Inputs &inputs,
                     std::span<float *const *const> outs) const {
  const ExpertWeights &weights = problem_.weights;
  if (!in_panels_) {
    for (std::size_t i = 0; i < projections.size(); ++i) {
      weights.dot(projections[i], group.expert, group.slot, first, rows, inputs, outs[i]);
    }
    return;
  }
  constexpr std::int64_t kAtOnce = 512; // inputs, so that caches hold their panels
  const std::int64_t columns = weights.columns(projections[0]);
  Buffer<std::byte> room(quads_of(rows) * kQuadRows * columns * bytes_of(weights.word));
  for (std::int64_t begin = 0; begin < inputs.count; begin += kAtOnce) {
    const std::int64_t count = std::min(kAtOnce, inputs.count - begin);
    const PanelInputs panels({inputs.rows + begin, count, inputs.stored}, columns);
    for (std::size_t i = 0; i < projections.size(); ++i) {
      const void *words =
          weights.words(projections[i], group.expert, group.slot, first, rows, room.data());
      panels.dot(words, weights.word, rows, outs[i] + begin);
    }
  }
}

void MoeGrouped::gate_up(std::int64_t begin, std::int64_t end) {
  const ExpertWeights &weights = problem_.weights;
  const std::int64_t width = weights.shape.expert_width;
  const bool gated = weights.shape.gated;
  const std::int64_t per_group = tiles(width, width_tile_);
  std::vector<const void *> inputs;
  std::vector<float> gates, ups;
  std::vector<float *> gate_rows, up_rows;
  for (std::int64_t item = begin; item < end; ++item) {
    const ExpertRows &group = groups_[item / per_group];
    const std::int64_t first = item % per_group * width_tile_;
    const std::int64_t rows = std::min(width_tile_, width - first);
    const std::int64_t count = std::int64_t(group.places.size());
    inputs.resize(count), gate_rows.resize(count), up_rows.resize(count);
    gates.resize(count * width_tile_), ups.resize(count * width_tile_);
    for (std::int64_t r = 0; r < count; ++r) {
      inputs[r] = input(group.places[r]);
      gate_rows[r] = &gates[r * width_tile_];
      up_rows[r] = &ups[r * width_tile_];
    }
    const Inputs multiplied{inputs.data(), count, inputs_.stored()};
    constexpr Projection kBoth[] = {Projection::gate, Projection::up};
    float *const *const outs[] = {gate_rows.data(), up_rows.data()};
    const std::size_t projections = gated ? 2 : 1;
    dot(std::span(kBoth).last(projections), group, first, rows, multiplied,
        std::span(outs).last(projections));
    with_type(problem_.dtype, [&](auto type) {
      using Type = decltype(type);
      const auto round = [](float value) { return rounded_to<Type>(value); };
      const Type *biases =
          bias<Type>(problem_.biases.gate_up, weights.shape.gate_up_rows(), group.expert);
      const std::int64_t first_up = first + weights.first_row(Projection::up);
      const auto finish = [&](float *values, std::int64_t first_bias) {
        for (std::int64_t i = 0; i < rows; ++i) {
          values[i] = round(values[i]);
        }
        for (std::int64_t i = 0; biases != nullptr && i < rows; ++i) {
          values[i] = round(values[i] + to_float(biases[first_bias + i]));
        }
      };
      for (std::int64_t r = 0; r < count; ++r) {
        float *up = up_rows[r], *gate = gated ? gate_rows[r] : up;
        finish(up, first_up);
        if (gated) {
          finish(gate, first);
        }
        for (std::int64_t i = 0; i < rows; ++i) {
          up[i] = round(activate(problem_.activation, gate[i], up[i], round));
        }
        inner_.fill(group.places[r], first, rows, up);
      }
    });
  }
}

void MoeGrouped::down(std::int64_t begin, std::int64_t end) {
  const std::int64_t hidden_size = problem_.weights.shape.hidden_size;
  const std::int64_t per_group = tiles(hidden_size, hidden_tile_);
  std::vector<const void *> inputs;
  std::vector<float> values;
  std::vector<float *> value_rows;
  for (std::int64_t item = begin; item < end; ++item) {
    const ExpertRows &group = groups_[item / per_group];
    const std::int64_t first = item % per_group * hidden_tile_;
    const std::int64_t rows = std::min(hidden_tile_, hidden_size - first);
    const std::int64_t count = std::int64_t(group.places.size());
    inputs.resize(count), value_rows.resize(count), values.resize(count * hidden_tile_);
    for (std::int64_t r = 0; r < count; ++r) {
      inputs[r] = inner_.row(group.places[r]);
      value_rows[r] = &values[r * hidden_tile_];
    }
    constexpr Projection kDown[] = {Projection::down};
    float *const *const outs[] = {value_rows.data()};
    dot(kDown, group, first, rows, {inputs.data(), count, inner_.stored()}, outs);
    with_type(problem_.dtype, [&](auto type) {
      using Type = decltype(type);
      auto *out = static_cast<Type *>(problem_.out);
      const Type *biases = bias<Type>(problem_.biases.down, hidden_size, group.expert);
      for (std::int64_t r = 0; r < count; ++r) {
        for (std::int64_t i = 0; i < rows; ++i) {
          float value = value_rows[r][i];
          if (biases != nullptr) {
            value = rounded_to<Type>(value) + to_float(biases[first + i]);
          }
          store(value, out[group.places[r] * hidden_size + first + i]);
        }
      }
    });
  }
}

} // namespace speq::cpu
