// INT4 matrices, and products of two of their rows with INT8 rows.
#pragma once

#include <cstdint>

#include "cuda/int8_rows.h"

namespace speq::cuda {

// Lanes to a row of weights: their loads are a cache line.
constexpr int kRowLanes = 8;
constexpr int kRowsPerWarp = kLanes / kRowLanes;

// Leaves 128 registers to a thread, which kMaxBatch rows with kInt4Loads take. Two blocks still
// have 32 KiB of weights under way to a multiprocessor.
constexpr int kInt4Blocks = 2;

struct Int4Matrix {
  const std::uint8_t *qweight; // [slots, rows, columns / 2]
  const Float16 *scales;       // [slots, rows, columns / group_size]
  int rows, columns, group_size;
  // Whether a block is one aligned vector of codes with one scale; else bytes are read.
  bool vectors;
  std::uint32_t group_magic; // see group_of
};

constexpr int kMagicShift = 31;
// group_of is exact while the square of the blocks is below 2^kMagicShift.
static_assert((kMaxInt4Columns / kInt8Block) * (kMaxInt4Columns / kInt8Block) <
              (std::int64_t(1) << kMagicShift));

// Which group a block lies in: a division by blocks per group, without dividing.
SPEQ_DEVICE int group_of(const Int4Matrix &matrix, int block) {
  return int((std::uint64_t(block) * matrix.group_magic) >> kMagicShift);
}

inline Int4Matrix int4_matrix(const Int4Values &values) {
  Int4Matrix matrix{static_cast<const std::uint8_t *>(values.qweight),
                    static_cast<const Float16 *>(values.scales),
                    int(values.rows),
                    int(values.columns),
                    int(values.columns / values.groups),
                    false,
                    0};
  matrix.vectors = matrix.columns % kInt8Block == 0 && matrix.group_size % kInt8Block == 0 &&
                   reinterpret_cast<std::uintptr_t>(values.qweight) % kVectorBytes == 0;
  if (matrix.vectors) {
    const std::uint32_t blocks_per_group = matrix.group_size / kInt8Block;
    matrix.group_magic = ((1u << kMagicShift) + blocks_per_group - 1) / blocks_per_group;
  }
  return matrix;
}

// Rows that a kernel multiplies at a time by a matrix: what bytes are read for is one row.
inline int batch_of(const Int4Matrix &matrix, std::int64_t rows) {
  return !matrix.vectors ? 1 : rows < kMaxBatch ? int(rows) : kMaxBatch;
}

struct Int4Row {
  const std::uint8_t *codes;
  const Float16 *scales;
};

SPEQ_DEVICE Int4Row int4_row(const Int4Matrix &matrix, std::int64_t slot, int row) {
  const std::int64_t index = slot * matrix.rows + row;
  return {matrix.qweight + index * (matrix.columns / 2),
          matrix.scales + index * (matrix.columns / matrix.group_size)};
}

SPEQ_DEVICE int dot_block(uint4 codes, uint4 even, uint4 odd, int sum) {
  constexpr unsigned kLow = 0x0F0F0F0Fu;
  sum = __dp4a(int(codes.x & kLow), int(even.x), sum);
  sum = __dp4a(int(codes.x >> 4 & kLow), int(odd.x), sum);
  sum = __dp4a(int(codes.y & kLow), int(even.y), sum);
  sum = __dp4a(int(codes.y >> 4 & kLow), int(odd.y), sum);
  sum = __dp4a(int(codes.z & kLow), int(even.z), sum);
  sum = __dp4a(int(codes.z >> 4 & kLow), int(odd.z), sum);
  sum = __dp4a(int(codes.w & kLow), int(even.w), sum);
  return __dp4a(int(codes.w >> 4 & kLow), int(odd.w), sum);
}

// The product of one row by one row, over blocks [begin, end): for layouts without vectors.
SPEQ_DEVICE float dot_bytes(const Int4Matrix &matrix, const Int4Row &weights,
                            const Int8Block *inputs, int begin, int end) {
  float sum = 0.0f;
#pragma unroll 1
  for (int block = begin + lane_id() % kRowLanes; block < end; block += kRowLanes) {
    const Int8Block &input = inputs[block];
    float part = 0.0f;
#pragma unroll 1
    for (int i = 0; i < kPairs && block * kPairs + i < matrix.columns / 2; ++i) {
      const int byte = block * kPairs + i;
      const std::uint8_t codes = weights.codes[byte];
      const float scale = widen(weights.scales[2 * byte / matrix.group_size]);
      const int dot = low_code(codes) * input.even[i] + high_code(codes) * input.odd[i];
      part = fmaf(float(dot), scale, part);
    }
    sum = fmaf(part, input.scale, sum);
  }
  return sum;
}

// Vectors of each of its two rows of weights that a lane has under way at a time.
template <int kRows> constexpr int kInt4Loads = kBlackwell && kRows > 2 ? 1 : 2;

// sums[w][r] = weights[w] times the row at inputs[start[r]], over blocks [begin, end). Lanes of
// a row of weights come with the same arguments and leave with the same sums.
template <int kRows>
SPEQ_DEVICE void multiply(const Int4Matrix &matrix, const Int4Row (&weights)[2],
                          const Int8Block *inputs, const int (&start)[kRows], int begin, int end,
                          float (&sums)[2][kRows]) {
#pragma unroll
  for (int w = 0; w < 2; ++w) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      sums[w][r] = 0.0f;
    }
  }
  constexpr int kLoads = kInt4Loads<kRows>;
  bool bytes = false;
  if constexpr (kRows == 1) {
    bytes = !matrix.vectors;
    if (bytes) {
      sums[0][0] = dot_bytes(matrix, weights[0], inputs + start[0], begin, end);
      sums[1][0] = dot_bytes(matrix, weights[1], inputs + start[0], begin, end);
    }
  }
