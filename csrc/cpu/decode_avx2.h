// Blocks of compact matrices with AVX2: classes, codes and tables in vectors of 32 weights.
#pragma once

#include <immintrin.h>

#include "cpu/coded_kernels.h"

namespace speq::cpu {
namespace {

// A constant that the compiler does not know: where registers are few, it would make it anew in
// each turn of a loop, in three instructions, and not read it.
SPEQ_MEMBER __m256i in_memory(__m256i value) {
  asm("" : "+x"(value));
  return value;
}
SPEQ_MEMBER __m256i in_memory(int byte) { return in_memory(_mm256_set1_epi8(char(byte))); }

// Values of three bits, each two of them in a pair of bytes, from bit 8, 6, 4 or 2 on, in turns;
// or from where 16 bits less the logarithm of `by` tell.
SPEQ_MEMBER __m256i classes_of_pairs(__m256i pairs, __m256i both_kept, __m256i kept,
                                     std::int64_t of_four = 1ll << 8 | 1ll << 26 | 1ll << 44 |
                                                            1ll << 62) {
  const __m256i by = _mm256_set1_epi64x(of_four);
  const __m256i both = _mm256_and_si256(_mm256_mulhi_epu16(pairs, by), both_kept);
  return _mm256_and_si256(_mm256_or_si256(both, _mm256_slli_epi16(both, 5)), kept);
}

// 32 values of three bits out of the first 12 of 16 bytes that may be read.
inline __m256i classes_of_32(const std::uint8_t *bytes) {
  const __m256i packed =
      _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i *>(bytes)));
  const __m256i pairs = _mm256_shuffle_epi8(
      packed, _mm256_setr_epi8(-1, 0, 0, 1, 1, 2, 2, 3, -1, 3, 3, 4, 4, 5, 5, 6, -1, 6, 6, 7, 7, 8,
                               8, 9, -1, 9, 9, 10, 10, 11, 11, 12));
  return classes_of_pairs(pairs, _mm256_set1_epi16(0x3F), _mm256_set1_epi16(0x0707));
}

inline __m256i load32(const std::uint8_t *bytes) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(bytes));
}

inline __m128i load16(const std::uint8_t *bytes) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i *>(bytes));
}

inline void store32(std::uint8_t *bytes, __m256i values) {
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(bytes), values);
}

inline std::uint64_t bits_of(__m256i low, __m256i high) {
  return std::uint32_t(_mm256_movemask_epi8(low)) |
         std::uint64_t(std::uint32_t(_mm256_movemask_epi8(high))) << 32;
}

inline std::uint64_t first_bits(std::int64_t present) { return ~0ull >> (kBlockColumns - present); }

// The sums of bytes up to each one, from the front of each half of a vector.
inline __m256i sums_up_to(__m256i values) {
  values = _mm256_add_epi8(values, _mm256_slli_epi64(values, 8));
  values = _mm256_add_epi8(values, _mm256_slli_epi64(values, 16));
  values = _mm256_add_epi8(values, _mm256_slli_epi64(values, 32));
  const __m256i of_first_eight = _mm256_set_epi64x(0x0707070707070707, -1, 0x0707070707070707, -1);
  return _mm256_add_epi8(values, _mm256_shuffle_epi8(values, of_first_eight));
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

// 32 bytes: sixteen, and sixteen of the other segment of a block.
SPEQ_MEMBER __m256i load_apart(const std::uint8_t *first, const std::uint8_t *second) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(load16(first)), load16(second), 1);
}

// A block of each row of a quad by the bytes of its words: of the first sixteen columns of both
// segments, then of the last. As floats, eight columns of a segment lie beside eight of the next
// one, even columns apart from odd ones: so no word changes halves. Inputs are laid alike.
struct LaidQuad {
  __m256i low[kQuadRows][2], high[kQuadRows][2];

