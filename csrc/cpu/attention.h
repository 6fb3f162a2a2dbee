// Attention of a few tokens over the entries of a text: tokens that follow one another, or a tree.
#pragma once

#include <vector>

#include "cpu/exact_rows.h"

namespace speq::cpu {

// Every array is of `word`.
struct AttentionProblem {
  std::int64_t rows, heads, kv_heads, width; // a head of `width` columns
  std::int64_t rotary;   // columns of a head that positions turn, from the first
  std::int64_t capacity; // entries there is room for
  std::int64_t start;    // the place of the first row's entry
  std::int64_t window;   // positions a row looks back, its own included
  std::int64_t nodes; // of a tree; the rows are the last of them, and entries of all lie together
  const std::int64_t *parents; // [nodes], the root's is -1; null: each node's is the one before it
  Word word;
  const void *queries;                   // [rows, heads, width]
  const void *keys, *values;             // [rows, kv_heads, width]
  const void *cos, *sin;                 // [rows, rotary]
  const void *query_weight, *key_weight; // of RMS norms, or null
  std::int64_t query_norm, key_norm;     // columns of a row that each norm takes together
  float eps, scale;
  void *cached_keys, *cached_values; // [kv_heads, capacity, width]
  void *out;                         // [rows, heads, width]
  const void *sinks; // [heads], or null: a score of no entry, which takes its share of the weights
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

  // The entry at a position that a row sees.
  std::int64_t entry_at(std::int64_t row, std::int64_t position) const {
    return position < root_ ? position : root_ + paths_[row][position - root_];
  }

  // The position behind the last one that a row sees, its own.
  std::int64_t behind(std::int64_t row) const { return root_ + std::int64_t(paths_[row].size()); }

  AttentionProblem problem_;
  ExactRows queries_;
  std::int64_t root_;                            // the place of the first node's entry
  std::vector<std::vector<std::int64_t>> paths_; // of each row: the nodes down to its own
};

} // namespace speq::cpu
