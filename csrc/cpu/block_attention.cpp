#include "cpu/block_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "cpu/add_rows.h"

namespace speq::cpu {
namespace {

// Positions of a block. Blocks begin at multiples of it and are merged in their order, so that the
// order of a row's sums depends neither on the rows beside it, nor on threads, nor on where its KV
// is.
constexpr std::int64_t kEntries = 512;

const std::byte *entries_of(const void *cached, std::int64_t entry, std::int64_t width, Word word) {
  return static_cast<const std::byte *>(cached) + entry * width * bytes_of(word);
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

BlockAttention::BlockAttention(const AttentionSpan &span, std::vector<KeyPart> keys,
                               const void *values, std::int64_t value_width,
                               std::int64_t share_heads)
    : span_(span), keys_(std::move(keys)), values_(values), value_width_(value_width),
      root_(span.start + span.rows - span.nodes), group_(span.heads / span.kv_heads),
      share_heads_(std::min(share_heads, group_)),
      head_groups_((group_ + share_heads_ - 1) / share_heads_),
      seen_first_(std::numeric_limits<std::int64_t>::max()), end_(0) {
  for (std::int64_t node = span.nodes - span.rows; node < span.nodes; ++node) {
    paths_.push_back(path_to(node, span.parents));
  }
  for (std::int64_t row = 0; row < span.rows; ++row) {
    seen_first_ = std::min(seen_first_, first_of(row));
    end_ = std::max(end_, behind(row));
  }
  first_block_ = seen_first_ / kEntries;
  blocks_ = (end_ + kEntries - 1) / kEntries - first_block_;
  totals_.resize(span.kv_heads * blocks_ * span.rows * group_);
  sums_ = Buffer<float>(totals_.size() * value_width);
}

std::int64_t BlockAttention::share_bytes() const {
  std::int64_t width = value_width_;
  for (const KeyPart &part : keys_) {
    width += part.width;
  }
  return (end_ - seen_first_ + blocks_ - 1) / blocks_ * width * bytes_of(span_.word);
}

void BlockAttention::attend(std::int64_t begin, std::int64_t end) {
  with_type(span_.word, [&](auto type) {
    for (std::int64_t at = begin; at < end; ++at) {
      const std::int64_t heads = at / blocks_, first_head = heads % head_groups_ * share_heads_;
      attend_share<decltype(type)>({heads / head_groups_, first_block_ + at % blocks_, first_head,
                                    std::min(share_heads_, group_ - first_head)});
    }
  });
}

std::vector<const std::byte *> BlockAttention::keys_at(const Share &share,
                                                       std::int64_t entry) const {
  std::vector<const std::byte *> keys;
  for (const KeyPart &part : keys_) {
    keys.push_back(
        entries_of(part.cached, share.kv_head * span_.capacity + entry, part.width, span_.word));
  }
  return keys;
}

BlockAttention::Bytes BlockAttention::copy_of(const Share &share, const void *cached,
                                              std::int64_t width,
                                              const std::vector<std::int64_t> &entries) const {
  const std::int64_t bytes = width * bytes_of(span_.word);
  Bytes copy(entries.size() * bytes);
  for (std::size_t at = 0; at < entries.size(); ++at) {
    const std::int64_t entry = share.kv_head * span_.capacity + entries[at];
    std::copy_n(entries_of(cached, entry, width, span_.word), bytes, &copy[at * bytes]);
  }
  return copy;
}

std::optional<std::vector<std::int64_t>>
BlockAttention::chosen_of(std::int64_t row, std::int64_t from, std::int64_t to) const {
  std::vector<std::int64_t> entries;
  for (std::int64_t at = from; at < to && span_.chosen != nullptr; ++at) {
    if (attends(row, at)) {
      entries.push_back(entry_at(row, at));
    }
  }
  if (span_.chosen == nullptr || 4 * std::int64_t(entries.size()) >= 3 * (to - from)) {
    return std::nullopt;
  }
  return entries;
}

void BlockAttention::score(const Share &share, std::int64_t first_row,
                           const std::vector<const std::byte *> &keys, std::int64_t count,
                           const std::vector<float *> &scores) const {
  const std::int64_t queries = scores.size();
  std::vector<const void *> inputs(queries);
  std::vector<float> more;
  for (std::size_t at = 0; at < keys_.size(); ++at) {
    const KeyPart &part = keys_[at];
    for (std::int64_t i = 0; i < queries; ++i) {
      const std::int64_t row = first_row + i / share.heads;
      const std::int64_t head = share.first_head + i % share.heads;
      inputs[i] = part.queries->row(row * span_.heads + share.kv_head * group_ + head);
    }
    std::vector<float *> outs = scores;
    if (at > 0) {
      more.resize(queries * count);
      for (std::int64_t i = 0; i < queries; ++i) {
        outs[i] = &more[i * count];
      }
    }
    part.queries->dot()(keys[at], part.width, count, inputs.data(), queries, outs.data());
    for (std::int64_t i = 0; i < queries && at > 0; ++i) {
      for (std::int64_t k = 0; k < count; ++k) {
        scores[i][k] += outs[i][k];
      }
    }
  }
}

template <typename Type> void BlockAttention::attend_share(const Share &share) {
  const std::int64_t nodes = span_.nodes, heads = share.heads, queries = span_.rows * heads;
  const std::int64_t first = std::max(share.block * kEntries, seen_first_);
  const std::int64_t last = std::min((share.block + 1) * kEntries, end_);
  const AddRows add_rows = add_rows_for(span_.word);
  const auto soften = micro_kernels().soften;
  const auto *values =
      entries_of(values_, share.kv_head * span_.capacity, value_width_, span_.word);

  // Of the query of row r and of head g of the share, at r * heads + g.
  std::vector<float> scores(queries * (last - first)), node_scores;
  std::vector<float *> score_rows(queries), node_score_rows(queries), sums(queries);
  std::vector<SoftmaxSum *> totals(queries);
  for (std::int64_t i = 0; i < queries; ++i) {
    const std::int64_t row = i / heads, head = share.first_head + i % heads;
    const std::int64_t partial = partial_at(share.kv_head, share.block) + row * group_ + head;
    score_rows[i] = &scores[i * (last - first)];
    sums[i] = sums_.data() + partial * value_width_;
    std::fill_n(sums[i], value_width_, 0.0f);
    totals[i] = &totals_[partial];
    *totals[i] = {-std::numeric_limits<float>::infinity(), 0.0f};
    if (span_.sinks != nullptr && first_of(row) / kEntries == share.block) {
      const auto *sinks = static_cast<const Type *>(span_.sinks) + share.kv_head * group_;
      *totals[i] = {to_float(sinks[head]), 1.0f};
    }
  }
  // Rows that leave out much of what they see here score the rest alone.
  std::vector<std::optional<std::vector<std::int64_t>>> chosen(span_.rows);
  bool whole = false;
  for (std::int64_t row = 0; row < span_.rows; ++row) {
    chosen[row] = chosen_of(row, std::max(first, first_of(row)), std::min(last, behind(row)));
    whole = whole || !chosen[row].has_value();
  }
  const std::int64_t past = std::min(last, root_);
  if (whole && first < past) {
    score(share, 0, keys_at(share, first), past - first, score_rows);
  }
  if (whole && last > root_) {
    node_scores.resize(queries * nodes);
    for (std::int64_t i = 0; i < queries; ++i) {
      node_score_rows[i] = &node_scores[i * nodes];
    }
    score(share, 0, keys_at(share, root_), nodes, node_score_rows);
  }
  for (std::int64_t row = 0; row < span_.rows; ++row) {
    const std::int64_t from = std::max(first, first_of(row)), to = std::min(last, behind(row));
    if (from >= to) {
      continue;
    }
    float **weights = &score_rows[row * heads];
    const auto weigh = [&](std::int64_t count) {
      for (std::int64_t g = 0; g < heads; ++g) {
        soften(weights[g], count, span_.scale, *totals[row * heads + g]);
        for (std::int64_t k = 0; k < count; ++k) {
          weights[g][k] = rounded_to<Type>(weights[g][k]); // as torch's attention rounds them
        }
      }
    };
    if (chosen[row].has_value()) {
      const std::vector<std::int64_t> &entries = *chosen[row];
      const std::int64_t count = entries.size();
      if (count == 0) {
        continue;
      }
      std::vector<Bytes> parts;
      std::vector<const std::byte *> keys;
      for (const KeyPart &part : keys_) {
        parts.push_back(copy_of(share, part.cached, part.width, entries));
        keys.push_back(parts.back().data());
      }
      score(share, row, keys, count, {weights, weights + heads});
      weigh(count);
      if (keys_[0].cached != values_) { // latents are both
        parts[0] = copy_of(share, values_, value_width_, entries);
      }
      add_rows(parts[0].data(), value_width_, count, weights, heads, &sums[row * heads]);
      continue;
    }
    for (std::int64_t g = 0; g < heads; ++g) {
      weights[g] += from - first;
      for (std::int64_t at = std::max(from, root_); at < to; ++at) {
        weights[g][at - from] = node_score_rows[row * heads + g][entry_at(row, at) - root_];
      }
    }
    for (std::int64_t at = from; at < to && span_.chosen != nullptr; ++at) {
      for (std::int64_t g = 0; g < heads && !attends(row, at); ++g) {
        weights[g][at - from] = -std::numeric_limits<float>::infinity();
      }
    }
    weigh(to - from);
    for (std::int64_t at = from, next; at < to; at = next) {
      // Contiguous KV is summed in one call.
      const std::int64_t entry = entry_at(row, at);
      next = std::max(at + 1, std::min(root_, to));
      while (next < to && entry_at(row, next) == entry + next - at) {
        ++next;
      }
      add_rows(entries_of(values, entry, value_width_, span_.word), value_width_, next - at,
               weights, heads, &sums[row * heads]);
      for (std::int64_t g = 0; g < heads; ++g) {
        weights[g] += next - at;
      }
    }
  }
}

void BlockAttention::merge(std::int64_t query, float *out) const {
  const std::int64_t row = query / span_.heads, head = query % span_.heads;
  const std::int64_t i = row * group_ + head % group_;
  const std::int64_t first = first_of(row) / kEntries, last = (behind(row) - 1) / kEntries;
  SoftmaxSum total = {};
  for (std::int64_t block = first; block <= last; ++block) {
    const std::int64_t at = partial_at(head / group_, block) + i;
    const SoftmaxSum &part = totals_[at];
    const float *part_sums = sums_.data() + at * value_width_;
    if (block == first || total.sum == 0.0f) {
      total = part;
      std::copy_n(part_sums, value_width_, out);
      continue;
    }
    if (part.sum == 0.0f) { // the row attends to nothing there
      continue;
    }
    const float most = std::max(total.most, part.most);
    const float before = std::exp(total.most - most), added = std::exp(part.most - most);
    for (std::int64_t k = 0; k < value_width_; ++k) {
      out[k] = out[k] * before + part_sums[k] * added;
    }
    total = {most, total.sum * before + part.sum * added};
  }
  if (total.sum == 0.0f) { // the row attends to nothing at all
    return;
  }
  for (std::int64_t k = 0; k < value_width_; ++k) {
    out[k] /= total.sum;
  }
}

} // namespace speq::cpu