  // Adds the products by R rows of 64 laid values to the partial sums of both segments, which begin
  // with sum_of(r, n). By one row, rows of weights go together, for sums wait longest.
  template <int R, typename SumOf>
  SPEQ_MEMBER void add(const float *const (&values)[R], const SumOf &sum_of) const {
    if constexpr (R == 1) {
      Sums sums[kQuadRows];
      SPEQ_UNROLL
      for (int n = 0; n < kQuadRows; ++n) {
        sums[n].load(sum_of(0, n));
      }
      SPEQ_UNROLL
      for (int i = 0; i < kSegmentVectors; ++i) {
        SPEQ_UNROLL
        for (int n = 0; n < kQuadRows; ++n) {
          sums[n].add(Floats(words_of(n, i)), values[0], i);
        }
      }
      SPEQ_UNROLL
      for (int n = 0; n < kQuadRows; ++n) {
        sums[n].store(sum_of(0, n));
      }
      return;
    }
    for (int n = 0; n < kQuadRows; ++n) {
      const Floats floats[kSegmentVectors] = {Floats(words_of(n, 0)), Floats(words_of(n, 1)),
                                              Floats(words_of(n, 2)), Floats(words_of(n, 3))};
      SPEQ_UNROLL
      for (int r = 0; r < R; ++r) {
        Sums sums;
        sums.load(sum_of(r, n));
        SPEQ_UNROLL
        for (int i = 0; i < kSegmentVectors; ++i) {
          sums.add(floats[i], values[r], i);
        }
        sums.store(sum_of(r, n));
      }
    }
  }

  // The words of a row, in their order.
  SPEQ_MEMBER void store(int n, BFloat16 *words) const {
    SPEQ_UNROLL
    for (int i = 0; i < kSegmentVectors; ++i, words += kVectorColumns) {
      const __m256i of = words_of(n, i);
      _mm_store_si128(reinterpret_cast<__m128i *>(words), _mm256_castsi256_si128(of));
      _mm_store_si128(reinterpret_cast<__m128i *>(words + kSegmentColumns),
                      _mm256_extracti128_si256(of, 1));
    }
  }

  // 64 values of a row of inputs as `add` takes them.
  SPEQ_MEMBER static void lay(const float *values, float *out) {
    for (int i = 0; i < kSegmentVectors; ++i, values += kVectorColumns, out += 2 * kVectorColumns) {
      const __m256 first = beside(values, values + kSegmentColumns);
      const __m256 second = beside(values + 4, values + kSegmentColumns + 4);
      _mm256_storeu_ps(out, _mm256_shuffle_ps(first, second, _MM_SHUFFLE(2, 0, 2, 0)));
      _mm256_storeu_ps(out + kVectorColumns,
                       _mm256_shuffle_ps(first, second, _MM_SHUFFLE(3, 1, 3, 1)));
    }
  }

  // Partial sums that `add` has added to, in the order of sum_order.h.
  SPEQ_MEMBER static void put_in_order(float *partial) {
    for (int i = 0; i < kPartialSums; i += 2 * kVectorColumns) {
      const __m256 even = _mm256_load_ps(partial + i);
      const __m256 odd = _mm256_load_ps(partial + i + kVectorColumns);
      const __m256 first = _mm256_unpacklo_ps(even, odd), last = _mm256_unpackhi_ps(even, odd);
      _mm256_store_ps(partial + i, _mm256_permute2f128_ps(first, last, 0x20));
      _mm256_store_ps(partial + i + kVectorColumns, _mm256_permute2f128_ps(first, last, 0x31));
    }
  }

private:
  struct Floats {
    SPEQ_MEMBER explicit Floats(__m256i words)
        : even(_mm256_castsi256_ps(_mm256_slli_epi32(words, 16))),
          odd(_mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32(int(0xFFFF0000))))) {}
    __m256 even, odd;
  };
  struct Sums {
    SPEQ_MEMBER void load(const float *partial) {
      even = _mm256_load_ps(partial);
      odd = _mm256_load_ps(partial + kVectorColumns);
    }
    SPEQ_MEMBER void add(const Floats &floats, const float *values, int i) {
      values += 2 * i * kVectorColumns;
      even = _mm256_fmadd_ps(floats.even, _mm256_loadu_ps(values), even);
      odd = _mm256_fmadd_ps(floats.odd, _mm256_loadu_ps(values + kVectorColumns), odd);
    }
    SPEQ_MEMBER void store(float *partial) const {
      _mm256_store_ps(partial, even);
      _mm256_store_ps(partial + kVectorColumns, odd);
    }
    __m256 even, odd;
  };

  SPEQ_MEMBER __m256i words_of(int n, int i) const {
    return i % 2 == 0 ? _mm256_unpacklo_epi8(low[n][i / 2], high[n][i / 2])
                      : _mm256_unpackhi_epi8(low[n][i / 2], high[n][i / 2]);
  }
  SPEQ_MEMBER static __m256 beside(const float *low, const float *high) {
    return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(low)), _mm_loadu_ps(high), 1);
  }
};

