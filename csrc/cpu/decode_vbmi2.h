// Blocks of compact matrices with AVX-512 VBMI and VBMI2: 64 weights at a time, in registers.
#pragma once

#include <algorithm>

#include "cpu/avx512_vectors.h"
#include "cpu/coded_kernels.h"
#include "cpu/decode_avx2.h"

namespace speq::cpu {
namespace {

// The words of a block, 32 to a vector.
struct VectorBlock {
  __m512i halves[2];

  // Eight words from column `at` on, a multiple of eight, and eight of the other segment, as
  // floats: a word's bits are the upper half of its float's. Sixteens come together, and are parted
  // by bytes: words of two vectors would take twice as long.
  __m512 load_apart(std::int64_t at) const {
    constexpr int kFirst = 0x44, kSecond = 0xEE; // pairs of quarters
    const __m512i sixteens = at < 16 ? _mm512_shuffle_i64x2(halves[0], halves[1], kFirst)
                                     : _mm512_shuffle_i64x2(halves[0], halves[1], kSecond);
    alignas(64) static constexpr auto parted = [] {
      struct {
        std::uint8_t from[2][64];
      } of{};
      for (int i = 0; i < 64; ++i) {
        of.from[0][i] = std::uint8_t(i / 32 * 32 + i % 32 / 4 * 2 + i % 2);
        of.from[1][i] = std::uint8_t(of.from[0][i] + 16);
      }
      return of;
    }();
    const __m512i from = _mm512_load_si512(parted.from[at % 16 / 8]);
    return _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi8(0xCCCCCCCCCCCCCCCC, from, sixteens));
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
  const __m512i eights = _mm512_permutexvar_epi8(load64(spread.bytes), packed);
  return _mm512_and_si512(_mm512_multishift_epi64_epi8(shifts, eights), _mm512_set1_epi8(7));
}

// 64 bytes so that pairs of what comes of them are in their order: pairs are made within sixteen
// bytes, and the eights of the first half go to their lower halves.
inline __m512i dealt_64(__m512i bytes) {
  return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), bytes);
}

// Dealt low and high bytes as words; those behind `present` are zeros.
inline VectorBlock words_of_dealt(__m512i low, __m512i high, std::int64_t present) {
  VectorBlock block{_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)};
  if (present < kBlockColumns) {
    const __mmask64 mask = first_of_64(present);
    block.halves[0] = _mm512_maskz_mov_epi16(__mmask32(mask), block.halves[0]);
    block.halves[1] = _mm512_maskz_mov_epi16(__mmask32(mask >> 32), block.halves[1]);
  }
  return block;
}

// The same of bytes in their order.
inline VectorBlock words_of(__m512i low, __m512i high, std::int64_t present) {
  return words_of_dealt(dealt_64(low), dealt_64(high), present);
}

// 64 bytes in a register: some processors expand bytes from memory very slowly.
inline __m512i loaded(const std::uint8_t *bytes) {
  __m512i values = load64(bytes);
  asm("" : "+v"(values));
  return values;
}

class VectorLossless {
public:
  using Block = VectorBlock;

  VectorLossless(const LosslessRows &matrix, std::int64_t quad)
      : bytes_(matrix.bytes + quad * kQuadRows * matrix.columns),
        classes_(matrix.classes + quad * kQuadRows * class_stride(matrix.columns)),
        stream_(matrix.streams), columns_(matrix.columns), stride_(class_stride(columns_)),
        streams_(matrix.quad(quad)), high_bytes_(_mm512_broadcast_i32x4(_mm_loadl_epi64(
                                         reinterpret_cast<const __m128i *>(matrix.high_bytes)))) {
    fetch_streams(matrix, streams_);
  }

  SPEQ_MEMBER void next(int rows, std::int64_t first, std::int64_t present, Block *blocks) {
    const std::uint8_t *bytes = bytes_ + first, *classes = classes_ + class_bytes(first);
    fetch_plane<kBlockColumns>(bytes_, columns_, first);
    fetch_plane<3 * kBlockColumns / 8>(classes_, stride_, class_bytes(first));
    std::int64_t back = std::max<std::int64_t>(streams_.back, 0);
    __m512i of[kQuadRows];
    __mmask64 escapes[kQuadRows];
    std::int64_t escaped[kQuadRows];
    SPEQ_UNROLL
    for (int n = 0; n < rows; ++n) {
      of[n] = classes_at(classes + n * stride_);
      escapes[n] =
          _mm512_mask_cmpeq_epi8_mask(first_of_64(present), of[n], _mm512_set1_epi8(kEscape));
      back -= __builtin_popcountll(escapes[n]);
      escaped[n] = back;
    }
    streams_.back = back;
    SPEQ_UNROLL
    for (int n = 0; n < rows; ++n) {
      const __m512i high = _mm512_mask_expand_epi8(_mm512_shuffle_epi8(high_bytes_, of[n]),
                                                   escapes[n], loaded(stream_ + escaped[n]));
      blocks[n] = words_of(load64(bytes + n * columns_), high, present);
    }
  }

private:
  const std::uint8_t *bytes_, *classes_, *stream_;
  std::int64_t columns_, stride_;
  QuadStreams streams_;
  __m512i high_bytes_;
};

