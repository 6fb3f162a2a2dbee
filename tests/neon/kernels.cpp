// The kernels of NEON beside the plain ones, on random problems, away from torch: words bit for
// bit, products of coded rows bit for bit those of their words, sums within rounding of the same in
// double; sums of pairs bit for bit those of a model of the instruction. Run on any machine by
// qemu-aarch64, and the plain ones alone where it is compiled for another processor. Prints how
// many comparisons there were, and a digest of the products that have the order of
// csrc/sum_order.h: it is the same on all processors. Ends with 1 at the first comparison that
// fails.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "cpu/encode.h"
#include "cpu/isa.h"
#include "cpu/records.h"

namespace {

using namespace speq;
using namespace speq::cpu;

std::mt19937_64 random_bits(7);
std::int64_t comparisons = 0;

std::int64_t drawn(std::int64_t least, std::int64_t most) {
  return least + std::int64_t(random_bits() % std::uint64_t(most - least + 1));
}

// Nearly so: of whole numbers, so that no mathematical library has a part in it.
float normal() {
  std::int64_t sum = 0;
  for (int part = 0; part < 4; ++part) {
    sum += drawn(-1'000'000, 1'000'000);
  }
  return float(sum) / 1.2e6f;
}

void require(bool holds, const char *isa, const std::string &what) {
  ++comparisons;
  if (!holds) {
    std::printf("%s: %s\n", isa, what.c_str());
    std::exit(1);
  }
}

// Memory behind which there is nothing to read but `slack`, so that the checkers see what is.
std::vector<std::uint8_t> bytes_of(std::int64_t count, std::int64_t slack) {
  std::vector<std::uint8_t> bytes(count + slack);
  for (std::uint8_t &byte : bytes) {
    byte = std::uint8_t(random_bits());
  }
  return bytes;
}

template <typename Word> struct Inputs {
  std::vector<std::vector<Word>> rows;
  std::vector<const void *> pointers;

  template <typename Draw>
  Inputs(std::int64_t count, std::int64_t columns, std::int64_t multiple, const Draw &draw) {
    const std::int64_t padded = (columns + multiple - 1) / multiple * multiple;
    for (std::int64_t r = 0; r < count; ++r) {
      rows.emplace_back(padded, Word{});
      std::generate_n(rows.back().begin(), columns, draw);
    }
    for (const std::vector<Word> &row : rows) {
      pointers.push_back(row.data());
    }
  }
};

struct InputRows : Inputs<float> {
  InputRows(std::int64_t count, std::int64_t columns)
      : Inputs(count, columns, kBlockColumns, normal) {}
};

// Inputs of pairs, padded as ExactRows has them. exponents: 0, or so many from that of subnormal
// words on, and now and then any bits.
struct PairRows : Inputs<BFloat16> {
  PairRows(std::int64_t count, std::int64_t columns, std::int64_t exponents)
      : Inputs(count, columns, kExactColumns, [=] { return drawn_word(exponents); }) {}

  static BFloat16 drawn_word(std::int64_t exponents) {
    const std::uint64_t bits = random_bits();
    if (exponents == 0) {
      return to_bfloat16(normal());
    }
    const auto exponent = std::uint64_t(drawn(0, exponents - 1)) << 7;
    return {std::uint16_t(drawn(0, 999) == 0 ? bits : (bits & 0x807F) | exponent)};
  }

  // Around those whose products are the smallest normal floats, or larger ones, or none.
  static std::int64_t drawn_exponents() { return drawn(0, 1) * drawn(50, 160); }
};

struct Results {
  std::vector<std::vector<float>> rows;
  std::vector<float *> pointers;

