// Rebuilds the words of records of codes with scales (scaled.h), in float32 and rounded once.
#pragma once

#include "cuda/compact_matrix.h"
#include "scaled.h"

namespace speq::cuda {

// Records in slots.
struct ScaledSlots {
  static constexpr int kMostRows = kMaxBatch;
  const std::uint8_t *records;
  std::int64_t slots, stride;
  bool vectors; // whether sixteen bytes are aligned wherever multiples of sixteen are
  ScaledLayout layout;

  SPEQ_DEVICE bool has(std::int64_t, std::int64_t slot) const { return slot < slots; }
  // Whether segments of a matrix are all there or not at all, and their vectors are aligned.
  SPEQ_DEVICE bool whole(int m) const { return vectors && layout.columns[m] % kSegment == 0; }
};

inline ScaledSlots scaled_slots(const Records &records, const ScaledLayout &layout) {
  const auto *bytes = static_cast<const std::uint8_t *>(records.records);
  const std::uintptr_t places =
      reinterpret_cast<std::uintptr_t>(bytes) | std::uintptr_t(records.slot_stride);
  return {bytes, records.slots, records.slot_stride, places % sizeof(uint4) == 0, layout};
}

// Two words of BF16 in a register.
SPEQ_DEVICE std::uint32_t rounded_pair(float low, float high) {
#ifdef __CUDA_ARCH__
  std::uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return to_bfloat16(low).bits | std::uint32_t(to_bfloat16(high).bits) << 16;
#endif
}

// Words of two values of float16, which are `shift` times too small, under a scale. The first
// product is exact.
SPEQ_DEVICE std::uint32_t scaled_pair(std::uint32_t halves, float shift, float scale) {
  const float low = widen(Float16{std::uint16_t(halves & 0xFFFFu)}) * shift;
  const float high = widen(Float16{std::uint16_t(halves >> 16)}) * shift;
  return rounded_pair(low * scale, high * scale);
}

// A lane's codes of four bits.
template <bool kWhole>
SPEQ_DEVICE void load_codes(const std::uint8_t *at, std::uint32_t (&codes)[kVectors]) {
  if (kWhole) {
    const uint4 vector = load_vector(at);
    codes[0] = vector.x, codes[1] = vector.y, codes[2] = vector.z, codes[3] = vector.w;
  } else {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      codes[i] = load_word(at + 4 * i);
    }
  }
}

struct Fp8Matrix : CompactMatrix {
  const float *scales;
  int block_rows, block_columns; // at least all that there are, where they share one

  // The scales of the blocks that a row is in.
  SPEQ_DEVICE const float *row_scales(int row) const {
    return scales + row / block_rows * ((columns + block_columns - 1) / block_columns);
  }
};

template <bool kWhole> class Fp8Decoder {
public:
  const Fp8Matrix &matrix;
  Segment<kWhole> segment;

  SPEQ_DEVICE Fp8Decoder(const Fp8Matrix &matrix, int quad)
      : matrix(matrix), segment(matrix, quad),
        scales_(matrix.row_scales(quad * kRows + Lane().row())), scale_(0.0f) {}

  SPEQ_DEVICE void prefetch(int ahead) const { segment.prefetch(ahead); }

  SPEQ_DEVICE void begin() {
    segment.load();
    if (segment.present > 0) {
      scale_ = __ldg(scales_ + segment.column / matrix.block_columns);
    }
  }

  SPEQ_DEVICE void words(int vector, std::uint32_t (&pairs)[kLaneColumns / 2]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const std::uint32_t codes = segment.bytes[2 * vector + i];
      pairs[2 * i] = pair_of(permute_bytes(codes, 0, 0x1404));
      pairs[2 * i + 1] = pair_of(permute_bytes(codes, 0, 0x3424));
      const std::uint32_t nans = ((codes & 0x7F7F7F7F) + 0x01010101) & 0x80808080;
      if (nans != 0) {
        mark_nans(nans, pairs[2 * i], pairs[2 * i + 1]);
      }
    }
  }

