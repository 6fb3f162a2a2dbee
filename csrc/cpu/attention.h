// Attention of a few tokens over the KV of a sequence: a chain of tokens, or a tree.
#pragma once

#include <vector>

#include "cpu/exact_rows.h"

namespace speq::cpu {

// Every array is of `word`.
struct AttentionProblem {
  std::int64_t rows, heads, kv_heads, width; // a head of `width` columns
  std::int64_t rotary;   // columns of a head that rotary embeddings rotate, from the first
  std::int64_t capacity; // tokens of KV there is room for
  std::int64_t start;    // position of the first row's KV
  std::int64_t window;   // positions a row looks back, its own included
  std::int64_t nodes; // of a tree; the rows are the last of them, and the KV of all is contiguous
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
  const void *sinks; // [heads], or null: sink scores, which take their share of the weights
};

class Attention {
public:
  // Norms and rotates queries and keys, and writes the rows' KV.
  explicit Attention(const AttentionProblem &problem);

  // A share is a block of entries of a head of keys and values, and all queries over it.
  std::int64_t shares() const { return problem_.kv_heads * blocks_; }
  void attend(std::int64_t begin, std::int64_t end);

  // Behind all shares: writes out the queries [begin, end) of the rows * heads.
  void merge(std::int64_t begin, std::int64_t end) const;

private:
  template <typename Type> void prepare();
  template <typename Type> void attend_block(std::int64_t kv_head, std::int64_t block);

  // Of what the queries of a head have of a block: the place of the first.
  std::int64_t partial_at(std::int64_t kv_head, std::int64_t block) const {
    return (kv_head * blocks_ + block - first_block_) * problem_.rows * group_;
  }

  // The place of the KV at a position that a row sees.
  std::int64_t entry_at(std::int64_t row, std::int64_t position) const {
    return position < root_ ? position : root_ + paths_[row][position - root_];
  }

  // The first position that a row sees.
  std::int64_t first_of(std::int64_t row) const {
    return std::max<std::int64_t>(behind(row) - problem_.window, 0);
  }

  // The position after the last one that a row sees, its own.
  std::int64_t behind(std::int64_t row) const { return root_ + std::int64_t(paths_[row].size()); }

  AttentionProblem problem_;
  ExactRows queries_;
  std::int64_t root_;                            // position of the first node's KV
  std::vector<std::vector<std::int64_t>> paths_; // of each row: the nodes down to its own
  std::int64_t group_;                           // queries of a row that share a head of keys
  std::int64_t seen_first_, end_;                // positions that any row sees
  std::int64_t first_block_, blocks_;
  std::vector<SoftmaxSum> totals_; // of each query over each block
  Buffer<float> sums_{0};          // the same, `width` columns each, not yet divided
};

} // namespace speq::cpu
