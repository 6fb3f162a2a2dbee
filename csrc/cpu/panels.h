// Products of rows by a matrix that was laid into panels of columns, over the vectors of an
// instruction set, which tiles.h describes.
#pragma once

#include "cpu/blocks.h"

namespace speq::cpu {

// What a panel's step multiplies: kDepth neighbouring elements of a row, by as many rows of the
// matrix in kVectors vectors of columns.
template <typename V> struct FloatStep {
  using Word = float;
  using Floats = typename V::Floats;
  using Columns = typename V::Floats;
  static constexpr int kDepth = 1, kVectors = kPanelColumns / V::kLanes;
  static constexpr int kRows = 6, kPanels = V::kRegisters >= 32 ? 4 / kVectors : 1;

  static Floats load(const float *sums) { return V::load(sums); }
  static void store(Floats v, float *sums) { V::store(v, sums); }
  static Floats zero() { return V::zero(); }
  static Floats row(const float *at) { return V::all(*at); }
  static Columns columns(const float *at, int vector) { return V::load(at + vector * V::kLanes); }
  static Floats fmadd(Columns columns, Floats row, Floats sum) {
    return V::fmadd(columns, row, sum);
  }
};

// R rows by N panels; their sums stay in registers.
template <typename Step, int R, int N>
static inline void panel_tile(const PanelRows &rows, const Panels &panels, std::int64_t row,
                              std::int64_t panel, const PanelSums &sums) {
  using Word = typename Step::Word;
  constexpr int kLanes = kPanelColumns / Step::kVectors;
  const Word *inputs[R];
  SPEQ_UNROLL
  for (int r = 0; r < R; ++r) {
    inputs[r] = static_cast<const Word *>(rows.first) + (row + r) * rows.stride;
  }
  const Word *columns = static_cast<const Word *>(panels.first) + panel * panels.stride;
  float *out = sums.first + row * sums.stride + panel * kPanelColumns;
  typename Step::Floats totals[R][N][Step::kVectors];
  const auto each = [&](const auto &body) {
    SPEQ_UNROLL
    for (int r = 0; r < R; ++r) {
      SPEQ_UNROLL
      for (int n = 0; n < N; ++n) {
        SPEQ_UNROLL
        for (int v = 0; v < Step::kVectors; ++v) {
          body(totals[r][n][v], out + r * sums.stride + n * kPanelColumns + v * kLanes);
        }
      }
    }
  };
  each([&](auto &total, const float *at) { total = sums.adds ? Step::load(at) : Step::zero(); });
  for (std::int64_t k = 0; k < panels.depth;
       k += Step::kDepth, columns += kPanelColumns * Step::kDepth) {
    typename Step::Columns loaded[N][Step::kVectors];
    SPEQ_UNROLL
    for (int n = 0; n < N; ++n) {
      SPEQ_UNROLL
      for (int v = 0; v < Step::kVectors; ++v) {
        loaded[n][v] = Step::columns(columns + n * panels.stride, v);
      }
    }
    SPEQ_UNROLL
    for (int r = 0; r < R; ++r) {
      const auto input = Step::row(inputs[r] + k);
      SPEQ_UNROLL
      for (int n = 0; n < N; ++n) {
        SPEQ_UNROLL
        for (int v = 0; v < Step::kVectors; ++v) {
          totals[r][n][v] = Step::fmadd(loaded[n][v], input, totals[r][n][v]);
        }
      }
    }
  }
  each([](const auto &total, float *at) { Step::store(total, at); });
}

// All rows from `row` on by N panels; the last ones, R at most.
template <typename Step, int R, int N>
static inline void panel_rows(const PanelRows &rows, const Panels &panels, std::int64_t row,
                              std::int64_t panel, const PanelSums &sums) {
  for (; row + R <= rows.count; row += R) {
    panel_tile<Step, R, N>(rows, panels, row, panel, sums);
  }
  if constexpr (R > 1) {
    if (row < rows.count) {
      panel_rows<Step, R / 2, N>(rows, panels, row, panel, sums);
    }
  }
}

template <typename Step>
static inline void panel_product(const PanelRows &rows, const Panels &panels,
                                 const PanelSums &sums) {
  std::int64_t panel = 0;
  for (; panel + Step::kPanels <= panels.count; panel += Step::kPanels) {
    panel_rows<Step, Step::kRows, Step::kPanels>(rows, panels, 0, panel, sums);
  }
  for (; panel < panels.count; ++panel) {
    panel_rows<Step, Step::kRows, 1>(rows, panels, 0, panel, sums);
  }
}

} // namespace speq::cpu
