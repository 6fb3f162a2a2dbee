// Blocks of matrices of codes with scales with AVX2.
#pragma once

#include <type_traits>

#include "cpu/decode_avx2.h"
#include "cpu/decode_scaled.h"

namespace speq::cpu {
namespace {

// 32 codes so that what comes of them by unpacking bytes, and then pairs, is in their order: groups
// of four go to the lower and the upper half in turns.
SPEQ_MEMBER __m256i dealt(__m256i codes) {
  return _mm256_permutevar8x32_epi32(codes, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
}

// 32 words of a row as floats: a segment of sum_order.h.
struct SegmentFloats {
  __m256 of[kSegmentVectors];
};

// Those of dealt codes, by the bytes of their words.
SPEQ_MEMBER SegmentFloats floats_of_dealt(__m256i low, __m256i high) {
  const __m256i none = _mm256_setzero_si256();
  const __m256i front = _mm256_unpacklo_epi8(low, high), back = _mm256_unpackhi_epi8(low, high);
  return {{_mm256_castsi256_ps(_mm256_unpacklo_epi16(none, front)),
           _mm256_castsi256_ps(_mm256_unpackhi_epi16(none, front)),
           _mm256_castsi256_ps(_mm256_unpacklo_epi16(none, back)),
           _mm256_castsi256_ps(_mm256_unpackhi_epi16(none, back))}};
}

SPEQ_MEMBER void store_segment(float *floats, const SegmentFloats &segment) {
  SPEQ_UNROLL
  for (std::int64_t i = 0; i < kSegmentVectors; ++i) {
    _mm256_store_ps(floats + i * kVectorColumns, segment.of[i]);
  }
}

// FP8 under one scale: words of an octave are those of the one before but for the exponent. So
// sixteen words tell those of all normal codes: of the eight mantissas in two neighbouring octaves,
// found by the lower half of a code. Its upper half tells what is to be added to their high bytes.
// Subnormal codes are rare and go one by one.
// kFloats: whether blocks are of floats.
template <bool kFloats> class Avx2Fp8 {
public:
  using Block = std::conditional_t<kFloats, FloatBlock, WordBlock>;
  using OfWords = Avx2Fp8<false>;

  Avx2Fp8(const Fp8Rows &matrix, std::int64_t quad)
      : columns_(matrix.columns), codes_(matrix.codes + quad * kQuadRows * columns_),
        scales_(matrix, quad) {}

  SPEQ_MEMBER void next(int rows, std::int64_t first, std::int64_t present, Block *blocks) {
    fetch_plane<kBlockColumns>(codes_, columns_, first);
    scales_.next(rows, first, [&](int n, float scale) { tables_[n] = Table(scale); });
    for (int n = 0; n < rows; ++n) {
      const Table table = tables_[scales_.place(n)]; // a copy: what is stored cannot change it
      const std::uint8_t *codes = codes_ + n * columns_ + first;
      const __m256i front = load32(codes), back = load32(codes + 32);
      const __m256i odd = _mm256_or_si256(not_normal(front), not_normal(back));
      if (!table.shifts || !_mm256_testz_si256(odd, odd)) {
        store_singly(codes, present, table.scale, blocks[n]);
        continue;
      }
      store(table, front, blocks[n].words);
      store(table, back, blocks[n].words + 32);
      clear_behind(blocks[n], present);
    }
  }

private:
  // Under a scale as near to 1 as this, no word is subnormal and none infinite.
  static constexpr float kLeast = 0x1p-100f, kMost = 0x1p100f;

  // Words under a scale.
  struct Table {
    float scale = 0.0f;
    bool shifts = false; // whether words of an octave are those of another, shifted
    __m256i low, high;   // bytes of the sixteen words, in both halves

    Table() : low(_mm256_setzero_si256()), high(_mm256_setzero_si256()) {}
    SPEQ_MEMBER explicit Table(float scale);
  };

  // Bytes that are not zero where codes are subnormal, zero or no number.
  SPEQ_MEMBER static __m256i not_normal(__m256i codes) {
    const __m256i magnitudes = _mm256_and_si256(codes, _mm256_set1_epi8(0x7F));
    return _mm256_subs_epu8(_mm256_sub_epi8(magnitudes, _mm256_set1_epi8(8)),
                            _mm256_set1_epi8(0x7E - 8));
  }

  // The words of 32 normal codes.
  SPEQ_MEMBER static void store(const Table &table, __m256i codes, float *floats) {
    __m256i low, high;
    bytes_of(table, dealt(codes), low, high);
    store_segment(floats, floats_of_dealt(low, high));
  }
  SPEQ_MEMBER static void store(const Table &table, __m256i codes, BFloat16 *words) {
    __m256i low, high;
    bytes_of(table, codes, low, high);
    store_words(words, low, high);
  }

  SPEQ_MEMBER static void bytes_of(const Table &table, __m256i codes, __m256i &low, __m256i &high) {
    const __m256i nibble = _mm256_set1_epi8(0xF);
    const __m256i places = _mm256_and_si256(codes, nibble);
    const __m256i upper = _mm256_and_si256(_mm256_srli_epi16(codes, 4), nibble);
    const __m256i added = _mm256_setr_epi8(
        0, 1, 2, 3, 4, 5, 6, 7, char(0x80), char(0x81), char(0x82), char(0x83), char(0x84),
        char(0x85), char(0x86), char(0x87), 0, 1, 2, 3, 4, 5, 6, 7, char(0x80), char(0x81),
        char(0x82), char(0x83), char(0x84), char(0x85), char(0x86), char(0x87));
    low = _mm256_shuffle_epi8(table.low, places);
    high =
        _mm256_add_epi8(_mm256_shuffle_epi8(table.high, places), _mm256_shuffle_epi8(added, upper));
  }

  static void store_singly(const std::uint8_t *codes, std::int64_t present, float scale,
                           Block &block) {
    block = {};
    for (std::int64_t i = 0; i < present; ++i) {
      const BFloat16 word = fp8_word(codes[i], scale);
      if constexpr (kFloats) {
        block.words[i] = to_float(word);
      } else {
        block.words[i] = word;
      }
    }
  }

  std::int64_t columns_;
  const std::uint8_t *codes_;
  Fp8QuadScales scales_;
  Table tables_[kQuadRows];
};

template <bool kFloats> Avx2Fp8<kFloats>::Table::Table(float scale) : scale(scale) {
  const float magnitude = scale < 0 ? -scale : scale;
  shifts = magnitude >= kLeast && magnitude <= kMost;
  // A normal code is (8 + its mantissa) times 2 to the power of its exponent less 10.
  const __m256 mantissas = _mm256_setr_ps(8, 9, 10, 11, 12, 13, 14, 15);
  const __m256i bits =
      _mm256_castps_si256(_mm256_mul_ps(mantissas, _mm256_set1_ps(shifts ? scale : 1.0f)));
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, up), 16);
  const __m256i even = _mm256_sub_epi32(rounded, _mm256_set1_epi32(10 << 7));
  const __m256i next = _mm256_add_epi32(even, _mm256_set1_epi32(1 << 7));
  // Within each half: words of four mantissas in both octaves; then their bytes apart.
  const __m256i words = _mm256_packus_epi32(even, next);
  const __m256i bytes = _mm256_shuffle_epi8(
      words, _mm256_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15, 0, 2, 4, 6, 8,
                              10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const __m256i planes = _mm256_permutevar8x32_epi32(bytes, order);
  low = _mm256_permute4x64_epi64(planes, _MM_SHUFFLE(1, 0, 1, 0));
  high = _mm256_permute4x64_epi64(planes, _MM_SHUFFLE(3, 2, 3, 2));
}

// 32 codes, two to the byte, in their order.
SPEQ_MEMBER __m256i codes_of(__m128i packed) {
  const __m128i nibble = _mm_set1_epi8(0xF);
  const __m128i even = _mm_and_si128(packed, nibble);
  const __m128i odd = _mm_and_si128(_mm_srli_epi16(packed, 4), nibble);
  return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_unpacklo_epi8(even, odd)),
                                 _mm_unpackhi_epi8(even, odd), 1);
}