class Avx2Lossless {
public:
  using Block = WordBlock;
  using Quad = LaidQuad;

  Avx2Lossless(const LosslessRows &matrix, std::int64_t quad)
      : columns_(matrix.columns), stride_(class_stride(columns_)),
        bytes_(matrix.bytes + quad * kQuadRows * columns_),
        classes_(matrix.classes + quad * kQuadRows * stride_), stream_(matrix.streams),
        streams_(matrix.quad(quad)), high_bytes_(_mm256_broadcastsi128_si256(_mm_loadl_epi64(
                                         reinterpret_cast<const __m128i *>(matrix.high_bytes)))) {
    fetch_streams(matrix, streams_);
  }

  SPEQ_MEMBER void next(int rows, std::int64_t first, std::int64_t present, Block *blocks) {
    fetch(first);
    for (int n = 0; n < rows; ++n) {
      rebuild(n, first, present, blocks[n]);
    }
  }

  // Each sixteen columns look their high bytes up in one vector: behind those of the classes lie
  // the next escapes, seven at most. An escape's class and how many there are up to it tell the
  // place. Rows go step by step together, for a row's steps wait for one another.
  SPEQ_MEMBER void next(std::int64_t first, Quad &quad) {
    fetch(first);
    __m256i of[kQuadRows][2], up_to[kQuadRows];
    Lanes lanes[kQuadRows];
    SPEQ_UNROLL
    for (int n = 0; n < kQuadRows; ++n) {
      const std::uint8_t *classes = classes_ + n * stride_ + class_bytes(first);
      const __m256i packed = load_apart(classes, classes + class_bytes(kSegmentColumns));
      of[n][0] = classes_of_lanes(packed, 0);
      of[n][1] = classes_of_lanes(packed, class_bytes(16));
      const __m256i marks[2] = {escapes(of[n][0]), escapes(of[n][1])};
      up_to[n] = _mm256_sub_epi8(_mm256_and_si256(marks[1], sixteen_), marks[0]); // both are ones
      const auto a = std::uint32_t(_mm256_movemask_epi8(marks[0]));
      const auto b = std::uint32_t(_mm256_movemask_epi8(marks[1]));
      const int all_a = __builtin_popcount(a), first_a = __builtin_popcount(a & 0xFFFF);
      const std::uint8_t **begin = lanes[n].begin;
      const std::int64_t back = streams_.back - all_a - __builtin_popcount(b);
      streams_.back = back & ~(back >> 63); // as take_back, which was measured to be slower here
      begin[0] = stream_ + streams_.back;
      begin[1] = begin[0] + first_a;
      begin[2] = begin[1] + __builtin_popcount(b & 0xFFFF);
      begin[3] = begin[2] + all_a - first_a;
    }
    SPEQ_UNROLL
    for (int n = 0; n < kQuadRows; ++n) {
      up_to[n] = sums_up_to(up_to[n]);
    }
    const __m256i most =
        _mm256_or_si256(_mm256_or_si256(up_to[0], up_to[1]), _mm256_or_si256(up_to[2], up_to[3]));
    SPEQ_UNROLL
    for (int n = 0; n < kQuadRows; ++n) {
      const std::uint8_t *bytes = bytes_ + n * columns_ + first;
      const __m256i places[2] = {
          _mm256_add_epi8(of[n][0], _mm256_and_si256(up_to[n], escapes(of[n][0]))),
          _mm256_add_epi8(of[n][1],
                          _mm256_and_si256(_mm256_srli_epi16(up_to[n], 4), escapes(of[n][1])))};
      quad.low[n][0] = load_apart(bytes, bytes + 32);
      quad.low[n][1] = load_apart(bytes + 16, bytes + 48);
      const Lanes &at = lanes[n];
      quad.high[n][0] = _mm256_shuffle_epi8(table(at.begin[0], at.begin[2]), places[0]);
      quad.high[n][1] = _mm256_shuffle_epi8(table(at.begin[1], at.begin[3]), places[1]);
    }
    if (!_mm256_testz_si256(most, _mm256_set1_epi8(char(0x88)))) [[unlikely]] {
      for (int n = 0; n < kQuadRows; ++n) {
        quad.high[n][0] = of_many(of[n][0], lanes[n].begin[0], lanes[n].begin[2]);
        quad.high[n][1] = of_many(of[n][1], lanes[n].begin[1], lanes[n].begin[3]);
      }
    }
  }

private:
  // Where the escapes of each sixteen columns begin.
  struct Lanes {
    const std::uint8_t *begin[4];
  };

