// The inner loops in plain C++: for processors without a file of their own, for group sizes that
// vectors do not take, and to read the others by.
#include <cmath>

#include "cpu/coded_tile.h"
#include "cpu/decode_scaled.h"
#include "cpu/encode_portable.h"
#include "sum_order.h"

namespace speq::cpu {
namespace {

// Lanes that share neither a group nor a byte with another: all but the oddest group sizes.
bool lanes_whole(const Int4Matrix &matrix) {
  return matrix.group_size % kLaneColumns == 0 || matrix.group_size == matrix.columns;
}

float dot_of_lanes(const Int4Matrix &matrix, const std::uint8_t *codes, const Float16 *scales,
                   const Int8Step *steps) {
  constexpr std::int64_t kBytes = kStepColumns / 2, kLaneBytes = kLaneColumns / 2;
  const std::int64_t row_bytes = matrix.row_bytes();
  float sum = 0.0f;
  for (std::int64_t begin = 0; begin < row_bytes; begin += kBytes) {
    const Int8Step &step = steps[begin / kBytes];
    std::uint8_t bytes[kBytes] = {};
    std::memcpy(bytes, codes + begin, row_bytes - begin < kBytes ? row_bytes - begin : kBytes);
    std::int16_t products[kBytes]; // of codes below 16, so that a pair fits
    for (std::int64_t i = 0; i < kBytes; ++i) {
      products[i] = std::int16_t((bytes[i] & 0xF) * step.even[i] + (bytes[i] >> 4) * step.odd[i]);
    }
    for (std::int64_t lane = 0; lane < kStepLanes; ++lane) {
      const std::int64_t column = 2 * begin + lane * kLaneColumns;
      if (column >= matrix.columns) {
        break;
      }
      std::int32_t part = step.start[lane];
      for (std::int64_t i = 0; i < kLaneBytes; ++i) {
        part += products[lane * kLaneBytes + i];
      }
      sum += float(part) * (step.scale[lane] * to_float(scales[column / matrix.group_size]));
    }
  }
  return sum;
}

float dot_of_bytes(const Int4Matrix &matrix, const std::uint8_t *codes, const Float16 *scales,
                   const Int8Step *steps) {
  float sum = 0.0f;
  for (std::int64_t byte = 0; byte < matrix.row_bytes(); ++byte) {
    const Int8Step &step = steps[2 * byte / kStepColumns];
    const std::int64_t at = byte % (kStepColumns / 2);
    const std::int32_t part =
        low_code(codes[byte]) * step.even[at] + high_code(codes[byte]) * step.odd[at];
    const float input_scale = step.scale[2 * at / kLaneColumns];
    sum += float(part) * (input_scale * to_float(scales[2 * byte / matrix.group_size]));
  }
  return sum;
}

void dot_int4(const Int4Matrix &matrix, std::int64_t begin, std::int64_t end,
              const Int8Step *const *inputs, std::int64_t count, float *const *outs) {
  const auto dot = lanes_whole(matrix) ? dot_of_lanes : dot_of_bytes;
  for (std::int64_t row = begin; row < end; ++row) {
    const std::uint8_t *codes = matrix.qweight + row * matrix.row_bytes();
    const Float16 *scales = matrix.scales + row * matrix.row_groups();
    for (std::int64_t r = 0; r < count; ++r) {
      outs[r][row - begin] = dot(matrix, codes, scales, inputs[r]);
    }
  }
}

// Columns of a state that are taken side by side.
constexpr std::int64_t kLanes = 16;

// `columns` words by values, from a column of their row on.
template <typename Word>
void add_products(const Word *words, const float *values, std::int64_t first, std::int64_t columns,
                  float *partial) {
  for (std::int64_t k = 0; k < columns; ++k) {
    float &sum = partial[first_partial(first + k) + (first + k) % kVectorColumns];
    sum = std::fma(to_float(words[k]), values[k], sum);
  }
}

template <typename Word>
void dot_exact(const void *weights, std::int64_t columns, std::int64_t rows,
               const void *const *inputs, std::int64_t count, float *const *outs) {
  const Word *row = static_cast<const Word *>(weights);
  for (std::int64_t n = 0; n < rows; ++n, row += columns) {
    for (std::int64_t r = 0; r < count; ++r) {
      float partial[kPartialSums] = {};
      add_products(row, static_cast<const float *>(inputs[r]), 0, columns, partial);
      outs[r][n] = total_of(partial);
    }
  }
}

template <typename Word>
void add_rows(const void *words, std::int64_t columns, std::int64_t count,
              const float *const *weights, std::int64_t queries, float *const *sums) {
  const Word *row = static_cast<const Word *>(words);
  for (std::int64_t n = 0; n < count; ++n, row += columns) {
    for (std::int64_t query = 0; query < queries; ++query) {
      for (std::int64_t k = 0; k < columns; ++k) {
        sums[query][k] += weights[query][n] * to_float(row[k]);
      }
    }
  }
}

void delta_step(float *state, std::int64_t rows, std::int64_t columns, const DeltaToken &token) {
  for (std::int64_t first = 0; first < columns; first += kLanes) {
    const std::int64_t present = columns - first < kLanes ? columns - first : kLanes;
    float change[kLanes] = {}, sums[kLanes] = {};
    const float *from = state + first;
    for (std::int64_t row = 0; token.takes_back && row < rows; ++row, from += columns) {
      for (std::int64_t k = 0; k < present; ++k) {
        change[k] += token.key[row] * token.decays[token.by_row ? row : 0] * from[k];
      }
    }
    for (std::int64_t k = 0; k < present; ++k) {
      const float value = token.value[first + k];
      change[k] = token.beta * (token.takes_back ? value - change[k] : value);
    }
    float *to = state + first;
    for (std::int64_t row = 0; row < rows; ++row, to += columns) {
      for (std::int64_t k = 0; k < present; ++k) {
        to[k] = token.decays[token.by_row ? row : 0] * to[k] + token.key[row] * change[k];
        sums[k] += token.query[row] * to[k];
      }
    }
    std::memcpy(token.out + first, sums, present * sizeof(float));
  }
}

// dot_exact's sums over blocks of compact matrices.
struct PlainProduct {
  struct Sum {
    float partial[kPartialSums];
  };
  static constexpr int kMostInputs = 4;
  static void clear(Sum &sum) { sum = {}; }
  static float total(const Sum &sum) { return total_of(sum.partial); }
  static const void *at(const void *input, std::int64_t first) {
    return static_cast<const float *>(input) + first;
  }

