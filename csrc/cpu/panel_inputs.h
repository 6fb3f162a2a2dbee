// Rows of inputs that so many weights pass over that it pays to lay them into panels: an input to a
// column (micro_kernels.h). A weight then multiplies sixteen inputs at once, and nothing is added
// up across a vector.
#pragma once

#include "cpu/exact_rows.h"

namespace speq::cpu {

class PanelInputs {
public:
  // Inputs of so many columns, which padding follows as ExactRows has it.
  PanelInputs(const Inputs &inputs, std::int64_t columns);

  // Whether there is a product of weights with inputs that are stored as float32, or as bfloat16
  // for pairs, that long.
  static bool takes(Word weights, Word stored, std::int64_t columns) {
    const std::int64_t depth = stored == Word::bfloat16 ? 2 : 1;
    return weights != Word::float16 && columns % depth == 0;
  }

  // `rows` rows of words, which lie one behind the other: outs[r][n] = row n . inputs[r]. Sums run
  // over the columns in their order, whatever rows and inputs there are besides.
  void dot(const void *words, Word weights, std::int64_t rows, float *const *outs) const;

private:
  template <typename Stored> void lay_out(const Inputs &inputs);
  template <typename Weight, typename Stored>
  void dot_words(const Weight *words, std::int64_t rows, float *const *outs) const;

  std::int64_t count_, columns_, panels_;
  Word stored_;
  Buffer<std::byte> buffer_; // panels of [columns, kPanelColumns], pairs side by side
};

} // namespace speq::cpu