  SPEQ_MEMBER void fetch(std::int64_t first) const {
    fetch_plane<kBlockColumns>(bytes_, columns_, first);
    fetch_plane<3 * kBlockColumns / 8>(classes_, stride_, class_bytes(first));
  }

  SPEQ_MEMBER __m256i escapes(__m256i classes) const { return _mm256_cmpeq_epi8(classes, seven_); }

  // The high bytes of classes, and of escapes as many as there are.
  SPEQ_MEMBER __m256i of_many(__m256i classes, const std::uint8_t *first,
                              const std::uint8_t *second) const {
    const __m256i marks = escapes(classes), one = _mm256_set1_epi8(1);
    const __m256i places = _mm256_sub_epi8(sums_up_to(_mm256_and_si256(marks, one)), one);
    return _mm256_blendv_epi8(_mm256_shuffle_epi8(high_bytes_, classes),
                              _mm256_shuffle_epi8(load_apart(first, second), places), marks);
  }

  // The classes of sixteen columns in each half, from a byte of it on.
  SPEQ_MEMBER __m256i classes_of_lanes(__m256i packed, char at) const {
    const char a = at, b = char(at + 3);
    const __m256i from = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(-1, a, a, char(a + 1), char(a + 1), char(a + 2), char(a + 2), char(a + 3), -1,
                      b, b, char(b + 1), char(b + 1), char(b + 2), char(b + 2), char(b + 3)));
    return classes_of_pairs(_mm256_shuffle_epi8(packed, from), both_kept_, seven_);
  }

  // The high bytes of classes, and the next eight of the stream, of each half.
  SPEQ_MEMBER __m256i table(const std::uint8_t *first, const std::uint8_t *second) const {
    constexpr int kUpper = 0xCC; // of each half
    return _mm256_blend_epi32(high_bytes_, load_apart(first - 8, second - 8), kUpper);
  }

  SPEQ_MEMBER void rebuild(int n, std::int64_t first, std::int64_t present, Block &block) {
    const std::uint8_t *bytes = bytes_ + n * columns_ + first;
    const std::uint8_t *classes = classes_ + n * stride_ + class_bytes(first);
    const __m256i of[2] = {classes_of_32(classes), classes_of_32(classes + class_bytes(32))};
    const std::uint64_t marked = bits_of(escapes(of[0]), escapes(of[1])) & first_bits(present);
    const std::uint8_t *next = stream_ + streams_.take_back(__builtin_popcountll(marked));
    SPEQ_UNROLL
    for (int half = 0; half < 2; ++half) {
      // Each sixteen columns take theirs from the stream by how many come before.
      const auto bits = std::uint32_t(marked >> 32 * half);
      const std::uint8_t *upper = next + __builtin_popcount(bits & 0xFFFF);
      store_words(block.words + 32 * half, load32(bytes + 32 * half),
                  of_many(of[half], next, upper));
      next = upper + __builtin_popcount(bits >> 16);
    }
    clear_behind(block, present);
  }

  std::int64_t columns_, stride_;
  const std::uint8_t *bytes_, *classes_, *stream_;
  QuadStreams streams_;
  __m256i high_bytes_;
  // Sixteen: a mark of the second of two vectors.
  const __m256i seven_ = in_memory(kEscape), sixteen_ = in_memory(0x10);
  const __m256i both_kept_ = in_memory(_mm256_set1_epi16(0x3F));
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
  // bytes of code 0. Sixteen columns to a half, as in a LaidQuad.
  struct Tables {
    __m256i start_low, above_high, zero_high;

    // The high bytes that codes tell.
    SPEQ_MEMBER __m256i high_bytes(__m256i codes, __m256i low) const {
      const __m256i start = _mm256_shuffle_epi8(start_low, codes);
      const __m256i reaches = _mm256_cmpeq_epi8(_mm256_max_epu8(low, start), low);
      return _mm256_add_epi8(_mm256_shuffle_epi8(above_high, codes), reaches);
    }
  };

  // For groups of whole halves of vectors: each sixteen columns have tables of their own.
  static bool takes(const Int4Matrix &codes) {
    return codes.group_size == codes.columns || codes.group_size % kBlockColumns == 0 ||
           codes.group_size == 32 || codes.group_size == 16;
  }

  // codes: from the first of the rows on
  explicit Avx2Windows(const Int4Matrix &codes)
      : scales_(codes.scales), row_groups_(codes.row_groups()) {
    const bool fine = codes.group_size < kBlockColumns && codes.group_size != codes.columns;
    columns_ = fine ? kBlockColumns : codes.group_size;
    groups_ = fine ? kBlockColumns / codes.group_size : 1;
  }

  // Blocks come one after the other.
  SPEQ_MEMBER void reach(std::int64_t rows, std::int64_t first) {
    if (first != next_tables_) {
      return;
    }
    for (std::int64_t n = 0; n < rows; ++n) {
      const Float16 *scales = scales_ + n * row_groups_;
      const auto scale = [&](std::int64_t group) { // of a block that ends early, the last one
        return scales[next_group_ + group < row_groups_ ? next_group_ + group : row_groups_ - 1];
      };
      const Tables tables = under(scale(0), scale(groups_ / 2));
      set(tables_[n][0], tables);
      set(tables_[n][1], groups_ == 4 ? under(scale(1), scale(3)) : tables);
    }
    next_tables_ += columns_;
    next_group_ += groups_;
  }

  // Of the first sixteen columns of both segments, and of the last.
  const Tables (&of(std::int64_t n) const)[2] { return tables_[n]; }

  // Of the columns of half a block, in their order.
  Tables of_half(std::int64_t n, int half) const {
    const Tables &first = tables_[n][0], &last = tables_[n][1];
    const auto beside = [&](__m256i Tables::*table) {
      return half == 0 ? _mm256_permute2x128_si256(first.*table, last.*table, 0x20)
                       : _mm256_permute2x128_si256(first.*table, last.*table, 0x31);
    };
    return {beside(&Tables::start_low), beside(&Tables::above_high), beside(&Tables::zero_high)};
  }

