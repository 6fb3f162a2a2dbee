#include "cpu/delta_rule.h"

#include <cmath>

#include "cpu/isa.h"
#include "cpu/norm.h"

namespace speq::cpu {

DeltaRule::DeltaRule(const DeltaProblem &problem)
    : problem_(problem), queries_(problem.mixed), stride_(problem.channels()),
      normed_(problem.eps ? problem.tokens * 2 * problem.keys() : 0),
      step_(micro_kernels().delta_step) {
  if (!problem.eps) {
    return;
  }
  queries_ = normed_.data();
  stride_ = 2 * problem.keys();
  const std::int64_t width = problem.key_width;
  const float root = std::sqrt(float(width));
  for (std::int64_t token = 0; token < problem.tokens; ++token) {
    const float *values = problem.mixed + token * problem.channels();
    float *normed = normed_.data() + token * 2 * problem.keys();
    for (std::int64_t head = 0; head < 2 * problem.key_heads; ++head) {
      const float norm = std::sqrt(sum_of_squares(values, width) + *problem.eps);
      const float scale = 1.0f / (head < problem.key_heads ? norm * root : norm);
      for (std::int64_t k = 0; k < width; ++k) {
        normed[k] = values[k] * scale;
      }
      values += width;
      normed += width;
    }
  }
}

void DeltaRule::run(std::int64_t begin, std::int64_t end) const {
  const DeltaProblem &p = problem_;
  Buffer<float> decays(p.decay_width);
  for (std::int64_t head = begin; head < end; ++head) {
    const std::int64_t key_head = head / (p.heads / p.key_heads);
    float *state = p.state + head * p.key_width * p.value_width;
    for (std::int64_t token = 0; token < p.tokens; ++token) {
      const float *query = queries_ + token * stride_ + key_head * p.key_width;
      const std::int64_t of_head = token * p.heads + head;
      for (std::int64_t k = 0; k < p.decay_width; ++k) {
        decays[k] = std::exp(p.decays[of_head * p.decay_width + k]);
      }
      step_(state, p.key_width, p.value_width,
            {query, query + p.keys(), decays.data(),
             p.mixed + token * p.channels() + 2 * p.keys() + head * p.value_width, p.betas[of_head],
             p.out + of_head * p.value_width, p.eps.has_value(), p.decay_width > 1});
    }
  }
}

} // namespace speq::cpu
