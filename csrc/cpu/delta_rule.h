// The gated delta rule and the selective scan over tokens that follow one another
// (speq/kernels/reference_recurrent.py). A head's state stays in a near cache while all of them
// pass over it.
#pragma once

#include <optional>

#include "cpu/buffer.h"
#include "cpu/micro_kernels.h"

namespace speq::cpu {

struct DeltaProblem {
  std::int64_t tokens, key_heads, heads; // each head of keys serves neighbouring heads
  std::int64_t key_width, value_width;
  std::optional<float> eps; // of the norms of queries and keys; the scan has none
  const float *mixed;       // [tokens, channels()]: queries, keys and values, head by head
  // [tokens, heads], the logarithms of decays [tokens, heads, decay_width]: of each row of a state,
  // or one for all of them.
  const float *betas, *decays;
  std::int64_t decay_width;
  float *state; // [heads, key_width, value_width]
  float *out;   // [tokens, heads, value_width]

  std::int64_t keys() const { return key_heads * key_width; }
  std::int64_t channels() const { return 2 * keys() + heads * value_width; }
};

class DeltaRule {
public:
  // Norms queries and keys, where the rule does.
  explicit DeltaRule(const DeltaProblem &problem);

  // All tokens over the states of heads [begin, end).
  void run(std::int64_t begin, std::int64_t end) const;

private:
  DeltaProblem problem_;
  // Queries and keys of the first token, and how far those of the next are from them.
  const float *queries_;
  std::int64_t stride_;
  Buffer<float> normed_; // [tokens, 2 * keys()]
  DeltaStep step_;
};

} // namespace speq::cpu