// The same, dealt.
SPEQ_MEMBER __m256i dealt_codes_of(__m128i packed) {
  const __m256i apart = _mm256_shuffle_epi8(
      _mm256_broadcastsi128_si256(packed),
      _mm256_setr_epi8(0, -1, 1, -1, 4, -1, 5, -1, 8, -1, 9, -1, 12, -1, 13, -1, 2, -1, 3, -1, 6,
                       -1, 7, -1, 10, -1, 11, -1, 14, -1, 15, -1));
  return _mm256_and_si256(_mm256_or_si256(apart, _mm256_slli_epi16(apart, 4)),
                          _mm256_set1_epi8(0xF));
}

// The bytes of sixteen words, in both halves of registers.
struct WordTable {
  __m256i low, high;

  SPEQ_MEMBER SegmentFloats floats(__m128i packed) const {
    const __m256i codes = dealt_codes_of(packed);
    return floats_of_dealt(_mm256_shuffle_epi8(low, codes), _mm256_shuffle_epi8(high, codes));
  }
  SPEQ_MEMBER void store(float *words, __m128i packed) const {
    store_segment(words, floats(packed));
  }
  SPEQ_MEMBER void store(BFloat16 *words, __m128i packed) const {
    const __m256i codes = codes_of(packed);
    store_words(words, _mm256_shuffle_epi8(low, codes), _mm256_shuffle_epi8(high, codes));
  }
};

