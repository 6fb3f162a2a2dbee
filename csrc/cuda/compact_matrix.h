// Compact matrices (compact.h) as a warp reads them: a quad of rows (quad_lanes.h). Where a run
// begins in the streams is found by one prefix sum over the warp.
#pragma once

#include <cstdint>

#include "compact.h"
#include "cuda/quad_lanes.h"

namespace speq::cuda {

// Records in slots.
struct RecordSlots {
  static constexpr int kMostRows = 2; // of inputs at a time: rebuilding takes the other registers
  const std::uint8_t *records;
  std::int64_t slots, stride;
  int stream_bytes; // of a slot, without what lies behind them
  bool vectors;     // whether sixteen bytes are aligned wherever multiples of sixteen are
  CompactLayout layout;

  // Whether segments of a matrix are all there or not at all, and their vectors are aligned.
  SPEQ_DEVICE bool whole(int m) const { return vectors && layout.columns[m] % kSegment == 0; }
};

inline RecordSlots record_slots(const Records &records, const CompactLayout &layout) {
  const auto *bytes = static_cast<const std::uint8_t *>(records.records);
  const std::uintptr_t places =
      reinterpret_cast<std::uintptr_t>(bytes) | std::uintptr_t(records.slot_stride);
  return {bytes,
          records.slots,
          records.slot_stride,
          int(records.slot_bytes - layout.fixed_bytes()),
          places % sizeof(uint4) == 0,
          layout};
}

// What the matrices of both kinds of records have alike.
struct CompactMatrix {
  const std::uint8_t *bytes, *streams;
  const std::uint32_t *index; // from the matrix's first quad on
  int rows, columns, stream_bytes;
};

SPEQ_DEVICE CompactMatrix compact_matrix(const RecordSlots &slots, int m, std::int64_t slot) {
  const CompactLayout &layout = slots.layout;
  const std::uint8_t *record = slots.records + slot * slots.stride;
  return {record + layout.bytes[m],
          record + layout.streams,
          reinterpret_cast<const std::uint32_t *>(record + layout.index) + layout.first_quad[m],
          int(layout.rows[m]),
          int(layout.columns[m]),
          slots.stream_bytes};
}

// Word `i` of four bytes behind an aligned place.
SPEQ_DEVICE std::uint32_t load_aligned(const std::uint8_t *at, int i = 0) {
  return __ldg(reinterpret_cast<const std::uint32_t *>(at) + i);
}

SPEQ_DEVICE uint4 load_vector(const std::uint8_t *at) {
  return __ldg(reinterpret_cast<const uint4 *>(at));
}

// Four bytes that begin anywhere behind an aligned base, or anywhere at all. Reads whole words of
// four, at most three bytes before and after them.
SPEQ_DEVICE std::uint32_t load_word(const std::uint8_t *base, int at) {
  const std::uint8_t *words = base + (at & ~3);
  return __funnelshift_r(load_aligned(words), load_aligned(words, 1), unsigned(at) * 8);
}

SPEQ_DEVICE std::uint32_t load_word(const std::uint8_t *at) {
  const int off = int(reinterpret_cast<std::uintptr_t>(at) % 4);
  return load_word(at - off, off);
}

// The first bits of a word.
SPEQ_DEVICE std::uint32_t low_bits(std::uint32_t word, int bits) {
  return bits <= 0 ? 0 : bits >= 32 ? word : word & ((1u << bits) - 1);
}

// Eight values of three bits, one to a nibble. Bits above them may be anything.
SPEQ_DEVICE std::uint32_t spread_classes(std::uint32_t values) {
  values = (values & 0xFFF000) * 16 + (values & 0xFFF);
  values += (values & 0x0FC00FC0) * 3;
  return values + (values & 0x38383838);
}

// Marks of eight columns are nibbles with their highest bit set or not.
constexpr std::uint32_t kEachMark = 0x88888888, kEachNibble = 0x11111111;

// How many marks of lower nibbles there are, in each nibble.
SPEQ_DEVICE std::uint32_t marks_before(std::uint32_t marks) { return marks * 0x02222222; }

// Bytes of all ones where columns are marked.
SPEQ_DEVICE void byte_masks(std::uint32_t marks, std::uint32_t (&masks)[2]) {
  const std::uint32_t even = marks << 4;
  masks[0] = permute_bytes(even, marks, 0xD9C8);
  masks[1] = permute_bytes(even, marks, 0xFBEA);
}

// Words of BF16, two to a register, of four high and four low bytes.
SPEQ_DEVICE void interleave(std::uint32_t high, std::uint32_t low, std::uint32_t *pairs) {
  pairs[0] = permute_bytes(low, high, 0x5140);
  pairs[1] = permute_bytes(low, high, 0x7362);
}

// The sum of what this and all runs before it in a step bring. All lanes of a warp ask at once.
SPEQ_DEVICE int up_to_run(int of_run) {
#pragma unroll
  for (int distance = kRunLanes; distance < kLanes; distance *= 2) {
    of_run = plus_lower_lane(of_run, distance);
  }
  return of_run;
}

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