  Results(std::int64_t count, std::int64_t columns) : rows(count, std::vector<float>(columns)) {
    for (std::vector<float> &row : rows) {
      pointers.push_back(row.data());
    }
  }
};

// The sign of what is no number is the compiler's choice.
bool same_bits(float one, float other) {
  return bits_as<std::uint32_t>(one) == bits_as<std::uint32_t>(other) ||
         (std::isnan(one) && std::isnan(other));
}

std::uint64_t digest = 0;
std::int64_t products = 0;

// Fowler-Noll-Vo 1a, word by word.
void digested(const Results &results) {
  for (const std::vector<float> &row : results.rows) {
    for (const float value : row) {
      const std::uint32_t bits = std::isnan(value) ? 0x7FC00000 : bits_as<std::uint32_t>(value);
      digest = (digest ^ bits) * 0x100000001B3;
      ++products;
    }
  }
}

// Words of a matrix by both, and its products by those of its words.
template <typename Rows>
void check_coded(const char *isa, const MicroKernels &kernels, const CodedKernels<Rows> &coded,
                 const CodedKernels<Rows> &plain, const Rows &matrix, const std::string &what) {
  const std::int64_t quads = quads_of(matrix.rows), columns = matrix.columns;
  std::vector<BFloat16> words(quads * kQuadRows * columns), wanted(words.size());
  for (std::int64_t quad = 0; quad < quads; ++quad) {
    coded.decode(matrix, quad, words.data() + quad * kQuadRows * columns);
    plain.decode(matrix, quad, wanted.data() + quad * kQuadRows * columns);
  }
  for (std::int64_t at = 0; at < matrix.rows * columns; ++at) {
    require(same_bits(to_float(words[at]), to_float(wanted[at])), isa, what + ": words");
  }
  for (const std::int64_t count : {std::int64_t(1), drawn(2, 9)}) {
    const InputRows inputs(count, columns);
    Results found(count, matrix.rows), of_words(count, matrix.rows);
    coded.dot(matrix, 0, matrix.rows, inputs.pointers.data(), count, found.pointers.data());
    kernels.dot_bfloat16(wanted.data(), columns, matrix.rows, inputs.pointers.data(), count,
                         of_words.pointers.data());
    digested(found);
    for (std::int64_t r = 0; r < count; ++r) {
      for (std::int64_t n = 0; n < matrix.rows; ++n) {
        require(same_bits(found.rows[r][n], of_words.rows[r][n]), isa,
                what + ": products are not those of the words");
      }
    }
    if (kernels.dot_bfloat16_pairs != nullptr) {
      // All sets of kernels are given the same problems, for one digest.
      const std::mt19937_64 before = random_bits;
      const PairRows pairs(count, columns, 0);
      random_bits = before;
      coded.dot_pairs(matrix, 0, matrix.rows, pairs.pointers.data(), count, found.pointers.data());
      kernels.dot_bfloat16_pairs(wanted.data(), columns, matrix.rows, pairs.pointers.data(), count,
                                 of_words.pointers.data());
      for (std::int64_t r = 0; r < count; ++r) {
        for (std::int64_t n = 0; n < matrix.rows; ++n) {
          require(same_bits(found.rows[r][n], of_words.rows[r][n]), isa,
                  what + ": products of pairs are not those of the words");
        }
      }
    }
  }
}

void check_compact(const char *isa, const MicroKernels &kernels, bool lossless) {
  const std::int64_t rows = drawn(1, 21);
  const std::int64_t columns = lossless ? drawn(1, 300) : 32 * drawn(1, 9);
  const bool wild = drawn(0, 3) == 0; // any bits: escapes everywhere
  std::vector<BFloat16> words(rows * columns);
  for (BFloat16 &word : words) {
    word = wild ? BFloat16{std::uint16_t(random_bits())} : to_bfloat16(0.02f * normal());
  }
  const std::int64_t group_size =
      lossless ? 32 : std::int64_t(32) << (drawn(0, 1) * (columns % 64 == 0));
  std::vector<std::uint8_t> qweight = bytes_of(rows * columns / 2, 64);
  std::vector<Float16> scales(rows * columns / group_size + 4);
  std::generate(scales.begin(), scales.end(),
                [] { return to_float16(0.01f * std::fabs(normal())); });
  const Int4Matrix codes = {qweight.data(), scales.data(), columns, group_size};
  const CompactLayout layout = dense_layout(rows, columns, lossless);
  std::vector<std::uint8_t> record;
  const auto encode = [&](const CompactEncoder &encoder) {
    record.assign(encoder.nbytes(), 0);
    encoder.write(record.data());
  };
  if (lossless) {
    encode(LosslessEncoder(layout, {words.data()}, kOnlyMatrix));
    const LosslessRows matrix =
        lossless_rows(layout, {record.data(), std::int64_t(record.size())}, 0);
    std::vector<BFloat16> again(quads_of(rows) * kQuadRows * columns);
    for (std::int64_t quad = 0; quad < quads_of(rows); ++quad) {
      kernels.lossless.decode(matrix, quad, again.data() + quad * kQuadRows * columns);
    }
    require(std::memcmp(again.data(), words.data(), words.size() * sizeof(BFloat16)) == 0, isa,
            "lossless: words are not those that were encoded");
    check_coded(isa, kernels, kernels.lossless, portable_kernels.lossless, matrix, "lossless");
  } else {
    encode(ResidualEncoder(layout, {words.data()}, {codes}, kOnlyMatrix));
    check_coded(isa, kernels, kernels.residual, portable_kernels.residual,
                residual_rows(layout, {record.data(), std::int64_t(record.size())}, 0, codes),
                "residual");
  }
}

void check_scaled(const char *isa, const MicroKernels &kernels) {
  const std::int64_t rows = 4 * drawn(1, 5), columns = 32 * drawn(1, 9);
  std::vector<std::uint8_t> codes = bytes_of(rows * columns, 64);
  {
    const std::int64_t odd = drawn(1, 300); // of FP8 any number of columns goes
    std::vector<std::uint8_t> bytes = bytes_of(rows * odd, 64);
    if (drawn(0, 1)) { // normal codes alone, as most blocks are
      for (std::uint8_t &byte : bytes) {
        byte = std::uint8_t((byte & 0x80) | (8 + (byte & 0x7F) % 0x70));
      }
    }
    std::vector<float> scales(rows * odd);
    constexpr float kOdd[4] = {0.0f, 1e-36f, -0.25f, INFINITY};
    for (float &scale : scales) {
      scale = drawn(0, 5) == 0 ? kOdd[drawn(0, 3)] : 0.01f * normal();
    }
    for (const Fp8Blocks blocks : {Fp8Blocks{128, 128}, Fp8Blocks{1, 0}, Fp8Blocks{0, 0}}) {
      check_coded(isa, kernels, kernels.fp8, portable_kernels.fp8,
                  Fp8Rows{rows, odd, bytes.data(), scales.data(), blocks}, "fp8");
    }
  }
  {
    const std::vector<std::uint8_t> scales = bytes_of(rows * columns / kMxfp4Block, 64);
    check_coded(
        isa, kernels, kernels.mxfp4, portable_kernels.mxfp4,
        Mxfp4Rows{rows, columns, codes.data(), scales.data(), columns / 2, columns / kMxfp4Block},
        "mxfp4");
  }
  {
    const std::int64_t group_size = columns % 128 == 0 ? 128 : 32, groups = columns / group_size;
    std::vector<std::uint16_t> scales(rows * groups);
    for (std::uint16_t &scale : scales) {
      scale = drawn(0, 7) == 0 ? std::uint16_t(random_bits()) : to_bfloat16(0.01f * normal()).bits;
    }
    std::vector<std::uint32_t> zeros((rows + kZeroRows - 1) / kZeroRows * groups);
    std::generate(zeros.begin(), zeros.end(), [] { return std::uint32_t(random_bits()); });
    check_coded(isa, kernels, kernels.int4, portable_kernels.int4,
                Int4Rows{rows, columns, codes.data(), scales.data(),
                         drawn(0, 1) ? zeros.data() : nullptr, group_size, drawn(0, 1) == 1},
                "int4");
  }
  {
    const std::vector<std::uint8_t> scales = bytes_of(rows * columns / kNvfp4Block, 64);
    check_coded(isa, kernels, kernels.nvfp4, portable_kernels.nvfp4,
                Nvfp4Rows{rows, columns, codes.data(), scales.data(), 0.37f, drawn(0, 1) == 1},
                "nvfp4");
  }
}

// Whether a sum is that of double but for rounding in float32, product by product.
bool is_near(float found, double wanted, double magnitudes, std::int64_t count) {
  return std::fabs(found - wanted) <= 1e-7 * double(count) * magnitudes + 1e-30;
}

template <typename Word>
void check_exact(const char *isa, DotExact dot, DotExact plain, AddRows add,
                 const std::string &what) {
  const std::int64_t rows = drawn(1, 9), columns = drawn(1, 600), count = drawn(1, 9);
  std::vector<Word> words(rows * columns);
  for (Word &word : words) {
    store(normal(), word);
  }
  const InputRows inputs(count, columns);
  Results found(count, rows);
  dot(words.data(), columns, rows, inputs.pointers.data(), count, found.pointers.data());
  Results in_order(count, rows); // csrc/sum_order.h
  plain(words.data(), columns, rows, inputs.pointers.data(), count, in_order.pointers.data());
  digested(found);
  for (std::int64_t r = 0; r < count; ++r) {
    for (std::int64_t n = 0; n < rows; ++n) {
      require(same_bits(found.rows[r][n], in_order.rows[r][n]), isa, what + ": order of sums");
      double sum = 0, magnitudes = 0;
      for (std::int64_t k = 0; k < columns; ++k) {
        const double product = double(to_float(words[n * columns + k])) * inputs.rows[r][k];
        sum += product;
        magnitudes += std::fabs(product);
      }
      require(is_near(found.rows[r][n], sum, magnitudes, columns), isa, what + ": product");
    }
  }
  const InputRows weights(count, rows);
  Results sums(count, columns);
  std::vector<const float *> rows_of_weights;
  for (std::int64_t r = 0; r < count; ++r) {
    rows_of_weights.push_back(weights.rows[r].data());
    std::generate(sums.rows[r].begin(), sums.rows[r].end(), normal);
  }
  const std::vector<std::vector<float>> before = sums.rows;
  add(words.data(), columns, rows, rows_of_weights.data(), count, sums.pointers.data());
  for (std::int64_t r = 0; r < count; ++r) {
    for (std::int64_t k = 0; k < columns; ++k) {
      double sum = before[r][k], magnitudes = std::fabs(sum);
      for (std::int64_t n = 0; n < rows; ++n) {
        const double product = double(to_float(words[n * columns + k])) * weights.rows[r][n];
        sum += product;
        magnitudes += std::fabs(product);
      }
      require(is_near(sums.rows[r][k], sum, magnitudes, rows + 1), isa, what + ": added rows");
    }
  }
}

void check_int4(const char *isa, const MicroKernels &kernels) {
  constexpr std::int64_t kGroups[4] = {32, 64, 128, 0};
  const std::int64_t group = kGroups[drawn(0, 3)];
  const std::int64_t columns = group == 0 ? 2 * drawn(1, 200) : group * drawn(1, 5);
  const std::int64_t group_size = group == 0 ? columns : group;
  const std::int64_t rows = drawn(1, 9), count = drawn(1, 6);
  const std::vector<std::uint8_t> qweight = bytes_of(rows * columns / 2, 0);
  std::vector<Float16> scales(rows * (columns / group_size));
  std::generate(scales.begin(), scales.end(), [] { return to_float16(0.01f * normal()); });
  const Int4Matrix matrix = {qweight.data(), scales.data(), columns, group_size};
  const InputRows inputs(count, columns);
  std::vector<std::vector<Int8Step>> steps(count, std::vector<Int8Step>(steps_of(columns)));
  std::vector<const Int8Step *> pointers;
  for (std::int64_t r = 0; r < count; ++r) {
    for (std::int64_t block = 0; block * kInt8Block < columns; ++block) {
      const std::int64_t left = columns - block * kInt8Block;
      kernels.round_block(inputs.rows[r].data() + block * kInt8Block,
                          left < kInt8Block ? left : kInt8Block, steps[r].data(), block);
    }
    pointers.push_back(steps[r].data());
  }
  Results found(count, rows), wanted(count, rows);
  kernels.dot_int4(matrix, 0, rows, pointers.data(), count, found.pointers.data());
  portable_kernels.dot_int4(matrix, 0, rows, pointers.data(), count, wanted.pointers.data());
  for (std::int64_t r = 0; r < count; ++r) {
    double magnitude = 0;
    for (const float value : inputs.rows[r]) {
      magnitude += std::fabs(value);
    }
    for (std::int64_t n = 0; n < rows; ++n) {
      require(is_near(found.rows[r][n], wanted.rows[r][n], magnitude, 8), isa,
              "int4 draft product");
    }
  }
}

void check_delta(const char *isa, const MicroKernels &kernels) {
  const std::int64_t rows = drawn(1, 40), columns = drawn(1, 70);
  std::vector<float> state(rows * columns), query(rows), key(rows), value(columns), out(columns);
  for (std::vector<float> *each : {&state, &query, &key, &value}) {
    std::generate(each->begin(), each->end(), normal);
  }
  std::vector<float> changed = state, other(columns), decays(rows);
  for (float &decay : decays) {
    decay = float(drawn(0, 100)) / 100;
  }
  DeltaToken token{query.data(), key.data(), decays.data(),   value.data(),
                   0.5f,         out.data(), drawn(0, 3) > 0, drawn(0, 1) > 0};
  kernels.delta_step(state.data(), rows, columns, token);
  token.out = other.data();
  portable_kernels.delta_step(changed.data(), rows, columns, token);
  const double magnitude = 8.0 * rows * rows;
  for (std::int64_t k = 0; k < columns; ++k) {
    require(is_near(out[k], other[k], magnitude, 8), isa, "delta rule: output");
  }
  for (std::size_t at = 0; at < state.size(); ++at) {
    require(is_near(state[at], changed[at], magnitude, 8), isa, "delta rule: state");
  }
}

void check_panels(const char *isa, const MicroKernels &kernels) {
  const std::int64_t rows = drawn(1, 15), panels = drawn(1, 5), depth = drawn(1, 70);
  std::vector<float> left(rows * depth), right(panels * depth * kPanelColumns);
  std::vector<float> sums(rows * panels * kPanelColumns);
  for (std::vector<float> *each : {&left, &right, &sums}) {
    std::generate(each->begin(), each->end(), normal);
  }
  std::vector<float> wanted = sums;
  const PanelRows of_rows = {left.data(), rows, depth};
  const Panels of_panels = {right.data(), panels, depth * kPanelColumns, depth};
  const bool adds = drawn(0, 1) == 1;
  kernels.panels(of_rows, of_panels, {sums.data(), panels * kPanelColumns, adds});
  portable_kernels.panels(of_rows, of_panels, {wanted.data(), panels * kPanelColumns, adds});
  for (std::size_t at = 0; at < sums.size(); ++at) {
    require(is_near(sums[at], wanted[at], 4.0 * depth, 8), isa, "panels");
  }
}

// BFDotAdd of the Arm architecture where FPCR.EBF is 0, by arithmetic in double alone: what is
// subnormal is zero before and after each step, and sums round to odd.
double flushed(double value) {
  return std::fabs(value) < 0x1p-126 ? std::copysign(0.0, value) : value;
}

double bounded(double value) {
  return std::fabs(value) >= 0x1p128 ? std::copysign(INFINITY, value) : flushed(value);
}

// The product of two words has 16 bits, and is whole in a float.
double modelled_product(BFloat16 one, BFloat16 other) {
  return bounded(flushed(to_float(one)) * flushed(to_float(other)));
}

double modelled_sum(double one, double other) {
  one = flushed(one), other = flushed(other);
  double sum = one + other;
  if (sum == 0.0 || !std::isfinite(sum)) {
    return sum;
  }
  const double part = sum - one; // what rounding took, whole: Knuth's TwoSum
  const double lost = (one - (sum - part)) + (other - part);
  std::uint64_t bits = bits_as<std::uint64_t>(sum);
  if (lost != 0.0 && bits % 2 == 0) {
    bits = bits_as<std::uint64_t>(std::nextafter(sum, lost > 0 ? INFINITY : -INFINITY));
  }
  constexpr std::uint64_t kBelow = (std::uint64_t(1) << 29) - 1; // what a float lacks
  bits = (bits & kBelow) != 0 ? (bits & ~kBelow) | (kBelow + 1) : bits;
  return bounded(bits_as<double>(bits));
}

// A lane of BFDOT: its sum, and a pair of each side.
double modelled_dot(double sum, const BFloat16 *one, const BFloat16 *other) {
  return modelled_sum(
      sum, modelled_sum(modelled_product(one[0], other[0]), modelled_product(one[1], other[1])));
}

// Whether a sum of pairs is that of double, but for `steps` additions that each lose at most the
// last bit of a float, and what is flushed on the way.
bool is_near_by_pairs(float found, double wanted, double magnitudes, std::int64_t steps) {
  return std::fabs(found - wanted) <= (magnitudes * 0x1p-23 + 0x1p-126) * double(steps);
}

void check_pairs(const char *isa, const MicroKernels &kernels) {
  const std::int64_t rows = drawn(1, 9), columns = drawn(1, 300), count = drawn(1, 9);
  const std::int64_t exponents = PairRows::drawn_exponents();
  constexpr std::int64_t kLanes = 4;
  // The model has zeros behind the weights, which those that are multiplied have not.
  const PairRows weights(rows, columns, exponents), inputs(count, columns, exponents);
  std::vector<BFloat16> words;
  for (const std::vector<BFloat16> &row : weights.rows) {
    words.insert(words.end(), row.begin(), row.begin() + columns);
  }
  Results found(count, rows), alone(1, 1);
  kernels.dot_bfloat16_pairs(words.data(), columns, rows, inputs.pointers.data(), count,
                             found.pointers.data());
  for (std::int64_t r = 0; r < count; ++r) {
    for (std::int64_t n = 0; n < rows; ++n) {
      float lanes[kLanes] = {};
      double sum = 0, magnitudes = 0;
      for (std::int64_t k = 0; k < std::int64_t(inputs.rows[r].size()); k += 2) {
        float &lane = lanes[k / 2 % kLanes];
        lane = float(modelled_dot(lane, &weights.rows[n][k], &inputs.rows[r][k]));
        for (std::int64_t at = k; at < k + 2; ++at) {
          const double product =
              double(to_float(weights.rows[n][at])) * to_float(inputs.rows[r][at]);
          sum += product;
          magnitudes += std::fabs(product);
        }
      }
      const float modelled = (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
      require(same_bits(found.rows[r][n], modelled), isa, "pairs: lanes");
      require(exponents > 0 || is_near_by_pairs(found.rows[r][n], sum, magnitudes, columns), isa,
              "pairs: product");
      kernels.dot_bfloat16_pairs(words.data() + n * columns, columns, 1, &inputs.pointers[r], 1,
                                 alone.pointers.data());
      require(same_bits(found.rows[r][n], alone.rows[0][0]), isa, "pairs: a row alone");
    }
  }
}

void check_panels_of_pairs(const char *isa, const MicroKernels &kernels) {
  const std::int64_t rows = drawn(1, 15), panels = drawn(1, 5), depth = 2 * drawn(1, 35);
  const bool adds = drawn(0, 1) == 1;
  const std::int64_t exponents = PairRows::drawn_exponents();
  const std::int64_t width = panels * kPanelColumns, stride = depth + 2 * drawn(0, 3);
  std::vector<BFloat16> left(rows * stride), right(panels * depth * kPanelColumns);
  for (std::vector<BFloat16> *each : {&left, &right}) {
    std::generate(each->begin(), each->end(), [&] { return PairRows::drawn_word(exponents); });
  }
  std::vector<float> sums(rows * width);
  std::generate(sums.begin(), sums.end(),
                [&] { return exponents > 0 ? 1e-38f * normal() : normal(); });
  const std::vector<float> before = sums;
  kernels.panel_pairs({left.data(), rows, stride},
                      {right.data(), panels, depth * kPanelColumns, depth},
                      {sums.data(), width, adds});
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t column = 0; column < width; ++column) {
      const float begun = adds ? before[row * width + column] : 0.0f;
      double modelled = begun, sum = begun, magnitudes = std::fabs(begun);
      for (std::int64_t k = 0; k < depth; k += 2) {
        const BFloat16 *one = &left[row * stride + k];
        const BFloat16 *other = &right[(column / kPanelColumns * depth + k) * kPanelColumns +
                                       2 * (column % kPanelColumns)];
        modelled = modelled_dot(modelled, one, other);
        for (int at = 0; at < 2; ++at) {
          const double product = double(to_float(one[at])) * to_float(other[at]);
          sum += product;
          magnitudes += std::fabs(product);
        }
      }
      const float found = sums[row * width + column];
      require(same_bits(found, float(modelled)), isa, "panels of pairs: lanes");
      require(exponents > 0 || is_near_by_pairs(found, sum, magnitudes, depth), isa,
              "panels of pairs: product");
    }
  }
}

} // namespace

