// Attention of a few tokens over heads of keys and values, with norms and rotary embeddings.
#pragma once

#include "cpu/block_attention.h"

namespace speq::cpu {

// Every array is of the span's word.
struct AttentionProblem {
  AttentionSpan span;
  std::int64_t width;                    // columns of a head of queries and keys
  std::int64_t value_width;              // those of values and results
  std::int64_t rotary;                   // those that are rotated, from the first
  const void *queries;                   // [rows, heads, width]
  const void *keys, *values;             // [rows, kv_heads, width or value_width]
  const void *cos, *sin;                 // [rows, rotary]
  const void *query_weight, *key_weight; // of RMS norms, or null
  std::int64_t query_norm, key_norm;     // columns of a row that each norm takes together
  float eps;
  void *cached_keys, *cached_values; // [kv_heads, capacity, width or value_width]
  void *out;                         // [rows, heads, value_width]
};

// Norms and rotates queries and keys, writes the rows' KV, and attends.
void attention(const AttentionProblem &problem);

} // namespace speq::cpu