private:
  // By vectors: copies of other sizes would be waited for where vectors are loaded.
  SPEQ_MEMBER static void set(Tables &to, const Tables &from) {
    to.start_low = from.start_low;
    to.above_high = from.above_high;
    to.zero_high = from.zero_high;
  }

  // Under one scale in either half.
  SPEQ_MEMBER static Tables under(Float16 first, Float16 second) {
    alignas(32) static constexpr auto starts = [] {
      struct {
        float of[16];
      } table{};
      for (int code = -8; code < 8; ++code) {
        table.of[code + 8] = code < 0 ? -kWindowStarts[-code] : kWindowStarts[code];
      }
      return table;
    }();
    const __m128i both =
        _mm_unpacklo_epi64(_mm_set1_epi16(short(first.bits)), _mm_set1_epi16(short(second.bits)));
    const __m128i exponent = _mm_set1_epi16(0x7C00);
    const __m128i infinite = _mm_cmpeq_epi16(_mm_and_si128(both, exponent), exponent);
    const __m256 scales = _mm256_cvtph_ps(_mm_andnot_si128(infinite, both)); // window_scale
    const auto words_of_4 = [&](int code) {
      const auto *from = reinterpret_cast<const __m128 *>(starts.of + code);
      return _mm256_srli_epi32(
          _mm256_castps_si256(_mm256_mul_ps(_mm256_broadcast_ps(from), scales)), 16);
    };
    const __m256i words[2] = {_mm256_packus_epi32(words_of_4(0), words_of_4(4)),
                              _mm256_packus_epi32(words_of_4(8), words_of_4(12))};
    const __m256i byte = _mm256_set1_epi16(0xFF);
    const __m256i high =
        _mm256_packus_epi16(_mm256_srli_epi16(words[0], 8), _mm256_srli_epi16(words[1], 8));
    const __m256i steps = _mm256_set1_epi32(0x00020100);
    const __m256i kept = _mm256_set1_epi64x(0x7F7F7F7F007F7F7F);
    const __m256i signs = _mm256_set1_epi64x(std::int64_t(0x8080808000000000));
    const __m256i zero =
        _mm256_sub_epi8(_mm256_shuffle_epi8(high, _mm256_set1_epi8(kInt4ZeroPoint)), steps);
    return {_mm256_packus_epi16(_mm256_and_si256(words[0], byte), _mm256_and_si256(words[1], byte)),
            _mm256_sub_epi8(high, _mm256_set1_epi8(-1)),
            _mm256_or_si256(_mm256_and_si256(zero, kept), signs)};
  }
  static_assert(kZeroClass == 3 && kClasses == 8);

  const Float16 *scales_;                      // of the first row
  std::int64_t row_groups_, columns_, groups_; // that tables are of, and groups of a row of those
  std::int64_t next_tables_ = 0, next_group_ = 0;
  Tables tables_[kQuadRows][2];
};

