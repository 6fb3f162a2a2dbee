// Loops that every instruction set's file compiles for itself; internal linkage throughout.
#pragma once

#include <cstring>

#include "cpu/micro_kernels.h"
#include "exponential.h"
#include "sum_order.h"

// Loops over a tile's rows and inputs, so that its sums stay in registers.
#define SPEQ_UNROLL _Pragma("GCC unroll 8")

namespace speq::cpu {

static inline void round_block(const float *values, std::int64_t columns, Int8Step *steps,
                               std::int64_t block) {
  constexpr int kBlocks = kStepColumns / kInt8Block;
  alignas(64) float padded[kInt8Block] = {};
  std::memcpy(padded, values, columns * sizeof(float));
  std::uint32_t bits = 0; // magnitudes order as their bits do, NaN above all
  for (int i = 0; i < kInt8Block; ++i) {
    const std::uint32_t magnitude = bits_as<std::uint32_t>(padded[i]) & 0x7FFFFFFFu;
    bits = magnitude > bits ? magnitude : bits;
  }
  const Int8Scale scale = int8_scale(bits_as<float>(bits));
  alignas(64) std::int32_t codes[kInt8Block];
  for (int i = 0; i < kInt8Block; ++i) {
    const float product = scale.inverse == 0.0f ? 0.0f : padded[i] * scale.inverse;
    codes[i] = bits_as<std::int32_t>(product + kRounder) - bits_as<std::int32_t>(kRounder);
  }
  Int8Step &step = steps[block / kBlocks];
  const std::int64_t at = block % kBlocks * (kInt8Block / 2);
  for (int i = 0; i < kInt8Block / 2; ++i) {
    step.even[at + i] = std::int8_t(codes[2 * i]);
    step.odd[at + i] = std::int8_t(codes[2 * i + 1]);
  }
  constexpr int kLanes = kInt8Block / kLaneColumns;
  for (int lane = 0; lane < kLanes; ++lane) {
    std::int32_t sum = 0;
    for (int i = 0; i < kLaneColumns; ++i) {
      sum += codes[lane * kLaneColumns + i];
    }
    step.start[block % kBlocks * kLanes + lane] = -kInt4ZeroPoint * sum;
    step.scale[block % kBlocks * kLanes + lane] = scale.scale;
  }
}

// e^x of x at most 0, in fewer steps: below -87, where the power of two is no normal number, 0.
static inline float exp_below(float x) {
  const Exponential parts = exponential_parts(x);
  return x < -87.0f ? 0.0f : parts.mantissa * power_of_two(parts.exponent);
}

// The total of partial sums (sum_order.h), in vectors of whatever width there is.
static inline float total_of(const float *partial) {
  typedef float Vector __attribute__((vector_size(kVectorColumns * sizeof(float))));
  typedef float Half __attribute__((vector_size(kVectorColumns * sizeof(float) / 2)));
  Vector l[kStepSegments];
  std::memcpy(l, partial, sizeof l);
  const Vector sums = ((l[0] + l[1]) + (l[2] + l[3])) + ((l[4] + l[5]) + (l[6] + l[7]));
  Half halves[2];
  std::memcpy(halves, &sums, sizeof halves);
  const Half sum = halves[0] + halves[1];
  return (sum[0] + sum[2]) + (sum[1] + sum[3]) + 0.0f;
}

static inline float soften(float *values, std::int64_t count, float scale, SoftmaxSum &total) {
  constexpr std::int64_t kLanes = 16; // sums side by side, so that vectors take them
  float most[kLanes], sums[kLanes] = {};
  for (float &lane : most) {
    lane = total.most;
  }
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (std::int64_t j = 0; j < kLanes; ++j) {
      values[i + j] *= scale;
      most[j] = values[i + j] > most[j] ? values[i + j] : most[j];
    }
  }
  for (; i < count; ++i) {
    values[i] *= scale;
    most[0] = values[i] > most[0] ? values[i] : most[0];
  }
  float largest = most[0];
  for (const float lane : most) {
    largest = lane > largest ? lane : largest;
  }
  for (i = 0; i + kLanes <= count; i += kLanes) {
    for (std::int64_t j = 0; j < kLanes; ++j) {
      values[i + j] = exp_below(values[i + j] - largest);
      sums[j] += values[i + j];
    }
  }
  for (; i < count; ++i) {
    values[i] = exp_below(values[i] - largest);
    sums[0] += values[i];
  }
  const float factor = exp_below(total.most - largest);
  total.sum *= factor;
  for (const float lane : sums) {
    total.sum += lane;
  }
  total.most = largest;
  return factor;
}

