#include "cpu/encode.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <numeric>

#include "cpu/buffer.h"
#include "cpu/encode_portable.h"
#include "cpu/isa.h"

namespace speq::cpu {
namespace {

std::array<std::int64_t, 256> count_high_bytes(const BFloat16 *words, std::int64_t count) {
  // In turns: a count that one of those before has just changed would have to be waited for.
  constexpr std::int64_t kTurns = 8;
  std::array<std::array<std::int64_t, 256>, kTurns> turns{};
  std::int64_t k = 0;
  for (; k + kTurns <= count; k += kTurns) {
    for (std::int64_t turn = 0; turn < kTurns; ++turn) {
      ++turns[turn][high_byte_of(words[k + turn])];
    }
  }
  for (; k < count; ++k) {
    ++turns[0][high_byte_of(words[k])];
  }
  std::array<std::int64_t, 256> counts{};
  for (const auto &turn : turns) {
    std::transform(counts.begin(), counts.end(), turn.begin(), counts.begin(), std::plus());
  }
  return counts;
}

// Appends both streams of a quad as they lie in a record.
void append(std::vector<std::uint8_t> &bytes, const FilledStreams &streams,
            const std::uint8_t *begin, const FilledStreams::BlockRow *rows,
            const std::uint8_t *end) {
  const std::uint8_t *taken = begin;
  for (; streams.exceptions != 0 && rows < streams.next_row; ++rows) {
    bytes.insert(bytes.end(), taken, static_cast<const std::uint8_t *>(rows->classes_end));
    bytes.push_back(std::uint8_t(std::popcount(rows->exceptions)));
    for_each_bit(rows->exceptions, [&](int column) { bytes.push_back(std::uint8_t(column)); });
    taken = rows->classes_end;
  }
  bytes.insert(bytes.end(), taken, static_cast<const std::uint8_t *>(streams.front));
  bytes.insert(bytes.end(), static_cast<const std::uint8_t *>(streams.back), end);
}

} // namespace

WordQuad CompactEncoder::quad(std::int64_t matrix, std::int64_t row) const {
  const std::int64_t columns = layout_.columns[matrix];
  return {words_[matrix] + row * columns, std::min(kQuadRows, layout_.rows[matrix] - row), columns};
}

std::uint8_t *CompactEncoder::first_entry(std::uint8_t *record) const {
  return record + layout_.index + layout_.first_quad[part_.first] * sizeof(std::uint32_t);
}

void CompactEncoder::clear_gaps(std::uint8_t *record) const {
  const auto clear_behind = [&](std::int64_t section, std::int64_t bytes) {
    std::memset(record + section + bytes, 0, whole_lines(bytes) - bytes);
  };
  clear_behind(layout_.index, (layout_.quads() + 1) * std::int64_t(sizeof(std::uint32_t)));
  for (std::int64_t m = part_.first; m < part_.end; ++m) {
    if (layout_.classes[m] != 0) {
      clear_behind(layout_.classes[m], layout_.rows[m] * class_stride(layout_.columns[m]));
    }
    clear_behind(layout_.bytes[m], layout_.rows[m] * layout_.columns[m]);
  }
  std::memset(record + layout_.streams + stream_bytes_, 0, kSlackBytes);
}

LosslessEncoder::LosslessEncoder(const CompactLayout &layout, const ExactWords &words,
                                 const RecordPart &part)
    : CompactEncoder(layout, words, part) {
  for (std::int64_t m = part.first; m < part.end; ++m) {
    const auto counts = count_high_bytes(words[m], layout_.rows[m] * layout_.columns[m]);
    // The most frequent, the lower ones first among equals.
    std::array<int, 256> order;
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int a, int b) { return counts[a] > counts[b]; });
    ClassTable &table = tables_[m];
    for (int of = 0; of < 256; ++of) {
      table.classes[order[of]] = std::uint8_t(std::min(of, kEscape));
      stream_bytes_ += of < kEscape ? 0 : counts[order[of]];
    }
    std::copy_n(order.begin(), kEscape, table.high_bytes);
  }
}

void LosslessEncoder::write(std::uint8_t *record) const {
  const SplitQuad split = micro_kernels().split_quad;
  if (part_.first == 0) {
    std::memset(record, 0, layout_.index);
  }
  std::uint8_t *index = first_entry(record), *streams = record + layout_.streams;
  std::uint8_t *stream = streams + part_.stream_start;
  const auto add_entry = [&] {
    const auto entry = std::uint32_t(stream - streams);
    std::memcpy(index, &entry, sizeof entry);
    index += sizeof entry;
  };
  for (std::int64_t m = part_.first; m < part_.end; ++m) {
    std::memcpy(record + m * kClasses, tables_[m].high_bytes, kClasses);
    const std::int64_t columns = layout_.columns[m], stride = class_stride(columns);
    for (std::int64_t row = 0; row < layout_.rows[m]; row += kQuadRows) {
      add_entry();
      stream = split(quad(m, row), tables_[m], record + layout_.bytes[m] + row * columns,
                     record + layout_.classes[m] + row * stride, stream);
    }
  }
  add_entry();
  clear_gaps(record);
}

ResidualEncoder::ResidualEncoder(const CompactLayout &layout, const ExactWords &words,
                                 const RecordCodes &codes, const RecordPart &part)
    : CompactEncoder(layout, words, part) {
  const FillStreams fill = micro_kernels().fill_streams;
  const std::int64_t columns = std::max(layout_.columns[0], layout_.columns[2]);
  const std::int64_t rows = kQuadRows * ((columns + kBlockColumns - 1) / kBlockColumns);
  const std::int64_t most = rows * (class_bytes(kBlockColumns) + kBlockColumns) + kSlackBytes;
  Buffer<std::uint8_t> room(most);
  Buffer<FilledStreams::BlockRow> block_rows(rows);
  index_.reserve(layout_.first_quad[part.end] - layout_.first_quad[part.first] + 1);
  const auto stream_end = [&] { return part.stream_start + std::int64_t(streams_.size()); };
  for (std::int64_t m = part.first; m < part.end; ++m) {
    for (std::int64_t row = 0; row < layout_.rows[m]; row += kQuadRows) {
      FilledStreams streams{room.data(), room.data() + most, block_rows.data(), 0};
      fill(quad(m, row), codes[m].from(row), streams);
      index_.push_back(std::uint32_t(stream_end()) |
                       (streams.exceptions != 0 ? kHasExceptions : 0));
      append(streams_, streams, room.data(), block_rows.data(), room.data() + most);
    }
  }
  stream_bytes_ = stream_end();
  index_.push_back(std::uint32_t(stream_bytes_));
}

void ResidualEncoder::write(std::uint8_t *record) const {
  std::memcpy(first_entry(record), index_.data(), index_.size() * sizeof index_[0]);
  for (std::int64_t m = part_.first; m < part_.end; ++m) {
    std::uint8_t *bytes = record + layout_.bytes[m];
    for (std::int64_t k = 0; k < layout_.rows[m] * layout_.columns[m]; ++k) {
      bytes[k] = std::uint8_t(words_[m][k].bits);
    }
  }
  std::copy(streams_.begin(), streams_.end(), record + layout_.streams + part_.stream_start);
  clear_gaps(record);
}

} // namespace speq::cpu
