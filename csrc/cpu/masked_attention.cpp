#include "cpu/masked_attention.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "cpu/pool.h"

namespace speq::cpu {
namespace {

// Entries that are laid into panels at a time. Blocks begin at multiples of it.
constexpr std::int64_t kEntries = 512;
// Queries of a share, about: for them all, entries are laid into panels once.
constexpr std::int64_t kShareQueries = 512;
// Queries whose scores exist at a time.
constexpr std::int64_t kTileQueries = 64;

constexpr std::int64_t rounded_up(std::int64_t count, std::int64_t multiple) {
  return (count + multiple - 1) / multiple * multiple;
}

// The entries that a row sees lie in [first, last); `whole` where it sees all of these.
struct Seen {
  std::int64_t first, last;
  bool whole;
};

Seen seen_of(const bool *mask, std::int64_t entries) {
  const auto *begin = mask, *end = mask + entries;
  const auto *first = static_cast<const bool *>(std::memchr(begin, 1, entries));
  if (first == nullptr) {
    return {0, 0, true};
  }
  while (!end[-1]) {
    --end;
  }
  return {first - begin, end - begin, std::memchr(first, 0, end - first) == nullptr};
}

// Type: of the arrays. Word: of what is multiplied, float or, where there are products of pairs,
// bfloat16.
template <typename Type, typename Word> class Share {
public:
  Share(const MaskedProblem &problem, PanelProduct product, const std::vector<Seen> &seen)
      : problem_(problem), product_(product), seen_(seen), group_(problem.heads / problem.kv_heads),
        depth_(rounded_up(problem.key_width, kDepth)),
        columns_(rounded_up(problem.value_width, kPanelColumns)), keys_(kEntries * depth_),
        values_(kEntries * columns_), scores_(kTileQueries * kEntries),
        weights_(kDepth == 2 ? kTileQueries * kEntries : 0) {}

  // Attends tokens [first, last) with the heads that share a head of keys and values.
  void attend(std::int64_t kv_head, std::int64_t first, std::int64_t last) {
    const std::int64_t count = (last - first) * group_;
    begin(kv_head, first, count);
    std::int64_t from = problem_.entries, to = 0;
    for (std::int64_t token = first; token < last; ++token) {
      if (seen_[token].first < seen_[token].last) {
        from = std::min(from, seen_[token].first);
        to = std::max(to, seen_[token].last);
      }
    }
    for (std::int64_t block = from / kEntries * kEntries; block < to; block += kEntries) {
      lay_out(kv_head, block, std::min(block + kEntries, problem_.entries));
      for (std::int64_t tile = 0; tile < count; tile += kTileQueries) {
        attend_tile(first, tile, std::min(tile + kTileQueries, count), block);
      }
    }
    finish(kv_head, first, count);
  }

private:
  // Rows of the matrix that lie side by side in a panel.
  static constexpr std::int64_t kDepth = sizeof(Word) == sizeof(float) ? 1 : 2;

  static Word word_of(Type value) {
    if constexpr (std::is_same_v<Type, Word>) {
      return value;
    } else {
      return to_float(value);
    }
  }

  static const Type *row_of(const HeadRows &rows, std::int64_t head, std::int64_t row) {
    return static_cast<const Type *>(rows.first) + head * rows.head_stride + row * rows.row_stride;
  }

  // Query i of the share is of token i / group and of head i % group of those that share keys.
  void begin(std::int64_t kv_head, std::int64_t first, std::int64_t count) {
    queries_.assign(count * depth_, Word{});
    sums_.assign(count * columns_, 0.0f);
    totals_.assign(count, {-std::numeric_limits<float>::infinity(), 0.0f});
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t head = kv_head * group_ + i % group_;
      const Type *query = row_of(problem_.queries, head, first + i / group_);
      std::transform(query, query + problem_.key_width, &queries_[i * depth_], word_of);
      if (problem_.sinks != nullptr) {
        totals_[i] = {to_float(static_cast<const Type *>(problem_.sinks)[head]), 1.0f};
      }
    }
  }

  // Lays entries [first, last) into panels: keys with an entry to a column, values with an entry
  // to a row. What is left of the block is zero.
  void lay_out(std::int64_t kv_head, std::int64_t first, std::int64_t last) {
    const std::int64_t count = last - first, width = problem_.key_width;
    if (count < kEntries || width < depth_ || problem_.value_width < columns_) {
      std::fill_n(keys_.data(), kEntries * depth_, Word{});
      std::fill_n(values_.data(), kEntries * columns_, Word{});
    }
    for (std::int64_t panel = 0; panel < count; panel += kPanelColumns) {
      const std::int64_t columns = std::min(kPanelColumns, count - panel);
      const Type *keys[kPanelColumns];
      for (std::int64_t column = 0; column < columns; ++column) {
        keys[column] = row_of(problem_.keys, kv_head, first + panel + column);
      }
      Word *to = keys_.data() + panel * depth_;
      for (std::int64_t k = 0; k < width; k += kDepth, to += kPanelColumns * kDepth) {
        for (std::int64_t column = 0; column < columns; ++column) {
          for (std::int64_t at = 0; at < std::min(kDepth, width - k); ++at) {
            to[column * kDepth + at] = word_of(keys[column][k + at]);
          }
        }
      }
    }
    for (std::int64_t entry = 0; entry < count; ++entry) {
      const Type *value = row_of(problem_.values, kv_head, first + entry);
      Word *row = values_.data() + entry / kDepth * kPanelColumns * kDepth + entry % kDepth;
      for (std::int64_t k = 0; k < problem_.value_width; k += kPanelColumns) {
        const std::int64_t columns = std::min(kPanelColumns, problem_.value_width - k);
        for (std::int64_t column = 0; column < columns; ++column) {
          row[k * kEntries + column * kDepth] = word_of(value[k + column]);
        }
      }
    }
  }

