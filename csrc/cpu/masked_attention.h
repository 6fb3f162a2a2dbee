// Attention of many tokens over their KV, where a mask says what each one sees.
#pragma once

#include "cpu/exact_rows.h"

namespace speq::cpu {

// Rows of a head of an array; each row is contiguous.
struct HeadRows {
  const void *first;
  std::int64_t head_stride, row_stride; // elements
};

// Arrays are of `word`.
struct MaskedProblem {
  std::int64_t heads, kv_heads, rows, entries;
  std::int64_t key_width, value_width;
  HeadRows queries, keys, values; // [heads, rows], [kv_heads, entries] of each
  const bool *mask;               // [rows, entries], true where seen
  Word word;
  float scale;
  const void *sinks; // [heads], or null: sink scores, which take their share of the weights
  void *out;         // [rows, heads, value_width]
};

// A row's sums do not depend on the rows beside it.
void masked_attention(const MaskedProblem &problem);

} // namespace speq::cpu
