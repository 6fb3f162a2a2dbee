// Blocks of matrices of codes with scales with AVX-512 VBMI: 32 words to a lookup of bytes.
#pragma once

#include "cpu/decode_scaled_avx2.h"
#include "cpu/decode_vbmi2.h"

namespace speq::cpu {
namespace {

// FP8: the bytes of words are looked up apart; rare codes are put in one by one.
class VectorFp8 {
public:
  using Block = VectorBlock;

  VectorFp8(const Fp8Rows &matrix, std::int64_t quad)
      : columns_(matrix.columns), codes_(matrix.codes + quad * kQuadRows * columns_),
        scales_(matrix, quad) {}

  SPEQ_MEMBER void next(int rows, std::int64_t first, std::int64_t present, Block *blocks) {
    scales_.next(rows, first, [&](int n, float scale) { tables_[n].make(scale); });
    const __mmask64 mask = first_of_64(present);
    SPEQ_UNROLL
    for (int n = 0; n < rows; ++n) {
      const Table &table = tables_[scales_.place(n)];
      const std::uint8_t *codes = codes_ + n * columns_ + first;
      fetch_ahead(codes + kQuadRows * columns_);
      const __m512i of = _mm512_maskz_loadu_epi8(mask, codes);
      const __m512i magnitudes = _mm512_and_si512(of, _mm512_set1_epi8(0x7F));
      const __mmask64 odd = _mm512_mask_cmpgt_epu8_mask(
          mask, _mm512_sub_epi8(magnitudes, table.least),
          _mm512_set1_epi8(Fp8Table::kMostNormal - Fp8Table::kLeastNormal));
      blocks[n] = table.words(dealt_64(of), present);
      if (odd != 0) [[unlikely]] {
        const VectorBlock block = blocks[n]; // whose address nobody takes
        blocks[n] = with_odd_codes(block, odd, codes, table.scale);
      }
    }
  }

private:
  // An Fp8Table, in all quarters.
  struct Table {
    float scale;
    __m512i least, low, high;

    SPEQ_MEMBER void make(float of) {
      Fp8Table table;
      table.make(of);
      const auto spread = [](__m256i halves) { return _mm512_broadcast_i64x4(halves); };
      scale = of, least = spread(table.least), low = spread(table.low), high = spread(table.high);
    }
    SPEQ_MEMBER VectorBlock words(__m512i codes, std::int64_t present) const {
      const __m512i places = _mm512_and_si512(codes, _mm512_set1_epi8(0xF));
      // The sign and the upper bits of the exponent: added to the high bytes as they are.
      constexpr int kSelect = 0xCA; // second where first has ones, third elsewhere
      const __m512i added =
          _mm512_and_si512(_mm512_ternarylogic_epi32(_mm512_set1_epi8(char(0x80)), codes,
                                                     _mm512_srli_epi16(codes, 4), kSelect),
                           _mm512_set1_epi8(char(0x87)));
      return words_of_dealt(_mm512_shuffle_epi8(low, places),
                            _mm512_add_epi8(_mm512_shuffle_epi8(high, places), added), present);
    }
  };

  // A block some of whose words the table has not.
  [[gnu::noinline]] static VectorBlock with_odd_codes(const VectorBlock &block, std::uint64_t odd,
                                                      const std::uint8_t *codes, float scale) {
    alignas(64) BFloat16 words[kBlockColumns];
    static_assert(sizeof words == sizeof block);
    std::memcpy(words, &block, sizeof words);
    for (; odd != 0; odd &= odd - 1) {
      const int i = __builtin_ctzll(odd);
      words[i] = fp8_word(codes[i], scale);
    }
    VectorBlock mended;
    std::memcpy(&mended, words, sizeof words);
    return mended;
  }

  std::int64_t columns_;
  const std::uint8_t *codes_;
  Fp8QuadScales scales_;
  Table tables_[kQuadRows] = {};
};

// Places in a table of the bytes of 32 words: each code of four bits twice, that of a low byte and
// that of the high one, which is sixteen places behind it. Codes of the second half of the words
// have a table of their own, kTables - 1 tables behind the first.
template <int kTables> SPEQ_MEMBER __m512i places_of(__m128i packed) {
  // Within each half of a quarter: two codes from one byte, four bytes of places to each.
  alignas(64) static constexpr auto bytes = [] {
    struct {
      std::uint8_t from[64], table[64];
    } of{};
    for (int i = 0; i < 64; ++i) {
      of.from[i] = std::uint8_t(i / 4);
      of.table[i] = std::uint8_t(16 * (i % 2) + 32 * (kTables - 1) * (i / 32));
    }
    return of;
  }();
  const __m512i twice = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(packed), load64(bytes.from));
  const __m512i codes = _mm512_srlv_epi16(twice, _mm512_set1_epi32(4 << 16));
  constexpr int kAndOr = 0xEA; // (first and second) or third
  return _mm512_ternarylogic_epi32(codes, _mm512_set1_epi8(0xF), load64(bytes.table), kAndOr);
}

// The low bytes of sixteen words, and the high ones behind them.
struct ByteTable {
  __m256i bytes;

