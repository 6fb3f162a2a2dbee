// Rebuilds words from the draft's INT4 codes and residual records.
#pragma once

#include "cuda/compact_matrix.h"
#include "cuda/int4_matrix.h"

namespace speq::cuda {

constexpr int kCodes = 16;
// Bits of a code, of which the lowest stands for its column in masks.
constexpr int kCodeBits = 4;
constexpr std::uint32_t kEachCode = 0x11111111, kEscapes = 0x88888888;

struct ResidualMatrix : CompactMatrix {
  Int4Row codes; // of the first row
  int group_size;

  // Whether columns of one lane have several scales.
  SPEQ_DEVICE bool mixes_groups() const {
    return group_size % kLaneColumns != 0 && group_size != columns;
  }
  SPEQ_DEVICE Float16 scale(int row, int column) const {
    return codes.scales[row * (columns / group_size) + column / group_size];
  }
};

// kWindowStarts[magnitude]; device code knows their values, but no address to look them up at.
template <int kMost = kInt4ZeroPoint> SPEQ_DEVICE float window_start_of(int magnitude) {
  constexpr float kStart = kWindowStarts[kMost];
  if constexpr (kMost == 0) {
    return kStart;
  } else {
    return magnitude == kMost ? kStart : window_start_of<kMost - 1>(magnitude);
  }
}

// window_scale, in few instructions.
SPEQ_DEVICE float widened_scale(Float16 scale) {
  return (scale.bits & 0x7C00) == 0x7C00 ? 0.0f : widen(scale);
}

class ResidualDecoder {
public:
  const ResidualMatrix &matrix;

  // starts: what `fill_starts` left.
  SPEQ_DEVICE ResidualDecoder(const ResidualMatrix &matrix, int quad, const float *starts)
      : matrix(matrix), row_(quad * kRows), streams_(matrix, quad), starts_(starts) {}

  SPEQ_DEVICE void prefetch(int column) const {
    const int at = row_ * matrix.columns;
    prefetch_rows(matrix.bytes + at, matrix.columns, column);
    prefetch_rows(matrix.codes.codes + at / 2, matrix.columns / 2, column / 2);
  }

  SPEQ_DEVICE void begin(int column) {
    const int present = present_columns(matrix, column);
    RowCounts zeros = 0, escapes = 0;
#pragma unroll
    for (int n = 0; n < kRows; ++n) {
      const int row = row_ + n, count = row < matrix.rows ? present : 0;
      const int at = row * matrix.columns + column;
      bytes_[n] = load_bytes<std::uint64_t>(matrix.bytes + at, count, matrix.vectors);
      // Nibbles of absent columns are no code 0.
      codes_[n] = load_bytes<std::uint32_t>(matrix.codes.codes + at / 2, count / 2, matrix.vectors);
      scales_[n] = widened_scale(count > 0 ? matrix.scale(row, column) : Float16{0});
      zeros |= RowCounts(__popc(zero_codes(codes_[n]))) << 8 * n;
    }
    read_front(BlockCounts(zeros), column);
#pragma unroll
    for (int n = 0; n < kRows; ++n) {
      escapes |= RowCounts(__popc(marks_[n] & kEscapes)) << 8 * n;
    }
    streams_.take_back(BlockCounts(escapes), escaped_);
  }

  SPEQ_DEVICE void next(int column, float (&words)[kRows]) {
#pragma unroll
    for (int n = 0; n < kRows; ++n) {
      if (matrix.mixes_groups() && column < matrix.columns && row_ + n < matrix.rows) {
        scales_[n] = widened_scale(matrix.scale(row_ + n, column));
      }
      const std::uint32_t nibble = codes_[n] & 0xF, low = bytes_[n] & 0xFF;
      const auto start = std::uint16_t(bits_as<std::uint32_t>(starts_[nibble] * scales_[n]) >> 16);
      std::uint32_t high = nibble == kInt4ZeroPoint ? zero_high_byte(start, int(marks_[n] & 7))
                                                    : high_byte(start, std::uint8_t(low));
      if ((marks_[n] & kEscapes & 0xF) != 0) {
        high = matrix.streams[escaped_[n]++];
      }
      words[n] = bits_as<float>(high << 24 | low << 16);
      codes_[n] >>= kCodeBits;
      bytes_[n] >>= 8;
      marks_[n] >>= kCodeBits;
    }
  }

private:
  SPEQ_DEVICE static std::uint32_t zero_codes(std::uint32_t codes) {
    std::uint32_t bits = codes ^ kInt4ZeroPoint * kEachCode;
    bits |= bits >> 1;
    bits |= bits >> 2;
    return ~bits & kEachCode;
  }

