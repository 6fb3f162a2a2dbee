// Blocks of compact matrices with AVX2: classes, codes and tables in vectors of 32 weights.
#pragma once

#include <immintrin.h>

#include "cpu/coded_kernels.h"

namespace speq::cpu {
namespace {

// 32 values of three bits out of the first 12 of 16 bytes that may be read.
inline __m256i classes_of_32(const std::uint8_t *bytes) {
  const __m256i packed =
      _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i *>(bytes)));
  // Pairs of bytes that hold two neighbouring values, from bit 8, 6, 4 or 2 on, and those alone.
  const __m256i pairs = _mm256_shuffle_epi8(
      packed, _mm256_setr_epi8(-1, 0, 0, 1, 1, 2, 2, 3, -1, 3, 3, 4, 4, 5, 5, 6, -1, 6, 6, 7, 7, 8,
                               8, 9, -1, 9, 9, 10, 10, 11, 11, 12));
  const __m256i by = _mm256_set1_epi64x(1ll << 8 | 1ll << 26 | 1ll << 44 | 1ll << 62);
  const __m256i both = _mm256_and_si256(_mm256_mulhi_epu16(pairs, by), _mm256_set1_epi16(0x3F));
  return _mm256_and_si256(_mm256_or_si256(both, _mm256_slli_epi16(both, 5)),
                          _mm256_set1_epi16(0x0707));
}

inline __m256i load32(const std::uint8_t *bytes) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(bytes));
}

inline __m128i load16(const std::uint8_t *bytes) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i *>(bytes));
}

inline void store16(std::uint8_t *bytes, __m128i values) {
  _mm_store_si128(reinterpret_cast<__m128i *>(bytes), values);
}

inline std::uint64_t bits_of(__m256i low, __m256i high) {
  return std::uint32_t(_mm256_movemask_epi8(low)) |
         std::uint64_t(std::uint32_t(_mm256_movemask_epi8(high))) << 32;
}

inline std::uint64_t first_bits(std::int64_t present) { return ~0ull >> (kBlockColumns - present); }

// Bytes that are marked, all ones, counted from the front of each half of a vector: the counts up
// to each byte, negative.
inline __m256i counts_of(__m256i marks) {
  marks = _mm256_add_epi8(marks, _mm256_slli_epi64(marks, 8));
  marks = _mm256_add_epi8(marks, _mm256_slli_epi64(marks, 16));
  marks = _mm256_add_epi8(marks, _mm256_slli_epi64(marks, 32));
  const __m256i of_first_eight = _mm256_set_epi64x(0x0707070707070707, -1, 0x0707070707070707, -1);
  return _mm256_add_epi8(marks, _mm256_shuffle_epi8(marks, of_first_eight));
}

// 32 words: the outer sixteen of each half, and the inner ones.
inline void store_halves(BFloat16 *words, __m256i outer, __m256i inner) {
  auto *out = reinterpret_cast<__m128i *>(words);
  _mm_store_si128(out, _mm256_castsi256_si128(outer));
  _mm_store_si128(out + 1, _mm256_castsi256_si128(inner));
  _mm_store_si128(out + 2, _mm256_extracti128_si256(outer, 1));
  _mm_store_si128(out + 3, _mm256_extracti128_si256(inner, 1));
}

// Low and high bytes of 32 words, in their order.
inline void store_words(BFloat16 *words, __m256i low, __m256i high) {
  store_halves(words, _mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high));
}

class Avx2Lossless {
public:
  using Block = WordBlock;