  SPEQ_DEVICE int within(int at) const { return at < end ? at : end; }
};

// The bytes of a segment's escapes, which take the place of those that classes or codes tell.
class Escapes {
public:
  std::uint32_t marks[kVectors]; // of the columns that escape

  // Finds the bytes, all lanes at once, and takes those of the step from the stream.
  SPEQ_DEVICE void find(const Lane &lane, StreamEnds &ends) {
    count_ = 0;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      count_ += __popc(marks[i]);
    }
    const int other = __shfl_xor_sync(kAllLanes, count_, 1);
    const int up_to = up_to_run(count_ + other);
    const int run = ends.back - up_to;
    at_ = (run > 0 ? run : 0) + (lane.ends_run() ? other : 0);
    const int left = ends.back - __shfl_sync(kAllLanes, up_to, kLanes - 1);
    ends.back = left > 0 ? left : 0;
  }

  // Puts them in their places.
  SPEQ_DEVICE void patch(const std::uint8_t *streams, std::uint32_t (&bytes)[kVectors * 2]) const {
    const std::uint32_t first = load_word(streams, at_);
    // A byte stays, or is the escape that has as many marks before it.
    constexpr std::uint32_t kStays = 0x32103210, kEscape = 4 * kEachNibble;
    std::uint32_t before = kEscape;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const std::uint32_t selectors =
          select_bits((marks[i] >> 3) * 0xF, marks_before(marks[i]) + before, kStays);
      bytes[2 * i] = permute_bytes(bytes[2 * i], first, selectors);
      bytes[2 * i + 1] = permute_bytes(bytes[2 * i + 1], first, selectors >> 16);
      before += std::uint32_t(__popc(marks[i])) * kEachNibble;
    }
    if (count_ > kAtOnce) {
      patch_singly(streams, bytes);
    }
  }

private:
  static constexpr int kAtOnce = 4; // that a word holds

  // Those behind the first ones, which are in their places.
  SPEQ_DEVICE void patch_singly(const std::uint8_t *streams,
                                std::uint32_t (&bytes)[kVectors * 2]) const {
    const std::uint8_t *from = streams + at_ + kAtOnce;
    int placed = kAtOnce;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      std::uint32_t left = marks[i];
#pragma unroll 1
      for (; placed > 0 && left != 0; --placed) {
        left &= left - 1;
      }
#pragma unroll 1
      for (; left != 0; left &= left - 1) {
        const int bit = 2 * (__ffs(int(left)) - 4); // of the vector's bytes
        const std::uint32_t mask = 0xFFu << bit % 32, byte = std::uint32_t(__ldg(from++))
                                                             << bit % 32;
        std::uint32_t &word = bytes[2 * i], &next = bytes[2 * i + 1];
        word = select_bits(bit < 32 ? mask : 0, byte, word);
        next = select_bits(bit < 32 ? 0 : mask, byte, next);
      }
    }
  }

  int count_, at_;
};

