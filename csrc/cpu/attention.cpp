#include "cpu/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/norm.h"

namespace speq::cpu {
namespace {

// Positions of a block. Blocks begin at multiples of it and are merged in their order, so that the
// order of a row's sums depends neither on the rows beside it, nor on threads, nor on where its KV
// is.
constexpr std::int64_t kEntries = 512;

// Rotates a head by its position; transformers rounds after each operation.
template <typename Type>
void rotate(Type *head, const Type *cos, const Type *sin, std::int64_t rotary) {
  const auto round = [](float value) { return rounded_to<Type>(value); };
  const std::int64_t half = rotary / 2;
  for (std::int64_t i = 0; i < half; ++i) {
    const float first = to_float(head[i]), second = to_float(head[half + i]);
    store(round(first * to_float(cos[i])) + round(-second * to_float(sin[i])), head[i]);
    store(round(second * to_float(cos[half + i])) + round(first * to_float(sin[half + i])),
          head[half + i]);
  }
}

AddRows add_rows_for(Word word) {
  const MicroKernels &kernels = micro_kernels();
  switch (word) {
  case Word::bfloat16:
    return kernels.add_bfloat16;
  case Word::float16:
    return kernels.add_float16;
  default:
    return kernels.add_float32;
  }
}

// Nodes from the root down to one of them.
std::vector<std::int64_t> path_to(std::int64_t node, const std::int64_t *parents) {
  std::vector<std::int64_t> path;
  for (; node >= 0; node = parents == nullptr ? node - 1 : parents[node]) {
    path.push_back(node);
  }
  std::reverse(path.begin(), path.end());
  return path;
}

} // namespace

Attention::Attention(const AttentionProblem &problem)
    : problem_(problem),
      queries_(problem.rows * problem.heads, problem.width, problem.word, problem.word),
      root_(problem.start + problem.rows - problem.nodes) {
  for (std::int64_t node = problem.nodes - problem.rows; node < problem.nodes; ++node) {
    paths_.push_back(path_to(node, problem.parents));
  }
  group_ = problem.heads / problem.kv_heads;
  seen_first_ = std::numeric_limits<std::int64_t>::max(), end_ = 0;
  for (std::int64_t row = 0; row < problem.rows; ++row) {
    seen_first_ = std::min(seen_first_, first_of(row));
    end_ = std::max(end_, behind(row));
  }
  first_block_ = seen_first_ / kEntries;
  blocks_ = (end_ + kEntries - 1) / kEntries - first_block_;
  totals_.resize(shares() * problem.rows * group_);
  sums_ = Buffer<float>(totals_.size() * problem.width);
  with_type(problem_.word, [&](auto type) { prepare<decltype(type)>(); });
}

template <typename Type> void Attention::prepare() {
  const auto &[rows, heads, kv_heads, width, rotary, capacity, start, window, nodes, parents, word,
               queries, keys, values, cos, sin, query_weight, key_weight, query_norm, key_norm, eps,
               scale, cached_keys, cached_values, out, sinks] = problem_;
  std::vector<Type> turned(std::max(heads, kv_heads) * width);
  for (std::int64_t row = 0; row < rows; ++row) {
    const auto turn = [&](const void *words, std::int64_t count, const void *weight,
                          std::int64_t together) {
      const auto *from = static_cast<const Type *>(words) + row * count * width;
      if (weight == nullptr) {
        std::copy_n(from, count * width, turned.data());
      } else {
        for (std::int64_t k = 0; k < count * width; k += together) {
          rms_norm(from + k, static_cast<const Type *>(weight), together, eps, turned.data() + k);
        }
      }
      for (std::int64_t head = 0; head < count; ++head) {
        rotate(turned.data() + head * width, static_cast<const Type *>(cos) + row * rotary,
               static_cast<const Type *>(sin) + row * rotary, rotary);
      }
    };
    turn(queries, heads, query_weight, query_norm);
    for (std::int64_t head = 0; head < heads; ++head) {
      queries_.fill(row * heads + head, turned.data() + head * width);
    }
    turn(keys, kv_heads, key_weight, key_norm);
    const auto *value = static_cast<const Type *>(values) + row * kv_heads * width;
    for (std::int64_t head = 0; head < kv_heads; ++head) {
      const std::int64_t entry = (head * capacity + start + row) * width;
      std::copy_n(turned.data() + head * width, width, static_cast<Type *>(cached_keys) + entry);
      std::copy_n(value + head * width, width, static_cast<Type *>(cached_values) + entry);
    }
  }
}

void Attention::attend(std::int64_t begin, std::int64_t end) {
  with_type(problem_.word, [&](auto type) {
    for (std::int64_t share = begin; share < end; ++share) {
      attend_block<decltype(type)>(share / blocks_, first_block_ + share % blocks_);
    }
  });
}

template <typename Type> void Attention::attend_block(std::int64_t kv_head, std::int64_t block) {
  const std::int64_t width = problem_.width, nodes = problem_.nodes;
  const std::int64_t count = problem_.rows * group_;
  const std::int64_t first = std::max(block * kEntries, seen_first_);
  const std::int64_t last = std::min((block + 1) * kEntries, end_);
  const AddRows add_rows = add_rows_for(problem_.word);
  const DotExact dot = queries_.dot();
  const auto soften = micro_kernels().soften;
  const std::int64_t first_entry = kv_head * problem_.capacity;
  const auto *keys = static_cast<const Type *>(problem_.cached_keys) + first_entry * width;
  const auto *values = static_cast<const Type *>(problem_.cached_values) + first_entry * width;

  // Of the query of row r and of head g among those that share this one, at r * group + g.
  std::vector<const void *> queries(count);
  std::vector<float> scores(count * (last - first)), node_scores;
  std::vector<float *> score_rows(count), node_score_rows(count), sums(count);
  SoftmaxSum *totals = &totals_[partial_at(kv_head, block)];
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t row = i / group_, head = kv_head * group_ + i % group_;
    queries[i] = queries_.row(row * problem_.heads + head);
    score_rows[i] = &scores[i * (last - first)];
    sums[i] = sums_.data() + (partial_at(kv_head, block) + i) * width;
    std::fill_n(sums[i], width, 0.0f);
    totals[i] = {-std::numeric_limits<float>::infinity(), 0.0f};
    if (problem_.sinks != nullptr && first_of(row) / kEntries == block) {
      totals[i] = {to_float(static_cast<const Type *>(problem_.sinks)[head]), 1.0f};
    }
  }
  const std::int64_t past = std::min(last, root_);
  if (first < past) {
    dot(keys + first * width, width, past - first, queries.data(), count, score_rows.data());
  }
  if (last > root_) {
    node_scores.resize(count * nodes);
    for (std::int64_t i = 0; i < count; ++i) {
      node_score_rows[i] = &node_scores[i * nodes];
    }
    dot(keys + root_ * width, width, nodes, queries.data(), count, node_score_rows.data());
  }
  for (std::int64_t row = 0; row < problem_.rows; ++row) {
    const std::int64_t from = std::max(first, first_of(row)), to = std::min(last, behind(row));
    if (from >= to) {
      continue;
    }
    float **weights = &score_rows[row * group_];
    for (std::int64_t g = 0; g < group_; ++g) {
      const std::int64_t i = row * group_ + g;
      weights[g] += from - first;
      for (std::int64_t at = std::max(from, root_); at < to; ++at) {
        weights[g][at - from] = node_score_rows[i][entry_at(row, at) - root_];
      }
      soften(weights[g], to - from, problem_.scale, totals[i]);
      for (std::int64_t k = 0; k < to - from; ++k) {
        weights[g][k] = rounded_to<Type>(weights[g][k]); // as torch's attention rounds them
      }
    }
    for (std::int64_t at = from, next; at < to; at = next) {
      // Contiguous KV is summed in one call.
      const std::int64_t entry = entry_at(row, at);
      next = std::max(at + 1, std::min(root_, to));
      while (next < to && entry_at(row, next) == entry + next - at) {
        ++next;
      }
      add_rows(values + entry * width, width, next - at, weights, group_, &sums[row * group_]);
      for (std::int64_t g = 0; g < group_; ++g) {
        weights[g] += next - at;
      }
    }
  }
}

