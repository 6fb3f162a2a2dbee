// Attention of a few tokens over the KV of a sequence, block by block of positions.
#pragma once

#include <optional>
#include <vector>

#include "cpu/exact_rows.h"

namespace speq::cpu {

// The tokens, and what they see: all KV before a tree, and in it their own and their ancestors'.
struct AttentionSpan {
  std::int64_t rows, heads, kv_heads;
  std::int64_t capacity; // tokens of KV there is room for
  std::int64_t start;    // position of the first row's KV
  std::int64_t window;   // positions a row looks back, its own included
  std::int64_t nodes; // of a tree; the rows are the last of them, and the KV of all is contiguous
  const std::int64_t *parents; // [nodes], the root's is -1; null: each node's is the one before it
  Word word;                   // of all arrays
  float scale;
  const void *sinks;  // [heads], or null: sink scores, which take their share of the weights
  const bool *chosen; // [rows, chosen_columns]: KV that a row attends to of what it sees; null: all
  std::int64_t chosen_columns;
};

// Columns of keys, and the same columns of queries. A score is the sum over all parts.
struct KeyPart {
  const void *cached; // [kv_heads, capacity, width]
  std::int64_t width;
  const ExactRows *queries; // [rows * heads]
};

class BlockAttention {
public:
  // share_heads: most heads of queries in a share. Queries are read once `attend` is called.
  BlockAttention(const AttentionSpan &span, std::vector<KeyPart> keys, const void *values,
                 std::int64_t value_width, std::int64_t share_heads);

  // A share is a block of entries of a head of keys and values, and some queries over it.
  std::int64_t shares() const { return span_.kv_heads * head_groups_ * blocks_; }
  // Bytes of keys and values that a share reads.
  std::int64_t share_bytes() const;
  void attend(std::int64_t begin, std::int64_t end);

  // Behind all shares: the result of a query of the rows * heads, `value_width` columns.
  void merge(std::int64_t query, float *out) const;
  std::int64_t merge_bytes() const { return blocks_ * value_width_ * std::int64_t(sizeof(float)); }

private:
  struct Share {
    std::int64_t kv_head, block, first_head, heads; // heads among those that share keys
  };
  using Bytes = std::vector<std::byte>;
  template <typename Type> void attend_share(const Share &share);
  // scores[r * heads + g][...] of `count` entries, of row r behind `first_row` and of head g of a
  // share. keys: of each part, those of the first entry.
  void score(const Share &share, std::int64_t first_row, const std::vector<const std::byte *> &keys,
             std::int64_t count, const std::vector<float *> &scores) const;
  // The keys of each part at an entry and behind it.
  std::vector<const std::byte *> keys_at(const Share &share, std::int64_t entry) const;
  // Entries of what is cached for the share's head, side by side.
  Bytes copy_of(const Share &share, const void *cached, std::int64_t width,
                const std::vector<std::int64_t> &entries) const;
  // The entries that a row attends to, of those at positions that it sees, if it is cheaper to copy
  // them than to score all.
  std::optional<std::vector<std::int64_t>> chosen_of(std::int64_t row, std::int64_t from,
                                                     std::int64_t to) const;

  // Of what the queries of a head have of a block: the place of the first.
  std::int64_t partial_at(std::int64_t kv_head, std::int64_t block) const {
    return (kv_head * blocks_ + block - first_block_) * span_.rows * group_;
  }

  // The place of the KV at a position that a row sees.
  std::int64_t entry_at(std::int64_t row, std::int64_t position) const {
    return position < root_ ? position : root_ + paths_[row][position - root_];
  }

  // True if a row attends to the KV at a position that it sees, of those that were chosen.
  bool attends(std::int64_t row, std::int64_t position) const {
    return span_.chosen[row * span_.chosen_columns + entry_at(row, position)];
  }

  // The first position that a row sees.
  std::int64_t first_of(std::int64_t row) const {
    return std::max<std::int64_t>(behind(row) - span_.window, 0);
  }

  // The position after the last one that a row sees, its own.
  std::int64_t behind(std::int64_t row) const { return root_ + std::int64_t(paths_[row].size()); }

  AttentionSpan span_;
  std::vector<KeyPart> keys_;
  const void *values_; // [kv_heads, capacity, value_width]
  std::int64_t value_width_;
  std::int64_t root_;                            // position of the first node's KV
  std::vector<std::vector<std::int64_t>> paths_; // of each row: the nodes down to its own
  std::int64_t group_;                           // queries of a row that share a head of keys
  std::int64_t share_heads_, head_groups_;
  std::int64_t seen_first_, end_; // positions that any row sees
  std::int64_t first_block_, blocks_;
  std::vector<SoftmaxSum> totals_; // of each query over each block
  Buffer<float> sums_{0};          // the same, `value_width` columns each, not yet divided
};

} // namespace speq::cpu