// Columns whose bytes are asked for together, while as many before them are read: all that a step
// needs would not stay in registers a step ahead.
constexpr int kAheadColumns = kBlockLanes * kCacheLine;

// What decoders have alike: a lane's row and the bytes of its segment. Places in planes of the
// record are those of the next step; they go on step by step.
// kWhole: segments are.
template <bool kWhole> struct Segment {
  Lane lane;
  int row, columns;                  // columns: none where there is no such row
  int column;                        // the segment's first
  int present;                       // how many of the columns there are
  std::uint32_t bytes[kVectors * 2]; // the low bytes of words

  SPEQ_DEVICE Segment(const CompactMatrix &matrix, int quad)
      : row(quad * kRows + lane.row()), columns(row < matrix.rows ? matrix.columns : 0),
        column(lane.column() - kStepColumns), present(0),
        at_(matrix.bytes + row * matrix.columns + lane.column()) {}

  // To the next step.
  SPEQ_DEVICE void advance() {
    column += kStepColumns;
    const int left = columns - column;
    present = left < 0 ? 0 : left < kSegment ? left : kSegment;
  }

  // The next step's.
  SPEQ_DEVICE void load() {
    advance();
#pragma unroll
    for (int i = 0; i < kVectors * 2; ++i) {
      bytes[i] = !kWhole && present > 4 * i ? load_word(at_ + 4 * i) : 0;
    }
    if (kWhole && present > 0) {
      const uint4 front = load_vector(at_), rest = load_vector(at_ + sizeof(uint4));
      const std::uint32_t words[kVectors * 2] = {front.x, front.y, front.z, front.w,
                                                 rest.x,  rest.y,  rest.z,  rest.w};
#pragma unroll
      for (int i = 0; i < kVectors * 2; ++i) {
        bytes[i] = words[i];
      }
    }
    at_ += kStepColumns;
  }

  SPEQ_DEVICE void prefetch(int ahead) const { prefetch_plane<8>(at_, ahead); }

  // Begin to fetch kAheadColumns of a plane, so many ahead of the next step, whose part of the
  // plane the lane has at `at`. The lanes of a row have a line each.
  template <int kBits> SPEQ_DEVICE void prefetch_plane(const std::uint8_t *at, int ahead) const {
    constexpr int kLineColumns = kCacheLine * 8 / kBits;
    const int line = int(lane.id / kBlockLanes * kRunLanes + lane.id % kRunLanes);
    const int first = ahead + line * kLineColumns - lane.column(); // from the segment on
    if (line * kLineColumns < kAheadColumns && column + kStepColumns + first < columns) {
      speq::cuda::prefetch(at + (ahead - lane.column()) / 8 * kBits + line * kCacheLine);
    }
  }

  // Whether a column of a vector is there, where any of the segment is.
  SPEQ_DEVICE bool has(int vector, int place) const {
    return kWhole || vector * kLaneColumns + place < present;
  }

private:
  const std::uint8_t *at_;
};

// Runs take(step) for each step of a quad, behind the decoder's `begin`; its `words` are then those
// of a vector of the lane's segment.
template <typename Decoder, typename Take> SPEQ_DEVICE void for_steps(Decoder &decoder, Take take) {
  const int columns = decoder.matrix.columns;
  decoder.prefetch(0);
#pragma unroll 1
  for (int first = 0; first < columns; first += kAheadColumns) {
    decoder.prefetch(kAheadColumns);
    const int end = first + kAheadColumns < columns ? first + kAheadColumns : columns;
#pragma unroll 1
    for (int step = first; step < end; step += kStepColumns) {
      decoder.begin();
      if (decoder.segment.present > 0) {
        take(step);
      }
    }
  }
}

} // namespace speq::cuda