void Attention::merge(std::int64_t begin, std::int64_t end) const {
  with_type(problem_.word, [&](auto type) {
    using Type = decltype(type);
    const std::int64_t width = problem_.width;
    std::vector<float> sums(width);
    for (std::int64_t query = begin; query < end; ++query) {
      const std::int64_t row = query / problem_.heads, head = query % problem_.heads;
      const std::int64_t i = row * group_ + head % group_;
      const std::int64_t first = first_of(row) / kEntries, last = (behind(row) - 1) / kEntries;
      SoftmaxSum total = {};
      for (std::int64_t block = first; block <= last; ++block) {
        const std::int64_t at = partial_at(head / group_, block) + i;
        const SoftmaxSum &part = totals_[at];
        const float *part_sums = sums_.data() + at * width;
        if (block == first) {
          total = part;
          std::copy_n(part_sums, width, sums.data());
          continue;
        }
        const float most = std::max(total.most, part.most);
        const float before = std::exp(total.most - most), added = std::exp(part.most - most);
        for (std::int64_t k = 0; k < width; ++k) {
          sums[k] = sums[k] * before + part_sums[k] * added;
        }
        total = {most, total.sum * before + part.sum * added};
      }
      auto *out = static_cast<Type *>(problem_.out) + query * width;
      for (std::int64_t k = 0; k < width; ++k) {
        store(sums[k] / total.sum, out[k]);
      }
    }
  });
}

} // namespace speq::cpu
