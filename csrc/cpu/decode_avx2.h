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
  // Pairs of bytes that hold values 0, 2, 4 ... of sixteen, and 1, 3, 5 ..., shifted to their tops.
  const __m256i even = _mm256_setr_epi8(0, 1, 0, 1, 1, 2, 2, 3, 3, 4, 3, 4, 4, 5, 5, 6, 6, 7, 6, 7,
                                        7, 8, 8, 9, 9, 10, 9, 10, 10, 11, 11, 12);
  const __m256i odd = _mm256_setr_epi8(0, 1, 1, 2, 1, 2, 2, 3, 3, 4, 4, 5, 4, 5, 5, 6, 6, 7, 7, 8,
                                       7, 8, 8, 9, 9, 10, 10, 11, 10, 11, 11, 12);
  const __m256i even_shifts =
      _mm256_setr_epi16(1 << 13, 1 << 7, 1 << 9, 1 << 11, 1 << 13, 1 << 7, 1 << 9, 1 << 11, 1 << 13,
                        1 << 7, 1 << 9, 1 << 11, 1 << 13, 1 << 7, 1 << 9, 1 << 11);
  const __m256i odd_shifts =
      _mm256_setr_epi16(1 << 10, 1 << 12, 1 << 6, 1 << 8, 1 << 10, 1 << 12, 1 << 6, 1 << 8, 1 << 10,
                        1 << 12, 1 << 6, 1 << 8, 1 << 10, 1 << 12, 1 << 6, 1 << 8);
  const __m256i low =
      _mm256_srli_epi16(_mm256_mullo_epi16(_mm256_shuffle_epi8(packed, even), even_shifts), 13);
  const __m256i high =
      _mm256_srli_epi16(_mm256_mullo_epi16(_mm256_shuffle_epi8(packed, odd), odd_shifts), 5);
  return _mm256_or_si256(low, _mm256_and_si256(high, _mm256_set1_epi16(0x0700)));
}

inline __m256i load32(const std::uint8_t *bytes) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(bytes));
}

inline void store32(std::uint8_t *bytes, __m256i values) {
  _mm256_store_si256(reinterpret_cast<__m256i *>(bytes), values);
}

inline std::uint64_t bits_of(__m256i low, __m256i high) {
  return std::uint32_t(_mm256_movemask_epi8(low)) |
         std::uint64_t(std::uint32_t(_mm256_movemask_epi8(high))) << 32;
}

inline std::uint64_t first_bits(std::int64_t present) { return ~0ull >> (kBlockColumns - present); }

// A byte's worth of lanes: where each set bit's byte comes from.
struct Expansions {
  std::uint64_t of[256];
};
constexpr Expansions expansions = [] {
  Expansions table{};
  for (int mask = 0; mask < 256; ++mask) {
    std::uint64_t next = 0;
    for (int bit = 0; bit < 8; ++bit) {
      table.of[mask] |= (mask >> bit & 1 ? next++ : 0x80ull) << 8 * bit;
    }
  }
  return table;
}();

// Put the next of `source` to each set bit of a mask, and zeros between: 64 bytes to `out`.
inline void expand(std::uint64_t mask, const std::uint8_t *source, std::uint8_t *out) {
  for (int i = 0; i < 8; ++i) {
    const int bits = int(mask >> 8 * i & 0xFF);
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(source));
    const __m128i order = _mm_cvtsi64_si128(std::int64_t(expansions.of[bits]));
    _mm_storel_epi64(reinterpret_cast<__m128i *>(out + 8 * i), _mm_shuffle_epi8(bytes, order));
    source += __builtin_popcount(unsigned(bits));
  }
}

// Replace the bytes that a mask names by the next of a stream's back.
inline void escape(std::uint8_t *bytes, std::uint64_t escapes, const std::uint8_t *streams,
                   QuadStreams &positions) {
  const std::uint8_t *source = streams + positions.take_back(__builtin_popcountll(escapes));
  for (; escapes != 0; escapes &= escapes - 1) {
    bytes[__builtin_ctzll(escapes)] = *source++;
  }
}

// Low and high bytes of 32 words, in their order.
inline void store_words(BFloat16 *words, __m256i low, __m256i high) {
  const __m256i outer = _mm256_unpacklo_epi8(low, high), inner = _mm256_unpackhi_epi8(low, high);
  auto *out = reinterpret_cast<__m256i *>(words);
  _mm256_store_si256(out, _mm256_permute2x128_si256(outer, inner, 0x20));
  _mm256_store_si256(out + 1, _mm256_permute2x128_si256(outer, inner, 0x31));
}

