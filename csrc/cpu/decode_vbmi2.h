// Blocks of compact matrices with AVX-512 VBMI and VBMI2: 64 weights at a time, in registers.
#pragma once

#include "cpu/avx512_vectors.h"
#include "cpu/coded_kernels.h"

namespace speq::cpu {
namespace {

// The words of a block, 32 to a vector.
struct VectorBlock {
  __m512i halves[2];

  __m256i part(std::int64_t at) const {
    const __m512i half = halves[at / 32];
    return at % 32 == 0 ? _mm512_castsi512_si256(half) : _mm512_extracti64x4_epi64(half, 1);
  }
};

inline __mmask64 first_of_64(std::int64_t present) { return ~0ull >> (kBlockColumns - present); }

inline __m512i load64(const std::uint8_t *bytes) { return _mm512_loadu_si512(bytes); }

// 64 values of three bits out of the first 24 of 32 bytes that may be read.
inline __m512i classes_at(const std::uint8_t *bytes) {
  const __m512i packed =
      _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(bytes)));
  // Three bytes to each eight, out of which eight shifts take three bits each.
  alignas(64) static constexpr auto spread = [] {
    struct {
      std::uint8_t bytes[64];
    } of{};
    for (int i = 0; i < 64; ++i) {
      of.bytes[i] = std::uint8_t(i / 8 * 3 + i % 8);
    }
    return of;
  }();
  const __m512i shifts = _mm512_set1_epi64(0x15120F0C09060300);
  const __m512i eights =
      _mm512_maskz_permutexvar_epi8(0x0707070707070707, load64(spread.bytes), packed);
  return _mm512_and_si512(_mm512_multishift_epi64_epi8(shifts, eights), _mm512_set1_epi8(7));
}

// Low and high bytes as words, in their order; those behind `present` are zeros.
inline VectorBlock words_of(__m512i low, __m512i high, std::int64_t present) {
  alignas(64) static constexpr auto order = [] {
    struct {
      std::uint8_t bytes[2][64];
    } of{};
    for (int i = 0; i < 128; ++i) {
      of.bytes[i / 64][i % 64] = std::uint8_t(i / 2 + (i % 2) * 64);
    }
    return of;
  }();
  VectorBlock block{_mm512_permutex2var_epi8(low, load64(order.bytes[0]), high),
                    _mm512_permutex2var_epi8(low, load64(order.bytes[1]), high)};
  if (present < kBlockColumns) {
    const __mmask64 mask = first_of_64(present);
    block.halves[0] = _mm512_maskz_mov_epi16(__mmask32(mask), block.halves[0]);
    block.halves[1] = _mm512_maskz_mov_epi16(__mmask32(mask >> 32), block.halves[1]);
  }
  return block;
}

// Of bytes, those that a mask names replaced by the next of a stream's back.
inline __m512i with_escapes(__m512i bytes, __mmask64 escapes, const std::uint8_t *streams,
                            QuadStreams &positions) {
  const std::int64_t at = positions.take_back(__builtin_popcountll(escapes));
  return _mm512_mask_expand_epi8(bytes, escapes, load64(streams + at));
}

class VectorLossless {
public:
  using Block = VectorBlock;

  VectorLossless(const LosslessRows &matrix, std::int64_t quad)
      : bytes_(matrix.bytes + quad * kQuadRows * matrix.columns),
        classes_(matrix.classes + quad * kQuadRows * class_stride(matrix.columns)),
        stream_(matrix.streams), columns_(matrix.columns), streams_(matrix.quad(quad)),
        exponents_(_mm512_broadcast_i32x4(
            _mm_loadl_epi64(reinterpret_cast<const __m128i *>(matrix.exponents)))) {}

  void begin(std::int64_t) {}

