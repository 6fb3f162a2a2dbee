// Products of panels by the tiles of AMX: sixteen rows by sixteen columns, 32 columns of weights to
// a step. For processors with all that avx512_bf16.cpp takes.
#include <immintrin.h>

#include "cpu/micro_kernels.h"

namespace speq::cpu {
namespace {

constexpr std::int64_t kTileRows = 16, kTileDepth = 32;
// Four tiles of sums, two of rows, two of panels.
constexpr int kSums = 0, kRows = 4, kPanels = 6;

struct alignas(64) TileConfig {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};
};

// Tiles for `upper` rows and `lower` ones below them, each kTileRows at most.
void configure(std::int64_t upper, std::int64_t lower) {
  TileConfig config;
  for (int tile = 0; tile < kPanels + 2; ++tile) {
    config.row_bytes[tile] = 64;
    config.rows[tile] = kTileRows;
  }
  config.rows[kSums] = config.rows[kSums + 1] = config.rows[kRows] = std::uint8_t(upper);
  // A tile of no rows would have none of it valid: one is configured, and never used.
  const auto below = std::uint8_t(lower > 0 ? lower : 1);
  config.rows[kSums + 2] = config.rows[kSums + 3] = config.rows[kRows + 1] = below;
  _tile_loadconfig(&config);
}

// Rows in two tiles, or in one, by two panels or one.
template <bool kTwoTiles, bool kTwoPanels>
void tile_product(const BFloat16 *rows, std::int64_t row_stride, const BFloat16 *panels,
                  std::int64_t panel_stride, std::int64_t depth, float *sums,
                  std::int64_t sum_stride, bool adds) {
  const std::int64_t sum_bytes = sum_stride * std::int64_t(sizeof(float));
  const std::int64_t row_bytes = row_stride * std::int64_t(sizeof(BFloat16));
  float *below = sums + kTileRows * sum_stride;
  if (adds) {
    _tile_loadd(0, sums, sum_bytes);
    if constexpr (kTwoPanels) {
      _tile_loadd(1, sums + kPanelColumns, sum_bytes);
    }
    if constexpr (kTwoTiles) {
      _tile_loadd(2, below, sum_bytes);
    }
    if constexpr (kTwoTiles && kTwoPanels) {
      _tile_loadd(3, below + kPanelColumns, sum_bytes);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (std::int64_t k = 0; k < depth; k += kTileDepth) {
    _tile_loadd(4, rows + k, row_bytes);
    _tile_loadd(6, panels + k * kPanelColumns, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kTwoTiles) {
      _tile_loadd(5, rows + kTileRows * row_stride + k, row_bytes);
      _tile_dpbf16ps(2, 5, 6);
    }
    if constexpr (kTwoPanels) {
      _tile_loadd(7, panels + panel_stride + k * kPanelColumns, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (kTwoTiles && kTwoPanels) {
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, sum_bytes);
  if constexpr (kTwoPanels) {
    _tile_stored(1, sums + kPanelColumns, sum_bytes);
  }
  if constexpr (kTwoTiles) {
    _tile_stored(2, below, sum_bytes);
  }
  if constexpr (kTwoTiles && kTwoPanels) {
    _tile_stored(3, below + kPanelColumns, sum_bytes);
  }
}

template <bool kTwoTiles>
void over_panels(const PanelRows &rows, const Panels &panels, std::int64_t depth,
                 const PanelSums &sums, std::int64_t row) {
  const auto *from = static_cast<const BFloat16 *>(rows.first) + row * rows.stride;
  const auto *first = static_cast<const BFloat16 *>(panels.first);
  float *out = sums.first + row * sums.stride;
  std::int64_t panel = 0;
  for (; panel + 2 <= panels.count; panel += 2) {
    tile_product<kTwoTiles, true>(from, rows.stride, first + panel * panels.stride, panels.stride,
                                  depth, out + panel * kPanelColumns, sums.stride, sums.adds);
  }
  if (panel < panels.count) {
    tile_product<kTwoTiles, false>(from, rows.stride, first + panel * panels.stride, panels.stride,
                                   depth, out + panel * kPanelColumns, sums.stride, sums.adds);
  }
}

} // namespace

void tile_pairs(const PanelRows &rows, const Panels &panels, const PanelSums &sums) {
  const std::int64_t depth = panels.depth / kTileDepth * kTileDepth;
  if (depth > 0) {
    std::int64_t row = 0;
    configure(kTileRows, kTileRows);
    for (; row + 2 * kTileRows <= rows.count; row += 2 * kTileRows) {
      over_panels<true>(rows, panels, depth, sums, row);
    }
    if (const std::int64_t left = rows.count - row; left > kTileRows) {
      configure(kTileRows, left - kTileRows);
      over_panels<true>(rows, panels, depth, sums, row);
    } else if (left > 0) {
      configure(left, 0);
      over_panels<false>(rows, panels, depth, sums, row);
    }
    _tile_release();
  }
  if (depth < panels.depth) {
    vector_pairs({static_cast<const BFloat16 *>(rows.first) + depth, rows.count, rows.stride},
                 {static_cast<const BFloat16 *>(panels.first) + depth * kPanelColumns, panels.count,
                  panels.stride, panels.depth - depth},
                 {sums.first, sums.stride, sums.adds || depth > 0});
  }
}

} // namespace speq::cpu
