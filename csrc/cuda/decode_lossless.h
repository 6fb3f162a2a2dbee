// Rebuilds the words of lossless records.
#pragma once

#include "cuda/compact_matrix.h"

namespace speq::cuda {

struct LosslessMatrix : CompactMatrix {
  const std::uint8_t *high_bytes, *classes;
};

template <bool kWhole> class LosslessDecoder {
public:
  const LosslessMatrix &matrix;
  Segment<kWhole> segment;

  SPEQ_DEVICE LosslessDecoder(const LosslessMatrix &matrix, int quad)
      : matrix(matrix), segment(matrix, quad), ends_(matrix, quad),
        of_classes_{load_aligned(matrix.high_bytes), load_aligned(matrix.high_bytes, 1)},
        classes_(matrix.classes + segment.row * int(class_stride(matrix.columns)) +
                 class_bytes(segment.lane.column())) {}

  SPEQ_DEVICE void prefetch(int ahead) const {
    segment.prefetch(ahead);
    segment.template prefetch_plane<3>(classes_, ahead);
  }

  SPEQ_DEVICE void begin() {
    segment.load();
    std::uint32_t packed[3];
    load_classes(packed);
    const std::uint32_t classes[kVectors] = {
        spread_classes(packed[0]), spread_classes(__funnelshift_r(packed[0], packed[1], 24)),
        spread_classes(__funnelshift_r(packed[1], packed[2], 16)), spread_classes(packed[2] >> 8)};
    Escapes escapes;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      escapes.marks[i] = (classes[i] + kEachNibble) & kEachMark;
    }
    escapes.find(segment.lane, ends_);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      high_[2 * i] = permute_bytes(of_classes_[0], of_classes_[1], classes[i]);
      high_[2 * i + 1] = permute_bytes(of_classes_[0], of_classes_[1], classes[i] >> 16);
    }
    escapes.patch(matrix.streams, high_);
  }

  SPEQ_DEVICE void words(int vector, std::uint32_t (&pairs)[kLaneColumns / 2]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      interleave(high_[2 * vector + i], segment.bytes[2 * vector + i], pairs + 2 * i);
    }
  }

private:
  // The next step's. Of absent columns a class that does not escape.
  SPEQ_DEVICE void load_classes(std::uint32_t (&packed)[3]) {
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      packed[i] = 0;
      if (!kWhole && segment.present > 0) {
        packed[i] = low_bits(load_word(classes_ + 4 * i), 3 * segment.present - 32 * i);
      }
    }
    if (kWhole && segment.present > 0) {
      packed[0] = load_aligned(classes_);
      packed[1] = load_aligned(classes_, 1);
      packed[2] = load_aligned(classes_, 2);
    }
    classes_ += class_bytes(kStepColumns);
  }

  StreamEnds ends_;
  std::uint32_t of_classes_[2];      // their high bytes
  const std::uint8_t *classes_;      // the next step's
  std::uint32_t high_[kVectors * 2]; // the high bytes of the segment
};

// The experts of a call.
struct LosslessSlots : RecordSlots {
  using Matrix = LosslessMatrix;
  template <bool kWhole> using Decoder = LosslessDecoder<kWhole>;

  SPEQ_DEVICE bool has(std::int64_t, std::int64_t slot) const { return slot < slots; }

  SPEQ_DEVICE LosslessMatrix matrix(int m, std::int64_t, std::int64_t slot) const {
    const std::uint8_t *record = records + slot * stride;
    return {compact_matrix(*this, m, slot), record + m * kClasses, record + layout.classes[m]};
  }
};

} // namespace speq::cuda
