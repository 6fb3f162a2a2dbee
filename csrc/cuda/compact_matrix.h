// Compact matrices (compact.h) as a warp reads them: a quad of rows, in steps of 256 columns.
//
// A lane has eight neighbouring columns of each row. Eight lanes share a block; where their weights
// continue in the streams, they find by counting.
#pragma once

#include <cstdint>

#include "compact.h"
#include "cuda/device.h"

namespace speq::cuda {

constexpr int kRows = int(kQuadRows);
constexpr int kStepColumns = kLanes * kLaneColumns;
constexpr int kBlockLanes = int(kBlockColumns) / kLaneColumns;
constexpr int kStepBlocks = kLanes / kBlockLanes;

// Records in slots.
struct RecordSlots {
  const std::uint8_t *records;
  std::int64_t slots, stride;
  int stream_bytes; // of a slot, without what lies behind them
  bool vectors;     // whether eight bytes are aligned wherever multiples of eight are
  CompactLayout layout;
};

inline RecordSlots record_slots(const Records &records, const ExpertShape &shape, bool lossless) {
  const CompactLayout layout = compact_layout(shape.hidden_size, shape.expert_width, lossless);
  const auto *bytes = static_cast<const std::uint8_t *>(records.records);
  const std::uintptr_t places =
      reinterpret_cast<std::uintptr_t>(bytes) | std::uintptr_t(records.slot_stride);
  return {bytes,
          records.slots,
          records.slot_stride,
          int(records.slot_bytes - layout.streams - kSlackBytes),
          places % kLaneColumns == 0,
          layout};
}

// What the matrices of both kinds of records have alike.
struct CompactMatrix {
  const std::uint8_t *bytes, *streams;
  const std::uint32_t *index; // from the matrix's first quad on
  int rows, columns, stream_bytes;
  bool vectors; // whether the columns of each lane are all there, and aligned
};

SPEQ_DEVICE CompactMatrix compact_matrix(const RecordSlots &slots, int m, std::int64_t slot) {
  const CompactLayout &layout = slots.layout;
  const std::uint8_t *record = slots.records + slot * slots.stride;
  return {record + layout.bytes[m],
          record + layout.streams,
          reinterpret_cast<const std::uint32_t *>(record + layout.index) + layout.first_quad[m],
          int(layout.rows[m]),
          int(layout.columns[m]),
          slots.stream_bytes,
          slots.vectors && layout.columns[m] % kLaneColumns == 0};
}

// How many of the columns of a lane, from `column` on, the matrix has.
SPEQ_DEVICE int present_columns(const CompactMatrix &matrix, int column) {
  const int left = matrix.columns - column;
  return left < 0 ? 0 : left < kLaneColumns ? left : kLaneColumns;
}

// A word of bytes, or the first `count` of them, with zeros behind.
template <typename Word>
SPEQ_DEVICE Word load_bytes(const std::uint8_t *at, int count, bool vectors) {
  if (vectors) {
    return count > 0 ? *reinterpret_cast<const Word *>(at) : Word(0);
  }
  Word word = 0;
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    word |= Word(at[i]) << 8 * i;
  }
  return word;
}

// Four bytes that begin anywhere. Reads whole words of four, at most three bytes more behind them.
SPEQ_DEVICE std::uint32_t load_word(const std::uint8_t *at) {
  const auto place = reinterpret_cast<std::uintptr_t>(at);
  const auto *words = reinterpret_cast<const std::uint32_t *>(place & ~std::uintptr_t(3));
  return std::uint32_t((std::uint64_t(words[1]) << 32 | words[0]) >> place % 4 * 8);
}

// Counts of the four rows of a quad, a byte each: at most 64, the columns of a block.
using RowCounts = std::uint32_t;

SPEQ_DEVICE int of_row(RowCounts counts, int n) { return int(counts >> 8 * n & 0xFF); }
SPEQ_DEVICE int of_all_rows(RowCounts counts) { return __dp4a(int(counts), 0x01010101, 0); }

