// Rebuilds words from the draft's INT4 codes and residual records.
#pragma once

#include "cuda/compact_matrix.h"
#include "cuda/int4_matrix.h"

namespace speq::cuda {

constexpr int kCodes = 16;

struct ResidualMatrix : CompactMatrix {
  Int4Matrix layout;
  Int4Row codes; // of the first row
};
static_assert(kSegment == kInt8Block);

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

// A byte for each of sixteen codes: of those below zero, and of the others.
struct CodeBytes {
  std::uint32_t below[2], others[2];

  // Those of four codes, whose lower three bits are nibbles of `selectors`; `signs` has bytes of
  // all ones for the others.
  SPEQ_DEVICE std::uint32_t of(std::uint32_t selectors, std::uint32_t signs) const {
    return select_bits(signs, permute_bytes(others[0], others[1], selectors),
                       permute_bytes(below[0], below[1], selectors));
  }
};

// The windows of all codes under a scale.
struct Windows {
  CodeBytes high, low;    // the bytes of their first words
  std::uint32_t zeros[2]; // the high bytes that classes of code 0 stand for

  SPEQ_DEVICE explicit Windows(float scale) {
    constexpr int kMost = kInt4ZeroPoint;
    std::uint32_t words[kMost + 1]; // of magnitudes
#pragma unroll
    for (int i = 0; i <= kMost; ++i) {
      words[i] = bits_as<std::uint32_t>(window_start_of<>(i) * scale);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      split(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3], high.others[i],
            low.others[i]);
      const int top = kMost - 4 * i;
      split(words[top], words[top - 1], words[top - 2], words[top - 3], high.below[i],
            low.below[i]);
      high.below[i] ^= 0x80808080;
    }
    // kZeroClass steps down, of both signs; then zero.
    const std::uint32_t first = (high.others[0] & 0x7F) * 0x010101;
    zeros[0] = ((first | 0x808080) - 0x020100) & 0x7F7F7F;
    zeros[1] = zeros[0] | 0x808080;
  }

private:
  // The highest bytes of four words, and the second highest.
  SPEQ_DEVICE static void split(std::uint32_t a, std::uint32_t b, std::uint32_t c, std::uint32_t d,
                                std::uint32_t &high, std::uint32_t &low) {
    const std::uint32_t front = permute_bytes(a, b, 0x7362), rest = permute_bytes(c, d, 0x7362);
    high = permute_bytes(front, rest, 0x7632);
    low = permute_bytes(front, rest, 0x5410);
  }
};
static_assert(kZeroClass == 3);

// high_byte of four words: one more where the low byte is below that of the window.
SPEQ_DEVICE std::uint32_t high_bytes(std::uint32_t starts_high, std::uint32_t starts_low,
                                     std::uint32_t low) {
  const std::uint32_t rest = (low | 0x80808080) - (starts_low & 0x7F7F7F7F);
  const std::uint32_t below = (~low & starts_low) | (~(low ^ starts_low) & ~rest);
  return starts_high + ((below & 0x80808080) >> 7);
}

// Marks of eight codes that are 0.
SPEQ_DEVICE std::uint32_t zero_marks(std::uint32_t codes) {
  return codes & ~((codes & 0x77777777) + 0x77777777) & kEachMark;
}

template <bool kWhole> class ResidualDecoder {
public:
  const ResidualMatrix &matrix;
  Segment<kWhole> segment;

  SPEQ_DEVICE ResidualDecoder(const ResidualMatrix &matrix, int quad)
      : matrix(matrix), segment(matrix, quad), ends_(matrix, quad),
        at_(matrix.codes.codes + (segment.row * matrix.columns + segment.lane.column()) / 2),
        scales_(matrix.codes.scales + segment.row * (matrix.columns / matrix.layout.group_size)) {}

  SPEQ_DEVICE void prefetch(int ahead) const {
    segment.prefetch(ahead);
    segment.template prefetch_plane<4>(at_, ahead);
  }

  SPEQ_DEVICE void begin() {
    segment.load();
    load_codes();
    const Run run = find_run();
    Escapes escapes;
    read_classes(run, escapes);
    mark_exceptions(run, escapes);
    escapes.find(segment.lane, ends_);
    if constexpr (kWhole) {
      const int group = group_of(matrix.layout, segment.column / kInt8Block);
      const Windows windows(segment.present == 0 ? 0.0f : widened_scale(scales_[group]));
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        find_high_bytes(windows, i);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        find_high_bytes_singly(i);
      }
    }
    escapes.patch(matrix.streams, high_);
  }

  SPEQ_DEVICE void words(int vector, std::uint32_t (&pairs)[kLaneColumns / 2]) const {
    interleave(high_[2 * vector], segment.bytes[2 * vector], pairs);
    interleave(high_[2 * vector + 1], segment.bytes[2 * vector + 1], pairs + 2);
  }

