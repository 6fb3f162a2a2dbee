#include "cpu/encode.h"

#include <algorithm>
#include <numeric>

namespace speq::cpu {
namespace {

int exponent_of(BFloat16 word) { return word.bits >> 7 & 0xFF; }

// Appends values of three bits, lowest first.
class ClassWriter {
public:
  explicit ClassWriter(std::vector<std::uint8_t> &bytes) : bytes_(bytes) {}
  void add(int value) {
    bits_ |= std::uint32_t(value) << count_;
    count_ += 3;
    for (; count_ >= 8; count_ -= 8, bits_ >>= 8) {
      bytes_.push_back(std::uint8_t(bits_));
    }
  }
  void end() {
    if (count_ > 0) {
      bytes_.push_back(std::uint8_t(bits_));
    }
    bits_ = 0, count_ = 0;
  }

private:
  std::vector<std::uint8_t> &bytes_;
  std::uint32_t bits_ = 0;
  int count_ = 0;
};

// The class of a word of code 0, by its high byte.
int zero_class_of(std::uint16_t start, int high) {
  if (high == 0) {
    return kZeroClass;
  }
  const int steps = (start >> 8 & 0x7F) - (high & 0x7F);
  const int sign = high < 0x80 ? 0 : kZeroClass + 1;
  return steps >= 0 && steps < kZeroClass ? sign + steps : kEscape;
}

int code_at(const std::uint8_t *qweight, std::int64_t column) {
  const std::uint8_t pair = qweight[column / 2];
  return column % 2 == 0 ? low_code(pair) : high_code(pair);
}

} // namespace

CompactEncoder::CompactEncoder(const CompactLayout &layout, const ExactWords &words)
    : layout_(layout), words_(words), index_(quads() + 1) {}

CompactEncoder::Quad CompactEncoder::quad(std::int64_t index) const {
  int matrix = 0;
  while (index >= layout_.first_quad[matrix + 1]) {
    ++matrix;
  }
  const std::int64_t row = (index - layout_.first_quad[matrix]) * kQuadRows;
  return {matrix, row, std::min(kQuadRows, layout_.rows[matrix] - row)};
}

const BFloat16 *CompactEncoder::row(int matrix, std::int64_t row) const {
  return words_[matrix] + row * layout_.columns[matrix];
}

void CompactEncoder::measure(std::int64_t begin, std::int64_t end) {
  for (std::int64_t at = begin; at < end; ++at) {
    const Streams streams = streams_of(quad(at));
    index_[at] = std::uint32_t(streams.front.size() + streams.back.size()) |
                 (streams.has_exceptions ? kHasExceptions : 0);
  }
}

std::int64_t CompactEncoder::finish() {
  stream_bytes_ = 0;
  for (std::uint32_t &entry : index_) {
    const std::uint32_t size = entry & ~kHasExceptions;
    entry = std::uint32_t(stream_bytes_) | (entry & kHasExceptions);
    stream_bytes_ += size;
  }
  return layout_.fixed_bytes() + stream_bytes_;
}

// A record's bytes depend on the weights alone.
void CompactEncoder::clear_gaps(std::uint8_t *record) const {
  const auto clear_behind = [&](std::int64_t section, std::int64_t bytes) {
    std::memset(record + section + bytes, 0, whole_lines(bytes) - bytes);
  };
  clear_behind(layout_.index, std::int64_t(index_.size() * sizeof index_[0]));
  for (int m = 0; m < layout_.matrices; ++m) {
    if (layout_.classes[m] != 0) {
      clear_behind(layout_.classes[m], layout_.rows[m] * class_stride(layout_.columns[m]));
    }
    clear_behind(layout_.bytes[m], layout_.rows[m] * layout_.columns[m]);
  }
}

void CompactEncoder::write(std::int64_t begin, std::int64_t end, std::uint8_t *record) const {
  std::uint8_t *streams = record + layout_.streams;
  if (begin == 0) {
    write_head(record);
    clear_gaps(record);
  }
  std::memcpy(record + layout_.index + begin * sizeof index_[0], &index_[begin],
              (end - begin) * sizeof index_[0]);
  if (end == quads()) {
    std::memcpy(record + layout_.index + end * sizeof index_[0], &index_[end], sizeof index_[0]);
    std::memset(streams + index_[end], 0, kSlackBytes);
  }
  for (std::int64_t at = begin; at < end; ++at) {
    const Quad of = quad(at);
    write_planes(of, record);
    const Streams parts = streams_of(of);
    std::copy(parts.front.begin(), parts.front.end(), streams + (index_[at] & ~kHasExceptions));
    std::uint8_t *back = streams + (index_[at + 1] & ~kHasExceptions);
    auto next = parts.back.begin();
    for (const std::size_t run : parts.runs) {
      back -= run;
      std::copy_n(next, run, back);
      next += std::ptrdiff_t(run);
    }
  }
}

LosslessEncoder::LosslessEncoder(const CompactLayout &layout, const ExactWords &words)
    : CompactEncoder(layout, words) {
  for (int m = 0; m < layout_.matrices; ++m) {
    std::array<std::int64_t, 256> counts{};
    for (std::int64_t r = 0; r < layout_.rows[m]; ++r) {
      const BFloat16 *words = row(m, r);
      for (std::int64_t k = 0; k < layout_.columns[m]; ++k) {
        ++counts[exponent_of(words[k])];
      }
    }
    // The most frequent, the lower ones first among equals.
    std::array<int, 256> order;
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int a, int b) { return counts[a] > counts[b]; });
    classes_[m].fill(kEscape);
    for (int of = 0; of < kEscape; ++of) {
      exponents_[m][of] = std::uint8_t(order[of]);
      classes_[m][order[of]] = std::uint8_t(of);
    }
  }
}