// 64 codes, a byte each.
inline __m512i codes_at(const std::uint8_t *qweight, std::int64_t present) {
  const __m256i pairs =
      present == kBlockColumns
          ? _mm256_loadu_si256(reinterpret_cast<const __m256i *>(qweight))
          : _mm256_maskz_loadu_epi8(__mmask32(~0u >> (32 - present / 2)), qweight);
  const __m512i apart = _mm512_cvtepu8_epi16(pairs);
  return _mm512_and_si512(_mm512_or_si512(apart, _mm512_slli_epi16(apart, 4)),
                          _mm512_set1_epi8(0xF));
}

// What the codes of four rows tell of the high bytes of their words, under the scales of a block.
class VectorWindows {
public:
  // By code: the bytes of the window's start, and, by class, the high bytes of code 0. Each 32
  // columns have a scale of their own, and each 16 a copy of its tables.
  struct Tables {
    __m512i start_low, start_high, zero_high;

    SPEQ_MEMBER __m512i high_bytes(__m512i codes, __m512i low) const {
      const __mmask64 carry = _mm512_cmplt_epu8_mask(low, _mm512_shuffle_epi8(start_low, codes));
      const __m512i high = _mm512_shuffle_epi8(start_high, codes);
      return _mm512_mask_sub_epi8(high, carry, high, _mm512_set1_epi8(-1));
    }
  };

  // For groups of whole blocks, or of halves.
  static bool takes(const Int4Matrix &codes) {
    return codes.group_size == codes.columns || codes.group_size % kBlockColumns == 0 ||
           codes.group_size == kBlockColumns / 2;
  }

  // codes: from the first of the rows on
  explicit VectorWindows(const Int4Matrix &codes)
      : scales_(codes.scales), row_groups_(codes.row_groups()),
        group_size_(std::min(codes.group_size, codes.columns)),
        halves_(codes.group_size < kBlockColumns && codes.group_size != codes.columns) {}

  // Blocks come one after the other.
  SPEQ_MEMBER void reach(std::int64_t rows, std::int64_t first) {
    if (first == next_tables_) {
      const std::int64_t group = first / group_size_;
      const std::int64_t second = halves_ && group + 1 < row_groups_ ? group + 1 : group;
      for (std::int64_t n = 0; n < rows; ++n) {
        const Float16 *scales = scales_ + n * row_groups_;
        fill(tables_[n], scales[group], scales[second]);
      }
      next_tables_ += halves_ ? kBlockColumns : group_size_;
    }
    asm("" : "+m"(tables_)); // kept in memory: registers have too much else to hold
  }

  const Tables &of(std::int64_t n) const { return tables_[n]; }

private:
  // What `fill` works with: which bytes of the starts under both scales its tables are made of,
  // what is taken off those, and the bits that are kept of them and set.
  struct Steps {
    alignas(64) float starts[16];
    alignas(64) std::uint8_t low[64], high[64], zero[64], less[64], kept[64], set[64];
  };
  static constexpr Steps steps = [] {
    Steps of{};
    for (int i = 0; i < 64; ++i) {
      const int code = i % 16, zero_class = i % kClasses, scale = i / 32 * 64;
      const bool negative = zero_class > kZeroClass;
      of.low[i] = std::uint8_t(scale + 4 * code + 2);
      of.high[i] = std::uint8_t(scale + 4 * code + 3);
      of.zero[i] = std::uint8_t(scale + 4 * kInt4ZeroPoint + 3);
      of.less[i] = std::uint8_t(negative ? zero_class - kZeroClass - 1 : zero_class);
      of.kept[i] = zero_class == kZeroClass ? 0 : 0x7F;
      of.set[i] = negative ? 0x80 : 0;
    }
    for (int i = 0; i < 16; ++i) {
      const int code = i - kInt4ZeroPoint;
      of.starts[i] = code < 0 ? -kWindowStarts[-code] : kWindowStarts[code];
    }
    return of;
  }();

  static __m512i starts_of(Float16 scale) {
    const bool finite = (scale.bits & 0x7C00) != 0x7C00;
    const __m512 scales = _mm512_cvtph_ps(_mm256_set1_epi16(short(finite ? scale.bits : 0)));
    return _mm512_castps_si512(_mm512_mul_ps(_mm512_load_ps(steps.starts), scales));
  }