  SPEQ_MEMBER static ByteTable of(const std::uint8_t *low, const std::uint8_t *high,
                                  __m256i added) {
    const __m128i moved = _mm_add_epi8(load16(high), _mm256_castsi256_si128(added));
    return {_mm256_inserti128_si256(_mm256_castsi128_si256(load16(low)), moved, 1)};
  }
  SPEQ_MEMBER static ByteTable of(__m256i bytes) { return {bytes}; }

  SPEQ_MEMBER __m512i words(__m128i packed) const {
    return _mm512_permutexvar_epi8(places_of<1>(packed), _mm512_castsi256_si512(bytes));
  }
};

// The words of a block whose halves `half(i)` gives, zeros behind those that are present.
template <typename Half> SPEQ_MEMBER VectorBlock block_of(std::int64_t present, const Half &half) {
  constexpr std::int64_t kColumns = kBlockColumns / 2;
  return {{half(0), present > kColumns ? half(1) : _mm512_setzero_si512()}};
}

// MXFP4: a code's word is one of sixteen of its scale.
class VectorMxfp4 {
public:
  using Block = VectorBlock;

  VectorMxfp4(const Mxfp4Rows &matrix, std::int64_t quad)
      : matrix_(matrix), codes_(matrix.codes + quad * kQuadRows * matrix.code_stride),
        scales_(matrix.scales + quad * kQuadRows * matrix.scale_stride),
        tables_(Mxfp4Tables::get()) {}

  SPEQ_MEMBER void next(int rows, std::int64_t first, std::int64_t present, Block *blocks) {
    fetch_plane<kBlockColumns / 2>(codes_, matrix_.code_stride, first / 2);
    SPEQ_UNROLL
    for (int n = 0; n < rows; ++n) {
      const std::uint8_t *codes = codes_ + n * matrix_.code_stride + first / 2;
      const std::uint8_t *scales = scales_ + n * matrix_.scale_stride + first / kMxfp4Block;
      blocks[n] = block_of(present, [&](int half) {
        const ByteTable table{load32(tables_.of_scale[scales[half]].low)};
        return table.words(load16(codes + half * kMxfp4Block / 2));
      });
    }
  }

private:
  const Mxfp4Rows &matrix_;
  const std::uint8_t *codes_, *scales_;
  const Mxfp4Tables &tables_;
};

// INT4: as MXFP4, with tables that groups have.
class VectorInt4 {
public:
  using Block = VectorBlock;

  VectorInt4(const Int4Rows &matrix, std::int64_t quad)
      : stride_(matrix.columns / 2), codes_(matrix.codes + quad * kQuadRows * stride_),
        tables_(matrix, quad) {}

  SPEQ_MEMBER void next(int rows, std::int64_t first, std::int64_t present, Block *blocks) {
    tables_.next(rows, first);
    SPEQ_UNROLL
    for (int n = 0; n < rows; ++n) {
      const std::uint8_t *codes = codes_ + n * stride_ + first / 2;
      fetch_ahead(codes + kQuadRows * stride_);
      blocks[n] = block_of(present, [&](int half) {
        return tables_.of(n, half).words(load16(codes + half * kInt4Columns / 2));
      });
    }
  }

private:
  std::int64_t stride_;
  const std::uint8_t *codes_;
  Int4QuadTables<ByteTable> tables_;
};

// NVFP4: two tables for 32 codes.
class VectorNvfp4 {
public:
  using Block = VectorBlock;

  VectorNvfp4(const Nvfp4Rows &matrix, std::int64_t quad)
      : codes_(matrix.codes + quad * kQuadRows * (matrix.columns / 2)),
        scales_(matrix.scales + quad * kQuadRows * (matrix.columns / kNvfp4Block)),
        code_stride_(matrix.columns / 2), scale_stride_(matrix.columns / kNvfp4Block),
        tables_(Nvfp4Tables::of(matrix)) {}

  SPEQ_MEMBER void next(int rows, std::int64_t first, std::int64_t present, Block *blocks) {
    fetch_plane<kBlockColumns / 2>(codes_, code_stride_, first / 2);
    SPEQ_UNROLL
    for (int n = 0; n < rows; ++n) {
      const std::uint8_t *codes = codes_ + n * code_stride_ + first / 2;
      const std::uint8_t *scales = scales_ + n * scale_stride_ + first / kNvfp4Block;
      blocks[n] = block_of(present, [&](int half) {
        const __m512i both =
            _mm512_inserti64x4(_mm512_castsi256_si512(tables_.of_code(scales[2 * half])),
                               tables_.of_code(scales[2 * half + 1]), 1);
        return _mm512_permutexvar_epi8(places_of<2>(load16(codes + half * kNvfp4Columns / 2)),
                                       both);
      });
    }
  }

private:
  const std::uint8_t *codes_, *scales_;
  std::int64_t code_stride_, scale_stride_;
  const Nvfp4Tables &tables_;
};

using VectorScaled = Scaled<VectorFp8, VectorMxfp4, VectorInt4, VectorNvfp4>;

} // namespace
} // namespace speq::cpu
