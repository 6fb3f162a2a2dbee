// Blocks of coded matrices with NEON, rebuilt as words. Residuals have the plain decoder.
#pragma once

#include <arm_neon.h>

#include "cpu/coded_kernels.h"
#include "cpu/decode_scaled.h"

namespace speq::cpu {
namespace {

// Low and high bytes of sixteen words, in their order.
SPEQ_MEMBER void store_words(BFloat16 *words, uint8x16_t low, uint8x16_t high) {
  auto *bytes = reinterpret_cast<std::uint8_t *>(words);
  vst1q_u8(bytes, vzip1q_u8(low, high));
  vst1q_u8(bytes + 16, vzip2q_u8(low, high));
}

// 32 codes, two to the byte, in their order.
SPEQ_MEMBER uint8x16x2_t codes_of(const std::uint8_t *packed) {
  const uint8x16_t bytes = vld1q_u8(packed);
  const uint8x16_t even = vandq_u8(bytes, vdupq_n_u8(0xF)), odd = vshrq_n_u8(bytes, 4);
  return {{vzip1q_u8(even, odd), vzip2q_u8(even, odd)}};
}

// The bytes of the words of sixteen codes.
struct ByteTables {
  uint8x16_t low, high;

  // Of the words of codes from first to 15, in turns: eight, and eight more.
  static ByteTables of(uint16x8_t front, uint16x8_t back) {
    const uint8x16_t one = vreinterpretq_u8_u16(front), other = vreinterpretq_u8_u16(back);
    return {vuzp1q_u8(one, other), vuzp2q_u8(one, other)};
  }

  SPEQ_MEMBER void store(BFloat16 *words, uint8x16_t codes) const {
    store_words(words, vqtbl1q_u8(low, codes), vqtbl1q_u8(high, codes));
  }
};

// Sixteen 3-bit values that begin at a byte; ten bytes behind them are read.
SPEQ_MEMBER uint8x16_t classes_of_16(const std::uint8_t *classes) {
  // Of each value the byte that it begins in, and the next; and how far it is up from there.
  constexpr std::uint8_t kFront[16] = {0, 1, 0, 1, 0, 1, 1, 2, 1, 2, 1, 2, 2, 3, 2, 3};
  constexpr std::uint8_t kBack[16] = {3, 4, 3, 4, 3, 4, 4, 5, 4, 5, 4, 5, 5, 6, 5, 6};
  constexpr std::int16_t kDown[8] = {0, -3, -6, -1, -4, -7, -2, -5};
  const uint8x16_t bytes = vld1q_u8(classes);
  const int16x8_t down = vld1q_s16(kDown);
  const auto values = [&](const std::uint8_t *places) {
    return vreinterpretq_u8_u16(
        vshlq_u16(vreinterpretq_u16_u8(vqtbl1q_u8(bytes, vld1q_u8(places))), down));
  };
  return vandq_u8(vuzp1q_u8(values(kFront), values(kBack)), vdupq_n_u8(7));
}

// How many of the bytes up to each one are 1, of bytes that are 0 or 1.
SPEQ_MEMBER uint8x16_t counts_of(uint8x16_t marks) {
  const uint8x16_t none = vdupq_n_u8(0);
  marks = vaddq_u8(marks, vextq_u8(none, marks, 15));
  marks = vaddq_u8(marks, vextq_u8(none, marks, 14));
  marks = vaddq_u8(marks, vextq_u8(none, marks, 12));
  return vaddq_u8(marks, vextq_u8(none, marks, 8));
}

class NeonLossless {
public:
  using Block = WordBlock;

  NeonLossless(const LosslessRows &matrix, std::int64_t quad)
      : columns_(matrix.columns), stride_(class_stride(columns_)),
        bytes_(matrix.bytes + quad * kQuadRows * columns_),
        classes_(matrix.classes + quad * kQuadRows * stride_), stream_(matrix.streams),
        streams_(matrix.quad(quad)),
        high_bytes_(vcombine_u8(vld1_u8(matrix.high_bytes), vdup_n_u8(0))) {
    fetch_streams(matrix, streams_);
  }