SPEQ_DEVICE int lane_block() { return lane_id() / kBlockLanes; }

// What the lanes of a step have counted. All lanes of a warp ask at once.
struct BlockCounts {
  RowCounts before; // in this lane's block, by the lanes before it
  RowCounts up_to;  // and with it

  SPEQ_DEVICE explicit BlockCounts(RowCounts own) : up_to(own) {
#pragma unroll
    for (int distance = 1; distance < kBlockLanes; distance *= 2) {
      const RowCounts lower = __shfl_up_sync(kAllLanes, up_to, distance);
      up_to += lane_id() % kBlockLanes >= distance ? lower : 0;
    }
    before = up_to - own;
  }

  SPEQ_DEVICE RowCounts of_block(int block) const {
    return __shfl_sync(kAllLanes, up_to, block * kBlockLanes + kBlockLanes - 1);
  }
};

// Positions in the streams, which stay there whatever an index or a stream says: a damaged record
// reads nothing outside itself.
struct StreamEnds {
  int front, back, end;
  bool has_exceptions;

  SPEQ_DEVICE StreamEnds(const CompactMatrix &matrix, int quad) : end(matrix.stream_bytes) {
    const QuadStreams streams = quad_streams(matrix.index + quad, end);
    front = int(streams.front);
    back = int(streams.back);
    has_exceptions = streams.has_exceptions;
    for (int at = front + lane_id() * kCacheLine; at < back; at += kLanes * kCacheLine) {
      prefetch(matrix.streams + at);
    }
  }

  // The position, and go on behind so many bytes.
  SPEQ_DEVICE int take_front(int bytes) {
    const int at = front;
    front = front + bytes < end ? front + bytes : end;
    return at;
  }

  // Where what this lane has counted of each row begins in the stream from the back.
  SPEQ_DEVICE void take_back(const BlockCounts &counts, int (&at)[kRows]) {
    int mine = 0;
    RowCounts of_mine = 0;
#pragma unroll
    for (int block = 0; block < kStepBlocks; ++block) {
      const RowCounts taken = counts.of_block(block);
      if (block == lane_block()) {
        mine = back;
        of_mine = taken;
      }
      back -= of_all_rows(taken);
      back = back > 0 ? back : 0;
    }
#pragma unroll
    for (int n = 0; n < kRows; ++n) {
      mine -= of_row(of_mine, n);
      at[n] = (mine > 0 ? mine : 0) + of_row(counts.before, n);
    }
  }
};

// Begin to fetch kRows rows of a plane, bytes [begin, begin + kBlockLanes lines) of each.
SPEQ_DEVICE void prefetch_rows(const std::uint8_t *rows, int row_bytes, int begin) {
  const int at = begin + lane_id() % kBlockLanes * kCacheLine;
  if (at < row_bytes) {
    prefetch(rows + lane_id() / kBlockLanes * row_bytes + at);
  }
}

// Columns whose bytes are asked for together, while as many before them are read: all that a step
// needs would not stay in registers a step ahead.
constexpr int kAheadColumns = kBlockLanes * kCacheLine;

// Runs take(column) for each step of a quad, where `column` is the lane's first. A decoder `begin`s
// a step; then `next` gives the words of each of the lane's columns, in turn, as floats.
template <typename Decoder, typename Take> SPEQ_DEVICE void for_steps(Decoder &decoder, Take take) {
  const int columns = decoder.matrix.columns;
  decoder.prefetch(0);
#pragma unroll 1
  for (int step = 0; step < columns; step += kStepColumns) {
    if (step % kAheadColumns == 0) {
      decoder.prefetch(step + kAheadColumns);
    }
    const int column = step + lane_id() * kLaneColumns;
    decoder.begin(column);
    take(column);
  }
}

} // namespace speq::cuda
