#include "cpu/attention.h"

#include <algorithm>

#include "cpu/norm.h"
#include "cpu/pool.h"
#include "cpu/rotary.h"

namespace speq::cpu {
namespace {

// Norms and rotates queries into `turned_queries`, and writes keys and values to the cache.
template <typename Type> void prepare(const AttentionProblem &problem, ExactRows &turned_queries) {
  const auto &[span, width, value_width, rotary, queries, keys, values, cos, sin, query_weight,
               key_weight, query_norm, key_norm, eps, cached_keys, cached_values, out] = problem;
  std::vector<Type> turned(std::max(span.heads, span.kv_heads) * width);
  for (std::int64_t row = 0; row < span.rows; ++row) {
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
        rotate_halves(turned.data() + head * width, static_cast<const Type *>(cos) + row * rotary,
                      static_cast<const Type *>(sin) + row * rotary, rotary);
      }
    };
    turn(queries, span.heads, query_weight, query_norm);
    for (std::int64_t head = 0; head < span.heads; ++head) {
      turned_queries.fill(row * span.heads + head, turned.data() + head * width);
    }
    turn(keys, span.kv_heads, key_weight, key_norm);
    const auto *value = static_cast<const Type *>(values) + row * span.kv_heads * value_width;
    for (std::int64_t head = 0; head < span.kv_heads; ++head) {
      const std::int64_t entry = head * span.capacity + span.start + row;
      std::copy_n(turned.data() + head * width, width,
                  static_cast<Type *>(cached_keys) + entry * width);
      std::copy_n(value + head * value_width, value_width,
                  static_cast<Type *>(cached_values) + entry * value_width);
    }
  }
}

} // namespace

void attention(const AttentionProblem &problem) {
  const AttentionSpan &span = problem.span;
  const std::int64_t width = problem.value_width, count = span.rows * span.heads;
  ExactRows queries(count, problem.width, span.word, span.word);
  BlockAttention blocks(span, {{problem.cached_keys, problem.width, &queries}},
                        problem.cached_values, width, span.heads);
  with_type(span.word, [&](auto type) {
    using Type = decltype(type);
    prepare<Type>(problem, queries);
    parallel_for(0, blocks.shares(), grain(blocks.share_bytes()),
                 [&](std::int64_t begin, std::int64_t end) { blocks.attend(begin, end); });
    parallel_for(0, count, grain(blocks.merge_bytes()), [&](std::int64_t begin, std::int64_t end) {
      std::vector<float> sums(width);
      for (std::int64_t query = begin; query < end; ++query) {
        blocks.merge(query, sums.data());
        auto *out = static_cast<Type *>(problem.out) + query * width;
        for (std::int64_t k = 0; k < width; ++k) {
          store(sums[k], out[k]);
        }
      }
    });
  });
}

} // namespace speq::cpu