class Avx2Residual {
public:
  using Block = WordBlock;
  using Quad = LaidQuad;

  static bool takes(const Int4Matrix &codes) { return Avx2Windows::takes(codes); }

  Avx2Residual(const ResidualRows &matrix, std::int64_t quad)
      : columns_(matrix.columns), row_bytes_(matrix.codes.row_bytes()),
        bytes_(matrix.bytes + quad * kQuadRows * columns_),
        qweight_(matrix.codes.qweight + quad * kQuadRows * row_bytes_), stream_(matrix.streams),
        streams_(matrix.quad(quad)), windows_(matrix.codes.from(quad * kQuadRows)) {
    fetch_streams(matrix, streams_);
  }

  SPEQ_MEMBER void next(std::int64_t first, Quad &quad) {
    const std::uint8_t *qweight = qweight_ + first / 2;
    fetch_plane<kBlockColumns>(bytes_, columns_, first);
    fetch_plane<kBlockColumns / 2>(qweight_, row_bytes_, first / 2);
    windows_.reach(kQuadRows, first);
    rebuild<kQuadRows>(0, first, qweight, quad);
  }

  SPEQ_MEMBER void next(int rows, std::int64_t first, std::int64_t present, Block *blocks) {
    Quad quad;
    if (rows == kQuadRows && present == kBlockColumns) {
      next(first, quad);
    } else { // what lies behind the codes may not be read
      windows_.reach(rows, first);
      for (int n = 0; n < rows; ++n) {
        alignas(32) std::uint8_t codes[kBlockColumns / 2] = {};
        std::memcpy(codes, qweight_ + n * row_bytes_ + first / 2, present / 2);
        rebuild<1>(n, first, codes, quad);
      }
    }
    for (int n = 0; n < rows; ++n) {
      quad.store(n, blocks[n].words);
      clear_behind(blocks[n], present);
    }
  }

private:
  using Windows = Avx2Windows::Tables[2];
  // Places of classes in a half of a vector, of which the first is no one's; of escapes behind the
  // high bytes of code 0.
  static constexpr int kMostZeros = 15, kMostEscapes = 8;

