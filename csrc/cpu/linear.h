// A dense matrix of few rows of inputs: what attention, shared experts and the head do at every
// token, bound by the reading of the weights.
#pragma once

#include "cpu/exact_rows.h"

namespace speq::cpu {

struct LinearProblem {
  std::int64_t rows, columns, outputs;
  Word word;          // of everything
  const void *inputs; // [rows, columns]
  const void *weight; // [outputs, columns]
  const void *bias;   // [outputs] or null
  void *out;          // [rows, outputs]
};

class Linear {
public:
  explicit Linear(const LinearProblem &problem);

  // Outputs [begin, end) of every row.
  void run(std::int64_t begin, std::int64_t end) const;

private:
  LinearProblem problem_;
  ExactRows inputs_;
};

} // namespace speq::cpu