#pragma unroll 1 // loads beyond kLoads would spill
  for (int first = bytes ? end : begin + lane_id() % kRowLanes; first < end;
       first += kLoads * kRowLanes) {
    uint4 codes[kLoads][2];
    float scale[kLoads][2];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int block = first + i * kRowLanes;
      if (block < end) {
#pragma unroll
        for (int w = 0; w < 2; ++w) {
          codes[i][w] = load_streamed(weights[w].codes + block * kVectorBytes);
          scale[i][w] = widen(weights[w].scales[group_of(matrix, block)]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int block = first + i * kRowLanes;
      if (block < end) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const Int8Block &input = inputs[start[r] + block];
          const uint4 even = *reinterpret_cast<const uint4 *>(input.even);
          const uint4 odd = *reinterpret_cast<const uint4 *>(input.odd);
          const float step = input.scale;
          const int bias = input.bias;
#pragma unroll
          for (int w = 0; w < 2; ++w) {
            const int dot = dot_block(codes[i][w], even, odd, bias);
            sums[w][r] = fmaf(float(dot), step * scale[i][w], sums[w][r]);
          }
        }
      }
    }
  }
#pragma unroll
  for (int w = 0; w < 2; ++w) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      sums[w][r] = sum_of_lanes<kRowLanes>(sums[w][r]);
    }
  }
}

// Where the rows of a batch begin; those that are compiled for but absent repeat the last.
template <int kRows, typename RowOf>
SPEQ_DEVICE void row_starts(int rows, int blocks, RowOf row_of, int (&start)[kRows]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    start[r] = row_of(r < rows ? r : rows - 1) * blocks;
  }
}

// Begin to fetch a row of weights, as many lanes together as will multiply it.
SPEQ_DEVICE void prefetch_row(const Int4Row &weights, int begin, int end) {
  constexpr int kBlocksPerLine = kCacheLine / kVectorBytes;
  for (int block = begin + lane_id() % kRowLanes * kBlocksPerLine; block < end;
       block += kRowLanes * kBlocksPerLine) {
    prefetch(weights.codes + block * kVectorBytes);
  }
}

} // namespace speq::cuda