  static void fill(Tables &tables, Float16 first, Float16 second) {
    const __m512i one = starts_of(first), other = starts_of(second);
    const auto bytes = [&](const std::uint8_t *from) {
      return _mm512_permutex2var_epi8(one, load64(from), other);
    };
    constexpr int kAndOr = 0xEA; // (first and second) or third
    tables.start_low = bytes(steps.low);
    tables.start_high = bytes(steps.high);
    tables.zero_high =
        _mm512_ternarylogic_epi32(_mm512_sub_epi8(bytes(steps.zero), load64(steps.less)),
                                  load64(steps.kept), load64(steps.set), kAndOr);
  }

  const Float16 *scales_; // of the first row
  std::int64_t row_groups_, group_size_;
  bool halves_; // whether a block has two scales
  std::int64_t next_tables_ = 0;
  Tables tables_[kQuadRows];
};

class VectorResidual {
public:
  using Block = VectorBlock;

  static bool takes(const Int4Matrix &codes) { return VectorWindows::takes(codes); }

  VectorResidual(const ResidualRows &matrix, std::int64_t quad)
      : columns_(matrix.columns), row_bytes_(matrix.codes.row_bytes()),
        qweight_(matrix.codes.qweight + quad * kQuadRows * row_bytes_),
        bytes_(matrix.bytes + quad * kQuadRows * columns_), stream_(matrix.streams),
        streams_(matrix.quad(quad)), windows_(matrix.codes.from(quad * kQuadRows)) {
    fetch_streams(matrix, streams_);
  }

  SPEQ_MEMBER void next(int rows, std::int64_t first, std::int64_t present, Block *blocks) {
    windows_.reach(rows, first);
    // Rows step by step together: what finds the places in the streams takes long, and not one row
    // shall wait for another. A block takes no more of the streams than may be read beyond.
    const std::uint8_t *bytes = bytes_ + first, *qweight = qweight_ + first / 2;
    fetch_plane<kBlockColumns>(bytes_, columns_, first);
    fetch_plane<kBlockColumns / 2>(qweight_, row_bytes_, first / 2);
    std::int64_t front = std::min(streams_.front, streams_.end);
    std::int64_t back = std::max<std::int64_t>(streams_.back, 0);
    const __mmask64 mask = first_of_64(present);
    __m512i codes[kQuadRows], high[kQuadRows];
    __mmask64 zeros[kQuadRows], escapes[kQuadRows];
    std::int64_t classes_of[kQuadRows], escaped[kQuadRows];
    SPEQ_UNROLL
    for (int n = 0; n < rows; ++n) {
      codes[n] = codes_at(qweight + n * row_bytes_, present);
      zeros[n] = _mm512_mask_cmpeq_epi8_mask(mask, codes[n], _mm512_set1_epi8(kInt4ZeroPoint));
      classes_of[n] = front;
      front += class_bytes(__builtin_popcountll(zeros[n]));
      escapes[n] = streams_.has_exceptions ? exceptions(front) : 0;
    }
    SPEQ_UNROLL
    for (int n = 0; n < rows; ++n) {
      const __m512i classes =
          _mm512_maskz_expand_epi8(zeros[n], classes_at(stream_ + classes_of[n]));
      const VectorWindows::Tables &tables = windows_.of(n);
      high[n] = tables.high_bytes(codes[n], load64(bytes + n * columns_));
      high[n] = _mm512_mask_shuffle_epi8(high[n], zeros[n], tables.zero_high, classes);
      escapes[n] |= _mm512_mask_cmpeq_epi8_mask(zeros[n], classes, _mm512_set1_epi8(kEscape));
      back -= __builtin_popcountll(escapes[n]);
      escaped[n] = back;
    }
    SPEQ_UNROLL
    for (int n = 0; n < rows; ++n) {
      high[n] = _mm512_mask_expand_epi8(high[n], escapes[n], loaded(stream_ + escaped[n]));
      blocks[n] = words_of(load64(bytes + n * columns_), high[n], present);
    }
    streams_.front = front;
    streams_.back = back;
  }

private:
  // The columns of the exceptions that are listed at `front`, which goes on behind them.
  [[gnu::noinline]] __mmask64 exceptions(std::int64_t &front) const {
    QuadStreams list{front, 0, streams_.end, true};
    __mmask64 columns = 0;
    const int count = stream_[list.take_front(1)];
    for (int i = 0; i < count; ++i) {
      columns |= 1ull << (stream_[list.take_front(1)] % kBlockColumns);
    }
    front = list.front;
    return columns;
  }

  std::int64_t columns_, row_bytes_;
  const std::uint8_t *qweight_, *bytes_, *stream_;
  QuadStreams streams_;
  VectorWindows windows_;
};

} // namespace
} // namespace speq::cpu
