// Binds what layers do between their products; bindings.cpp says how.

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "cpu/norm.h"
#include "cpu/op_list.h"
#include "cpu/rotary.h"
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
  const std::int64_t groups = columns > 0 ? weight.size(0) / columns : 0; // rows take them in turn
  STD_TORCH_CHECK(groups > 0 && weight.size(0) == groups * columns && rows % groups == 0 &&
                      out.size(0) == rows && out.size(1) == columns &&
                      added.has_value() == sums.has_value(),
                  "inputs [R, H], weight [G * H] and out [R, H] do not fit together");
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
        const std::int64_t at = row % groups * columns;
        if (weight.scalar_type() == type) {
          rms_norm(normed, static_cast<const Type *>(weight.const_data_ptr()) + at, columns,
                   float(eps), outs + first);
        } else {
          rms_norm(normed, static_cast<const float *>(weight.const_data_ptr()) + at, columns,
                   float(eps), outs + first);
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

// value in a word of `type`.
float rounded_as(Word type, float value) {
  with_type(type, [&](auto word) { value = rounded_to<decltype(word)>(value); });
  return value;
}

// How a router chooses by its logits; speq/kernels/decoder_ops.py says what its fields mean.
struct RouterRule {
  bool sigmoid, rounded, divided;
  std::int64_t groups, kept_groups, group_best;
  float added, scale;
};

// Logits to scores: sigmoids, or their softmax.
void score(std::vector<float> &values, bool sigmoid) {
  if (sigmoid) {
    for (float &value : values) {
      value = 1.0f / (1.0f + std::exp(-value));
    }
    return;
  }
  const float most = *std::max_element(values.begin(), values.end());
  for (float &value : values) {
    value = std::exp(value - most);
  }
  const float sum = std::accumulate(values.begin(), values.end(), 0.0f);
  for (float &value : values) {
    value /= sum;
  }
}

// Leaves only the experts of the best groups to choose from: those with the largest sums of their
// best choices. Other sigmoids are never chosen; other shares of a softmax become 0.
void keep_groups(const RouterRule &rule, std::vector<float> &scores, std::vector<float> &choices) {
  const std::int64_t size = std::int64_t(choices.size()) / rule.groups;
  Ranked groups, members;
  for (std::int64_t group = 0; group < rule.groups; ++group) {
    members.clear();
    for (std::int64_t expert = group * size; expert < (group + 1) * size; ++expert) {
      members.emplace_back(choices[expert], expert);
    }
    rank(members, rule.group_best);
    float sum = 0.0f;
    for (std::int64_t i = 0; i < rule.group_best; ++i) {
      sum += members[i].first;
    }
    groups.emplace_back(sum, group);
  }
  rank(groups, rule.kept_groups);
  std::vector<bool> kept(rule.groups, false);
  for (std::int64_t i = 0; i < rule.kept_groups; ++i) {
    kept[groups[i].second] = true;
  }
  for (std::size_t expert = 0; expert < choices.size(); ++expert) {
    if (!kept[std::int64_t(expert) / size]) {
      choices[expert] = rule.sigmoid ? -std::numeric_limits<float>::infinity() : 0.0f;
      scores[expert] = rule.sigmoid ? scores[expert] : 0.0f;
    }
  }
}

const float *floats_for_experts(const std::optional<Tensor> &tensor, const char *name,
                                std::int64_t experts) {
  if (!tensor.has_value()) {
    return nullptr;
  }
  check(*tensor, name, 1, ScalarType::Float);
  STD_TORCH_CHECK(tensor->size(0) == experts, name, " must be [E] of logits [T, E]");
  return static_cast<const float *>(tensor->const_data_ptr());
}

void route_out(Tensor logits, std::optional<Tensor> bias, std::optional<Tensor> factors,
               bool sigmoid, bool rounded, bool divided, std::int64_t groups,
               std::int64_t kept_groups, std::int64_t group_best, double added, double scale,
               Tensor topk_weights, Tensor topk_ids) {
  check(logits, "logits", 2, logits.scalar_type());
  check(topk_weights, "topk_weights", 2, topk_weights.scalar_type());
  check(topk_ids, "topk_ids", 2, ScalarType::Long);
  const std::int64_t rows = logits.size(0), experts = logits.size(1), top_k = topk_ids.size(1);
  STD_TORCH_CHECK(topk_ids.size(0) == rows && topk_weights.size(0) == rows &&
                      topk_weights.size(1) == top_k && top_k > 0 && top_k <= experts,
                  "topk_weights and topk_ids must be [T, K] of logits [T, E], K from 1 to E");
  STD_TORCH_CHECK(groups > 0 && experts % groups == 0 && kept_groups > 0 && kept_groups <= groups &&
                      group_best > 0 && (groups == 1 || group_best <= experts / groups),
                  "groups must divide the experts, and their best and those kept be among them");
  const RouterRule rule{sigmoid,     rounded,    divided,      groups,
                        kept_groups, group_best, float(added), float(scale)};
  const float *biases = floats_for_experts(bias, "bias", experts);
  const float *scales = floats_for_experts(factors, "factors", experts);
  const Word type = word_of(logits, "logits");
  const auto round = [&](float value) { return rule.rounded ? rounded_as(type, value) : value; };
  std::vector<float> scores(experts), choices(experts);
  Ranked ranked;
  for (std::int64_t row = 0; row < rows; ++row) {
    with_type(type, [&](auto word) {
      const auto *words = static_cast<const decltype(word) *>(logits.const_data_ptr());
      std::transform(words + row * experts, words + (row + 1) * experts, scores.begin(),
                     [](auto each) { return to_float(each); });
    });
    score(scores, rule.sigmoid);
    std::transform(scores.begin(), scores.end(), scores.begin(), round);
    for (std::int64_t expert = 0; expert < experts; ++expert) {
      choices[expert] = scores[expert] + (biases == nullptr ? 0.0f : biases[expert]);
    }
    if (rule.groups > 1) {
      keep_groups(rule, scores, choices);
    }
    ranked.clear();
    for (std::int64_t expert = 0; expert < experts; ++expert) {
      ranked.emplace_back(choices[expert], expert);
    }
    rank(ranked, top_k);
    float total = 1.0f;
    if (rule.divided) {
      total = 0.0f;
      for (std::int64_t k = 0; k < top_k; ++k) {
        total += scores[ranked[k].second];
      }
      total = round(round(total) + rule.added);
    }
    with_type(word_of(topk_weights, "topk_weights"), [&](auto word) {
      auto *weights = static_cast<decltype(word) *>(topk_weights.mutable_data_ptr()) + row * top_k;
      auto *ids = static_cast<std::int64_t *>(topk_ids.mutable_data_ptr()) + row * top_k;
      for (std::int64_t k = 0; k < top_k; ++k) {
        const std::int64_t expert = ranked[k].second;
        const float weight = round(scores[expert] / total) * rule.scale;
        store(scales == nullptr ? weight : weight * scales[expert], weights[k]);
        ids[k] = expert;
      }
    });
  }
}

// Rotates heads of rows in place.
void rotate_out(Tensor rows, std::int64_t width, Tensor cos, Tensor sin, bool interleaved) {
  const ScalarType type = rows.scalar_type();
  check(rows, "rows", 2, type);
  for (const Tensor *tensor : {&cos, &sin}) {
    check(*tensor, "cos and sin", 2, interleaved ? ScalarType::Float : type);
  }
  const std::int64_t count = rows.size(0), columns = cos.size(1);
  const std::int64_t rotary = interleaved ? 2 * columns : columns;
  STD_TORCH_CHECK(width > 0 && rows.size(1) % width == 0 && rotary % 2 == 0 && rotary <= width &&
                      cos.size(0) == count && sin.size(0) == count && sin.size(1) == columns,
                  "cos and sin must have a row for each of rows, no wider than a head");
  with_type(word_of(rows, "rows"), [&](auto word) {
    using Type = decltype(word);
    auto *words = static_cast<Type *>(rows.mutable_data_ptr());
    for (std::int64_t row = 0; row < count; ++row) {
      for (std::int64_t head = 0; head < rows.size(1); head += width) {
        Type *turned = words + row * rows.size(1) + head;
        if (interleaved) {
          rotate_pairs(turned, static_cast<const float *>(cos.const_data_ptr()) + row * columns,
                       static_cast<const float *>(sin.const_data_ptr()) + row * columns, rotary);
        } else {
          rotate_halves(turned, static_cast<const Type *>(cos.const_data_ptr()) + row * columns,
                        static_cast<const Type *>(sin.const_data_ptr()) + row * columns, rotary);
        }
      }
    }
  });
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

template <typename Type> float rounded_sigmoid(float value) {
  return rounded_to<Type>(1.0f / (1.0f + std::exp(-value)));
}

// Rows [T, N * H], N of each token.
std::int64_t streams_of(const Tensor &rows, const char *name, const Tensor &whole,
                        ScalarType type) {
  check(rows, name, 2, type);
  check(whole, "rows of a token together", 2, type);
  const std::int64_t columns = whole.size(1);
  STD_TORCH_CHECK(rows.size(0) == whole.size(0) && columns > 0 && rows.size(1) > 0 &&
                      rows.size(1) % columns == 0,
                  name, " must be [T, N * H], and others [T, H]");
  return rows.size(1) / columns;
}

void mix_streams_out(Tensor normed, Tensor gates, Tensor out) {
  const ScalarType type = normed.scalar_type();
  const std::int64_t streams = streams_of(normed, "normed", out, type), columns = out.size(1);
  STD_TORCH_CHECK(streams_of(gates, "gates", out, type) == streams, "gates must be as normed");
  with_type(word_of(normed, "normed"), [&](auto word) {
    using Type = decltype(word);
    const auto *rows = static_cast<const Type *>(normed.const_data_ptr());
    const auto *weights = static_cast<const Type *>(gates.const_data_ptr());
    auto *mixed = static_cast<Type *>(out.mutable_data_ptr());
    for (std::int64_t row = 0; row < out.size(0); ++row) {
      for (std::int64_t i = 0; i < columns; ++i) {
        float sum = 0.0f;
        for (std::int64_t n = 0; n < streams; ++n) {
          const std::int64_t at = (row * streams + n) * columns + i;
          sum +=
              rounded_to<Type>(rounded_sigmoid<Type>(to_float(weights[at])) * to_float(rows[at]));
        }
        store(sum / float(streams), mixed[row * columns + i]);
      }
    }
  });
}

void add_streams_out(Tensor hidden, Tensor update, Tensor gates, Tensor out) {
  const ScalarType type = hidden.scalar_type();
  const std::int64_t streams = streams_of(hidden, "hidden", update, type);
  const std::int64_t columns = update.size(1), rows = update.size(0);
  check(gates, "gates", 2, type);
  STD_TORCH_CHECK(streams_of(out, "out", update, type) == streams && gates.size(0) == rows &&
                      gates.size(1) == streams,
                  "gates must be [T, N], and out as hidden");
  with_type(word_of(hidden, "hidden"), [&](auto word) {
    using Type = decltype(word);
    const auto *before = static_cast<const Type *>(hidden.const_data_ptr());
    const auto *added = static_cast<const Type *>(update.const_data_ptr());
    const auto *logits = static_cast<const Type *>(gates.const_data_ptr());
    auto *sums = static_cast<Type *>(out.mutable_data_ptr());
    for (std::int64_t at = 0; at < rows * streams; ++at) {
      const float logit = rounded_to<Type>(to_float(logits[at]) / float(streams));
      const float weight = 2.0f * rounded_sigmoid<Type>(logit);
      const Type *of_token = added + at / streams * columns;
      for (std::int64_t i = 0; i < columns; ++i) {
        const float term = rounded_to<Type>(to_float(of_token[i]) * weight);
        store(to_float(before[at * columns + i]) + term, sums[at * columns + i]);
      }
    }
  });
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(speq, CPU, m) {
  m.impl("rms_norm_out", SPEQ_BOX(rms_norm_out));
  m.impl("route_out", SPEQ_BOX(route_out));
  m.impl("rotate_out", SPEQ_BOX(rotate_out));
  m.impl("combine_out", SPEQ_BOX(combine_out));
  m.impl("mix_streams_out", SPEQ_BOX(mix_streams_out));
  m.impl("add_streams_out", SPEQ_BOX(add_streams_out));
}