private:
  // Words of two codes that are in the high bytes of halves: as numbers of float16 they are 2^8
  // times too small.
  SPEQ_DEVICE std::uint32_t pair_of(std::uint32_t codes) const {
    return scaled_pair((codes & 0x80008000) | ((codes >> 1) & 0x3F803F80), 256.0f, scale_);
  }

  // nans: the highest bits of bytes that are no numbers.
  SPEQ_DEVICE static void mark_nans(std::uint32_t nans, std::uint32_t &first,
                                    std::uint32_t &second) {
    constexpr std::uint32_t kNan = 0x7FC0;
    first |= (nans & 0x80 ? kNan : 0) | (nans & 0x8000 ? kNan << 16 : 0);
    second |= (nans & 0x800000 ? kNan : 0) | (nans & 0x80000000 ? kNan << 16 : 0);
  }

  const float *scales_; // of the blocks of the lane's row
  float scale_;         // of the segment
};

struct Fp8Slots : ScaledSlots {
  using Matrix = Fp8Matrix;
  template <bool kWhole> using Decoder = Fp8Decoder<kWhole>;

  Fp8Blocks blocks;

  SPEQ_DEVICE Fp8Matrix matrix(int m, std::int64_t, std::int64_t slot) const {
    const Fp8Rows rows = fp8_rows(layout, records + slot * stride, blocks, m);
    return {{rows.codes, nullptr, nullptr, int(rows.rows), int(rows.columns), 0},
            rows.scales,
            int(blocks.rows == 0 ? rows.rows : blocks.rows),
            int(blocks.columns == 0 ? rows.columns : blocks.columns)};
  }
};

struct Mxfp4Matrix : CompactMatrix {
  const std::uint8_t *scales;
  int code_stride, scale_stride;
};

// A segment has one scale.
template <bool kWhole> class Mxfp4Decoder {
public:
  static_assert(kSegment == int(kMxfp4Block));
  const Mxfp4Matrix &matrix;
  Segment<kWhole> segment;

  SPEQ_DEVICE Mxfp4Decoder(const Mxfp4Matrix &matrix, int quad)
      : matrix(matrix), segment(matrix, quad),
        at_(matrix.bytes + segment.row * matrix.code_stride + segment.lane.column() / 2),
        scales_(matrix.scales + segment.row * matrix.scale_stride), codes_{}, half_scale_(0.0f) {}

  SPEQ_DEVICE void prefetch(int ahead) const { segment.template prefetch_plane<4>(at_, ahead); }

  SPEQ_DEVICE void begin() {
    segment.advance();
    if (segment.present > 0) {
      load_codes<kWhole>(at_, codes_);
      half_scale_ = e8m0_half(__ldg(scales_ + segment.column / kSegment));
    }
    at_ += kStepColumns / 2;
  }

  SPEQ_DEVICE void words(int vector, std::uint32_t (&pairs)[kLaneColumns / 2]) const {
#pragma unroll
    for (int i = 0; i < kLaneColumns / 2; ++i) {
      // Codes in the highest bits of halves: as numbers of float16 they are 2^14 times too small,
      // and of twice their values 2^15 times.
      const std::uint32_t byte = codes_[vector] >> 8 * i;
      const std::uint32_t codes = (byte << 12 & 0xF000u) | (byte << 24 & 0xF0000000u);
      pairs[i] =
          scaled_pair((codes & 0x80008000) | ((codes & 0x70007000) >> 3), 32768.0f, half_scale_);
    }
  }

private:
  const std::uint8_t *at_, *scales_; // the next step's codes; scales of the row
  std::uint32_t codes_[kVectors];
  float half_scale_;
};

struct GroupedInt4Matrix : CompactMatrix {
  Int4Rows rows_of;
};

// A segment has one scale, since groups are of whole segments.
template <bool kWhole> class GroupedInt4Decoder {
public:
  static_assert(kSegment == int(kInt4Columns));
  const GroupedInt4Matrix &matrix;
  Segment<kWhole> segment;

  SPEQ_DEVICE GroupedInt4Decoder(const GroupedInt4Matrix &matrix, int quad)
      : matrix(matrix), segment(matrix, quad),
        at_(matrix.bytes + segment.row * (matrix.columns / 2) + segment.lane.column() / 2),
        codes_{}, scale_(0.0f), zero_(0) {}

  SPEQ_DEVICE void prefetch(int ahead) const { segment.template prefetch_plane<4>(at_, ahead); }

  SPEQ_DEVICE void begin() {
    segment.advance();
    if (segment.present > 0) {
      load_codes<kWhole>(at_, codes_);
      const std::int64_t group = segment.column / matrix.rows_of.group_size;
      scale_ = matrix.rows_of.scale(segment.row, group);
      zero_ = matrix.rows_of.zero(segment.row, group);
    }
    at_ += kStepColumns / 2;
  }

  SPEQ_DEVICE void words(int vector, std::uint32_t (&pairs)[kLaneColumns / 2]) const {
#pragma unroll
    for (int i = 0; i < kLaneColumns / 2; ++i) {
      const std::uint32_t byte = codes_[vector] >> 8 * i;
      pairs[i] = rounded_pair(float(int(byte & 0xF) - zero_) * scale_,
                              float(int(byte >> 4 & 0xF) - zero_) * scale_);
    }
  }

private:
  const std::uint8_t *at_; // the next step's codes
  std::uint32_t codes_[kVectors];
  float scale_;
  int zero_;
};

