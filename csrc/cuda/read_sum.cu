// The sum of words: a plain read of memory. The first launch leaves a sum for each block, the
// second, of one block, adds those up.
#include "cuda/launch.h"

namespace speq::cuda {
namespace {

using Word = unsigned long long; // wraps

struct ReadSum {
  const Word *words;
  std::int64_t num_words;
  Word *sums; // one for each block
};

constexpr int kBlocks = 2048;
// Loads that a thread has under way at a time.
constexpr int kWordLoads = 8;

__global__ void __launch_bounds__(kThreads) read_sum_kernel(const ReadSum p) {
  SPEQ_SHARED_MEMORY(memory);
  auto *const sums = reinterpret_cast<Word *>(memory); // one for each warp

  const std::int64_t stride = std::int64_t(gridDim.x) * kThreads;
  Word sum = 0;
  for (std::int64_t first = std::int64_t(blockIdx.x) * kThreads + threadIdx.x; first < p.num_words;
       first += kWordLoads * stride) {
    Word words[kWordLoads];
#pragma unroll
    for (int i = 0; i < kWordLoads; ++i) {
      const std::int64_t index = first + i * stride;
      words[i] = index < p.num_words ? p.words[index] : 0;
    }
#pragma unroll
    for (int i = 0; i < kWordLoads; ++i) {
      sum += words[i];
    }
  }
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(kAllLanes, sum, distance);
  }
  if (lane_id() == 0) {
    sums[warp_id()] = sum;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    Word total = 0;
    for (int warp = 0; warp < kWarps; ++warp) {
      total += sums[warp];
    }
    p.sums[blockIdx.x] = total;
  }
}

} // namespace

std::size_t read_sum_workspace() { return kBlocks * sizeof(Word); }

Error read_sum(const std::int64_t *words, std::int64_t num_words, std::int64_t *out,
               void *workspace, void *stream) {
  constexpr std::int64_t kBlockWords = kThreads * kWordLoads;
  std::int64_t blocks = (num_words + kBlockWords - 1) / kBlockWords;
  blocks = blocks < 1 ? 1 : blocks > kBlocks ? kBlocks : blocks;
  auto *const sums = static_cast<Word *>(workspace);
  const std::size_t shared_bytes = kWarps * sizeof(Word);
  const ReadSum first{reinterpret_cast<const Word *>(words), num_words, sums};
  if (const Error error =
          launch(read_sum_kernel, {unsigned(blocks), 1}, shared_bytes, stream, first)) {
    return error;
  }
  const ReadSum second{sums, blocks, reinterpret_cast<Word *>(out)};
  return launch(read_sum_kernel, {1, 1}, shared_bytes, stream, second);
}

} // namespace speq::cuda
