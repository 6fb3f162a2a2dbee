#include "cpu/attention.h"

#include <algorithm>
#include <limits>

#include "cpu/norm.h"

namespace speq::cpu {
namespace {

// Positions whose scores exist at a time. Blocks begin at multiples of it, so that the order of a
// row's sums depends neither on the rows beside it nor on where its KV is.
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

void Attention::run(std::int64_t begin, std::int64_t end) const {
  with_type(problem_.word, [&](auto type) {
    for (std::int64_t kv_head = begin; kv_head < end; ++kv_head) {
      attend<decltype(type)>(kv_head);
    }
  });
}

template <typename Type> void Attention::attend(std::int64_t kv_head) const {
  const std::int64_t width = problem_.width, nodes = problem_.nodes;
  const std::int64_t group = problem_.heads / problem_.kv_heads, count = problem_.rows * group;
  const DotExact dot = queries_.dot();
  const AddRows add_rows = add_rows_for(problem_.word);
  const auto soften = micro_kernels().soften;
  const auto *keys = static_cast<const Type *>(problem_.cached_keys);
  const auto *values = static_cast<const Type *>(problem_.cached_values);
  const std::int64_t first_entry = kv_head * problem_.capacity;

  // Of the query of row r and of head g among those that share this one, at r * group + g.
  std::vector<const void *> queries(count);
  std::vector<float> scores(count * kEntries), node_scores(count * nodes), sums(count * width, 0);
  std::vector<float *> score_rows(count), node_score_rows(count);
  std::vector<SoftmaxSum> totals(count, {-std::numeric_limits<float>::infinity(), 0.0f});
  std::int64_t seen_first = std::numeric_limits<std::int64_t>::max(), end = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t head = kv_head * group + i % group;
    queries[i] = queries_.row(i / group * problem_.heads + head);
    if (problem_.sinks != nullptr) {
      totals[i] = {to_float(static_cast<const Type *>(problem_.sinks)[head]), 1.0f};
    }
    score_rows[i] = &scores[i * kEntries];
    node_score_rows[i] = &node_scores[i * nodes];
    const std::int64_t own = behind(i / group);
    seen_first = std::min(seen_first, std::max<std::int64_t>(own - problem_.window, 0));
    end = std::max(end, own);
  }
  dot(keys + (first_entry + root_) * width, width, nodes, queries.data(), count,
      node_score_rows.data());
  for (std::int64_t block = seen_first / kEntries * kEntries; block < end; block += kEntries) {
    const std::int64_t first = std::max(block, seen_first);
    const std::int64_t last = std::min(block + kEntries, end), past = std::min(last, root_);
    if (first < past) {
      dot(keys + (first_entry + first) * width, width, past - first, queries.data(), count,
          score_rows.data());
    }
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t row = i / group, own = behind(row);
      const std::int64_t from = std::max(first, own - problem_.window), to = std::min(last, own);
      if (from >= to) {
        continue;
      }
      float *weights = score_rows[i] + (from - first), *sum = &sums[i * width];
      for (std::int64_t at = std::max(from, root_); at < to; ++at) {
        weights[at - from] = node_score_rows[i][entry_at(row, at) - root_];
      }
      const float factor = soften(weights, to - from, problem_.scale, totals[i]);
      for (std::int64_t k = 0; k < width; ++k) {
        sum[k] *= factor;
      }
      for (std::int64_t k = 0; k < to - from; ++k) {
        weights[k] = rounded_to<Type>(weights[k]); // as torch's attention rounds them
      }
      for (std::int64_t at = from, next; at < to; at = next) {
        // Contiguous KV is summed in one call.
        const std::int64_t entry = entry_at(row, at);
        next = std::max(at + 1, std::min(root_, to));
        while (next < to && entry_at(row, next) == entry + next - at) {
          ++next;
        }
        add_rows(values + (first_entry + entry) * width, width, next - at, weights + (at - from),
                 sum);
      }
    }
  }
  for (std::int64_t i = 0; i < count; ++i) {
    auto *out = static_cast<Type *>(problem_.out) +
                (i / group * problem_.heads + kv_head * group + i % group) * width;
    for (std::int64_t k = 0; k < width; ++k) {
      store(sums[i * width + k] / totals[i].sum, out[k]);
    }
  }
}

} // namespace speq::cpu
