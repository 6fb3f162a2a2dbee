#include "cpu/moe_grouped.h"

namespace speq::cpu {
namespace {

constexpr std::int64_t kTileBytes = 128 << 10;

std::int64_t tile_of(const ExactSlots &matrix) {
  const std::int64_t rows = kTileBytes / (matrix.columns * bytes_of(matrix.word));
  return std::clamp<std::int64_t>(rows / 4 * 4, 4, 32);
}

std::int64_t tiles(std::int64_t size, std::int64_t tile) { return (size + tile - 1) / tile; }

} // namespace

MoeGrouped::MoeGrouped(const MoeGroupedProblem &problem)
    : problem_(problem),
      groups_(group_by_expert(problem.ids, problem.slots, problem.num_slots, true, "slot_table")),
      width_tile_(tile_of(problem.gate_up)), hidden_tile_(tile_of(problem.down)),
      hidden_stride_(padded(problem.hidden_size())), width_stride_(padded(problem.expert_width())),
      inputs_(problem.rows * hidden_stride_), inner_(problem.ids.size() * width_stride_) {
  const std::int64_t width = problem_.expert_width();
  widen_rows(problem_.hidden_states, problem_.dtype, problem_.rows, problem_.hidden_size(),
             inputs_.data());
  for (std::size_t place = 0; place < problem_.ids.size(); ++place) {
    float *values = &inner_[place * width_stride_];
    std::fill(values + width, values + width_stride_, 0.0f);
  }
}

std::int64_t MoeGrouped::inner_tiles() const {
  return std::int64_t(groups_.size()) * tiles(problem_.expert_width(), width_tile_);
}

std::int64_t MoeGrouped::out_tiles() const {
  return std::int64_t(groups_.size()) * tiles(problem_.hidden_size(), hidden_tile_);
}

void MoeGrouped::gate_up(std::int64_t begin, std::int64_t end) {
  const std::int64_t width = problem_.expert_width(), columns = problem_.hidden_size();
  const std::int64_t per_group = tiles(width, width_tile_);
  const DotExact dot = dot_for(problem_.gate_up.word);
  std::vector<const float *> inputs;
  std::vector<float> ups;
  std::vector<float *> gate_rows, up_rows;
  for (std::int64_t item = begin; item < end; ++item) {
    const ExpertRows &group = groups_[item / per_group];
    const std::int64_t first = item % per_group * width_tile_;
    const std::int64_t rows = std::min(width_tile_, width - first);
    const std::int64_t count = std::int64_t(group.places.size());
    inputs.resize(count), gate_rows.resize(count), up_rows.resize(count);
    ups.resize(count * width_tile_);
    for (std::int64_t r = 0; r < count; ++r) {
      inputs[r] = &inputs_[group.places[r] / problem_.top_k * hidden_stride_];
      gate_rows[r] = &inner_[group.places[r] * width_stride_ + first];
      up_rows[r] = &ups[r * width_tile_];
    }
    dot(problem_.gate_up.row(group.slot, first), columns, rows, inputs.data(), count,
        gate_rows.data());
    dot(problem_.gate_up.row(group.slot, width + first), columns, rows, inputs.data(), count,
        up_rows.data());
    with_type(problem_.dtype, [&](auto type) {
      const auto round = [](float value) { return rounded_to<decltype(type)>(value); };
      for (std::int64_t r = 0; r < count; ++r) {
        for (std::int64_t i = 0; i < rows; ++i) {
          const float gate = round(activate(problem_.activation, round(gate_rows[r][i])));
          gate_rows[r][i] = round(gate * round(up_rows[r][i]));
        }
      }
    });
  }
}

void MoeGrouped::down(std::int64_t begin, std::int64_t end) {
  const std::int64_t width = problem_.expert_width(), hidden_size = problem_.hidden_size();
  const std::int64_t per_group = tiles(hidden_size, hidden_tile_);
  const DotExact dot = dot_for(problem_.down.word);
  std::vector<const float *> inputs;
  std::vector<float> values;
  std::vector<float *> value_rows;
  for (std::int64_t item = begin; item < end; ++item) {
    const ExpertRows &group = groups_[item / per_group];
    const std::int64_t first = item % per_group * hidden_tile_;
    const std::int64_t rows = std::min(hidden_tile_, hidden_size - first);
    const std::int64_t count = std::int64_t(group.places.size());
    inputs.resize(count), value_rows.resize(count), values.resize(count * hidden_tile_);
    for (std::int64_t r = 0; r < count; ++r) {
      inputs[r] = &inner_[group.places[r] * width_stride_];
      value_rows[r] = &values[r * hidden_tile_];
    }
    dot(problem_.down.row(group.slot, first), width, rows, inputs.data(), count, value_rows.data());
    with_type(problem_.dtype, [&](auto type) {
      auto *out = static_cast<decltype(type) *>(problem_.out);
      for (std::int64_t r = 0; r < count; ++r) {
        for (std::int64_t i = 0; i < rows; ++i) {
          store(value_rows[r][i], out[group.places[r] * hidden_size + first + i]);
        }
      }
    });
  }
}

} // namespace speq::cpu