CompactEncoder::Streams LosslessEncoder::streams_of(const Quad &quad) const {
  Streams streams;
  const std::int64_t columns = layout_.columns[quad.matrix];
  const auto &classes = classes_[quad.matrix];
  for (std::int64_t first = 0; first < columns; first += kBlockColumns) {
    const std::int64_t last = std::min(first + kBlockColumns, columns);
    for (std::int64_t n = 0; n < quad.rows; ++n) {
      const BFloat16 *words = row(quad.matrix, quad.row + n);
      const std::size_t begin = streams.back.size();
      for (std::int64_t k = first; k < last; ++k) {
        if (classes[exponent_of(words[k])] == kEscape) {
          streams.back.push_back(std::uint8_t(exponent_of(words[k])));
        }
      }
      streams.end_run(begin);
    }
  }
  return streams;
}

void LosslessEncoder::write_planes(const Quad &quad, std::uint8_t *record) const {
  const std::int64_t columns = layout_.columns[quad.matrix];
  const auto &classes = classes_[quad.matrix];
  std::vector<std::uint8_t> packed;
  for (std::int64_t r = quad.row; r < quad.row + quad.rows; ++r) {
    const BFloat16 *words = row(quad.matrix, r);
    std::uint8_t *bytes = record + layout_.bytes[quad.matrix] + r * columns;
    packed.clear();
    ClassWriter writer(packed);
    for (std::int64_t k = 0; k < columns; ++k) {
      bytes[k] = std::uint8_t((words[k].bits >> 8 & 0x80) | (words[k].bits & 0x7F));
      writer.add(classes[exponent_of(words[k])]);
    }
    writer.end();
    packed.resize(class_stride(columns));
    std::copy(packed.begin(), packed.end(),
              record + layout_.classes[quad.matrix] + r * class_stride(columns));
  }
}

void LosslessEncoder::write_head(std::uint8_t *record) const {
  std::memset(record, 0, layout_.index);
  std::memcpy(record, exponents_, sizeof exponents_);
}

ResidualEncoder::ResidualEncoder(const CompactLayout &layout, const ExactWords &words,
                                 const RecordCodes &codes)
    : CompactEncoder(layout, words), codes_(codes) {}

bool ResidualEncoder::fill(const Quad &quad, bool exceptions, Streams &streams) const {
  const Int4Matrix &codes = codes_[quad.matrix];
  bool found = false;
  for (std::int64_t first = 0; first < codes.columns; first += kBlockColumns) {
    const std::int64_t last = std::min(first + kBlockColumns, codes.columns);
    for (std::int64_t n = 0; n < quad.rows; ++n) {
      const BFloat16 *words = row(quad.matrix, quad.row + n);
      const std::uint8_t *qweight = codes.qweight + (quad.row + n) * codes.row_bytes();
      const Float16 *scales = codes.scales + (quad.row + n) * codes.row_groups();
      const std::size_t begin = streams.back.size();
      std::uint8_t places[kBlockColumns];
      int count = 0;
      ClassWriter classes(streams.front);
      for (std::int64_t k = first; k < last; ++k) {
        const int code = code_at(qweight, k), high = words[k].bits >> 8;
        const std::uint16_t start = window_start(code, window_scale(scales[k / codes.group_size]));
        if (code == 0) {
          const int of = zero_class_of(start, high);
          classes.add(of);
          if (of == kEscape) {
            streams.back.push_back(std::uint8_t(high));
          }
        } else if (high != high_byte(start, std::uint8_t(words[k].bits))) {
          places[count++] = std::uint8_t(k - first);
          streams.back.push_back(std::uint8_t(high));
        }
      }
      classes.end();
      streams.end_run(begin);
      if (exceptions) {
        streams.front.push_back(std::uint8_t(count));
        streams.front.insert(streams.front.end(), places, places + count);
      }
      found = found || count > 0;
    }
  }
  return found;
}

CompactEncoder::Streams ResidualEncoder::streams_of(const Quad &quad) const {
  Streams streams;
  if (fill(quad, false, streams)) {
    streams = {};
    streams.has_exceptions = fill(quad, true, streams);
  }
  return streams;
}

void ResidualEncoder::write_planes(const Quad &quad, std::uint8_t *record) const {
  const std::int64_t columns = layout_.columns[quad.matrix];
  for (std::int64_t r = quad.row; r < quad.row + quad.rows; ++r) {
    const BFloat16 *words = row(quad.matrix, r);
    std::uint8_t *bytes = record + layout_.bytes[quad.matrix] + r * columns;
    for (std::int64_t k = 0; k < columns; ++k) {
      bytes[k] = std::uint8_t(words[k].bits);
    }
  }
}

} // namespace speq::cpu
