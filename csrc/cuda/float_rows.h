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

// Floats from row to row, so that each lane's columns are aligned.
SPEQ_INLINE std::int64_t float_stride(std::int64_t columns) {
  return (columns + kLaneColumns - 1) / kLaneColumns * kLaneColumns;
}

// Copies rows [num_rows, columns] to `out`; with an order of inputs, one for each position.
Error widen_rows(Values rows, std::int64_t columns, const Route &route, const InputOrder &order,
                 float *out, void *stream);

} // namespace speq::cuda
