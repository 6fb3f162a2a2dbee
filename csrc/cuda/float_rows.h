// Inputs of products with compact matrices: rows in float32.
#pragma once

#include <cstdint>

#include "cuda/launch.h"

namespace speq::cuda {

// The order of inputs of each expert, where it has one of its own.
struct InputOrder {
  const std::int32_t *input_perm; // [base_count, columns] or null
  const std::int64_t *base_slots; // [experts]
  std::int64_t base_count;
};

// Where a column lies in a row of floats. Eight lanes have 32 neighbouring columns each, of as many
// as a warp takes at a time; what they read together, four columns each, lies together.
SPEQ_INLINE int float_place(int column) {
  constexpr int kStep = kLanes * kLaneColumns, kSegment = 32, kVector = 4;
  constexpr int kSegments = kStep / kSegment;
  const int segment = column % kStep / kSegment, vector = column % kSegment / kVector;
  return column / kStep * kStep + (vector * kSegments + segment) * kVector + column % kVector;
}

// Floats from row to row.
SPEQ_INLINE std::int64_t float_stride(std::int64_t columns) {
  constexpr int kStep = kLanes * kLaneColumns;
  return (columns + kStep - 1) / kStep * kStep;
}

// Copies rows [num_rows, columns] to `out`, in the order of float_place; with an order of inputs,
// one for each position.
Error widen_rows(Values rows, std::int64_t columns, const Route &route, const InputOrder &order,
                 float *out, void *stream);

} // namespace speq::cuda