  // The classes of each segment are unpacked into one half. Of a column with code 0 the number of
  // those up to it tells the place of its class there; and that where among the high bytes of
  // classes its own is: the next escapes lie behind them. Rows go step by step together.
  template <int kRows>
  SPEQ_MEMBER void rebuild(int row, std::int64_t first, const std::uint8_t *qweight, Quad &quad) {
    const __m256i nibble = _mm256_set1_epi8(0xF), zero_code = _mm256_set1_epi8(kInt4ZeroPoint);
    __m256i zeros[kRows][2], places[kRows];
    const std::uint8_t *packed[kRows];
    std::uint64_t listed[kRows];
    int one[kRows], other[kRows], all[kRows], of_one[kRows], most = 0;
    SPEQ_UNROLL
    for (int n = 0; n < kRows; ++n) {
      const __m256i pairs = load32(qweight + n * row_bytes_),
                    even = _mm256_and_si256(pairs, nibble),
                    odd = _mm256_and_si256(_mm256_srli_epi16(pairs, 4), nibble);
      const __m256i codes[2] = {_mm256_unpacklo_epi8(even, odd), _mm256_unpackhi_epi8(even, odd)};
      const std::uint8_t *bytes = bytes_ + (row + n) * columns_ + first;
      SPEQ_UNROLL
      for (int i = 0; i < 2; ++i) {
        zeros[n][i] = _mm256_cmpeq_epi8(codes[i], zero_code);
        quad.low[row + n][i] = load_apart(bytes + 16 * i, bytes + 32 + 16 * i);
        quad.high[row + n][i] = windows_.of(row + n)[i].high_bytes(codes[i], quad.low[row + n][i]);
      }
      one[n] = __builtin_popcount(in_columns<0x20>(zeros[n]));
      other[n] = __builtin_popcount(in_columns<0x31>(zeros[n]));
      packed[n] = stream_ + streams_.take_front(class_bytes(one[n] + other[n]));
      listed[n] = streams_.has_exceptions ? exceptions() : 0;
      most |= one[n] | other[n] | (listed[n] != 0 ? 2 * kMostZeros : 0);
    }
    SPEQ_UNROLL
    for (int n = 0; n < kRows; ++n) {
      const __m256i classes = classes_of_segments(packed[n], 3 * one[n]);
      const __m256i escaped = _mm256_cmpeq_epi8(classes, _mm256_set1_epi8(kEscape));
      const auto escapes = std::uint32_t(_mm256_movemask_epi8(escaped));
      of_one[n] = __builtin_popcount(escapes & ((2ull << one[n]) - 1));
      all[n] = of_one[n] + __builtin_popcount((escapes >> 16) & ((2ull << other[n]) - 1));
      most |= all[n] > kMostEscapes ? 2 * kMostZeros : 0;
      places[n] = _mm256_sub_epi8(classes, _mm256_and_si256(sums_up_to(escaped), escaped));
    }
    if (most > kMostZeros) [[unlikely]] {
      for (int n = 0; n < kRows; ++n) {
        replace(row + n, packed[n], listed[n], zeros[n], quad.high[row + n]);
      }
      return;
    }
    SPEQ_UNROLL
    for (int n = 0; n < kRows; ++n) {
      const std::uint8_t *next = stream_ + streams_.take_back(all[n]);
      const __m256i escapes = load_apart(next - 8, next + of_one[n] - 8);
      // A mark of the second sixteen columns of a segment counts sixteen.
      const __m256i up_to = sums_up_to(
          _mm256_sub_epi8(_mm256_and_si256(zeros[n][1], _mm256_set1_epi8(0x10)), zeros[n][0]));
      const __m256i of_first = _mm256_and_si256(up_to, nibble);
      const __m256i counts[2] = {
          of_first, _mm256_add_epi8(_mm256_and_si256(_mm256_srli_epi16(up_to, 4), nibble),
                                    _mm256_shuffle_epi8(of_first, _mm256_set1_epi8(15)))};
      SPEQ_UNROLL
      for (int i = 0; i < 2; ++i) {
        constexpr int kUpper = 0xCC; // of each half
        const __m256i table =
            _mm256_blend_epi32(windows_.of(row + n)[i].zero_high, escapes, kUpper);
        const __m256i found = _mm256_shuffle_epi8(table, _mm256_shuffle_epi8(places[n], counts[i]));
        quad.high[row + n][i] = _mm256_blendv_epi8(quad.high[row + n][i], found, zeros[n][i]);
      }
    }
  }