inline void clear_behind(WordBlock &block, std::int64_t present) {
  if (present < kBlockColumns) {
    std::memset(block.words + present, 0, (kBlockColumns - present) * sizeof(BFloat16));
  }
}

class Avx2Lossless {
public:
  using Block = WordBlock;

  Avx2Lossless(const LosslessRows &matrix, std::int64_t quad)
      : matrix_(matrix), row_(quad * kQuadRows), streams_(matrix.quad(quad)) {}

  void begin(std::int64_t) {}

  Block next(int n, std::int64_t first, std::int64_t present) {
    const std::int64_t stride = class_stride(matrix_.columns);
    const std::uint8_t *bytes = matrix_.bytes + (row_ + n) * matrix_.columns + first;
    const std::uint8_t *classes = matrix_.classes + (row_ + n) * stride + class_bytes(first);
    fetch_ahead(bytes + kQuadRows * matrix_.columns);
    fetch_ahead(classes + kQuadRows * stride);
    const __m256i table = _mm256_broadcastsi128_si256(
        _mm_loadl_epi64(reinterpret_cast<const __m128i *>(matrix_.exponents)));
    const __m256i of[2] = {classes_of_32(classes), classes_of_32(classes + class_bytes(32))};
    const __m256i seven = _mm256_set1_epi8(kEscape);
    alignas(32) std::uint8_t exponents[kBlockColumns];
    store32(exponents, _mm256_shuffle_epi8(table, of[0]));
    store32(exponents + 32, _mm256_shuffle_epi8(table, of[1]));
    const std::uint64_t escapes =
        bits_of(_mm256_cmpeq_epi8(of[0], seven), _mm256_cmpeq_epi8(of[1], seven));
    escape(exponents, escapes & first_bits(present), matrix_.streams, streams_);
    Block block;
    const __m256i low_bits = _mm256_set1_epi8(0x7F);
    for (int at = 0; at < kBlockColumns; at += 32) {
      // The exponent's lowest bit above the mantissa, the others below the sign.
      const __m256i exponent = load32(exponents + at), sign_mantissa = load32(bytes + at);
      const __m256i low =
          _mm256_or_si256(_mm256_and_si256(low_bits, sign_mantissa),
                          _mm256_andnot_si256(low_bits, _mm256_slli_epi16(exponent, 7)));
      const __m256i high =
          _mm256_or_si256(_mm256_and_si256(low_bits, _mm256_srli_epi16(exponent, 1)),
                          _mm256_andnot_si256(low_bits, sign_mantissa));
      store_words(block.words + at, low, high);
    }
    clear_behind(block, present);
    return block;
  }

private:
  const LosslessRows &matrix_;
  std::int64_t row_;
  QuadStreams streams_;
};

class Avx2Residual {
public:
  using Block = WordBlock;

  // For groups of which `takes_tables` holds.
  Avx2Residual(const ResidualRows &matrix, std::int64_t quad)
      : matrix_(matrix), row_(quad * kQuadRows), streams_(matrix.quad(quad)) {}

  void begin(std::int64_t first) {
    const std::int64_t group = matrix_.codes.group_size, rows = matrix_.rows - row_;
    const bool fine = group < kBlockColumns && group != matrix_.columns;
    if (first != next_tables_) {
      return;
    }
    next_tables_ += group < kBlockColumns ? kBlockColumns : group;
    for (int n = 0; n < kQuadRows && n < rows; ++n) {
      const Float16 *scales = matrix_.codes.scales + (row_ + n) * matrix_.codes.row_groups();
      for (int lane = 0; lane < 4; ++lane) {
        const std::int64_t column = first + lane * 16;
        if (lane > 0 && (!fine || column >= matrix_.columns)) {
          std::memcpy(&tables_[n][lane], &tables_[n][0], sizeof(Tables));
        } else {
          fill(tables_[n][lane], window_scale(scales[column / group]));
        }
      }
    }
  }

