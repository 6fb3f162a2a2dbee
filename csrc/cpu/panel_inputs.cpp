#include "cpu/panel_inputs.h"

#include <type_traits>

namespace speq::cpu {
namespace {

constexpr std::int64_t panels_of(std::int64_t count) {
  return (count + kPanelColumns - 1) / kPanelColumns;
}

// A pair of bfloat16, or a float: what a step of a panel has of an input.
template <typename Stored>
using Step = std::conditional_t<std::is_same_v<Stored, BFloat16>, std::uint32_t, Stored>;

} // namespace

PanelInputs::PanelInputs(const Inputs &inputs, std::int64_t columns)
    : count_(inputs.count), columns_(columns), panels_(panels_of(count_)), stored_(inputs.stored),
      buffer_(panels_ * kPanelColumns * columns * bytes_of(stored_)) {
  if (stored_ == Word::bfloat16) {
    lay_out<BFloat16>(inputs);
  } else {
    lay_out<float>(inputs);
  }
}

template <typename Stored> void PanelInputs::lay_out(const Inputs &inputs) {
  using Of = Step<Stored>;
  const std::int64_t steps = columns_ * sizeof(Stored) / sizeof(Of);
  auto *to = reinterpret_cast<Of *>(buffer_.data());
  for (std::int64_t first = 0; first < count_; first += kPanelColumns) {
    const std::int64_t present = std::min(kPanelColumns, count_ - first);
    for (std::int64_t step = 0; step < steps; ++step, to += kPanelColumns) {
      for (std::int64_t i = 0; i < present; ++i) {
        std::memcpy(to + i, static_cast<const Of *>(inputs.rows[first + i]) + step, sizeof *to);
      }
      std::fill(to + present, to + kPanelColumns, Of{});
    }
  }
}

void PanelInputs::dot(const void *words, Word weights, std::int64_t rows,
                      float *const *outs) const {
  if (stored_ == Word::bfloat16) {
    return dot_words<BFloat16, BFloat16>(static_cast<const BFloat16 *>(words), rows, outs);
  }
  if (weights == Word::bfloat16) {
    return dot_words<BFloat16, float>(static_cast<const BFloat16 *>(words), rows, outs);
  }
  dot_words<float, float>(static_cast<const float *>(words), rows, outs);
}

template <typename Weight, typename Stored>
void PanelInputs::dot_words(const Weight *words, std::int64_t rows, float *const *outs) const {
  // A block of columns at a time: its panels, and the weights of some rows, stay in caches.
  constexpr std::int64_t kBlock = 512, kRows = 96;
  constexpr bool kWidens = !std::is_same_v<Weight, Stored>;
  const MicroKernels &kernels = micro_kernels();
  const PanelProduct product = stored_ == Word::bfloat16 ? kernels.panel_pairs : kernels.panels;
  const auto *panels = reinterpret_cast<const Stored *>(buffer_.data());
  const std::int64_t stride = panels_ * kPanelColumns;
  Buffer<float> sums(kRows * stride);
  Buffer<Stored> widened(kWidens ? kRows * kBlock : 0);
  for (std::int64_t first = 0; first < rows; first += kRows) {
    const std::int64_t count = std::min(kRows, rows - first);
    for (std::int64_t begin = 0; begin < columns_; begin += kBlock) {
      const std::int64_t depth = std::min(kBlock, columns_ - begin);
      const Weight *from = words + first * columns_ + begin;
      PanelRows weights{from, count, columns_};
      if constexpr (kWidens) {
        for (std::int64_t n = 0; n < count; ++n) {
          kernels.widen_bfloat16(from + n * columns_, depth, widened.data() + n * kBlock);
        }
        weights = {widened.data(), count, kBlock};
      }
      product(weights, {panels + begin * kPanelColumns, panels_, columns_ * kPanelColumns, depth},
              {sums.data(), stride, begin > 0});
    }
    for (std::int64_t r = 0; r < count_; ++r) {
      for (std::int64_t n = 0; n < count; ++n) {
        outs[r][first + n] = sums[n * stride + r];
      }
    }
  }
}

} // namespace speq::cpu
