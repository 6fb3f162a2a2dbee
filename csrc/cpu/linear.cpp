#include "cpu/linear.h"

#include <vector>

namespace speq::cpu {

Linear::Linear(const LinearProblem &problem)
    : problem_(problem), stride_(padded(problem.columns)), inputs_(problem.rows * stride_) {
  widen_rows(problem_.inputs, problem_.word, problem_.rows, problem_.columns, inputs_.data());
}

void Linear::run(std::int64_t begin, std::int64_t end) const {
  const std::int64_t outputs = end - begin, row_bytes = problem_.columns * bytes_of(problem_.word);
  std::vector<float> values(problem_.rows * outputs);
  std::vector<const float *> inputs(problem_.rows);
  std::vector<float *> value_rows(problem_.rows);
  for (std::int64_t r = 0; r < problem_.rows; ++r) {
    inputs[r] = inputs_.data() + r * stride_;
    value_rows[r] = &values[r * outputs];
  }
  dot_for(problem_.word)(static_cast<const std::byte *>(problem_.weight) + begin * row_bytes,
                         problem_.columns, outputs, inputs.data(), problem_.rows,
                         value_rows.data());
  with_type(problem_.word, [&](auto type) {
    using Type = decltype(type);
    const auto *bias = static_cast<const Type *>(problem_.bias);
    auto *out = static_cast<Type *>(problem_.out);
    for (std::int64_t r = 0; r < problem_.rows; ++r) {
      for (std::int64_t n = 0; n < outputs; ++n) {
        const float added = bias == nullptr ? 0.0f : to_float(bias[begin + n]);
        store(value_rows[r][n] + added, out[r * problem_.outputs + begin + n]);
      }
    }
  });
}

} // namespace speq::cpu