  Avx2Lossless(const LosslessRows &matrix, std::int64_t quad)
      : columns_(matrix.columns), stride_(class_stride(columns_)),
        bytes_(matrix.bytes + quad * kQuadRows * columns_),
        classes_(matrix.classes + quad * kQuadRows * stride_), stream_(matrix.streams),
        streams_(matrix.quad(quad)), high_bytes_(_mm256_broadcastsi128_si256(_mm_loadl_epi64(
                                         reinterpret_cast<const __m128i *>(matrix.high_bytes)))) {
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
  SPEQ_MEMBER void rebuild(int n, std::int64_t first, std::int64_t present, Block &block) {
    const std::uint8_t *bytes = bytes_ + n * columns_ + first;
    const std::uint8_t *classes = classes_ + n * stride_ + class_bytes(first);
    const __m256i of[2] = {classes_of_32(classes), classes_of_32(classes + class_bytes(32))};
    const __m256i seven = _mm256_set1_epi8(kEscape);
    const __m256i marks[2] = {_mm256_cmpeq_epi8(of[0], seven), _mm256_cmpeq_epi8(of[1], seven)};
    const std::uint64_t escapes = bits_of(marks[0], marks[1]) & first_bits(present);
    const std::uint8_t *next = stream_ + streams_.take_back(__builtin_popcountll(escapes));
    SPEQ_UNROLL
    for (int half = 0; half < 2; ++half) {
      // Each sixteen columns take theirs from the stream by how many come before.
      const auto bits = std::uint32_t(escapes >> 32 * half);
      const std::uint8_t *upper = next + __builtin_popcount(bits & 0xFFFF);
      const __m256i escaped =
          _mm256_inserti128_si256(_mm256_castsi128_si256(load16(next)), load16(upper), 1);
      next = upper + __builtin_popcount(bits >> 16);
      const __m256i places = _mm256_sub_epi8(_mm256_set1_epi8(-1), counts_of(marks[half]));
      const __m256i high = _mm256_blendv_epi8(_mm256_shuffle_epi8(high_bytes_, of[half]),
                                              _mm256_shuffle_epi8(escaped, places), marks[half]);
      store_words(block.words + 32 * half, load32(bytes + 32 * half), high);
    }
    clear_behind(block, present);
  }

  std::int64_t columns_, stride_;
  const std::uint8_t *bytes_, *classes_, *stream_;
  QuadStreams streams_;
  __m256i high_bytes_;
};

// 32 codes, a byte each.
inline __m256i codes_of_32(const std::uint8_t *qweight) {
  const __m256i apart =
      _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(qweight)));
  return _mm256_and_si256(_mm256_or_si256(apart, _mm256_slli_epi16(apart, 4)),
                          _mm256_set1_epi8(0xF));
}

// What the codes of four rows tell of the high bytes of their words, under the scales of a block.
class Avx2Windows {
public:
  // By code: the low byte of the window's start, and one more than the high one. By class: the high
  // bytes of code 0. Of the scale of sixteen columns.
  struct Tables {
    alignas(16) std::uint8_t start_low[16], above_high[16], zero_high[16];
  };

  // For groups of whole halves of vectors: each sixteen columns have tables of their own.
  static bool takes(const Int4Matrix &codes) {
    return codes.group_size == codes.columns || codes.group_size % kBlockColumns == 0 ||
           codes.group_size == 32 || codes.group_size == 16;
  }

  // codes: from the first of the rows on
  explicit Avx2Windows(const Int4Matrix &codes)
      : codes_(codes),
        fine_(codes.group_size < kBlockColumns && codes.group_size != codes.columns) {}

  // Blocks come one after the other.
  SPEQ_MEMBER void reach(std::int64_t rows, std::int64_t first) {
    if (first == next_tables_) {
      fill_all(rows, first);
    }
  }

  // The tables of the columns of half a block, as vectors look them up.
  __m256i table(std::int64_t n, int half, std::uint8_t (Tables::*bytes)[16]) const {
    const int first = fine_ ? 2 * half : 0, second = fine_ ? first + 1 : 0;
    return _mm256_inserti128_si256(_mm256_castsi128_si256(load16(tables_[n][first].*bytes)),
                                   load16(tables_[n][second].*bytes), 1);
  }

  // The high bytes that the codes of half a block tell.
  SPEQ_MEMBER __m256i high_bytes(std::int64_t n, int half, __m256i codes, __m256i low) const {
    const __m256i start = _mm256_shuffle_epi8(table(n, half, &Tables::start_low), codes);
    const __m256i reaches = _mm256_cmpeq_epi8(_mm256_max_epu8(low, start), low);
    return _mm256_add_epi8(_mm256_shuffle_epi8(table(n, half, &Tables::above_high), codes),
                           reaches);
  }

private:
  void fill_all(std::int64_t rows, std::int64_t first) {
    next_tables_ += fine_ ? kBlockColumns : codes_.group_size;
    for (std::int64_t n = 0; n < rows; ++n) {
      const Float16 *scales = codes_.scales + n * codes_.row_groups();
      for (int part = 0; part < (fine_ ? 4 : 1) && first + part * 16 < codes_.columns; ++part) {
        fill(tables_[n][part], scales[(first + part * 16) / codes_.group_size]);
      }
    }
  }