  // Marks the lane's columns: with the classes of zero codes, and which escape.
  SPEQ_DEVICE void read_front(const BlockCounts &zeros, int column) {
    int at[kRows] = {};
    RowCounts listed = 0;
    find_runs(zeros, column, at, listed);
    const RowCounts of_block = zeros.of_block(lane_block());
#pragma unroll
    for (int n = 0; n < kRows; ++n) {
      const std::uint32_t each = zero_codes(codes_[n]);
      const int bit = 3 * of_row(zeros.before, n);
      std::uint32_t values = each == 0 ? 0 : load_word(matrix.streams + at[n] + bit / 8) >> bit % 8;
      marks_[n] = 0;
#pragma unroll
      for (int v = 0; v < kLaneColumns; ++v) {
        if (each >> kCodeBits * v & 1) {
          marks_[n] |= (values & 7) << kCodeBits * v;
          values >>= 3;
        }
      }
      marks_[n] |= marks_[n] << 1 & marks_[n] << 2 & marks_[n] << 3 & kEscapes;
#pragma unroll 1
      for (int i = 0; i < of_row(listed, n); ++i) {
        const int place = at[n] + int(class_bytes(of_row(of_block, n))) + 1 + i;
        const int of = matrix.streams[place < streams_.end ? place : streams_.end] % kBlockColumns;
        if (of / kLaneColumns == lane_id() % kBlockLanes) {
          marks_[n] |= kEscapes & 0xFu << kCodeBits * (of % kLaneColumns);
        }
      }
    }
  }

  // Where the runs of this lane's block lie in the stream from the front, and how many exceptions
  // each lists behind its classes. That must be read to know where the next run lies.
  SPEQ_DEVICE void find_runs(const BlockCounts &zeros, int column, int (&at)[kRows],
                             RowCounts &listed) {
    const int first = column - lane_id() * kLaneColumns;
#pragma unroll 1
    for (int block = 0; block < kStepBlocks; ++block) {
      const RowCounts of_block = zeros.of_block(block);
      const bool mine = block == lane_block();
      const bool lists =
          streams_.has_exceptions && first + block * int(kBlockColumns) < matrix.columns;
#pragma unroll
      for (int n = 0; n < kRows; ++n) {
        const int run = streams_.take_front(int(class_bytes(of_row(of_block, n))));
        at[n] = mine ? run : at[n];
        if (lists && row_ + n < matrix.rows) {
          const int length = matrix.streams[streams_.take_front(1)];
          streams_.take_front(length);
          listed |= mine ? RowCounts(length) << 8 * n : 0;
        }
      }
    }
  }

  int row_;
  StreamEnds streams_;
  const float *starts_;
  float scales_[kRows];
  // Of the step's columns that are left. A nibble of marks has the class of a zero code, and above
  // it whether the column escapes.
  std::uint64_t bytes_[kRows];
  std::uint32_t codes_[kRows], marks_[kRows];
  int escaped_[kRows]; // where the high bytes of the next escapes lie
};

// The experts of a call, and the codes of those that records are residuals of.
struct ResidualSlots : RecordSlots {
  using Matrix = ResidualMatrix;
  using Decoder = ResidualDecoder;

  const std::int64_t *base_slots; // by expert; null for the only one there is
  std::int64_t base_count;
  Int4Matrix gate_up, down;

  SPEQ_DEVICE std::int64_t base_slot(std::int64_t id) const {
    return base_slots == nullptr ? 0 : base_slots[id];
  }

  SPEQ_DEVICE bool has(std::int64_t id, std::int64_t slot) const {
    return slot < slots && base_slot(id) >= 0 && base_slot(id) < base_count;
  }

  SPEQ_DEVICE ResidualMatrix matrix(int m, std::int64_t id, std::int64_t slot) const {
    ResidualMatrix matrix{compact_matrix(*this, m, slot), {}, 0};
    const Int4Matrix &codes = m == 2 ? down : gate_up;
    matrix.codes = int4_row(codes, base_slot(id), m == 1 ? matrix.rows : 0);
    matrix.group_size = codes.group_size;
    matrix.vectors = matrix.vectors && reinterpret_cast<std::uintptr_t>(codes.qweight) % 4 == 0;
    return matrix;
  }

  // What windows of codes begin with under a scale of one, by nibble. Threads share the work.
  SPEQ_DEVICE static void fill_starts(float *starts) {
    const int code = int(threadIdx.x) - kInt4ZeroPoint;
    if (code < kInt4ZeroPoint) {
      const float start = window_start_of<>(code < 0 ? -code : code);
      starts[threadIdx.x] = code < 0 ? -start : start;
    }
  }
};

} // namespace speq::cuda