  SPEQ_MEMBER void next(int rows, std::int64_t first, std::int64_t present, Block *blocks) {
    fetch_plane<kBlockColumns>(bytes_, columns_, first);
    fetch_plane<3 * kBlockColumns / 8>(classes_, stride_, class_bytes(first));
    for (int n = 0; n < rows; ++n) {
      rebuild(n, first, present, blocks[n]);
    }
  }

private:
  static constexpr int kParts = kBlockColumns / 16;

  SPEQ_MEMBER void rebuild(int n, std::int64_t first, std::int64_t present, Block &block) {
    const std::uint8_t *bytes = bytes_ + n * columns_ + first;
    const std::uint8_t *classes = classes_ + n * stride_ + class_bytes(first);
    uint8x16_t of[kParts], marks[kParts];
    std::int64_t escapes[kParts], all = 0;
    SPEQ_UNROLL
    for (int part = 0; part < kParts; ++part) {
      of[part] = classes_of_16(classes + class_bytes(16 * part));
      marks[part] = vandq_u8(vceqq_u8(of[part], vdupq_n_u8(kEscape)), vdupq_n_u8(1));
      if (present < kBlockColumns) { // what lies behind the row is none of its
        marks[part] = vandq_u8(marks[part], vcltq_u8(vaddq_u8(places(), vdupq_n_u8(16 * part)),
                                                     vdupq_n_u8(std::uint8_t(present))));
      }
      escapes[part] = vaddvq_u8(marks[part]);
      all += escapes[part];
    }
    const std::uint8_t *next = stream_ + streams_.take_back(all);
    SPEQ_UNROLL
    for (int part = 0; part < kParts; ++part) {
      const uint8x16_t counts = vsubq_u8(counts_of(marks[part]), vdupq_n_u8(1));
      const uint8x16_t escaped = vqtbl1q_u8(vld1q_u8(next), counts);
      next += escapes[part];
      const uint8x16_t high = vbslq_u8(vceqq_u8(marks[part], vdupq_n_u8(1)), escaped,
                                       vqtbl1q_u8(high_bytes_, of[part]));
      store_words(block.words + 16 * part, vld1q_u8(bytes + 16 * part), high);
    }
    clear_behind(block, present);
  }

  static uint8x16_t places() {
    constexpr std::uint8_t kPlaces[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return vld1q_u8(kPlaces);
  }

  std::int64_t columns_, stride_;
  const std::uint8_t *bytes_, *classes_, *stream_;
  QuadStreams streams_;
  uint8x16_t high_bytes_;
};

// Values times a scale, rounded to BF16. A product that is no number stays none: the bits that
// rounding looks at are zero in it.
SPEQ_MEMBER uint16x8_t rounded(float32x4_t front, float32x4_t back, float scale) {
  const auto bits_of = [&](float32x4_t values) {
    const uint32x4_t bits = vreinterpretq_u32_f32(vmulq_n_f32(values, scale));
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    return vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7FFF)));
  };
  return vshrn_high_n_u32(vshrn_n_u32(bits_of(front), 16), bits_of(back), 16);
}

// FP8 under one scale: words of an octave are those of the one before but for the exponent. So
// sixteen words tell those of all normal codes: of the eight mantissas in two neighbouring octaves,
// found by the lower half of a code. Its upper half tells what is to be added to their high bytes.
// Subnormal codes are rare and go one by one.
class NeonFp8 {
public:
  using Block = WordBlock;

  NeonFp8(const Fp8Rows &matrix, std::int64_t quad)
      : columns_(matrix.columns), codes_(matrix.codes + quad * kQuadRows * columns_),
        scales_(matrix, quad) {}

