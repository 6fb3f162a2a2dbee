// What the ops over dense matrices have alike, whatever code those are in.
#pragma once

#include "cpu/linear.h"
#include "cpu/tensors.h"

namespace speq::cpu {

// inputs [R, K] and out [R, N] by a matrix of some words, N rows of them, whose products `dot` has.
inline void run_linear(const Tensor &inputs, std::int64_t outputs, Word weights,
                       const std::optional<Tensor> &bias, Tensor &out, DotRows dot) {
  const ScalarType type = inputs.scalar_type();
  check(inputs, "inputs", 2, type);
  check(out, "out", 2, out.scalar_type() == ScalarType::Float ? ScalarType::Float : type);
  const std::int64_t rows = inputs.size(0), columns = inputs.size(1);
  STD_TORCH_CHECK(out.size(0) == rows && out.size(1) == outputs,
                  "out must be [R, N] of inputs [R, K] and a matrix [N, K]");
  if (bias.has_value()) {
    check(*bias, "bias", 1, type);
    STD_TORCH_CHECK(bias->size(0) == outputs, "bias must have an element for each output");
  }
  const Word word = word_of(inputs, "inputs");
  if (out.numel() == 0) {
    return;
  }
  const Linear linear(
      {
          rows,
          columns,
          outputs,
          weights,
          word,
          word_of(out, "out"),
          inputs.const_data_ptr(),
          bias.has_value() ? bias->const_data_ptr() : nullptr,
          out.mutable_data_ptr(),
      },
      std::move(dot));
  parallel_for(0, quads_of(outputs), grain(kQuadRows * columns * bytes_of(weights)),
               [&](std::int64_t begin, std::int64_t end) {
                 linear.run(begin * kQuadRows, std::min(end * kQuadRows, outputs));
               });
}

} // namespace speq::cpu