private:
  // What the stream from the front has of the run that a lane has a part of.
  struct Run {
    int at;     // where its classes lie
    int listed; // where its exceptions lie
    int exceptions;
    int zeros_before; // this lane's, in the run
  };

  // The next step's. Nibbles of absent columns are no code 0.
  SPEQ_DEVICE void load_codes() {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      codes_[i] = 0;
      if constexpr (!kWhole) {
#pragma unroll 1
        for (int byte = 0; byte < 4 && 8 * i + 2 * byte < segment.present; ++byte) {
          codes_[i] |= std::uint32_t(__ldg(at_ + 4 * i + byte)) << 8 * byte;
        }
      }
    }
    if (kWhole && segment.present > 0) {
      const uint4 vector = load_vector(at_);
      codes_[0] = vector.x;
      codes_[1] = vector.y;
      codes_[2] = vector.z;
      codes_[3] = vector.w;
    }
    at_ += kStepColumns / 2;
  }

  // Finds this lane's run, and takes those of the step from the stream.
  SPEQ_DEVICE Run find_run() {
    int own = 0;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      own += __popc(zero_marks(codes_[i]));
    }
    const int other = __shfl_xor_sync(kAllLanes, own, 1);
    const int bytes = (3 * (own + other) + 7) / 8;
    // Both lanes of a run see whether it is there: segments of a block begin it, or follow.
    const bool lists = ends_.has_exceptions &&
                       segment.column - (segment.lane.ends_run() ? kSegment : 0) < segment.columns;
    const int room = bytes + (lists ? 1 : 0);
    const int up_to = up_to_run(room);
    int taken = __shfl_sync(kAllLanes, up_to, kLanes - 1);
    Run run{ends_.front + up_to - room, 0, 0, segment.lane.ends_run() ? other : 0};
    if (ends_.has_exceptions) {
      taken += pass_exceptions(run, bytes, lists);
    }
    run.at = ends_.within(run.at);
    run.listed = run.at + bytes + 1;
    ends_.front = ends_.within(ends_.front + taken);
    return run;
  }

  // How many exceptions a run lists says where the next one lies. Most list none: all lanes read as
  // if those before had none, and again behind the first that has some.
  SPEQ_DEVICE int pass_exceptions(Run &run, int bytes, bool lists) const {
    int taken = 0;
    unsigned left = kAllLanes;
#pragma unroll 1
    while (left != 0) {
      const bool mine = (left >> segment.lane.id & 1) != 0;
      if (mine && lists) {
        run.exceptions = __ldg(matrix.streams + ends_.within(run.at + bytes));
      }
      left = __ballot_sync(kAllLanes, mine && run.exceptions > 0);
      if (left != 0) {
        const int first = __ffs(int(left)) - 1;
        const int count = __shfl_sync(kAllLanes, run.exceptions, first);
        taken += count;
        left = kAllLanes << first << kRunLanes;
        run.at += (left >> segment.lane.id & 1) != 0 ? count : 0;
      }
    }
    return taken;
  }

  // Reads the classes of the segment's zero codes; marks those that escape.
  SPEQ_DEVICE void read_classes(const Run &run, Escapes &escapes) {
    const int bit = 3 * run.zeros_before;
    const std::uint8_t *from = matrix.streams + ((run.at + bit / 8) & ~3);
    const unsigned shift = unsigned(run.at) * 8 + unsigned(bit);
    const std::uint32_t words[4] = {load_aligned(from), load_aligned(from, 1),
                                    load_aligned(from, 2), load_aligned(from, 3)};
    std::uint32_t left[3];
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      left[i] = __funnelshift_r(words[i], words[i + 1], shift);
    }
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const std::uint32_t zeros = zero_marks(codes_[i]);
      const unsigned bits = 3 * unsigned(__popc(zeros));
      const std::uint32_t classes = left[0] & ((1u << bits) - 1);
      left[0] = __funnelshift_r(left[0], left[1], bits);
      left[1] = __funnelshift_r(left[1], left[2], bits);
      left[2] >>= bits;
      classes_[i] = classes;
      escapes.marks[i] = 0;