// MXFP4: a code's word is one of sixteen of its scale, whose bytes two shuffles find.
template <bool kFloats> class Avx2Mxfp4 {
public:
  using Block = std::conditional_t<kFloats, FloatBlock, WordBlock>;
  using OfWords = Avx2Mxfp4<false>;

  Avx2Mxfp4(const Mxfp4Rows &matrix, std::int64_t quad)
      : matrix_(matrix), codes_(matrix.codes + quad * kQuadRows * matrix.code_stride),
        scales_(matrix.scales + quad * kQuadRows * matrix.scale_stride),
        tables_(Mxfp4Tables::get()) {}

  SPEQ_MEMBER void next(int rows, std::int64_t first, std::int64_t present, Block *blocks) {
    fetch_plane<kBlockColumns / 2>(codes_, matrix_.code_stride, first / 2);
    for (int n = 0; n < rows; ++n) {
      const std::uint8_t *codes = codes_ + n * matrix_.code_stride + first / 2;
      const std::uint8_t *scales = scales_ + n * matrix_.scale_stride + first / kMxfp4Block;
      table(scales[0]).store(blocks[n].words, load16(codes));
      if (present > kMxfp4Block) {
        table(scales[1]).store(blocks[n].words + kMxfp4Block, load16(codes + 16));
      }
      clear_behind(blocks[n], present);
    }
  }

  SPEQ_MEMBER SegmentFloats segment(int n, std::int64_t first) const {
    const std::uint8_t *codes = codes_ + n * matrix_.code_stride + first / 2;
    fetch_ahead(codes + kQuadRows * matrix_.code_stride);
    return table(scales_[n * matrix_.scale_stride + first / kMxfp4Block]).floats(load16(codes));
  }

private:
  SPEQ_MEMBER WordTable table(std::uint8_t scale) const {
    const Mxfp4Tables::Bytes &bytes = tables_.of_scale[scale];
    return {_mm256_broadcastsi128_si256(load16(bytes.low)),
            _mm256_broadcastsi128_si256(load16(bytes.high))};
  }

  const Mxfp4Rows &matrix_;
  const std::uint8_t *codes_, *scales_;
  const Mxfp4Tables &tables_;
};