static inline Float16 round_group(const float *values, std::int64_t count, std::uint8_t *codes) {
  constexpr float kMost = 65504.0f, kLow = -8.0f, kHigh = 7.0f;
  std::uint32_t bits = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::uint32_t magnitude = bits_as<std::uint32_t>(values[i]) & 0x7FFFFFFFu;
    bits = magnitude > bits ? magnitude : bits;
  }
  const float wanted = bits_as<float>(bits) / kHigh;
  const Float16 stored = to_float16(wanted > kMost ? kMost : wanted);
  // By the scale as it is stored; where that is zero, so are the codes.
  const float scale = to_float(stored);
  const float divisor = scale > 0.0f ? scale : bits_as<float>(0x7F800000u);
  constexpr std::int64_t kAtOnce = 32;
  std::uint32_t whole[kAtOnce];
  for (std::int64_t first = 0; first < count; first += kAtOnce) {
    const std::int64_t present = count - first < kAtOnce ? count - first : kAtOnce;
    const auto round = [&](std::int64_t i) {
      const float value = values[first + i] / divisor;
      const float low = value > kLow ? value : kLow, within = low < kHigh ? low : kHigh;
      whole[i] = bits_as<std::uint32_t>(within + kRounder) + kInt4ZeroPoint;
    };
    const auto store = [&](std::int64_t i) {
      codes[first / 2 + i] = std::uint8_t((whole[2 * i] & 0xF) | (whole[2 * i + 1] & 0xF) << 4);
    };
    if (present == kAtOnce) {
      for (std::int64_t i = 0; i < kAtOnce; ++i) {
        round(i);
      }
      for (std::int64_t i = 0; i < kAtOnce / 2; ++i) {
        store(i);
      }
    } else {
      for (std::int64_t i = 0; i < present; ++i) {
        round(i);
      }
      for (std::int64_t i = 0; i < present / 2; ++i) {
        store(i);
      }
    }
  }
  return stored;
}

static inline void round_bfloat16(const float *values, std::int64_t count, BFloat16 *words) {
  for (std::int64_t i = 0; i < count; ++i) {
    words[i] = to_bfloat16(values[i]);
  }
}

static inline void widen_bfloat16(const BFloat16 *words, std::int64_t count, float *values) {
  for (std::int64_t i = 0; i < count; ++i) {
    values[i] = to_float(words[i]);
  }
}

// Bytes ahead of an INT4 row that its codes are asked for. Rows are too short for the processor to
// see a stream in them: without asking, half the bandwidth is lost; asking for less than some
// kilobytes, or into the first cache, gains less.
constexpr std::int64_t kAheadBytes = 8192;

static inline void fetch_ahead(const void *address) { __builtin_prefetch(address, 0, 2); }

static inline std::int64_t read_sum(const std::int64_t *words, std::int64_t count) {
  constexpr std::int64_t kLine = 8;
  std::uint64_t sums[kLine] = {};
  std::int64_t i = 0;
  for (; i + kLine <= count; i += kLine) {
    fetch_ahead(reinterpret_cast<const char *>(words + i) + kAheadBytes);
    for (std::int64_t j = 0; j < kLine; ++j) {
      sums[j] += std::uint64_t(words[i + j]);
    }
  }
  for (; i < count; ++i) {
    sums[0] += std::uint64_t(words[i]);
  }
  std::uint64_t sum = 0;
  for (const std::uint64_t part : sums) {
    sum += part;
  }
  return std::int64_t(sum);
}

// Calls tile.template run<N, R>(row, input) for rows [first, last) and R inputs from `input` on; N
// is the rows that the tile takes at once with so many inputs.
template <int R, typename Tile>
static inline void over_rows(const Tile &tile, std::int64_t first, std::int64_t last,
                             std::int64_t input) {
  constexpr int N = Tile::template rows_at_once<R>;
  for (; first + N <= last; first += N) {
    tile.template run<N, R>(first, input);
  }
  for (; first < last; ++first) {
    tile.template run<1, R>(first, input);
  }
}

// Weight rows that all inputs pass over before the next: they stay in the cache meanwhile.
constexpr std::int64_t kTileRows = 32;

// Inputs beside four rows whose sums stay in registers: a step verifies up to so many tokens while
// weights pass once.
constexpr int most_inputs(int registers) { return registers >= 32 ? 6 : 4; }

// The last `left` inputs, R at most.
template <int R, typename Tile>
static inline void over_last(const Tile &tile, std::int64_t first, std::int64_t last,
                             std::int64_t input, std::int64_t left) {
  if constexpr (R > 0) {
    if (left == R) {
      over_rows<R>(tile, first, last, input);
    } else {
      over_last<R - 1>(tile, first, last, input, left);
    }
  }
}

// Runs a tile over all rows and inputs, no more inputs at a time than Tile::kMostInputs, so that a
// register file holds the sums, and each weight comes from memory once.
template <typename Tile>
static inline void in_tiles(std::int64_t rows, std::int64_t count, const Tile &tile) {
  for (std::int64_t first = 0; first < rows; first += kTileRows) {
    const std::int64_t last = first + kTileRows < rows ? first + kTileRows : rows;
    std::int64_t input = 0;
    for (; count - input > Tile::kMostInputs; input += 4) {
      over_rows<4>(tile, first, last, input);
    }
    over_last<Tile::kMostInputs>(tile, first, last, input, count - input);
  }
}

} // namespace speq::cpu