  static void fill(Tables &tables, Float16 scale) {
    alignas(32) static constexpr auto starts = [] {
      struct {
        float of[16];
      } table{};
      for (int code = -8; code < 8; ++code) {
        table.of[code + 8] = code < 0 ? -kWindowStarts[-code] : kWindowStarts[code];
      }
      return table;
    }();
    const __m256 scales = _mm256_set1_ps(window_scale(scale));
    const auto words_of_8 = [&](int code) {
      const __m256 first = _mm256_mul_ps(_mm256_load_ps(starts.of + code), scales);
      return _mm256_srli_epi32(_mm256_castps_si256(first), 16);
    };
    constexpr int kInOrder = 0xD8; // packing takes from the halves of vectors in turn
    const __m256i words =
        _mm256_permute4x64_epi64(_mm256_packus_epi32(words_of_8(0), words_of_8(8)), kInOrder);
    const __m256i bytes = _mm256_permute4x64_epi64(
        _mm256_packus_epi16(_mm256_and_si256(words, _mm256_set1_epi16(0xFF)),
                            _mm256_srli_epi16(words, 8)),
        kInOrder);
    const __m128i high = _mm256_extracti128_si256(bytes, 1);
    const __m128i steps = _mm_setr_epi8(0, 1, 2, 0, 0, 1, 2, 0, 0, 1, 2, 0, 0, 1, 2, 0);
    const __m128i kept = _mm_set1_epi64x(0x7F7F7F7F007F7F7F);
    const __m128i signs = _mm_set1_epi64x(std::int64_t(0x8080808000000000));
    const __m128i zero = _mm_sub_epi8(_mm_shuffle_epi8(high, _mm_set1_epi8(kInt4ZeroPoint)), steps);
    store16(tables.start_low, _mm256_castsi256_si128(bytes));
    store16(tables.above_high, _mm_sub_epi8(high, _mm_set1_epi8(-1)));
    store16(tables.zero_high, _mm_or_si128(_mm_and_si128(zero, kept), signs));
  }
  static_assert(kZeroClass == 3 && kClasses == 8);

  Int4Matrix codes_;
  bool fine_; // whether a block has several scales
  std::int64_t next_tables_ = 0;
  Tables tables_[kQuadRows][4];
};

class Avx2Residual {
public:
  using Block = WordBlock;

  static bool takes(const Int4Matrix &codes) { return Avx2Windows::takes(codes); }

  Avx2Residual(const ResidualRows &matrix, std::int64_t quad)
      : matrix_(matrix), row_(quad * kQuadRows), streams_(matrix.quad(quad)),
        windows_(matrix.codes.from(row_)) {
    fetch_streams(matrix, streams_);
  }

  SPEQ_MEMBER void next(int rows, std::int64_t first, std::int64_t present, Block *blocks) {
    windows_.reach(rows, first);
    const Int4Matrix &codes = matrix_.codes;
    fetch_plane<kBlockColumns>(matrix_.bytes + row_ * matrix_.columns, matrix_.columns, first);
    fetch_plane<kBlockColumns / 2>(codes.qweight + row_ * codes.row_bytes(), codes.row_bytes(),
                                   first / 2);
    for (int n = 0; n < rows; ++n) {
      rebuild(n, first, present, blocks[n]);
    }
  }

private:
  SPEQ_MEMBER void rebuild(int n, std::int64_t first, std::int64_t present, Block &block) {
    const Int4Matrix &codes = matrix_.codes;
    const std::uint8_t *bytes = matrix_.bytes + (row_ + n) * matrix_.columns + first;
    const std::uint8_t *qweight = codes.qweight + (row_ + n) * codes.row_bytes() + first / 2;
    alignas(32) std::uint8_t copy[kBlockColumns / 2] = {};
    if (present < kBlockColumns) { // what lies behind the codes may not be read
      std::memcpy(copy, qweight, present / 2);
      qweight = copy;
    }
    __m256i low[2], high[2], zeros[2], classes[2], escaped[2];
    SPEQ_UNROLL
    for (int half = 0; half < 2; ++half) {
      const __m256i of = codes_of_32(qweight + 16 * half);
      low[half] = load32(bytes + 32 * half);
      high[half] = windows_.high_bytes(n, half, of, low[half]);
      zeros[half] = _mm256_cmpeq_epi8(of, _mm256_set1_epi8(kInt4ZeroPoint));
    }
    const std::uint64_t zero_bits = bits_of(zeros[0], zeros[1]);
    const int count = __builtin_popcountll(zero_bits);
    expand_classes(matrix_.streams + streams_.take_front(class_bytes(count)), count, zeros,
                   classes);
    SPEQ_UNROLL
    for (int half = 0; half < 2; ++half) {
      const __m256i of_zeros = _mm256_shuffle_epi8(
          windows_.table(n, half, &Avx2Windows::Tables::zero_high), classes[half]);
      high[half] = _mm256_blendv_epi8(high[half], of_zeros, zeros[half]);
      escaped[half] = _mm256_cmpeq_epi8(classes[half], _mm256_set1_epi8(kEscape));
      store_words(block.words + 32 * half, low[half], high[half]);
    }
    std::uint64_t escapes = bits_of(escaped[0], escaped[1]) & zero_bits;
    if (streams_.has_exceptions) {
      const int listed = matrix_.streams[streams_.take_front(1)];
      for (int i = 0; i < listed; ++i) {
        escapes |= 1ull << (matrix_.streams[streams_.take_front(1)] % kBlockColumns);
      }
    }
    escape(block, escapes, matrix_.streams + streams_.take_back(__builtin_popcountll(escapes)));
    clear_behind(block, present);
  }