  template <bool kWhole>
  static void add(Sum *sums, const WordBlock *blocks, const void *input, std::int64_t first,
                  std::int64_t present) {
    for (int n = 0; n < kQuadRows; ++n) {
      add_products(blocks[n].words, static_cast<const float *>(input), first,
                   kWhole ? kBlockColumns : present, sums[n].partial);
    }
  }
};

void panel_product(const PanelRows &rows, const Panels &panels, const PanelSums &sums) {
  for (std::int64_t row = 0; row < rows.count; ++row) {
    const float *inputs = static_cast<const float *>(rows.first) + row * rows.stride;
    for (std::int64_t panel = 0; panel < panels.count; ++panel) {
      const float *columns = static_cast<const float *>(panels.first) + panel * panels.stride;
      float *out = sums.first + row * sums.stride + panel * kPanelColumns;
      float totals[kPanelColumns] = {};
      if (sums.adds) {
        std::memcpy(totals, out, sizeof totals);
      }
      for (std::int64_t k = 0; k < panels.depth; ++k) {
        for (std::int64_t column = 0; column < kPanelColumns; ++column) {
          totals[column] += inputs[k] * columns[k * kPanelColumns + column];
        }
      }
      std::memcpy(out, totals, sizeof totals);
    }
  }
}

} // namespace

const MicroKernels portable_kernels = {
    dot_int4,
    dot_exact<float>,
    dot_exact<BFloat16>,
    dot_exact<Float16>,
    nullptr,
    round_block,
    round_group,
    read_sum,
    {dot_coded<PlainProduct, PortableLossless, dot_exact<BFloat16>, LosslessRows>, nullptr,
     decode_quad<PortableLossless, LosslessRows>},
    {dot_coded<PlainProduct, PortableResidual, dot_exact<BFloat16>, ResidualRows>, nullptr,
     decode_quad<PortableResidual, ResidualRows>},
    add_rows<float>,
    add_rows<BFloat16>,
    add_rows<Float16>,
    soften,
    {dot_coded<PlainProduct, PortableFp8, dot_exact<BFloat16>, Fp8Rows>, nullptr,
     decode_quad<PortableFp8, Fp8Rows>},
    {dot_coded<PlainProduct, PortableMxfp4, dot_exact<BFloat16>, Mxfp4Rows>, nullptr,
     decode_quad<PortableMxfp4, Mxfp4Rows>},
    {dot_coded<PlainProduct, PortableInt4, dot_exact<BFloat16>, Int4Rows>, nullptr,
     decode_quad<PortableInt4, Int4Rows>},
    {dot_coded<PlainProduct, PortableNvfp4, dot_exact<BFloat16>, Nvfp4Rows>, nullptr,
     decode_quad<PortableNvfp4, Nvfp4Rows>},
    delta_step,
    panel_product,
    nullptr,
    round_bfloat16,
    widen_bfloat16,
    kNeverInPanels,
    kNeverInPanels,
    split_quad<PortableSplit>,
    fill_streams<PortableFiller>,
};

} // namespace speq::cpu