#pragma unroll 1
      for (std::uint32_t escaped = classes & classes >> 1 & classes >> 2 & 0x249249; escaped != 0;
           escaped &= escaped - 1) {
        // The mark that has as many before it as the class.
        const std::uint32_t number = std::uint32_t(__ffs(int(escaped)) - 1) / 3;
        const std::uint32_t other = marks_before(zeros) ^ number * kEachNibble;
        escapes.marks[i] |= zeros & ~(((other & 0x77777777) + 0x77777777) | other);
      }
    }
  }

  SPEQ_DEVICE void mark_exceptions(const Run &run, Escapes &escapes) const {
#pragma unroll 1
    for (int i = 0; i < run.exceptions; ++i) {
      const int of = __ldg(matrix.streams + ends_.within(run.listed + i)) % kBlockColumns;
      const std::uint32_t mark = 8u << of % kLaneColumns * 4;
      const int vector = of / kLaneColumns - (segment.lane.ends_run() ? kVectors : 0);
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        escapes.marks[j] |= vector == j ? mark : 0;
      }
    }
  }

  SPEQ_DEVICE void find_high_bytes(const Windows &windows, int vector) {
    const std::uint32_t codes = codes_[vector], zeros = zero_marks(codes);
    const std::uint32_t magnitudes = codes & 0x77777777;
    const std::uint32_t before = marks_before(zeros), classes = spread_classes(classes_[vector]);
    std::uint32_t signs[2], zero[2];
    byte_masks(codes, signs);
    byte_masks(zeros, zero);
    // The high bytes of zero codes, one behind the other.
    const std::uint32_t of_zeros[2] = {
        permute_bytes(windows.zeros[0], windows.zeros[1], classes),
        permute_bytes(windows.zeros[0], windows.zeros[1], classes >> 16)};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const std::uint32_t selectors = magnitudes >> 16 * i, low = segment.bytes[2 * vector + i];
      const std::uint32_t of_codes = high_bytes(windows.high.of(selectors, signs[i]),
                                                windows.low.of(selectors, signs[i]), low);
      const std::uint32_t of_zero = permute_bytes(of_zeros[0], of_zeros[1], before >> 16 * i);
      high_[2 * vector + i] = select_bits(zero[i], of_zero, of_codes);
    }
  }

  // Where a segment has several scales, or is not all there.
  SPEQ_DEVICE void find_high_bytes_singly(int vector) {
    std::uint32_t codes = codes_[vector], classes = classes_[vector];
    std::uint64_t low = std::uint64_t(segment.bytes[2 * vector + 1]) << 32, high = 0;
    low |= segment.bytes[2 * vector];
#pragma unroll 1
    for (int v = 0; v < kLaneColumns && segment.has(vector, v); ++v) {
      const int column = segment.column + vector * kLaneColumns + v, code = int(codes & 0xF);
      const int magnitude = code < kInt4ZeroPoint ? kInt4ZeroPoint - code : code - kInt4ZeroPoint;
      const float start = window_start_of<>(magnitude);
      const float scale = widened_scale(scales_[column / matrix.layout.group_size]);
      const float first = (code < kInt4ZeroPoint ? -start : start) * scale;
      const auto word = std::uint16_t(bits_as<std::uint32_t>(first) >> 16);
      std::uint8_t byte = high_byte(word, std::uint8_t(low));
      if (code == kInt4ZeroPoint) {
        byte = zero_high_byte(word, int(classes & 7));
        classes >>= 3;
      }
      high |= std::uint64_t(byte) << 8 * v;
      codes >>= 4;
      low >>= 8;
    }
    high_[2 * vector] = std::uint32_t(high);
    high_[2 * vector + 1] = std::uint32_t(high >> 32);
  }

  StreamEnds ends_;
  const std::uint8_t *at_; // the next step's codes
  const Float16 *scales_;  // of the row
  std::uint32_t codes_[kVectors];
  std::uint32_t classes_[kVectors];  // of the zero codes of a vector, three bits each
  std::uint32_t high_[kVectors * 2]; // of the segment's words, a byte each
};

// The experts of a call, and the codes of those that records are residuals of.
struct ResidualSlots : RecordSlots {
  using Matrix = ResidualMatrix;
  template <bool kWhole> using Decoder = ResidualDecoder<kWhole>;

  const std::int64_t *base_slots; // by expert; null for the only one there is
  std::int64_t base_count;
  Int4Matrix gate_up, down;

  SPEQ_DEVICE std::int64_t base_slot(std::int64_t id) const {
    return base_slots == nullptr ? 0 : base_slots[id];
  }

  SPEQ_DEVICE bool has(std::int64_t id, std::int64_t slot) const {
    return slot < slots && base_slot(id) >= 0 && base_slot(id) < base_count;
  }

  SPEQ_DEVICE const Int4Matrix &codes(int m) const { return m == 2 ? down : gate_up; }

  SPEQ_DEVICE bool whole(int m) const { return RecordSlots::whole(m) && codes(m).vectors; }

  SPEQ_DEVICE ResidualMatrix matrix(int m, std::int64_t id, std::int64_t slot) const {
    const Int4Matrix &codes = this->codes(m);
    ResidualMatrix matrix{compact_matrix(*this, m, slot), codes, {}};
    matrix.codes = int4_row(codes, base_slot(id), m == 1 ? int(layout.rows[0]) : 0);
    return matrix;
  }
};

} // namespace speq::cuda