  Block next(int n, std::int64_t first, std::int64_t present) {
    const std::uint8_t *bytes = bytes_ + n * columns_ + first;
    const std::uint8_t *classes = classes_ + n * class_stride(columns_) + class_bytes(first);
    fetch_ahead(bytes + kQuadRows * columns_);
    fetch_ahead(classes + kQuadRows * class_stride(columns_));
    const __m512i of = classes_at(classes);
    const __mmask64 escapes =
        _mm512_mask_cmpeq_epi8_mask(first_of_64(present), of, _mm512_set1_epi8(kEscape));
    const __m512i exponents =
        with_escapes(_mm512_shuffle_epi8(exponents_, of), escapes, stream_, streams_);
    // The exponent's lowest bit above the mantissa, the others below the sign.
    const __m512i sign_mantissa = load64(bytes), low_bits = _mm512_set1_epi8(0x7F);
    const __m512i low = _mm512_ternarylogic_epi32(low_bits, sign_mantissa,
                                                  _mm512_slli_epi16(exponents, 7), kSelect);
    const __m512i high = _mm512_ternarylogic_epi32(low_bits, _mm512_srli_epi16(exponents, 1),
                                                   sign_mantissa, kSelect);
    return words_of(low, high, present);
  }

private:
  static constexpr int kSelect = 0xCA; // the second where the first is one, else the third

  const std::uint8_t *bytes_, *classes_, *stream_;
  std::int64_t columns_;
  QuadStreams streams_;
  __m512i exponents_;
};

class VectorResidual {
public:
  using Block = VectorBlock;

  // For groups of which `takes_tables` holds.
  VectorResidual(const ResidualRows &matrix, std::int64_t quad)
      : codes_(matrix.codes), row_(quad * kQuadRows), rows_(matrix.rows - row_),
        bytes_(matrix.bytes + row_ * matrix.columns), stream_(matrix.streams),
        streams_(matrix.quad(quad)) {}

  void begin(std::int64_t first) {
    if (first != next_tables_) {
      return;
    }
    const std::int64_t group = codes_.group_size;
    next_tables_ += group < kBlockColumns ? kBlockColumns : group;
    SPEQ_UNROLL
    for (int n = 0; n < kQuadRows; ++n) {
      if (n < rows_) {
        const Float16 *scales = codes_.scales + (row_ + n) * codes_.row_groups();
        tables_[n] = group < kBlockColumns && group != codes_.columns
                         ? tables_of_lanes(scales, first)
                         : tables_of(window_scale(scales[first / group]));
      }
    }
  }

  Block next(int n, std::int64_t first, std::int64_t present) {
    const std::uint8_t *bytes = bytes_ + n * codes_.columns + first;
    const std::uint8_t *qweight = codes_.qweight + (row_ + n) * codes_.row_bytes() + first / 2;
    fetch_ahead(bytes + kQuadRows * codes_.columns);
    fetch_ahead(qweight + kQuadRows * codes_.row_bytes());
    const __mmask64 mask = first_of_64(present);
    const __m256i pairs =
        present == kBlockColumns
            ? _mm256_loadu_si256(reinterpret_cast<const __m256i *>(qweight))
            : _mm256_maskz_loadu_epi8(__mmask32(~0u >> (32 - present / 2)), qweight);
    const __m512i apart = _mm512_cvtepu8_epi16(pairs);
    const __m512i codes = _mm512_and_si512(_mm512_or_si512(apart, _mm512_slli_epi16(apart, 4)),
                                           _mm512_set1_epi8(0xF));
    const __m512i low = load64(bytes);
    const Tables &tables = tables_[n];
    __m512i high = _mm512_shuffle_epi8(tables.start_high, codes);
    const __mmask64 carry =
        _mm512_cmplt_epu8_mask(low, _mm512_shuffle_epi8(tables.start_low, codes));
    high = _mm512_mask_sub_epi8(high, carry, high, _mm512_set1_epi8(-1));

    const __mmask64 zeros =
        _mm512_mask_cmpeq_epi8_mask(mask, codes, _mm512_set1_epi8(kInt4ZeroPoint));
    const std::int64_t front = streams_.take_front(class_bytes(__builtin_popcountll(zeros)));
    const __m512i classes = _mm512_maskz_expand_epi8(zeros, classes_at(stream_ + front));
    high = _mm512_mask_shuffle_epi8(high, zeros, tables.zero_high, classes);

    __mmask64 escapes = _mm512_mask_cmpeq_epi8_mask(zeros, classes, _mm512_set1_epi8(kEscape));
    if (streams_.has_exceptions) {
      escapes |= exceptions();
    }
    return words_of(low, with_escapes(high, escapes, stream_, streams_), present);
  }

private:
  // By code: the bytes of the window's start, and, by class, the high bytes of code 0; of the scale
  // of each sixteen columns.
  struct Tables {
    __m512i start_low, start_high, zero_high;
  };