  SPEQ_MEMBER void next(int rows, std::int64_t first, std::int64_t present, Block *blocks) {
    fetch_plane<kBlockColumns>(codes_, columns_, first);
    scales_.next(rows, first, [&](int n, float scale) { tables_[n] = Table::of(scale); });
    for (int n = 0; n < rows; ++n) {
      const Table table = tables_[scales_.place(n)]; // a copy: what is stored cannot change it
      const std::uint8_t *codes = codes_ + n * columns_ + first;
      uint8x16_t parts[kParts], odd = vdupq_n_u8(0);
      SPEQ_UNROLL
      for (int part = 0; part < kParts; ++part) {
        parts[part] = vld1q_u8(codes + 16 * part);
        odd = vorrq_u8(odd, not_normal(parts[part]));
      }
      if (!table.shifts || vmaxvq_u8(odd) != 0) {
        blocks[n] = {};
        for (std::int64_t i = 0; i < present; ++i) {
          blocks[n].words[i] = fp8_word(codes[i], table.scale);
        }
        continue;
      }
      SPEQ_UNROLL
      for (int part = 0; part < kParts; ++part) {
        const uint8x16_t places = vandq_u8(parts[part], vdupq_n_u8(0xF));
        const uint8x16_t octaves = vandq_u8(vshrq_n_u8(parts[part], 4), vdupq_n_u8(7));
        const uint8x16_t added = vorrq_u8(octaves, vandq_u8(parts[part], vdupq_n_u8(0x80)));
        store_words(blocks[n].words + 16 * part, vqtbl1q_u8(table.bytes.low, places),
                    vaddq_u8(vqtbl1q_u8(table.bytes.high, places), added));
      }
      clear_behind(blocks[n], present);
    }
  }

private:
  static constexpr int kParts = kBlockColumns / 16;
  // Under a scale as near to 1 as this, no word is subnormal and none infinite.
  static constexpr float kLeast = 0x1p-100f, kMost = 0x1p100f;

  // Words under a scale.
  struct Table {
    float scale = 0.0f;
    bool shifts = false; // whether words of an octave are those of another, shifted
    ByteTables bytes{};

    SPEQ_MEMBER static Table of(float scale) {
      const float magnitude = scale < 0 ? -scale : scale;
      const bool shifts = magnitude >= kLeast && magnitude <= kMost;
      // A normal code is (8 + its mantissa) times 2 to the power of its exponent less 10.
      constexpr float kMantissas[8] = {8, 9, 10, 11, 12, 13, 14, 15};
      const uint16x8_t words =
          rounded(vld1q_f32(kMantissas), vld1q_f32(kMantissas + 4), shifts ? scale : 1.0f);
      const uint16x8_t even = vsubq_u16(words, vdupq_n_u16(10 << 7));
      return {scale, shifts, ByteTables::of(even, vaddq_u16(even, vdupq_n_u16(1 << 7)))};
    }
  };

  // Bytes that are not zero where codes are subnormal, zero or no number.
  SPEQ_MEMBER static uint8x16_t not_normal(uint8x16_t codes) {
    const uint8x16_t magnitudes = vandq_u8(codes, vdupq_n_u8(0x7F));
    return vqsubq_u8(vsubq_u8(magnitudes, vdupq_n_u8(8)), vdupq_n_u8(0x7E - 8));
  }

  std::int64_t columns_;
  const std::uint8_t *codes_;
  Fp8QuadScales scales_;
  Table tables_[kQuadRows];
};

class NeonMxfp4 {
public:
  using Block = WordBlock;

  NeonMxfp4(const Mxfp4Rows &matrix, std::int64_t quad)
      : matrix_(matrix), codes_(matrix.codes + quad * kQuadRows * matrix.code_stride),
        scales_(matrix.scales + quad * kQuadRows * matrix.scale_stride),
        tables_(Mxfp4Tables::get()) {}

  SPEQ_MEMBER void next(int rows, std::int64_t first, std::int64_t present, Block *blocks) {
    fetch_plane<kBlockColumns / 2>(codes_, matrix_.code_stride, first / 2);
    for (int n = 0; n < rows; ++n) {
      const std::uint8_t *codes = codes_ + n * matrix_.code_stride + first / 2;
      const std::uint8_t *scales = scales_ + n * matrix_.scale_stride + first / kMxfp4Block;
      for (std::int64_t at = 0; at < present; at += kMxfp4Block) {
        const Mxfp4Tables::Bytes &bytes = tables_.of_scale[scales[at / kMxfp4Block]];
        const ByteTables tables = {vld1q_u8(bytes.low), vld1q_u8(bytes.high)};
        const uint8x16x2_t of = codes_of(codes + at / 2);
        tables.store(blocks[n].words + at, of.val[0]);
        tables.store(blocks[n].words + at + 16, of.val[1]);
      }
      clear_behind(blocks[n], present);
    }
  }

private:
  const Mxfp4Rows &matrix_;
  const std::uint8_t *codes_, *scales_;
  const Mxfp4Tables &tables_;
};

