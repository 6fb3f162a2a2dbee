#include "cpu/encode.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <numeric>

namespace speq::cpu {
namespace {

std::uint8_t high_byte_of(BFloat16 word) { return std::uint8_t(word.bits >> 8); }

// Bytes in the order of memory, so that a byte of a word is a weight of eight.
static_assert(std::endian::native == std::endian::little);

// Three bits of each byte of eight, one behind the other.
std::uint32_t packed(std::uint64_t eight) {
  eight = (eight | eight >> 5) & 0x003F'003F'003F'003F;
  eight = (eight | eight >> 10) & 0x0000'0FFF'0000'0FFF;
  return std::uint32_t((eight | eight >> 20) & 0xFF'FFFF);
}

// The lowest bit of each byte of eight that is an escape.
std::uint64_t escapes_in(std::uint64_t eight) {
  static_assert(kEscape == 7);
  return eight & eight >> 1 & eight >> 2 & 0x0101'0101'0101'0101;
}

// Calls body(column) for each bit that is set, the lowest first.
template <typename Body> void for_each_bit(std::uint64_t bits, const Body &body) {
  for (; bits != 0; bits &= bits - 1) {
    body(std::countr_zero(bits));
  }
}

// The class of a word of code 0, by its high byte.
int zero_class_of(std::uint16_t start, int high) {
  if (high == 0) {
    return kZeroClass;
  }
  const int steps = (start >> 8 & 0x7F) - (high & 0x7F);
  const int sign = high < 0x80 ? 0 : kZeroClass + 1;
  return steps >= 0 && steps < kZeroClass ? sign + steps : kEscape;
}

// Classes of eight words, a byte each; of fewer, where no more are present, and zeros.
std::uint64_t classes_of(const std::array<std::uint8_t, 256> &classes, const BFloat16 *words,
                         std::int64_t present) {
  std::uint64_t eight = 0;
  if (present >= 8) {
    for (int i = 0; i < 8; ++i) {
      eight |= std::uint64_t(classes[high_byte_of(words[i])]) << 8 * i;
    }
  } else {
    for (int i = 0; i < present; ++i) {
      eight |= std::uint64_t(classes[high_byte_of(words[i])]) << 8 * i;
    }
  }
  return eight;
}

// The windows of all codes under a scale, by the code as it is stored.
struct Windows {
  std::uint16_t starts[16];

  void fill(Float16 stored) {
    const float scale = window_scale(stored);
    for (int i = 0; i < 16; ++i) {
      starts[i] = window_start(i - kInt4ZeroPoint, scale);
    }
  }
};

// Weights of a row of a block, the first at bit 0: those of code 0, and those whose high bytes are
// not what their codes tell.
struct Told {
  std::uint64_t zeros = 0, others = 0;

  void add(int at, int code, std::uint16_t start, BFloat16 word) {
    zeros |= std::uint64_t(code == kInt4ZeroPoint) << at;
    others |= std::uint64_t(high_byte(start, std::uint8_t(word.bits)) != word.bits >> 8) << at;
  }
};

} // namespace

CompactEncoder::CompactEncoder(const CompactLayout &layout, const ExactWords &words)
    : layout_(layout), words_(words), index_(quads() + 1), streams_(quads()) {}

CompactEncoder::Streams::Streams(std::int64_t columns) {
  const std::int64_t block_rows = kQuadRows * ((columns + kBlockColumns - 1) / kBlockColumns);
  room_.resize(block_rows * (class_bytes(kBlockColumns) + kBlockColumns) + kSlackBytes);
  block_rows_.reserve(block_rows);
  clear();
}

void CompactEncoder::Streams::clear() {
  front_ = room_.data();
  back_ = room_.data() + room_.size();
  block_rows_.clear();
  has_exceptions_ = false;
}

void CompactEncoder::Streams::add_classes(const std::uint64_t *eights, int count) {
  for (int i = 0; i < (count + 7) / 8; ++i) {
    const std::uint32_t bits = packed(eights[i]);
    std::memcpy(front_ + 3 * i, &bits, sizeof bits); // a byte too much, which the next overwrites
  }
  front_ += class_bytes(count);
}

void CompactEncoder::Streams::add_escapes(const std::uint8_t *run, int count) {
  back_ -= count;
  std::memcpy(back_, run, count);
}

void CompactEncoder::Streams::add_exceptions(std::uint64_t columns) {
  block_rows_.push_back({front_, columns});
  has_exceptions_ = has_exceptions_ || columns != 0;
}

std::vector<std::uint8_t> CompactEncoder::Streams::joined() const {
  std::vector<std::uint8_t> bytes;
  const std::uint8_t *taken = room_.data(), *end = room_.data() + room_.size();
  bytes.reserve((front_ - taken) + (end - back_));
  if (has_exceptions_) {
    for (const BlockRow &row : block_rows_) {
      bytes.insert(bytes.end(), taken, static_cast<const std::uint8_t *>(row.classes_end));
      bytes.push_back(std::uint8_t(std::popcount(row.exceptions)));
      for_each_bit(row.exceptions, [&](int column) { bytes.push_back(std::uint8_t(column)); });
      taken = row.classes_end;
    }
  }
  bytes.insert(bytes.end(), taken, static_cast<const std::uint8_t *>(front_));
  bytes.insert(bytes.end(), static_cast<const std::uint8_t *>(back_), end);
  return bytes;
}

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
  Streams streams(std::max(layout_.columns[0], layout_.columns[2]));
  for (std::int64_t at = begin; at < end; ++at) {
    streams.clear();
    fill(quad(at), streams);
    streams_[at] = streams.joined();
    index_[at] =
        std::uint32_t(streams_[at].size()) | (streams.has_exceptions() ? kHasExceptions : 0);
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

void CompactEncoder::write_bytes(const Quad &quad, std::uint8_t *record) const {
  const std::int64_t columns = layout_.columns[quad.matrix];
  const BFloat16 *words = row(quad.matrix, quad.row);
  std::uint8_t *bytes = record + layout_.bytes[quad.matrix] + quad.row * columns;
  for (std::int64_t k = 0; k < quad.rows * columns; ++k) {
    bytes[k] = std::uint8_t(words[k].bits);
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
    write_bytes(quad(at), record);
    write_classes(quad(at), record);
    std::copy(streams_[at].begin(), streams_[at].end(), streams + (index_[at] & ~kHasExceptions));
  }
}

LosslessEncoder::LosslessEncoder(const CompactLayout &layout, const ExactWords &words)
    : CompactEncoder(layout, words) {
  for (int m = 0; m < layout_.matrices; ++m) {
    // In turns: a count that the one before it has just changed would have to be waited for.
    std::array<std::array<std::int64_t, 256>, 4> turns{};
    const BFloat16 *words = row(m, 0);
    for (std::int64_t k = 0; k < layout_.rows[m] * layout_.columns[m]; ++k) {
      ++turns[k % 4][high_byte_of(words[k])];
    }
    std::array<std::int64_t, 256> counts{};
    for (const auto &turn : turns) {
      std::transform(counts.begin(), counts.end(), turn.begin(), counts.begin(), std::plus());
    }
    // The most frequent, the lower ones first among equals.
    std::array<int, 256> order;
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int a, int b) { return counts[a] > counts[b]; });
    classes_[m].fill(kEscape);
    for (int of = 0; of < kEscape; ++of) {
      high_bytes_[m][of] = std::uint8_t(order[of]);
      classes_[m][order[of]] = std::uint8_t(of);
    }
  }
}

void LosslessEncoder::fill(const Quad &quad, Streams &streams) const {
  const std::int64_t columns = layout_.columns[quad.matrix];
  const auto &classes = classes_[quad.matrix];
  for (std::int64_t first = 0; first < columns; first += kBlockColumns) {
    const std::int64_t last = std::min(first + kBlockColumns, columns);
    for (std::int64_t n = 0; n < quad.rows; ++n) {
      const BFloat16 *words = row(quad.matrix, quad.row + n);
      std::uint8_t run[kBlockColumns];
      int count = 0;
      for (std::int64_t k = first; k < last; k += 8) {
        const std::uint64_t eight = classes_of(classes, words + k, last - k);
        for_each_bit(escapes_in(eight),
                     [&](int bit) { run[count++] = high_byte_of(words[k + bit / 8]); });
      }
      streams.add_escapes(run, count);
    }
  }
}

void LosslessEncoder::write_classes(const Quad &quad, std::uint8_t *record) const {
  const std::int64_t columns = layout_.columns[quad.matrix];
  const auto &classes = classes_[quad.matrix];
  for (std::int64_t r = quad.row; r < quad.row + quad.rows; ++r) {
    const BFloat16 *words = row(quad.matrix, r);
    std::uint8_t *plane = record + layout_.classes[quad.matrix] + r * class_stride(columns);
    for (std::int64_t k = 0; k < columns; k += 8, plane += 3) {
      const std::uint32_t bits = packed(classes_of(classes, words + k, columns - k));
      std::memcpy(plane, &bits, 3);
    }
  }
}

void LosslessEncoder::write_head(std::uint8_t *record) const {
  std::memset(record, 0, layout_.index);
  std::memcpy(record, high_bytes_, sizeof high_bytes_);
}

ResidualEncoder::ResidualEncoder(const CompactLayout &layout, const ExactWords &words,
                                 const RecordCodes &codes)
    : CompactEncoder(layout, words), codes_(codes) {}

void ResidualEncoder::fill(const Quad &quad, Streams &streams) const {
  const Int4Matrix &codes = codes_[quad.matrix];
  Windows windows[kQuadRows];
  std::int64_t group = -1; // of all the windows
  for (std::int64_t first = 0; first < codes.columns; first += kBlockColumns) {
    const std::int64_t last = std::min(first + kBlockColumns, codes.columns);
    const bool one_group = first / codes.group_size == (last - 1) / codes.group_size;
    const bool known = one_group && first / codes.group_size == group;
    for (std::int64_t n = 0; n < quad.rows; ++n) {
      const BFloat16 *words = row(quad.matrix, quad.row + n);
      const std::uint8_t *qweight = codes.qweight + (quad.row + n) * codes.row_bytes();
      const Float16 *scales = codes.scales + (quad.row + n) * codes.row_groups();
      Told told;
      alignas(8) std::uint8_t classes[kBlockColumns] = {};
      int zeros = 0;
      for (std::int64_t k = first; k < last;) {
        const std::int64_t of = k / codes.group_size;
        const std::int64_t end = std::min(last, (of + 1) * codes.group_size);
        if (!known) {
          windows[n].fill(scales[of]);
        }
        Told part;
        for (std::int64_t at = k; at < end; at += 2) {
          const int pair = qweight[at / 2], low = pair & 0xF, high = pair >> 4;
          part.add(int(at - first), low, windows[n].starts[low], words[at]);
          part.add(int(at - first + 1), high, windows[n].starts[high], words[at + 1]);
        }
        const std::uint16_t start = windows[n].starts[kInt4ZeroPoint];
        part.others &= ~part.zeros;
        told.others |= part.others;
        for_each_bit(part.zeros, [&](int column) {
          const int zero_class = zero_class_of(start, words[first + column].bits >> 8);
          classes[zeros++] = std::uint8_t(zero_class);
          told.zeros |= std::uint64_t(zero_class == kEscape) << column;
        });
        k = end;
      }
      std::uint8_t run[kBlockColumns];
      int count = 0;
      for_each_bit(told.others | told.zeros, [&](int column) {
        run[count++] = std::uint8_t(words[first + column].bits >> 8);
      });
      std::uint64_t eights[kBlockColumns / 8];
      std::memcpy(eights, classes, sizeof eights);
      streams.add_classes(eights, zeros);
      streams.add_escapes(run, count);
      streams.add_exceptions(told.others);
    }
    group = one_group ? first / codes.group_size : -1;
  }
}

} // namespace speq::cpu
