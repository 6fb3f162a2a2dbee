#pragma once

#include <cstdint>

#include "half.h"

namespace speq::cpu {

// Dequantise rows [row_begin, row_end) of a symmetric INT4 matrix.
//
//   qweight  [rows, columns / 2]           two codes per byte, low nibble first
//   scales   [rows, columns / group_size]  float16 bits
//   out      [rows, columns]               code * scale, rounded once to Out
//
// columns is even and a multiple of group_size, group_size is even.
template <typename Out>
void unpack_int4(const std::uint8_t *qweight, const Float16 *scales, Out *out,
                 std::int64_t row_begin, std::int64_t row_end, std::int64_t columns,
                 std::int64_t group_size);

} // namespace speq::cpu