int main(int count, char **arguments) {
  const int rounds = count > 1 ? std::atoi(arguments[1]) : 100;
  struct Named {
    const char *name;
    const MicroKernels &kernels;
    Isa isa;
  };
  const Named all[] = {
      {"portable", portable_kernels, Isa::portable},
#ifdef SPEQ_AARCH64
      {"neon", neon_kernels, Isa::neon},
      {"neon_dot", neon_dot_kernels, Isa::neon_dot},
      {"neon_bf16", neon_bf16_kernels, Isa::neon_bf16},
#endif
  };
  for (const Named &each : all) {
    if (each.isa < best_isa()) {
      continue; // this processor lacks it
    }
    random_bits.seed(7);
    comparisons = products = 0;
    digest = 0xCBF29CE484222325;
    for (int round = 0; round < rounds; ++round) {
      check_compact(each.name, each.kernels, true);
      check_compact(each.name, each.kernels, false);
      check_scaled(each.name, each.kernels);
      check_exact<float>(each.name, each.kernels.dot_float32, portable_kernels.dot_float32,
                         each.kernels.add_float32, "float32");
      check_exact<BFloat16>(each.name, each.kernels.dot_bfloat16, portable_kernels.dot_bfloat16,
                            each.kernels.add_bfloat16, "bfloat16");
      check_exact<Float16>(each.name, each.kernels.dot_float16, portable_kernels.dot_float16,
                           each.kernels.add_float16, "float16");
      check_int4(each.name, each.kernels);
      check_delta(each.name, each.kernels);
      check_panels(each.name, each.kernels);
    }
    const std::uint64_t found = digest;
    const std::int64_t digested_products = products;
    const bool pairs = each.kernels.dot_bfloat16_pairs != nullptr;
    for (int round = 0; pairs && round < rounds; ++round) {
      check_pairs(each.name, each.kernels);
      check_panels_of_pairs(each.name, each.kernels);
    }
    std::printf("%s: %lld comparisons, digest %016llx of %lld products\n", each.name,
                (long long)comparisons, (unsigned long long)found, (long long)digested_products);
  }
  return 0;
}
