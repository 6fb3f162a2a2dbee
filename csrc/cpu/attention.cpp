#include "cpu/attention.h"

#include <limits>
#include <vector>

#include "cpu/norm.h"

namespace speq::cpu {
namespace {

// Entries whose scores exist at a time. Blocks begin at multiples of it, so that what a row adds
// up, and in which order, does not depend on the rows beside it.
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

} // namespace

Attention::Attention(const AttentionProblem &problem)
    : problem_(problem),
      queries_(problem.rows * problem.heads, problem.width, problem.word, problem.word) {
  with_type(problem_.word, [&](auto type) { prepare<decltype(type)>(); });
}

template <typename Type> void Attention::prepare() {
  const auto &[rows, heads, kv_heads, width, rotary, capacity, start, window, word, queries, keys,
               values, cos, sin, query_weight, key_weight, query_norm, key_norm, eps, scale,
               cached_keys, cached_values, out] = problem_;
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
  const std::int64_t width = problem_.width, start = problem_.start;
  const std::int64_t group = problem_.heads / problem_.kv_heads, count = problem_.rows * group;
  const std::int64_t end = start + problem_.rows;
  const std::int64_t seen_first = std::max<std::int64_t>(start + 1 - problem_.window, 0);
  const DotExact dot = queries_.dot();
  const AddRows add_rows = add_rows_for(problem_.word);
  const auto soften = micro_kernels().soften;
  const auto *keys = static_cast<const Type *>(problem_.cached_keys);
  const auto *values = static_cast<const Type *>(problem_.cached_values);
  const std::int64_t first_entry = kv_head * problem_.capacity;

  // Of the query of row r and of head g among those that share this one, at r * group + g.
  std::vector<const void *> queries(count);
  std::vector<float> scores(count * kEntries), sums(count * width, 0.0f);
  std::vector<float *> score_rows(count);
  std::vector<SoftmaxSum> totals(count, {-std::numeric_limits<float>::infinity(), 0.0f});
  for (std::int64_t i = 0; i < count; ++i) {
    queries[i] = queries_.row(i / group * problem_.heads + kv_head * group + i % group);
    score_rows[i] = &scores[i * kEntries];
  }
  for (std::int64_t block = seen_first / kEntries * kEntries; block < end; block += kEntries) {
    const std::int64_t first = std::max(block, seen_first);
    const std::int64_t last = std::min(block + kEntries, end);
    dot(keys + (first_entry + first) * width, width, last - first, queries.data(), count,
        score_rows.data());
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t own = start + i / group + 1; // behind the last entry that the row sees
      const std::int64_t from = std::max(first, own - problem_.window), to = std::min(last, own);
      if (from >= to) {
        continue;
      }
      float *weights = score_rows[i] + (from - first), *sum = &sums[i * width];
      const float factor = soften(weights, to - from, problem_.scale, totals[i]);
      for (std::int64_t k = 0; k < width; ++k) {
        sum[k] *= factor;
      }
      for (std::int64_t k = 0; k < to - from; ++k) {
        weights[k] = rounded_to<Type>(weights[k]); // as torch's attention rounds them
      }
      add_rows(values + (first_entry + from) * width, width, to - from, weights, sum);
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
