#include "cpu/latent_attention.h"

#include <algorithm>

#include "cpu/add_rows.h"
#include "cpu/norm.h"
#include "cpu/pool.h"
#include "cpu/rotary.h"

namespace speq::cpu {
namespace {

// Heads of queries that read a block of latents together: few, as all share one head of keys.
constexpr std::int64_t kShareHeads = 8;

template <typename Type> class LatentAttention {
public:
  explicit LatentAttention(const LatentAttentionProblem &problem)
      : problem_(problem), rotary_queries_(queries(problem.rotary)),
        latent_queries_(queries(problem.rank)), mixed_(queries(problem.rank)),
        blocks_(problem.span,
                {{problem.cached_latents, problem.rank, &latent_queries_},
                 {problem.cached_rotary, problem.rotary, &rotary_queries_}},
                problem.cached_latents, problem.rank, kShareHeads) {}

  void run() {
    write_rows();
    const std::int64_t heads = problem_.span.heads, rank = problem_.rank;
    const auto of_bytes = [&](std::int64_t width) {
      return grain(width * rank * std::int64_t(sizeof(Type)));
    };
    parallel_for(0, heads, of_bytes(problem_.key_width),
                 each([&](std::int64_t head) { absorb(head); }));
    parallel_for(0, blocks_.shares(), grain(blocks_.share_bytes()),
                 [&](std::int64_t begin, std::int64_t end) { blocks_.attend(begin, end); });
    parallel_for(0, heads, of_bytes(problem_.value_width),
                 each([&](std::int64_t head) { expand(head); }));
  }

private:
  template <typename Body> static auto each(const Body &body) {
    return [body](std::int64_t begin, std::int64_t end) {
      for (std::int64_t at = begin; at < end; ++at) {
        body(at);
      }
    };
  }

  ExactRows queries(std::int64_t width) const {
    const AttentionSpan &span = problem_.span;
    return ExactRows(span.rows * span.heads, width, span.word, span.word);
  }

  // The row's query of a head.
  const Type *query(std::int64_t row, std::int64_t head) const {
    const std::int64_t width = problem_.key_width + problem_.rotary;
    return static_cast<const Type *>(problem_.queries) + (row * problem_.span.heads + head) * width;
  }

  // The rows of the expansion that are of a head: keys, and then values.
  const Type *expansion(std::int64_t head) const {
    const std::int64_t rows = problem_.key_width + problem_.value_width;
    return static_cast<const Type *>(problem_.expansion) + head * rows * problem_.rank;
  }

  void rotate(std::int64_t row, const Type *columns, Type *out) const {
    const std::int64_t rotary = problem_.rotary;
    if (problem_.columns == RotaryColumns::neighbours) {
      const std::int64_t at = row * rotary / 2;
      std::copy_n(columns, rotary, out);
      rotate_pairs(out, static_cast<const float *>(problem_.cos) + at,
                   static_cast<const float *>(problem_.sin) + at, rotary);
      return;
    }
    if (problem_.columns == RotaryColumns::parted) {
      part_pairs(columns, rotary, out);
    } else {
      std::copy_n(columns, rotary, out);
    }
    rotate_halves(out, static_cast<const Type *>(problem_.cos) + row * rotary,
                  static_cast<const Type *>(problem_.sin) + row * rotary, rotary);
  }

  // Writes the rows' latents and rotated keys to the cache, and rotates the queries.
  void write_rows() {
    const std::int64_t rank = problem_.rank, rotary = problem_.rotary;
    std::vector<Type> rotated(rotary);
    for (std::int64_t row = 0; row < problem_.span.rows; ++row) {
      const std::int64_t entry = problem_.span.start + row;
      const Type *latent = static_cast<const Type *>(problem_.latents) + row * (rank + rotary);
      rms_norm(latent, static_cast<const Type *>(problem_.norm_weight), rank, problem_.eps,
               static_cast<Type *>(problem_.cached_latents) + entry * rank);
      rotate(row, latent + rank, static_cast<Type *>(problem_.cached_rotary) + entry * rotary);
      for (std::int64_t head = 0; head < problem_.span.heads; ++head) {
        rotate(row, query(row, head) + problem_.key_width, rotated.data());
        rotary_queries_.fill(row * problem_.span.heads + head, rotated.data());
      }
    }
  }

  // Multiplies a head's queries by its keys' part of the expansion.
  void absorb(std::int64_t head) {
    const std::int64_t rows = problem_.span.rows, width = problem_.key_width;
    const std::int64_t rank = problem_.rank;
    std::vector<float> weights(rows * width), sums(rows * rank, 0.0f);
    std::vector<const float *> weight_rows(rows);
    std::vector<float *> sum_rows(rows);
    for (std::int64_t row = 0; row < rows; ++row) {
      std::transform(query(row, head), query(row, head) + width, &weights[row * width],
                     [](Type word) { return to_float(word); });
      weight_rows[row] = &weights[row * width];
      sum_rows[row] = &sums[row * rank];
    }
    add_rows_for(problem_.span.word)(expansion(head), rank, width, weight_rows.data(), rows,
                                     sum_rows.data());
    for (std::int64_t row = 0; row < rows; ++row) {
      put(latent_queries_, row * problem_.span.heads + head, sum_rows[row]);
    }
  }

  // Multiplies what a head's queries got of the latents by its values' part of the expansion.
  void expand(std::int64_t head) {
    const std::int64_t rows = problem_.span.rows, width = problem_.value_width;
    const std::int64_t rank = problem_.rank;
    std::vector<float> mixed(rank), results(rows * width);
    std::vector<const void *> inputs(rows);
    std::vector<float *> outs(rows);
    for (std::int64_t row = 0; row < rows; ++row) {
      const std::int64_t at = row * problem_.span.heads + head;
      blocks_.merge(at, mixed.data());
      put(mixed_, at, mixed.data());
      inputs[row] = mixed_.row(at);
      outs[row] = &results[row * width];
    }
    mixed_.dot()(expansion(head) + problem_.key_width * rank, rank, width, inputs.data(), rows,
                 outs.data());
    for (std::int64_t row = 0; row < rows; ++row) {
      Type *out = static_cast<Type *>(problem_.out) + (row * problem_.span.heads + head) * width;
      for (std::int64_t k = 0; k < width; ++k) {
        store(outs[row][k], out[k]);
      }
    }
  }

  // Rounded as every instruction set rounds it.
  void put(ExactRows &rows, std::int64_t at, float *values) const {
    for (std::int64_t k = 0; k < problem_.rank; ++k) {
      values[k] = rounded_to<Type>(values[k]);
    }
    rows.fill(at, 0, problem_.rank, values);
  }

  const LatentAttentionProblem &problem_;
  ExactRows rotary_queries_, latent_queries_, mixed_; // [rows * heads]
  BlockAttention blocks_;
};

} // namespace

void latent_attention(const LatentAttentionProblem &problem) {
  with_type(problem.span.word, [&](auto type) { LatentAttention<decltype(type)>(problem).run(); });
}

} // namespace speq::cpu