// INT4: a table for each row of a quad, made where a group begins.
class NeonInt4 {
public:
  using Block = WordBlock;

  NeonInt4(const Int4Rows &matrix, std::int64_t quad) : matrix_(matrix), row_(quad * kQuadRows) {}

  SPEQ_MEMBER void next(int rows, std::int64_t first, std::int64_t present, Block *blocks) {
    const std::int64_t stride = matrix_.columns / 2;
    const std::uint8_t *codes = matrix_.codes + row_ * stride;
    fetch_plane<kBlockColumns / 2>(codes, stride, first / 2);
    for (std::int64_t at = 0; at < present; at += kInt4Columns) {
      if (first + at == next_) {
        for (int n = 0; n < rows; ++n) {
          tables_[n] = table_under(matrix_.scale(row_ + n, group_), matrix_.zero(row_ + n, group_));
        }
        ++group_;
        next_ += matrix_.group_size;
      }
      for (int n = 0; n < rows; ++n) {
        const uint8x16x2_t of = codes_of(codes + n * stride + (first + at) / 2);
        tables_[n].store(blocks[n].words + at, of.val[0]);
        tables_[n].store(blocks[n].words + at + 16, of.val[1]);
      }
    }
    for (int n = 0; n < rows; ++n) {
      clear_behind(blocks[n], present);
    }
  }

private:
  SPEQ_MEMBER static ByteTables table_under(float scale, int zero) {
    constexpr float kCodes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const float32x4_t less = vdupq_n_f32(float(zero));
    const auto values = [&](int first) { return vsubq_f32(vld1q_f32(kCodes + first), less); };
    return ByteTables::of(rounded(values(0), values(4), scale),
                          rounded(values(8), values(12), scale));
  }

  const Int4Rows &matrix_;
  std::int64_t row_;
  std::int64_t group_ = 0, next_ = 0; // the next group, and where it begins
  ByteTables tables_[kQuadRows] = {};
};

// NVFP4: a table for each block of a row.
class NeonNvfp4 {
public:
  using Block = WordBlock;

  NeonNvfp4(const Nvfp4Rows &matrix, std::int64_t quad) : matrix_(matrix), row_(quad * kQuadRows) {}

  SPEQ_MEMBER void next(int rows, std::int64_t first, std::int64_t present, Block *blocks) {
    const std::int64_t stride = matrix_.columns / 2, scale_stride = matrix_.columns / kNvfp4Block;
    const std::uint8_t *codes = matrix_.codes + row_ * stride + first / 2;
    fetch_plane<kBlockColumns / 2>(matrix_.codes + row_ * stride, stride, first / 2);
    for (int n = 0; n < rows; ++n) {
      const std::uint8_t *scales = matrix_.scales + (row_ + n) * scale_stride + first / kNvfp4Block;
      for (std::int64_t at = 0; at < present; at += kNvfp4Columns) {
        const uint8x16x2_t of = codes_of(codes + n * stride + at / 2);
        for (int part = 0; part < 2; ++part) {
          const std::uint8_t scale = scales[at / kNvfp4Block + part];
          table_under(matrix_.scale(scale)).store(blocks[n].words + at + 16 * part, of.val[part]);
        }
      }
      clear_behind(blocks[n], present);
    }
  }

private:
  SPEQ_MEMBER static ByteTables table_under(float scale) {
    constexpr float kMagnitudes[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    const float32x4_t front = vld1q_f32(kMagnitudes), back = vld1q_f32(kMagnitudes + 4);
    return ByteTables::of(rounded(front, back, scale),
                          rounded(vnegq_f32(front), vnegq_f32(back), scale));
  }

  const Nvfp4Rows &matrix_;
  std::int64_t row_;
};

using NeonScaled = Scaled<NeonFp8, NeonMxfp4, NeonInt4, NeonNvfp4>;

} // namespace
} // namespace speq::cpu
