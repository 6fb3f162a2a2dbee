// Binds attention over the KV of a sequence; bindings.cpp says how.

#include "cpu/attention.h"
#include "cpu/latent_attention.h"
#include "cpu/masked_attention.h"
#include "cpu/op_list.h"
#include "cpu/tensors.h"

namespace {

using namespace speq;
using namespace speq::cpu;

// The columns that a norm's weight takes together; 0 without a norm.
std::int64_t norm_columns(const std::optional<Tensor> &weight, std::int64_t columns,
                          ScalarType type) {
  if (!weight.has_value()) {
    return 0;
  }
  check(*weight, "a norm's weight", 1, type);
  STD_TORCH_CHECK(weight->size(0) > 0 && columns % weight->size(0) == 0,
                  "norms must take whole heads");
  return weight->size(0);
}

// The parents of a tree's nodes, each of which lies before its children; null without a tree.
const std::int64_t *parents_of(const std::optional<Tensor> &parents) {
  if (!parents.has_value()) {
    return nullptr;
  }
  check(*parents, "parents", 1, ScalarType::Long);
  const std::span<const std::int64_t> ids = ids_of(*parents);
  for (std::size_t node = 0; node < ids.size(); ++node) {
    STD_TORCH_CHECK(node == 0 ? ids[node] == -1 : ids[node] >= 0 && ids[node] < std::int64_t(node),
                    "parents must name -1 for the root, which is node 0, and for each other node ",
                    "one before it; that of node ", node, " is ", ids[node]);
  }
  return ids.data();
}

// The span of rows [rows, heads] over a cache of so many heads and entries.
AttentionSpan span_of(const Tensor &queries, std::int64_t heads, std::int64_t kv_heads,
                      std::int64_t capacity, std::int64_t start, std::int64_t window, double scale,
                      const std::optional<Tensor> &parents) {
  const std::int64_t rows = queries.size(0);
  STD_TORCH_CHECK(start >= 0 && rows <= capacity && start <= capacity - rows && window > 0,
                  "the cache must have room for the rows, and window be positive");
  const std::int64_t nodes = parents.has_value() ? parents->size(0) : rows;
  STD_TORCH_CHECK(nodes >= rows && start >= nodes - rows,
                  "rows must be the last nodes of their tree, whose entries lie before theirs");
  return {rows,
          heads,
          kv_heads,
          capacity,
          start,
          window,
          nodes,
          parents_of(parents),
          word_of(queries, "queries"),
          float(scale),
          nullptr,
          nullptr,
          0};
}

// Has rows attend to what is chosen of what they see.
void choose(AttentionSpan &span, const std::optional<Tensor> &chosen) {
  if (chosen.has_value()) {
    check(*chosen, "chosen", 2, ScalarType::Bool);
    STD_TORCH_CHECK(chosen->size(0) == span.rows && chosen->size(1) >= span.start + span.rows,
                    "chosen must have a row for each of queries, of what is cached behind them");
    span.chosen = static_cast<const bool *>(chosen->const_data_ptr());
    span.chosen_columns = chosen->size(1);
  }
}

void attention_out(Tensor queries, Tensor keys, Tensor values, std::optional<Tensor> query_norm,
                   std::optional<Tensor> key_norm, double eps, Tensor cos, Tensor sin,
                   Tensor cached_keys, Tensor cached_values, std::int64_t start,
                   std::int64_t window, double scale, std::optional<Tensor> parents, Tensor out,
                   std::optional<Tensor> sinks, std::optional<Tensor> chosen) {
  const ScalarType type = queries.scalar_type();
  for (const Tensor *tensor : {&queries, &keys, &values, &cos, &sin, &out}) {
    check(*tensor, "queries, keys, values, cos, sin and out", 2, type);
  }
  check(cached_keys, "cached_keys", 3, type);
  check(cached_values, "cached_values", 3, type);
  const std::int64_t rows = queries.size(0), kv_heads = cached_keys.size(0);
  const std::int64_t capacity = cached_keys.size(1), width = cached_keys.size(2);
  const std::int64_t value_width = cached_values.size(2);
  STD_TORCH_CHECK(kv_heads > 0 && width > 0 && queries.size(1) > 0 &&
                      queries.size(1) % (kv_heads * width) == 0 && keys.size(0) == rows &&
                      keys.size(1) == kv_heads * width && values.size(0) == rows &&
                      values.size(1) == kv_heads * value_width && out.size(0) == rows &&
                      out.size(1) == queries.size(1) / width * value_width,
                  "queries, keys, values and out must be rows of the heads that are cached");
  STD_TORCH_CHECK(cached_values.size(0) == kv_heads && cached_values.size(1) == capacity &&
                      value_width > 0,
                  "keys and values must be cached alike");
  STD_TORCH_CHECK(cos.size(0) == rows && sin.size(0) == rows && sin.size(1) == cos.size(1) &&
                      cos.size(1) % 2 == 0 && cos.size(1) <= width,
                  "cos and sin must have a row for each of queries, no wider than a head");
  const std::int64_t query_columns = norm_columns(query_norm, queries.size(1), type);
  const std::int64_t key_columns = norm_columns(key_norm, keys.size(1), type);
  AttentionSpan span =
      span_of(queries, queries.size(1) / width, kv_heads, capacity, start, window, scale, parents);
  if (sinks.has_value()) {
    check(*sinks, "sinks", 1, type);
    STD_TORCH_CHECK(sinks->size(0) == span.heads, "sinks must be one for each head");
    span.sinks = sinks->const_data_ptr();
  }
  choose(span, chosen);
  if (rows == 0) {
    return;
  }
  attention({
      span,
      width,
      value_width,
      cos.size(1),
      queries.const_data_ptr(),
      keys.const_data_ptr(),
      values.const_data_ptr(),
      cos.const_data_ptr(),
      sin.const_data_ptr(),
      query_norm.has_value() ? query_norm->const_data_ptr() : nullptr,
      key_norm.has_value() ? key_norm->const_data_ptr() : nullptr,
      query_columns,
      key_columns,
      float(eps),
      cached_keys.mutable_data_ptr(),
      cached_values.mutable_data_ptr(),
      out.mutable_data_ptr(),
  });
}

void latent_attention_out(Tensor queries, Tensor latents, Tensor norm, double eps, Tensor expansion,
                          Tensor cos, Tensor sin, bool interleaved, Tensor cached_latents,
                          Tensor cached_rotary, std::int64_t start, std::int64_t window,
                          double scale, std::optional<Tensor> parents, Tensor out,
                          std::optional<Tensor> chosen) {
  const ScalarType type = queries.scalar_type();
  for (const Tensor *tensor : {&queries, &latents, &expansion, &out}) {
    check(*tensor, "queries, latents, expansion and out", 2, type);
  }
  check(norm, "norm", 1, type);
  check(cached_latents, "cached_latents", 3, type);
  check(cached_rotary, "cached_rotary", 3, type);
  const std::int64_t rows = queries.size(0), capacity = cached_latents.size(1);
  const std::int64_t rank = cached_latents.size(2), rotary = cached_rotary.size(2);
  STD_TORCH_CHECK(cached_latents.size(0) == 1 && cached_rotary.size(0) == 1 &&
                      cached_rotary.size(1) == capacity && rank > 0 && rotary > 0 &&
                      rotary % 2 == 0,
                  "latents and rotated keys must be cached alike, as one head");
  STD_TORCH_CHECK(latents.size(0) == rows && latents.size(1) == rank + rotary &&
                      norm.size(0) == rank && expansion.size(1) == rank && out.size(0) == rows,
                  "latents, norm, expansion and out must be of the rows and latents");
  // heads * (key + rotary) columns of queries, heads * value of out, heads * (key + value) rows.
  const std::int64_t rotated = queries.size(1) + out.size(1) - expansion.size(0);
  STD_TORCH_CHECK(rotated > 0 && rotated % rotary == 0,
                  "queries, expansion and out must be of the same heads");
  const std::int64_t heads = rotated / rotary;
  const std::int64_t key_width = queries.size(1) / heads - rotary;
  STD_TORCH_CHECK(queries.size(1) % heads == 0 && out.size(1) % heads == 0 && key_width > 0 &&
                      out.size(1) > 0,
                  "queries, expansion and out must be of the same heads");
  const bool neighbours = interleaved && cos.scalar_type() == ScalarType::Float && cos.dim() == 2 &&
                          2 * cos.size(1) == rotary;
  for (const Tensor *tensor : {&cos, &sin}) {
    check(*tensor, "cos and sin", 2, neighbours ? ScalarType::Float : type);
    STD_TORCH_CHECK(tensor->size(0) == rows &&
                        tensor->size(1) == (neighbours ? rotary / 2 : rotary),
                    "cos and sin must have a row for each of queries, of the rotated columns");
  }
  AttentionSpan span = span_of(queries, heads, 1, capacity, start, window, scale, parents);
  choose(span, chosen);
  if (rows == 0) {
    return;
  }
  latent_attention({
      span,
      rank,
      rotary,
      key_width,
      out.size(1) / heads,
      neighbours    ? RotaryColumns::neighbours
      : interleaved ? RotaryColumns::parted
                    : RotaryColumns::halves,
      queries.const_data_ptr(),
      latents.const_data_ptr(),
      norm.const_data_ptr(),
      float(eps),
      expansion.const_data_ptr(),
      cos.const_data_ptr(),
      sin.const_data_ptr(),
      cached_latents.mutable_data_ptr(),
      cached_rotary.mutable_data_ptr(),
      out.mutable_data_ptr(),
  });
}

// Rows of heads [heads, rows, width], each contiguous.
HeadRows head_rows(const Tensor &tensor, const char *name, ScalarType type) {
  STD_TORCH_CHECK(tensor.dim() == 3 && tensor.scalar_type() == type &&
                      (tensor.size(2) == 1 || tensor.stride(2) == 1),
                  name, " must be heads of contiguous rows, of one dtype with query");
  return {tensor.const_data_ptr(), tensor.stride(0), tensor.stride(1)};
}

void masked_attention_out(Tensor query, Tensor key, Tensor value, Tensor mask, double scale,
                          std::optional<Tensor> sinks, Tensor out) {
  const ScalarType type = query.scalar_type();
  const HeadRows queries = head_rows(query, "query", type), keys = head_rows(key, "key", type);
  const HeadRows values = head_rows(value, "value", type);
  check(mask, "mask", 2, ScalarType::Bool);
  check(out, "out", 3, type);
  const std::int64_t heads = query.size(0), kv_heads = key.size(0), rows = query.size(1);
  const std::int64_t entries = key.size(1), key_width = key.size(2), value_width = value.size(2);
  STD_TORCH_CHECK(kv_heads > 0 && heads % kv_heads == 0 && heads > 0 && entries > 0 &&
                      key_width > 0 && value_width > 0 && query.size(2) == key_width &&
                      value.size(0) == kv_heads && value.size(1) == entries,
                  "query, key and value must be of the same heads and entries");
  STD_TORCH_CHECK(mask.size(0) == rows && mask.size(1) == entries && out.size(0) == rows &&
                      out.size(1) == heads && out.size(2) == value_width,
                  "mask and out must be of the rows of query");
  const void *scores = nullptr;
  if (sinks.has_value()) {
    check(*sinks, "sinks", 1, type);
    STD_TORCH_CHECK(sinks->size(0) == heads, "sinks must be one for each head");
    scores = sinks->const_data_ptr();
  }
  masked_attention({heads, kv_heads, rows, entries, key_width, value_width, queries, keys, values,
                    static_cast<const bool *>(mask.const_data_ptr()), word_of(query, "query"),
                    float(scale), scores, out.mutable_data_ptr()});
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(speq, CPU, m) {
  m.impl("attention_out", SPEQ_BOX_AT(attention_out, 10));
  m.impl("latent_attention_out", SPEQ_BOX_AT(latent_attention_out, 10));
  m.impl("masked_attention_out", SPEQ_BOX(masked_attention_out));
}