struct GroupedInt4Slots : ScaledSlots {
  using Matrix = GroupedInt4Matrix;
  template <bool kWhole> using Decoder = GroupedInt4Decoder<kWhole>;
  static constexpr int kMostRows = 2;
  Int4Groups groups;

  SPEQ_DEVICE GroupedInt4Matrix matrix(int m, std::int64_t, std::int64_t slot) const {
    const Int4Rows rows = int4_rows(layout, records + slot * stride, groups, m);
    return {{rows.codes, nullptr, nullptr, int(rows.rows), int(rows.columns), 0}, rows};
  }
};

struct Nvfp4Matrix : CompactMatrix {
  Nvfp4Rows rows_of;
};

// A segment has two scales.
template <bool kWhole> class Nvfp4Decoder {
public:
  static_assert(kSegment == int(kNvfp4Columns));
  const Nvfp4Matrix &matrix;
  Segment<kWhole> segment;

  SPEQ_DEVICE Nvfp4Decoder(const Nvfp4Matrix &matrix, int quad)
      : matrix(matrix), segment(matrix, quad),
        at_(matrix.bytes + segment.row * (matrix.columns / 2) + segment.lane.column() / 2),
        scales_(matrix.rows_of.scales + segment.row * (matrix.columns / int(kNvfp4Block))),
        codes_{}, scale_{} {}

  SPEQ_DEVICE void prefetch(int ahead) const { segment.template prefetch_plane<4>(at_, ahead); }

  SPEQ_DEVICE void begin() {
    segment.advance();
    if (segment.present > 0) {
      load_codes<kWhole>(at_, codes_);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        scale_[i] = matrix.rows_of.scale(__ldg(scales_ + segment.column / int(kNvfp4Block) + i));
      }
    }
    at_ += kStepColumns / 2;
  }

  SPEQ_DEVICE void words(int vector, std::uint32_t (&pairs)[kLaneColumns / 2]) const {
#pragma unroll
    for (int i = 0; i < kLaneColumns / 2; ++i) {
      // As in MXFP4; values are 2^14 times too small.
      const std::uint32_t byte = codes_[vector] >> 8 * i;
      const std::uint32_t codes = (byte << 12 & 0xF000u) | (byte << 24 & 0xF0000000u);
      pairs[i] = scaled_pair((codes & 0x80008000) | ((codes & 0x70007000) >> 3), 16384.0f,
                             scale_[vector * kLaneColumns / int(kNvfp4Block)]);
    }
  }

private:
  const std::uint8_t *at_, *scales_; // the next step's codes; scales of the row
  std::uint32_t codes_[kVectors];
  float scale_[2];
};

struct Nvfp4Slots : ScaledSlots {
  using Matrix = Nvfp4Matrix;
  template <bool kWhole> using Decoder = Nvfp4Decoder<kWhole>;
  bool divides;

  SPEQ_DEVICE Nvfp4Matrix matrix(int m, std::int64_t, std::int64_t slot) const {
    const Nvfp4Rows rows = nvfp4_rows(layout, records + slot * stride, divides, m);
    return {{rows.codes, nullptr, nullptr, int(rows.rows), int(rows.columns), 0}, rows};
  }
};

struct Mxfp4Slots : ScaledSlots {
  using Matrix = Mxfp4Matrix;
  template <bool kWhole> using Decoder = Mxfp4Decoder<kWhole>;

  SPEQ_DEVICE Mxfp4Matrix matrix(int m, std::int64_t, std::int64_t slot) const {
    const Mxfp4Rows rows = mxfp4_rows(layout, records + slot * stride, m);
    return {{rows.codes, nullptr, nullptr, int(rows.rows), int(rows.columns), 0},
            rows.scales,
            int(rows.code_stride),
            int(rows.scale_stride)};
  }
};

} // namespace speq::cuda
