#include "cpu/linear.h"

#include <utility>
#include <vector>

namespace speq::cpu {

Linear::Linear(const LinearProblem &problem, DotRows dot)
    : problem_(problem), dot_(std::move(dot)),
      inputs_(problem.rows, problem.columns, problem.weights, problem.word) {
  with_type(problem_.word, [&](auto type) {
    const auto *words = static_cast<const decltype(type) *>(problem_.inputs);
    for (std::int64_t r = 0; r < problem_.rows; ++r) {
      inputs_.fill(r, words + r * problem_.columns);
    }
  });
}

void Linear::run(std::int64_t begin, std::int64_t end) const {
  const std::int64_t outputs = end - begin;
  std::vector<float> values(problem_.rows * outputs);
  std::vector<const void *> inputs(problem_.rows);
  std::vector<float *> value_rows(problem_.rows);
  for (std::int64_t r = 0; r < problem_.rows; ++r) {
    inputs[r] = inputs_.row(r);
    value_rows[r] = &values[r * outputs];
  }
  dot_(begin, end, {inputs.data(), problem_.rows, inputs_.stored()}, value_rows.data());
  with_type(problem_.word, [&](auto type) {
    using Type = decltype(type);
    const auto *bias = static_cast<const Type *>(problem_.bias);
    const auto write = [&](auto *out) {
      for (std::int64_t r = 0; r < problem_.rows; ++r) {
        for (std::int64_t n = 0; n < outputs; ++n) {
          const float added = bias == nullptr ? 0.0f : to_float(bias[begin + n]);
          store(value_rows[r][n] + added, out[r * problem_.outputs + begin + n]);
        }
      }
    };
    if (problem_.results == Word::float32) {
      write(static_cast<float *>(problem_.out));
    } else {
      write(static_cast<Type *>(problem_.out));
    }
  });
}

} // namespace speq::cpu