// Values times a scale, rounded to BF16, eight to a register. A product that is no number stays
// none: the bits that rounding looks at are zero in it.
SPEQ_MEMBER __m256i rounded(__m256 values, __m256 scale) {
  const __m256i bits = _mm256_castps_si256(_mm256_mul_ps(values, scale));
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF));
  return _mm256_srli_epi32(_mm256_add_epi32(bits, up), 16);
}

// The bytes of the words of sixteen values times a scale: low ones, and high ones behind them.
SPEQ_MEMBER __m256i table_of(__m256 front, __m256 back, float scale) {
  const __m256 by = _mm256_set1_ps(scale);
  const __m256i words = _mm256_packus_epi32(rounded(front, by), rounded(back, by));
  const __m256i in_order = _mm256_permute4x64_epi64(words, _MM_SHUFFLE(3, 1, 2, 0));
  const __m256i low = _mm256_and_si256(in_order, _mm256_set1_epi16(0xFF));
  const __m256i bytes = _mm256_packus_epi16(low, _mm256_srli_epi16(in_order, 8));
  return _mm256_permute4x64_epi64(bytes, _MM_SHUFFLE(3, 1, 2, 0));
}

// Words of the numbers from -15 to 15 times each BF16 of two octaves, low and high bytes apart.
// Under a scale some even number of octaves away, exponents alone differ, and so high bytes, by
// half of it.
struct Int4Tables {
  static constexpr int kLargest = 15;
  static constexpr std::uint16_t kOctaves = 0x3F; // the high byte of their positive scales
  // High bytes of scales under which no word is subnormal and none infinite.
  static constexpr int kLeast = 1, kMost = 0x7C;

  alignas(32) std::uint8_t low[256][32], high[256][32];

  static const Int4Tables &get() {
    static const Int4Tables tables;
    return tables;
  }

  // The bytes of the words of codes less a zero point, under a scale from kLeast to kMost.
  SPEQ_MEMBER __m256i of(std::uint16_t scale, int zero) const {
    const int first = kLargest - zero, octaves = (scale >> 8 & 0x7F) - kOctaves;
    const __m128i codes = _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m128i none = _mm_cmpeq_epi8(codes, _mm_set1_epi8(char(zero)));
    // A zero has the sign of the scale and no exponent.
    const __m128i added = _mm_set1_epi8(char(octaves + (scale >> 8 & 0x80)));
    const __m128i back = _mm_and_si128(none, _mm_set1_epi8(char(octaves)));
    const __m128i moved =
        _mm_sub_epi8(_mm_add_epi8(load16(high[scale & 0xFF] + first), added), back);
    return _mm256_inserti128_si256(_mm256_castsi128_si256(load16(low[scale & 0xFF] + first)), moved,
                                   1);
  }

private:
  Int4Tables() : low{}, high{} {
    for (int scale = 0; scale < 256; ++scale) {
      const float value = to_float(BFloat16{std::uint16_t(kOctaves << 8 | scale)});
      for (int number = -kLargest; number <= kLargest; ++number) {
        const std::uint16_t word = to_bfloat16(float(number) * value).bits;
        low[scale][kLargest + number] = std::uint8_t(word);
        high[scale][kLargest + number] = std::uint8_t(word >> 8);
      }
    }
  }
};

