// A dense matrix of few rows of inputs: what attention, shared experts and the head do at every
// token, bound by the reading of the weights.
#pragma once

#include <functional>

#include "cpu/exact_rows.h"

namespace speq::cpu {

struct LinearProblem {
  std::int64_t rows, columns, outputs;
  Word weights;       // of the matrix [outputs, columns]
  Word word;          // of inputs and bias
  Word results;       // of out: that word, or float32
  const void *inputs; // [rows, columns]
  const void *bias;   // [outputs] or null
  void *out;          // [rows, outputs]
};

// Rows [begin, end) of the matrix by inputs: outs[r][n - begin].
using DotRows = std::function<void(std::int64_t begin, std::int64_t end, const Inputs &inputs,
                                   float *const *outs)>;

class Linear {
public:
  Linear(const LinearProblem &problem, DotRows dot);

  // Outputs [begin, end) of every row.
  void run(std::int64_t begin, std::int64_t end) const;

private:
  LinearProblem problem_;
  DotRows dot_;
  ExactRows inputs_;
};

} // namespace speq::cpu
