// Which positions of the routes go to one expert, without sorting and without the host.
//
// Every position has blocks of its own; those of the first position with an expert, its leader,
// do the work for all of them, and the others leave.
#pragma once

#include <cstdint>

#include "cuda/device.h"

namespace speq::cuda {

struct Gathered {
  unsigned matches[kWarps];
  std::int32_t members[kMaxPositions]; // positions with the leader's expert, in their order
};

// All threads gather; how many there are, or none where `leader` is not their first.
SPEQ_DEVICE int gather(const std::int64_t *topk_ids, int positions, int leader, Gathered &shared) {
  const int position = int(threadIdx.x);
  const bool match = position < positions && topk_ids[position] == topk_ids[leader];
  const unsigned matches = __ballot_sync(kAllLanes, match);
  if (lane_id() == 0) {
    shared.matches[warp_id()] = matches;
  }
  __syncthreads();
  int before = 0, count = 0;
  for (int warp = 0; warp < kWarps; ++warp) {
    const int found = __popc(shared.matches[warp]);
    before += warp < warp_id() ? found : 0;
    count += found;
  }
  if (match) {
    const unsigned lanes_before = (1u << lane_id()) - 1;
    shared.members[before + __popc(matches & lanes_before)] = position;
  }
  __syncthreads();
  return shared.members[0] == leader ? count : 0;
}

} // namespace speq::cuda