// INT4: a table for each row of a quad, found or made where a group begins.
template <bool kFloats> class Avx2Int4 {
public:
  using Block = std::conditional_t<kFloats, FloatBlock, WordBlock>;
  using OfWords = Avx2Int4<false>;

  Avx2Int4(const Int4Rows &matrix, std::int64_t quad)
      : matrix_(matrix), stride_(matrix.columns / 2), groups_(matrix.row_groups()),
        codes_(matrix.codes + quad * kQuadRows * stride_),
        scales_(matrix.scales + quad * kQuadRows * groups_),
        zeros_(matrix.zeros == nullptr ? nullptr
                                       : matrix.zeros + quad * kQuadRows / kZeroRows * groups_),
        shift_(int(4 * (quad * kQuadRows % kZeroRows))), tables_of_(Int4Tables::get()) {}

  SPEQ_MEMBER void next(int rows, std::int64_t first, std::int64_t present, Block *blocks) {
    fetch_plane<kBlockColumns / 2>(codes_, stride_, first / 2);
    std::int64_t group = group_, begin = next_;
    for (int n = 0; n < rows; ++n) {
      __m256i table = tables_[n];
      group = group_, begin = next_;
      for (std::int64_t at = 0; at < present; at += kInt4Columns) {
        if (first + at == begin) {
          table = table_of_group(n, group++);
          begin += matrix_.group_size;
        }
        halves_of(table).store(blocks[n].words + at,
                               load16(codes_ + n * stride_ + (first + at) / 2));
      }
      tables_[n] = table;
      clear_behind(blocks[n], present);
    }
    group_ = group, next_ = begin;
  }

  SPEQ_MEMBER SegmentFloats segment(int n, std::int64_t first) {
    static_assert(kSegmentColumns == kInt4Columns);
    if (first == 0) {
      group_ = next_ = 0;
    }
    if (first == next_) {
      tables_[0] = table_of_group(n, group_++);
      next_ += matrix_.group_size;
    }
    const std::uint8_t *codes = codes_ + n * stride_ + first / 2;
    fetch_ahead(codes + kQuadRows * stride_);
    return halves_of(tables_[0]).floats(load16(codes));
  }

private:
  static constexpr std::uint32_t kZeros = 0x8888; // kInt4Zero of each row
  static_assert(kZeroRows % kQuadRows == 0);

  SPEQ_MEMBER static WordTable halves_of(__m256i table) {
    return {_mm256_permute2x128_si256(table, table, 0x00),
            _mm256_permute2x128_si256(table, table, 0x11)};
  }

  SPEQ_MEMBER __m256i table_of_group(int n, std::int64_t group) const {
    const std::uint32_t zeros = zeros_ == nullptr ? kZeros : zeros_[group] >> shift_;
    return table_under(scales_[n * groups_ + group], int(zeros >> 4 * n & 0xF));
  }

  // The bytes of the words of all codes.
  SPEQ_MEMBER __m256i table_under(std::uint16_t scale, int zero) const {
    const int upper = scale >> 8 & 0x7F;
    if (!matrix_.halves && upper >= Int4Tables::kLeast && upper <= Int4Tables::kMost) {
      return tables_of_.of(scale, zero);
    }
    const __m256i codes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i front = _mm256_sub_epi32(codes, _mm256_set1_epi32(zero));
    const __m256i back = _mm256_add_epi32(front, _mm256_set1_epi32(8));
    return table_of(_mm256_cvtepi32_ps(front), _mm256_cvtepi32_ps(back), matrix_.scale_of(scale));
  }

  const Int4Rows &matrix_;
  std::int64_t stride_, groups_;
  const std::uint8_t *codes_;
  const std::uint16_t *scales_;
  const std::uint32_t *zeros_;
  int shift_;
  const Int4Tables &tables_of_;
  std::int64_t group_ = 0, next_ = 0; // the next group, and where it begins
  __m256i tables_[kQuadRows] = {};
};

// Tables of all scales of a matrix of NVFP4. A matrix has thousands of blocks, and few matrices are
// multiplied in turns: gate and up.
struct Nvfp4Tables {
  static constexpr int kKept = 2;

  alignas(32) std::uint8_t of_scale[256][32];
  std::uint32_t of_matrix;
  bool divides, made;

  // The tables of a matrix, which this thread keeps until it has seen kKept others.
  static const Nvfp4Tables &of(const Nvfp4Rows &matrix) {
    static thread_local Nvfp4Tables kept[kKept] = {};
    static thread_local int oldest = 0;
    for (const Nvfp4Tables &tables : kept) {
      if (tables.made && tables.of_matrix == bits_as<std::uint32_t>(matrix.of_matrix) &&
          tables.divides == matrix.divides) {
        return tables;
      }
    }
    Nvfp4Tables &tables = kept[oldest];
    oldest = (oldest + 1) % kKept;
    tables.make(matrix);
    return tables;
  }

