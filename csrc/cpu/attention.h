// Attention of a few tokens that follow one another, over the entries of a text.
#pragma once

#include "cpu/exact_rows.h"

namespace speq::cpu {

// Every array is of `word`.
struct AttentionProblem {
  std::int64_t rows, heads, kv_heads, width; // a head of `width` columns
  std::int64_t rotary;   // columns of a head that positions turn, from the first
  std::int64_t capacity; // entries there is room for
  std::int64_t start;    // the place of the first row's entry
  std::int64_t window;   // entries a row sees, its own included
  Word word;
  const void *queries;                   // [rows, heads, width]
  const void *keys, *values;             // [rows, kv_heads, width]
  const void *cos, *sin;                 // [rows, rotary]
  const void *query_weight, *key_weight; // of RMS norms, or null
  std::int64_t query_norm, key_norm;     // columns of a row that each norm takes together
  float eps, scale;
  void *cached_keys, *cached_values; // [kv_heads, capacity, width]
  void *out;                         // [rows, heads, width]
};

class Attention {
public:
  // Norms and turns queries and keys, and writes the rows' entries.
  explicit Attention(const AttentionProblem &problem);

  // The queries that share the heads [begin, end) of keys and values.
  void run(std::int64_t begin, std::int64_t end) const;

private:
  template <typename Type> void prepare();
  template <typename Type> void attend(std::int64_t kv_head) const;

  AttentionProblem problem_;
  ExactRows queries_;
};

} // namespace speq::cpu