  void attend_tile(std::int64_t token, std::int64_t tile, std::int64_t end, std::int64_t block) {
    std::int64_t from = kEntries, to = 0; // of the block, what any query of the tile sees
    for (std::int64_t i = tile; i < end; i += group_ - i % group_) {
      const Seen &seen = seen_[token + i / group_];
      if (std::max(seen.first, block) < std::min(seen.last, block + kEntries)) {
        from = std::min(from, std::max(seen.first - block, std::int64_t(0)));
        to = std::max(to, std::min(seen.last - block, kEntries));
      }
    }
    if (from >= to) {
      return;
    }
    from = from / kPanelColumns * kPanelColumns;
    to = rounded_up(to, kPanelColumns);
    product_(
        {&queries_[tile * depth_], end - tile, depth_},
        {keys_.data() + from * depth_, (to - from) / kPanelColumns, kPanelColumns * depth_, depth_},
        {scores_.data() + from, kEntries, false});
    for (std::int64_t i = tile; i < end; ++i) {
      const std::int64_t at = (i - tile) * kEntries;
      weigh(i, seen_[token + i / group_], token + i / group_, block, from, to, &scores_[at]);
      if constexpr (kDepth == 2) {
        micro_kernels().round_bfloat16(&scores_[at + from], to - from, &weights_[at + from]);
      }
    }
    const Word *weights;
    if constexpr (kDepth == 2) {
      weights = weights_.data();
    } else {
      weights = scores_.data();
    }
    product_({weights + from, end - tile, kEntries},
             {values_.data() + from * kPanelColumns, columns_ / kPanelColumns,
              kPanelColumns * kEntries, to - from},
             {&sums_[tile * columns_], columns_, true});
  }

  // Makes weights of scores [from, to) of a block, zeros for what the query does not see.
  void weigh(std::int64_t i, const Seen &seen, std::int64_t token, std::int64_t block,
             std::int64_t from, std::int64_t to, float *scores) {
    const std::int64_t first = std::max(seen.first - block, from);
    const std::int64_t last = std::min(seen.last - block, to);
    const bool *mask = problem_.mask + token * problem_.entries + block;
    if (first >= last || (!seen.whole && std::memchr(mask + first, 1, last - first) == nullptr)) {
      std::fill(scores + from, scores + to, 0.0f);
      return;
    }
    for (std::int64_t at = first; at < last && !seen.whole; ++at) {
      scores[at] = mask[at] ? scores[at] : -std::numeric_limits<float>::infinity();
    }
    const float factor =
        micro_kernels().soften(scores + first, last - first, problem_.scale, totals_[i]);
    if (factor != 1.0f) {
      float *sums = &sums_[i * columns_];
      std::transform(sums, sums + columns_, sums, [&](float sum) { return sum * factor; });
    }
    std::fill(scores + from, scores + first, 0.0f);
    std::fill(scores + last, scores + to, 0.0f);
  }

  void finish(std::int64_t kv_head, std::int64_t first, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t head = kv_head * group_ + i % group_;
      auto *out = static_cast<Type *>(problem_.out) +
                  ((first + i / group_) * problem_.heads + head) * problem_.value_width;
      for (std::int64_t k = 0; k < problem_.value_width; ++k) {
        store(sums_[i * columns_ + k] / totals_[i].sum, out[k]);
      }
    }
  }

  const MaskedProblem &problem_;
  PanelProduct product_;
  const std::vector<Seen> &seen_;
  std::int64_t group_;
  std::int64_t depth_, columns_; // of queries and keys, and of values, padded
  Buffer<Word> keys_, values_;   // panels of a block
  Buffer<float> scores_;         // [kTileQueries, kEntries]
  Buffer<Word> weights_;         // the same
  std::vector<Word> queries_;    // [queries, depth]
  std::vector<float> sums_;      // [queries, columns], not yet divided
  std::vector<SoftmaxSum> totals_;
};

template <typename Type, typename Word>
void in_shares(const MaskedProblem &problem, PanelProduct product) {
  std::vector<Seen> seen(problem.rows);
  parallel_for(0, problem.rows, grain(problem.entries), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      seen[row] = seen_of(problem.mask + row * problem.entries, problem.entries);
    }
  });
  const std::int64_t group = problem.heads / problem.kv_heads;
  const std::int64_t tokens = std::max<std::int64_t>(kShareQueries / group, 1);
  const std::int64_t shares = (problem.rows + tokens - 1) / tokens;
  // The last tokens see most: they go first, so that no thread ends with one of them.
  parallel_for(0, shares * problem.kv_heads, 1, [&](std::int64_t begin, std::int64_t end) {
    Share<Type, Word> share(problem, product, seen);
    for (std::int64_t at = begin; at < end; ++at) {
      const std::int64_t first = (shares - 1 - at / problem.kv_heads) * tokens;
      share.attend(at % problem.kv_heads, first, std::min(first + tokens, problem.rows));
    }
  });
}

} // namespace

void masked_attention(const MaskedProblem &problem) {
  const MicroKernels &kernels = micro_kernels();
  with_type(problem.word, [&](auto type) {
    using Type = decltype(type);
    if constexpr (std::is_same_v<Type, BFloat16>) {
      if (kernels.panel_pairs != nullptr) {
        return in_shares<Type, BFloat16>(problem, kernels.panel_pairs);
      }
    }
    in_shares<Type, float>(problem, kernels.panels);
  });
}

} // namespace speq::cpu