  SPEQ_MEMBER __m256i of_code(std::uint8_t scale) const {
    return _mm256_load_si256(reinterpret_cast<const __m256i *>(of_scale[scale]));
  }

private:
  void make(const Nvfp4Rows &matrix) {
    const __m256 front = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
    const __m256 back = _mm256_xor_ps(front, _mm256_set1_ps(-0.0f));
    for (int scale = 0; scale < 256; ++scale) {
      _mm256_store_si256(reinterpret_cast<__m256i *>(of_scale[scale]),
                         table_of(front, back, matrix.scale(std::uint8_t(scale))));
    }
    of_matrix = bits_as<std::uint32_t>(matrix.of_matrix);
    divides = matrix.divides;
    made = true;
  }
};

// NVFP4: as MXFP4, with two tables for 32 codes.
template <bool kFloats> class Avx2Nvfp4 {
public:
  using Block = std::conditional_t<kFloats, FloatBlock, WordBlock>;
  using OfWords = Avx2Nvfp4<false>;

  Avx2Nvfp4(const Nvfp4Rows &matrix, std::int64_t quad)
      : codes_(matrix.codes + quad * kQuadRows * (matrix.columns / 2)),
        scales_(matrix.scales + quad * kQuadRows * (matrix.columns / kNvfp4Block)),
        code_stride_(matrix.columns / 2), scale_stride_(matrix.columns / kNvfp4Block),
        tables_(Nvfp4Tables::of(matrix)) {}

  SPEQ_MEMBER void next(int rows, std::int64_t first, std::int64_t present, Block *blocks) {
    fetch_plane<kBlockColumns / 2>(codes_, code_stride_, first / 2);
    for (int n = 0; n < rows; ++n) {
      const std::uint8_t *codes = codes_ + n * code_stride_ + first / 2;
      const std::uint8_t *scales = scales_ + n * scale_stride_ + first / kNvfp4Block;
      for (std::int64_t at = 0; at < present; at += kNvfp4Columns) {
        store(blocks[n].words + at, load16(codes + at / 2), scales + at / kNvfp4Block);
      }
      clear_behind(blocks[n], present);
    }
  }

  SPEQ_MEMBER SegmentFloats segment(int n, std::int64_t first) const {
    const std::uint8_t *codes = codes_ + n * code_stride_ + first / 2;
    fetch_ahead(codes + kQuadRows * code_stride_);
    return floats(load16(codes), scales_ + n * scale_stride_ + first / kNvfp4Block);
  }

private:
  // The bytes of the words of 32 codes in two blocks: a half of a register has a block.
  SPEQ_MEMBER WordTable table(const std::uint8_t *scales) const {
    const __m256i front = tables_.of_code(scales[0]), back = tables_.of_code(scales[1]);
    return {_mm256_permute2x128_si256(front, back, 0x20),
            _mm256_permute2x128_si256(front, back, 0x31)};
  }
  SPEQ_MEMBER SegmentFloats floats(__m128i packed, const std::uint8_t *scales) const {
    const WordTable of = table(scales);
    const __m256i codes = codes_of(packed);
    return floats_of_dealt(dealt(_mm256_shuffle_epi8(of.low, codes)),
                           dealt(_mm256_shuffle_epi8(of.high, codes)));
  }
  SPEQ_MEMBER void store(float *words, __m128i packed, const std::uint8_t *scales) const {
    store_segment(words, floats(packed, scales));
  }
  SPEQ_MEMBER void store(BFloat16 *words, __m128i packed, const std::uint8_t *scales) const {
    table(scales).store(words, packed);
  }

  const std::uint8_t *codes_, *scales_;
  std::int64_t code_stride_, scale_stride_;
  const Nvfp4Tables &tables_;
};

using Avx2Scaled = Scaled<Avx2Fp8<true>, Avx2Mxfp4<true>, Avx2Int4<true>, Avx2Nvfp4<true>>;

} // namespace
} // namespace speq::cpu