  __mmask64 exceptions() {
    __mmask64 columns = 0;
    const int count = stream_[streams_.take_front(1)];
    for (int i = 0; i < count; ++i) {
      columns |= 1ull << (stream_[streams_.take_front(1)] % kBlockColumns);
    }
    return columns;
  }

  static Tables tables_of(float scale) {
    alignas(64) static constexpr auto starts = [] {
      struct {
        float of[16];
      } windows{};
      for (int code = -8; code < 8; ++code) {
        windows.of[code + 8] = code < 0 ? -kWindowStarts[-code] : kWindowStarts[code];
      }
      return windows;
    }();
    const __m512i words = _mm512_srli_epi32(
        _mm512_castps_si512(_mm512_mul_ps(_mm512_load_ps(starts.of), _mm512_set1_ps(scale))), 16);
    const __m128i low = _mm512_cvtepi32_epi8(words);
    const __m128i high = _mm512_cvtepi32_epi8(_mm512_srli_epi32(words, 8));
    const __m128i window =
        _mm_and_si128(_mm_shuffle_epi8(high, _mm_set1_epi8(kInt4ZeroPoint)), _mm_set1_epi8(0x7F));
    const __m128i steps =
        _mm_sub_epi8(window, _mm_setr_epi8(0, 1, 2, 0, 0, 1, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0));
    const __m128i magnitude = _mm_and_si128(
        steps, _mm_setr_epi8(127, 127, 127, 0, 127, 127, 127, 0, 0, 0, 0, 0, 0, 0, 0, 0));
    const __m128i zero_high = _mm_or_si128(
        magnitude, _mm_setr_epi8(0, 0, 0, 0, -128, -128, -128, 0, 0, 0, 0, 0, 0, 0, 0, 0));
    return {_mm512_broadcast_i32x4(low), _mm512_broadcast_i32x4(high),
            _mm512_broadcast_i32x4(zero_high)};
  }

  // Of groups of less than a block.
  Tables tables_of_lanes(const Float16 *scales, std::int64_t first) const {
    Tables lanes{};
    for (int lane = 0; lane < 4; ++lane) {
      const std::int64_t column = first + lane * 16;
      if (column < codes_.columns) {
        const Tables tables = tables_of(window_scale(scales[column / codes_.group_size]));
        const __mmask8 mask = __mmask8(3 << 2 * lane);
        lanes.start_low = _mm512_mask_mov_epi64(lanes.start_low, mask, tables.start_low);
        lanes.start_high = _mm512_mask_mov_epi64(lanes.start_high, mask, tables.start_high);
        lanes.zero_high = _mm512_mask_mov_epi64(lanes.zero_high, mask, tables.zero_high);
      }
    }
    return lanes;
  }

  const Int4Matrix &codes_;
  std::int64_t row_, rows_;
  const std::uint8_t *bytes_, *stream_;
  QuadStreams streams_;
  std::int64_t next_tables_ = 0;
  Tables tables_[kQuadRows];
};

} // namespace
} // namespace speq::cpu