  // The classes of `count` weights of code 0, which lie one behind the other, in their columns.
  static SPEQ_MEMBER void expand_classes(const std::uint8_t *packed, int count,
                                         const __m256i (&zeros)[2], __m256i (&classes)[2]) {
    // How many there are up to each column, negative, of the whole block.
    const __m256i last = _mm256_set1_epi8(15);
    __m256i counts[2] = {counts_of(zeros[0]), counts_of(zeros[1])};
    const __m256i sums = _mm256_shuffle_epi8(counts[0], last);
    const __m256i upper_sums = _mm256_shuffle_epi8(counts[1], last);
    counts[0] = _mm256_add_epi8(counts[0], _mm256_permute2x128_si256(sums, sums, 0x08));
    counts[1] = _mm256_add_epi8(counts[1], _mm256_permute2x128_si256(upper_sums, upper_sums, 0x08));
    counts[1] = _mm256_add_epi8(counts[1],
                                _mm256_add_epi8(sums, _mm256_permute2x128_si256(sums, sums, 0x01)));
    // Sixteen classes at a time, to the columns whose place is among them: other places have their
    // highest bit set, and so take zeros.
    const __m256i of = classes_of_32(packed);
    take16(_mm256_permute2x128_si256(of, of, 0x00), 0, counts, classes, true);
    take16(_mm256_permute2x128_si256(of, of, 0x11), 16, counts, classes, false);
    if (count > 32) {
      const __m256i rest = classes_of_32(packed + class_bytes(32));
      take16(_mm256_permute2x128_si256(rest, rest, 0x00), 32, counts, classes, false);
      take16(_mm256_permute2x128_si256(rest, rest, 0x11), 48, counts, classes, false);
    }
  }

  static SPEQ_MEMBER void take16(__m256i sixteen, int first, const __m256i (&counts)[2],
                                 __m256i (&classes)[2], bool begins) {
    SPEQ_UNROLL
    for (int half = 0; half < 2; ++half) {
      const __m256i places =
          _mm256_adds_epu8(_mm256_sub_epi8(_mm256_set1_epi8(char(-1 - first)), counts[half]),
                           _mm256_set1_epi8(0x70));
      const __m256i taken = _mm256_shuffle_epi8(sixteen, places);
      classes[half] = begins ? taken : _mm256_or_si256(classes[half], taken);
    }
  }

  // Replace the high bytes that a mask names by the next of a stream. Most blocks have at most one:
  // the first is written even where there is none, for a branch would often be mistaken.
  static SPEQ_MEMBER void escape(Block &block, std::uint64_t escapes, const std::uint8_t *next) {
    auto *bytes = reinterpret_cast<std::uint8_t *>(block.words);
    const auto put = [&](std::int64_t at) { bytes[2 * at + 1] = *next++; };
    put(escapes == 0 ? kBlockColumns : __builtin_ctzll(escapes));
    for (escapes &= escapes - 1; escapes != 0; escapes &= escapes - 1) {
      put(__builtin_ctzll(escapes));
    }
  }

  const ResidualRows &matrix_;
  std::int64_t row_;
  QuadStreams streams_;
  Avx2Windows windows_;
};

} // namespace
} // namespace speq::cpu
