// The order in which exact products are added up: the same for every instruction set and on cards,
// so that a row's result depends on its columns alone.
//
// Columns come in steps of 256, steps in segments of 32, segments in vectors of 8. Column
// 256 s + 32 l + 8 i + v is multiplied into partial sum [l][v] with one rounding (FMA) in float32,
// in the order of s, then of i. The partial sums are then added over l, neighbours first, and after
// that over v, halves first. A zero that comes out is positive: columns of zeros change nothing.
//
// So a lane of a warp has eight sums of a segment, and no vector of a processor mixes two sums.
#pragma once

#include <cstdint>

#include "portable.h"

namespace speq {

constexpr std::int64_t kStepSegments = 8, kSegmentColumns = 32, kVectorColumns = 8;
constexpr std::int64_t kSumColumns = kStepSegments * kSegmentColumns; // of a step
constexpr std::int64_t kSegmentVectors = kSegmentColumns / kVectorColumns;
constexpr std::int64_t kPartialSums = kStepSegments * kVectorColumns;

// The first partial sum of the segment that a column lies in.
SPEQ_INLINE std::int64_t first_partial(std::int64_t column) {
  return column % kSumColumns / kSegmentColumns * kVectorColumns;
}

} // namespace speq
