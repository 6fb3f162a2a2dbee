// Binds what layers do between their products; bindings.cpp says how.

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>
#include <vector>

#include "cpu/norm.h"
#include "cpu/op_list.h"
#include "cpu/tensors.h"

namespace {

using namespace speq;
using namespace speq::cpu;

void rms_norm_out(Tensor inputs, std::optional<Tensor> added, Tensor weight, double eps,
                  std::optional<Tensor> sums, Tensor out) {
  const ScalarType type = inputs.scalar_type();
  check(inputs, "inputs", 2, type);
  check(weight, "weight", 1, weight.scalar_type() == type ? type : ScalarType::Float);
  check(out, "out", 2, type);
  const std::int64_t rows = inputs.size(0), columns = inputs.size(1);
  STD_TORCH_CHECK(weight.size(0) == columns && out.size(0) == rows && out.size(1) == columns &&
                      added.has_value() == sums.has_value(),
                  "inputs [R, H], weight [H] and out [R, H] do not fit together");
  for (const std::optional<Tensor> &tensor : {added, sums}) {
    if (tensor.has_value()) {
      check(*tensor, "added and sums", 2, type);
      STD_TORCH_CHECK(tensor->size(0) == rows && tensor->size(1) == columns,
                      "added and sums must have the shape of inputs");
    }
  }
  with_type(word_of(inputs, "inputs"), [&](auto word) {
    using Type = decltype(word);
    const auto *values = static_cast<const Type *>(inputs.const_data_ptr());
    const auto *others =
        added.has_value() ? static_cast<const Type *>(added->const_data_ptr()) : nullptr;
    auto *totals = sums.has_value() ? static_cast<Type *>(sums->mutable_data_ptr()) : nullptr;
    auto *outs = static_cast<Type *>(out.mutable_data_ptr());
    parallel_for(0, rows, grain(columns * sizeof(Type)), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t row = begin; row < end; ++row) {
        const std::int64_t first = row * columns;
        if (others != nullptr) {
          for (std::int64_t i = first; i < first + columns; ++i) {
            store(to_float(values[i]) + to_float(others[i]), totals[i]);
          }
        }
        const Type *normed = (others == nullptr ? values : totals) + first;
        if (weight.scalar_type() == type) {
          rms_norm(normed, static_cast<const Type *>(weight.const_data_ptr()), columns, float(eps),
                   outs + first);
        } else {
          rms_norm(normed, static_cast<const float *>(weight.const_data_ptr()), columns, float(eps),
                   outs + first);
        }
      }
    });
  });
}

// The largest of values, largest first, exactly as torch.topk orders equals.
using Ranked = std::vector<std::pair<float, std::int64_t>>;

void rank(Ranked &ranked, std::int64_t count) {
  const auto above = [](const auto &a, const auto &b) {
    return (a.first != a.first && b.first == b.first) || a.first > b.first;
  };
  if (count * 64 <= std::int64_t(ranked.size())) {
    std::partial_sort(ranked.begin(), ranked.begin() + count, ranked.end(), above);
    return;
  }
  std::nth_element(ranked.begin(), ranked.begin() + count - 1, ranked.end(), above);
  std::sort(ranked.begin(), ranked.begin() + count - 1, above);
}

void route_out(Tensor logits, bool normalised, Tensor topk_weights, Tensor topk_ids) {
  check(logits, "logits", 2, logits.scalar_type());
  check(topk_weights, "topk_weights", 2, topk_weights.scalar_type());
  check(topk_ids, "topk_ids", 2, ScalarType::Long);
  const std::int64_t rows = logits.size(0), experts = logits.size(1), top_k = topk_ids.size(1);
  STD_TORCH_CHECK(topk_ids.size(0) == rows && topk_weights.size(0) == rows &&
                      topk_weights.size(1) == top_k && top_k > 0 && top_k <= experts,
                  "topk_weights and topk_ids must be [T, K] of logits [T, E], K from 1 to E");
  std::vector<float> probs(experts);
  Ranked ranked;
  for (std::int64_t row = 0; row < rows; ++row) {
    with_type(word_of(logits, "logits"), [&](auto type) {
      const auto *words = static_cast<const decltype(type) *>(logits.const_data_ptr());
      std::transform(words + row * experts, words + (row + 1) * experts, probs.begin(),
                     [](auto word) { return to_float(word); });
    });
    const float most = *std::max_element(probs.begin(), probs.end());
    for (float &prob : probs) {
      prob = std::exp(prob - most);
    }
    const float sum = std::accumulate(probs.begin(), probs.end(), 0.0f);
    ranked.clear();
    for (std::int64_t expert = 0; expert < experts; ++expert) {
      ranked.emplace_back(probs[expert] / sum, expert);
    }
    rank(ranked, top_k);
    float total = 1.0f;
    if (normalised) {
      total = 0.0f;
      for (std::int64_t k = 0; k < top_k; ++k) {
        total += ranked[k].first;
      }
    }
    with_type(word_of(topk_weights, "topk_weights"), [&](auto type) {
      auto *weights = static_cast<decltype(type) *>(topk_weights.mutable_data_ptr()) + row * top_k;
      auto *ids = static_cast<std::int64_t *>(topk_ids.mutable_data_ptr()) + row * top_k;
      for (std::int64_t k = 0; k < top_k; ++k) {
        store(ranked[k].first / total, weights[k]);
        ids[k] = ranked[k].second;
      }
    });
  }
}

void combine_out(Tensor outputs, Tensor topk_weights, Tensor out) {
  const ScalarType type = outputs.scalar_type();
  check(outputs, "outputs", 3, type);
  check(topk_weights, "topk_weights", 2, topk_weights.scalar_type());
  check(out, "out", 2, type);
  const std::int64_t rows = outputs.size(0), top_k = outputs.size(1), columns = outputs.size(2);
  STD_TORCH_CHECK(topk_weights.size(0) == rows && topk_weights.size(1) == top_k &&
                      out.size(0) == rows && out.size(1) == columns,
                  "outputs [T, K, H], topk_weights [T, K] and out [T, H] do not fit together");
  std::vector<float> weights(rows * top_k);
  with_type(word_of(topk_weights, "topk_weights"), [&](auto word) {
    const auto *words = static_cast<const decltype(word) *>(topk_weights.const_data_ptr());
    std::transform(words, words + rows * top_k, weights.begin(),
                   [](auto weight) { return to_float(weight); });
  });
  with_type(word_of(outputs, "outputs"), [&](auto word) {
    const auto *words = static_cast<const decltype(word) *>(outputs.const_data_ptr());
    auto *totals = static_cast<decltype(word) *>(out.mutable_data_ptr());
    parallel_for(0, rows, grain(top_k * columns * sizeof word),
                 [&](std::int64_t begin, std::int64_t end) {
                   std::vector<float> sums(columns);
                   for (std::int64_t row = begin; row < end; ++row) {
                     std::fill(sums.begin(), sums.end(), 0.0f);
                     for (std::int64_t place = row * top_k; place < (row + 1) * top_k; ++place) {
                       for (std::int64_t i = 0; i < columns; ++i) {
                         sums[i] += to_float(words[place * columns + i]) * weights[place];
                       }
                     }
                     for (std::int64_t i = 0; i < columns; ++i) {
                       store(sums[i], totals[row * columns + i]);
                     }
                   }
                 });
  });
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(speq, CPU, m) {
  m.impl("rms_norm_out", SPEQ_BOX(rms_norm_out));
  m.impl("route_out", SPEQ_BOX(route_out));
  m.impl("combine_out", SPEQ_BOX(combine_out));
}