  Block next(int n, std::int64_t first, std::int64_t present) {
    const Int4Matrix &codes = matrix_.codes;
    const std::uint8_t *bytes = matrix_.bytes + (row_ + n) * matrix_.columns + first;
    const std::uint8_t *qweight = codes.qweight + (row_ + n) * codes.row_bytes() + first / 2;
    fetch_ahead(bytes + kQuadRows * matrix_.columns);
    fetch_ahead(qweight + kQuadRows * codes.row_bytes());
    alignas(32) std::uint8_t copy[kBlockColumns / 2] = {};
    if (present < kBlockColumns) { // what lies behind the codes may not be read
      std::memcpy(copy, qweight, present / 2);
      qweight = copy;
    }
    alignas(32) std::uint8_t high[kBlockColumns];
    const __m256i middle = _mm256_set1_epi8(kInt4ZeroPoint);
    __m256i is_zero[2];
    for (int half = 0; half < 2; ++half) {
      const __m256i of = codes_of_32(qweight + 16 * half), low = load32(bytes + 32 * half);
      const __m256i start = _mm256_shuffle_epi8(table(n, half, &Tables::start_low), of);
      const __m256i reaches = _mm256_cmpeq_epi8(_mm256_max_epu8(low, start), low);
      const __m256i carry = _mm256_andnot_si256(reaches, _mm256_set1_epi8(1));
      store32(high + 32 * half,
              _mm256_add_epi8(_mm256_shuffle_epi8(table(n, half, &Tables::start_high), of), carry));
      is_zero[half] = _mm256_cmpeq_epi8(of, middle);
    }
    const std::uint64_t zeros = bits_of(is_zero[0], is_zero[1]) & first_bits(present);
    std::uint64_t escapes = 0;
    const std::int64_t front = streams_.take_front(class_bytes(__builtin_popcountll(zeros)));
    if (zeros != 0) {
      alignas(32) std::uint8_t packed[kBlockColumns + 8], classes[kBlockColumns];
      store32(packed, classes_of_32(matrix_.streams + front));
      store32(packed + 32, classes_of_32(matrix_.streams + front + class_bytes(32)));
      expand(zeros, packed, classes);
      __m256i escaped[2];
      for (int half = 0; half < 2; ++half) {
        const __m256i of = load32(classes + 32 * half);
        const __m256i zero_high = _mm256_shuffle_epi8(table(n, half, &Tables::zero_high), of);
        store32(high + 32 * half,
                _mm256_blendv_epi8(load32(high + 32 * half), zero_high, is_zero[half]));
        escaped[half] = _mm256_cmpeq_epi8(of, _mm256_set1_epi8(kEscape));
      }
      escapes = bits_of(escaped[0], escaped[1]) & zeros;
    }
    if (streams_.has_exceptions) {
      const int count = matrix_.streams[streams_.take_front(1)];
      for (int i = 0; i < count; ++i) {
        escapes |= 1ull << (matrix_.streams[streams_.take_front(1)] % kBlockColumns);
      }
    }
    escape(high, escapes, matrix_.streams, streams_);
    Block block;
    for (int at = 0; at < kBlockColumns; at += 32) {
      store_words(block.words + at, load32(bytes + at), load32(high + at));
    }
    clear_behind(block, present);
    return block;
  }

private:
  // By code: the bytes of the window's start, and, by class, the high bytes of code 0; of the scale
  // of sixteen columns.
  struct Tables {
    alignas(16) std::uint8_t start_low[16], start_high[16], zero_high[16];
  };

  static void fill(Tables &tables, float scale) {
    for (int code = -8; code < 8; ++code) {
      const std::uint16_t start = window_start(code, scale);
      tables.start_low[code + 8] = std::uint8_t(start & 0xFF);
      tables.start_high[code + 8] = std::uint8_t(start >> 8);
    }
    for (int of = 0; of < 16; ++of) {
      tables.zero_high[of] = zero_high_byte(window_start(0, scale), of % kClasses);
    }
  }

  // The tables of the columns of half a block, as vectors look them up.
  __m256i table(int n, int half, std::uint8_t (Tables::*bytes)[16]) const {
    const auto *first = reinterpret_cast<const __m128i *>(&(tables_[n][2 * half].*bytes));
    const auto *second = reinterpret_cast<const __m128i *>(&(tables_[n][2 * half + 1].*bytes));
    return _mm256_set_m128i(_mm_load_si128(second), _mm_load_si128(first));
  }

  static __m256i codes_of_32(const std::uint8_t *qweight) {
    const __m256i apart =
        _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(qweight)));
    return _mm256_and_si256(_mm256_or_si256(apart, _mm256_slli_epi16(apart, 4)),
                            _mm256_set1_epi8(0xF));
  }

  const ResidualRows &matrix_;
  std::int64_t row_;
  QuadStreams streams_;
  std::int64_t next_tables_ = 0;
  Tables tables_[kQuadRows][4];
};

} // namespace
} // namespace speq::cpu
