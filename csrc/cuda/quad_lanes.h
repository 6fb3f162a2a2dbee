// How a warp divides a quad of rows of weights, in steps of 256 columns: a lane has a segment of
// one row (sum_order.h). Two lanes have the run of a row of a block; lanes are in the order of runs
// in compact records.
#pragma once

#include "compact.h"
#include "cuda/device.h"
#include "sum_order.h"

namespace speq::cuda {

constexpr int kRows = int(kQuadRows);
constexpr int kSegment = int(kSegmentColumns);
constexpr int kVectors = int(kSegmentVectors);
constexpr int kRunLanes = int(kBlockColumns) / kSegment;
constexpr int kBlockLanes = kRunLanes * kRows;
constexpr int kStepColumns = int(kSumColumns);
static_assert(kStepColumns == kLanes / kRows * kSegment && kLaneColumns == kVectorColumns);

// A lane's place in a quad.
struct Lane {
  unsigned id;

  // Found again for each product: what follows from it would take registers in between.
  SPEQ_DEVICE Lane() : id(unsigned(found_again(lane_id()))) {}

  SPEQ_DEVICE int row() const { return int(id / kRunLanes % kRows); }
  // Of the segments of a step.
  SPEQ_DEVICE int segment() const { return int(id / kBlockLanes * kRunLanes + id % kRunLanes); }
  // The segment's first column.
  SPEQ_DEVICE int column() const { return segment() * kSegment; }
  // Whether it has the second half of a run.
  SPEQ_DEVICE bool ends_run() const { return id % kRunLanes != 0; }
};

// The total of a row's partial sums, of which each lane has those of its segment, in each of the
// row's lanes. Lanes of neighbouring segments exchange first; each gives half of its sums away.
SPEQ_DEVICE float total_of_segments(const float (&partial)[kLaneColumns]) {
  static_assert(kRunLanes == 2 && kLanes / kBlockLanes == 4 && kLaneColumns == 8);
  constexpr int kNext = kBlockLanes, kLast = 2 * kBlockLanes;
  const auto exchange = [](float low, float high, int distance) {
    const bool upper = (lane_id() & distance) != 0;
    const float given = upper ? low : high;
    return (upper ? high : low) + __shfl_xor_sync(kAllLanes, given, distance);
  };
  float four[4];
#pragma unroll
  for (int v = 0; v < 4; ++v) {
    four[v] = exchange(partial[v], partial[v + 4], 1);
  }
  const float even = exchange(four[0], four[2], kNext), odd = exchange(four[1], four[3], kNext);
  float sum = exchange(even, odd, kLast);
  sum += __shfl_xor_sync(kAllLanes, sum, 1);
  sum += __shfl_xor_sync(kAllLanes, sum, kNext);
  sum += __shfl_xor_sync(kAllLanes, sum, kLast);
  return sum + 0.0f;
}

} // namespace speq::cuda