  // Bits of laid bytes by their columns, of the first segment (kHalves 0x20) or the second (0x31).
  template <int kHalves> SPEQ_MEMBER static std::uint32_t in_columns(const __m256i (&bytes)[2]) {
    return std::uint32_t(
        _mm256_movemask_epi8(_mm256_permute2x128_si256(bytes[0], bytes[1], kHalves)));
  }

  // Classes from either of two bits on, each from the second byte of a half on.
  SPEQ_MEMBER static __m256i classes_of_segments(const std::uint8_t *packed, int bit) {
    std::uint64_t one, other;
    std::memcpy(&one, packed, sizeof one);
    std::memcpy(&other, packed + bit / 8, sizeof other);
    const __m256i from =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(-1, 0, 0, 1, 1, 2, 1, 2, 2, 3, 3, 4, 4, 5, 4, 5));
    const __m256i bits =
        _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_cvtsi64_si128(std::int64_t(one))),
                                _mm_cvtsi64_si128(std::int64_t(other >> bit % 8)), 1);
    // Each pair from bit 5, 3, 1 or 7 on, in turns.
    return classes_of_pairs(_mm256_shuffle_epi8(bits, from), _mm256_set1_epi16(0x3F),
                            _mm256_set1_epi8(kEscape),
                            1ll << 11 | 1ll << 29 | 1ll << 47 | 1ll << 57);
  }

  // The columns of the exceptions that are listed next.
  SPEQ_MEMBER std::uint64_t exceptions() {
    std::uint64_t columns = 0;
    for (int left = stream_[streams_.take_front(1)]; left > 0; --left) {
      columns |= 1ull << (stream_[streams_.take_front(1)] % kBlockColumns);
    }
    return columns;
  }

  // The high bytes of a row that has more of code 0 or more escapes, one by one.
  SPEQ_MEMBER void replace(int n, const std::uint8_t *packed, std::uint64_t escapes,
                           const __m256i (&of_zeros)[2], __m256i (&high)[2]) {
    // Of a column, in laid bytes.
    const auto laid = [](int at) { return (at & 0xF) | (at & 0x10) << 1 | (at & 0x20) >> 1; };
    alignas(32) std::uint8_t of[kBlockColumns], of_classes[kBlockColumns];
    SPEQ_UNROLL
    for (int i = 0; i < 2; ++i) {
      store32(of + 32 * i, high[i]);
      store32(of_classes + 32 * i, windows_.of(n)[i].zero_high);
    }
    std::uint64_t zeros = in_columns<0x20>(of_zeros) | std::uint64_t(in_columns<0x31>(of_zeros))
                                                           << 32;
    for (int i = 0; zeros != 0; zeros &= zeros - 1, ++i) {
      const int at = __builtin_ctzll(zeros), place = laid(at), of_class = class_at(packed, i);
      escapes |= std::uint64_t(of_class == kEscape) << at;
      of[place] = of_classes[(place & ~0xF) | of_class];
    }
    const std::uint8_t *next = stream_ + streams_.take_back(__builtin_popcountll(escapes));
    for (; escapes != 0; escapes &= escapes - 1) {
      of[laid(__builtin_ctzll(escapes))] = *next++;
    }
    SPEQ_UNROLL
    for (int i = 0; i < 2; ++i) {
      high[i] = load32(of + 32 * i);
    }
  }

  std::int64_t columns_, row_bytes_;
  const std::uint8_t *bytes_, *qweight_, *stream_;
  QuadStreams streams_;
  Avx2Windows windows_;
};

} // namespace
} // namespace speq::cpu
