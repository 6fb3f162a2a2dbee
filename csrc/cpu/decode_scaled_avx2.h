// Blocks of matrices of codes with scales with AVX2.
#pragma once

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

  // Adds the products by 32 values to the partial sums of the segment.
  SPEQ_MEMBER void add_to(float *partial, const float *values) const {
    __m256 sum = _mm256_load_ps(partial);
    SPEQ_UNROLL
    for (std::int64_t i = 0; i < kSegmentVectors; ++i) {
      sum = _mm256_fmadd_ps(of[i], _mm256_loadu_ps(values + i * kVectorColumns), sum);
    }
    _mm256_store_ps(partial, sum);
  }
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

// The words of FP8 codes under one scale. Those of an octave are those of the one before but for
// the exponent. So sixteen words tell those of all normal codes: of the eight mantissas in two
// neighbouring octaves, found by the lower half of a code. Its upper half tells what is to be added
// to their high bytes.
struct Fp8Table {
  // Under a scale as near to 1 as this, no word is subnormal and none infinite.
  static constexpr float kLeast = 0x1p-100f, kMost = 0x1p100f;
  // Magnitudes of normal codes, and where none begins.
  static constexpr int kLeastNormal = 8, kMostNormal = 0x7E, kNone = 0x81;

  float scale = 0.0f;
  __m256i least{};       // magnitude of the first code whose word is one of these, shifted
  __m256i low{}, high{}; // bytes of the sixteen words, in both halves

  SPEQ_MEMBER void make(float scale);

  // What is added to high bytes, by the upper half of a code, in both halves.
  SPEQ_MEMBER static __m256i added() {
    return _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, char(0x80), char(0x81),
                                                     char(0x82), char(0x83), char(0x84), char(0x85),
                                                     char(0x86), char(0x87)));
  }
};

void Fp8Table::make(float of) {
  scale = of;
  const float magnitude = scale < 0 ? -scale : scale;
  // Whether words of an octave are those of another, shifted.
  const bool shifts = magnitude >= kLeast && magnitude <= kMost;
  least = _mm256_set1_epi8(char(shifts ? kLeastNormal : kNone));
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

// FP8: rare codes, those that are subnormal, zero or no number, are put in one by one.
class Avx2Fp8 {
public:
  using Block = WordBlock;

  Avx2Fp8(const Fp8Rows &matrix, std::int64_t quad)
      : columns_(matrix.columns), codes_(matrix.codes + quad * kQuadRows * columns_),
        scales_(matrix, quad) {}

  SPEQ_MEMBER void begin(int rows, std::int64_t first) {
    scales_.next(rows, first, [&](int n, float scale) { tables_[n].make(scale); });
  }

  template <typename Use> SPEQ_MEMBER void segments(int n, std::int64_t first, const Use &use) {
    const Fp8Table &table = tables_[scales_.place(n)];
    const std::uint8_t *codes = codes_ + n * columns_ + first;
    fetch_ahead(codes + kQuadRows * columns_);
    const __m256i front = dealt(load32(codes)), back = dealt(load32(codes + kSegmentColumns));
    const __m256i odd = _mm256_or_si256(not_in(table, front), not_in(table, back));
    if (!_mm256_testz_si256(odd, odd)) [[unlikely]] {
      use(0, with_odd_codes(codes, table));
      use(1, with_odd_codes(codes + kSegmentColumns, table));
      return;
    }
    __m256i low, high;
    bytes_of(table, front, low, high);
    use(0, floats_of_dealt(low, high));
    bytes_of(table, back, low, high);
    use(1, floats_of_dealt(low, high));
  }

  SPEQ_MEMBER void next(int rows, std::int64_t first, std::int64_t present, Block *blocks) {
    begin(rows, first);
    for (int n = 0; n < rows; ++n) {
      const Fp8Table &table = tables_[scales_.place(n)];
      const std::uint8_t *codes = codes_ + n * columns_ + first;
      fetch_ahead(codes + kQuadRows * columns_);
      std::uint64_t singly = 0;
      SPEQ_UNROLL
      for (int half = 0; half < 2; ++half) {
        const __m256i of = load32(codes + 32 * half);
        __m256i low, high;
        bytes_of(table, of, low, high);
        store_words(blocks[n].words + 32 * half, low, high);
        singly |= std::uint64_t(places_of(not_in(table, of))) << 32 * half;
      }
      for (singly &= first_bits(present); singly != 0; singly &= singly - 1) {
        const int i = __builtin_ctzll(singly);
        blocks[n].words[i] = fp8_word(codes[i], table.scale);
      }
      clear_behind(blocks[n], present);
    }
  }

private:
  // Bytes that are not zero where a table has not the codes' words: those that are subnormal, zero
  // or no number, or all.
  SPEQ_MEMBER __m256i not_in(const Fp8Table &table, __m256i codes) const {
    const __m256i magnitudes = _mm256_and_si256(codes, magnitude_);
    return _mm256_subs_epu8(_mm256_sub_epi8(magnitudes, table.least), range_);
  }

  // A bit for each byte that is not zero.
  SPEQ_MEMBER static std::uint32_t places_of(__m256i bytes) {
    return ~std::uint32_t(_mm256_movemask_epi8(_mm256_cmpeq_epi8(bytes, _mm256_setzero_si256())));
  }

  SPEQ_MEMBER void bytes_of(const Fp8Table &table, __m256i codes, __m256i &low,
                            __m256i &high) const {
    const __m256i places = _mm256_and_si256(codes, nibble_);
    const __m256i upper = _mm256_and_si256(_mm256_srli_epi16(codes, 4), nibble_);
    low = _mm256_shuffle_epi8(table.low, places);
    high = _mm256_add_epi8(_mm256_shuffle_epi8(table.high, places),
                           _mm256_shuffle_epi8(added_, upper));
  }

  // A segment some of whose words the table has not.
  [[gnu::noinline]] SegmentFloats with_odd_codes(const std::uint8_t *codes,
                                                 const Fp8Table &table) const {
    const __m256i of = load32(codes);
    __m256i low, high;
    bytes_of(table, dealt(of), low, high);
    SegmentFloats segment = floats_of_dealt(low, high);
    alignas(32) float floats[kSegmentColumns];
    std::memcpy(floats, &segment, sizeof floats);
    std::uint32_t singly = places_of(not_in(table, of));
    for (; singly != 0; singly &= singly - 1) {
      const int i = __builtin_ctz(singly);
      floats[i] = to_float(fp8_word(codes[i], table.scale));
    }
    std::memcpy(&segment, floats, sizeof segment);
    return segment;
  }

  std::int64_t columns_;
  const std::uint8_t *codes_;
  Fp8QuadScales scales_;
  Fp8Table tables_[kQuadRows];
  // Bits of a magnitude, and how far those of normal codes go.
  __m256i magnitude_ = in_memory(0x7F),
          range_ = in_memory(Fp8Table::kMostNormal - Fp8Table::kLeastNormal);
  __m256i nibble_ = in_memory(0xF);
  __m256i added_ = in_memory(Fp8Table::added());
};

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

// Sixteen bytes in both halves of a register.
SPEQ_MEMBER __m256i both(const std::uint8_t *bytes) {
  return _mm256_broadcastsi128_si256(load16(bytes));
}

// The bytes of sixteen words, in both halves of registers.
struct WordTable {
  __m256i low, high;

  // Of bytes that lie somewhere, what is added to high ones in both halves.
  SPEQ_MEMBER static WordTable of(const std::uint8_t *low, const std::uint8_t *high,
                                  __m256i added) {
    return {both(low), _mm256_add_epi8(both(high), added)};
  }
  // Of low bytes, and high ones behind them.
  SPEQ_MEMBER static WordTable of(__m256i bytes) {
    return {_mm256_permute2x128_si256(bytes, bytes, 0x00),
            _mm256_permute2x128_si256(bytes, bytes, 0x11)};
  }

  SPEQ_MEMBER SegmentFloats floats(__m128i packed) const {
    const __m256i codes = dealt_codes_of(packed);
    return floats_of_dealt(_mm256_shuffle_epi8(low, codes), _mm256_shuffle_epi8(high, codes));
  }
  SPEQ_MEMBER void store(BFloat16 *words, __m128i packed) const {
    const __m256i codes = codes_of(packed);
    store_words(words, _mm256_shuffle_epi8(low, codes), _mm256_shuffle_epi8(high, codes));
  }
};

// MXFP4: a code's word is one of sixteen of its scale, whose bytes two shuffles find.
class Avx2Mxfp4 {
public:
  using Block = WordBlock;

  Avx2Mxfp4(const Mxfp4Rows &matrix, std::int64_t quad)
      : matrix_(matrix), codes_(matrix.codes + quad * kQuadRows * matrix.code_stride),
        scales_(matrix.scales + quad * kQuadRows * matrix.scale_stride),
        tables_(Mxfp4Tables::get()) {}

  SPEQ_MEMBER void begin(int, std::int64_t first) const {
    fetch_plane<kBlockColumns / 2>(codes_, matrix_.code_stride, first / 2);
  }

  template <typename Use>
  SPEQ_MEMBER void segments(int n, std::int64_t first, const Use &use) const {
    const std::uint8_t *codes = codes_ + n * matrix_.code_stride + first / 2;
    const std::uint8_t *scales = scales_ + n * matrix_.scale_stride + first / kMxfp4Block;
    use(0, table(scales[0]).floats(load16(codes)));
    use(1, table(scales[1]).floats(load16(codes + 16)));
  }

  SPEQ_MEMBER void next(int rows, std::int64_t first, std::int64_t present, Block *blocks) {
    begin(rows, first);
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

private:
  SPEQ_MEMBER WordTable table(std::uint8_t scale) const {
    const Mxfp4Tables::Bytes &bytes = tables_.of_scale[scale];
    return {both(bytes.low), both(bytes.high)};
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

  struct alignas(64) Bytes {
    std::uint8_t low[32], high[32];
  };
  Bytes of_scale[256];

  // The bytes that have an exponent, by zero point: all but that of its own code.
  alignas(16) std::uint8_t nonzero[16][16];

  static const Int4Tables &get() {
    static const Int4Tables tables;
    return tables;
  }

  // The words of codes less a zero point, under a positive scale from kLeast to kMost.
  template <typename Table> SPEQ_MEMBER Table of(std::uint16_t scale, int zero) const {
    const int first = kLargest - zero, octaves = (scale >> 8) - kOctaves;
    const __m256i moved = _mm256_and_si256(_mm256_set1_epi8(char(octaves)), both(nonzero[zero]));
    const Bytes &bytes = of_scale[scale & 0xFF];
    return Table::of(bytes.low + first, bytes.high + first, moved);
  }

private:
  Int4Tables() : of_scale{}, nonzero{} {
    for (int zero = 0; zero < 16; ++zero) {
      std::memset(nonzero[zero], 0xFF, sizeof nonzero[zero]);
      nonzero[zero][zero] = 0;
    }
    for (int scale = 0; scale < 256; ++scale) {
      const float value = to_float(BFloat16{std::uint16_t(kOctaves << 8 | scale)});
      for (int number = -kLargest; number <= kLargest; ++number) {
        const std::uint16_t word = to_bfloat16(float(number) * value).bits;
        of_scale[scale].low[kLargest + number] = std::uint8_t(word);
        of_scale[scale].high[kLargest + number] = std::uint8_t(word >> 8);
      }
    }
  }
};

// The tables of INT4 codes in a quad's rows, found or made where a group begins: a table for each
// half of a block and row. A Table is made of a WordTable's bytes: low ones, and high ones behind.
template <typename Table> class Int4QuadTables {
public:
  Int4QuadTables(const Int4Rows &matrix, std::int64_t quad)
      : matrix_(matrix), groups_(matrix.row_groups()),
        scales_(matrix.scales + quad * kQuadRows * groups_),
        zeros_(matrix.zeros == nullptr ? nullptr
                                       : matrix.zeros + quad * kQuadRows / kZeroRows * groups_),
        shift_(int(4 * (quad * kQuadRows % kZeroRows))),
        found_(matrix.halves ? 0 : Int4Tables::kMost - Int4Tables::kLeast + 1),
        fine_(matrix.group_size % kBlockColumns != 0 && matrix.group_size != matrix.columns),
        tables_of_(Int4Tables::get()) {
    const std::int64_t scales = kQuadRows * groups_;
    fetch_lines(scales_ + scales, scales * std::int64_t(sizeof *scales_));
  }

  // Takes the groups that begin in a block. Columns come in order.
  SPEQ_MEMBER void next(int rows, std::int64_t first) {
    if (first == next_) {
      find(rows, 0);
    } else if (fine_) {
      for (int n = 0; n < rows; ++n) {
        tables_[n][0] = tables_[n][1];
      }
    }
    if (!fine_) {
      return;
    }
    if (first + kInt4Columns == next_ && next_ < matrix_.columns) {
      find(rows, 1);
    } else {
      for (int n = 0; n < rows; ++n) {
        tables_[n][1] = tables_[n][0];
      }
    }
  }

  SPEQ_MEMBER const Table &of(int n, int half) const { return tables_[n][fine_ ? half : 0]; }

private:
  static_assert(kZeroRows % kQuadRows == 0);

  // The tables of the group that begins with half a block.
  SPEQ_MEMBER void find(int rows, int half) {
    const auto find_under = [&](const auto &zero_of) {
      const std::uint16_t *scale = scales_;
      for (int n = 0; n < rows; ++n, scale += groups_) {
        tables_[n][half] = under(*scale, zero_of(n));
      }
    };
    if (zeros_ == nullptr) {
      find_under([](int) { return kInt4Zero; });
    } else {
      const std::uint32_t zeros = *zeros_++ >> shift_;
      find_under([&](int n) { return int(zeros >> 4 * n & 0xF); });
    }
    ++scales_;
    next_ += matrix_.group_size;
  }

  // The words of all codes.
  SPEQ_MEMBER Table under(std::uint16_t scale, int zero) const {
    if (std::uint32_t(scale >> 8) - std::uint32_t(Int4Tables::kLeast) < found_) [[likely]] {
      return tables_of_.template of<Table>(scale, zero);
    }
    return rounded_under(matrix_.scale_of(scale), zero);
  }
  [[gnu::noinline]] static Table rounded_under(float scale, int zero) {
    const __m256i codes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i front = _mm256_sub_epi32(codes, _mm256_set1_epi32(zero));
    const __m256i back = _mm256_add_epi32(front, _mm256_set1_epi32(8));
    return Table::of(table_of(_mm256_cvtepi32_ps(front), _mm256_cvtepi32_ps(back), scale));
  }

  const Int4Rows &matrix_;
  std::int64_t groups_;
  const std::uint16_t *scales_; // of the first row, the next group's
  const std::uint32_t *zeros_;  // of all rows
  int shift_;
  std::uint32_t found_; // so many high bytes of scales, from kLeast on, have their tables
  bool fine_;           // whether halves of a block have tables of their own
  const Int4Tables &tables_of_;
  std::int64_t next_ = 0; // where the next group begins
  Table tables_[kQuadRows][2];
};

// INT4: as MXFP4, with tables that groups have.
class Avx2Int4 {
public:
  using Block = WordBlock;

  Avx2Int4(const Int4Rows &matrix, std::int64_t quad)
      : stride_(matrix.columns / 2), codes_(matrix.codes + quad * kQuadRows * stride_),
        tables_(matrix, quad) {}

  SPEQ_MEMBER void begin(int rows, std::int64_t first) { tables_.next(rows, first); }

  template <typename Use>
  SPEQ_MEMBER void segments(int n, std::int64_t first, const Use &use) const {
    const std::uint8_t *codes = codes_ + n * stride_ + first / 2;
    fetch_ahead(codes + kQuadRows * stride_);
    use(0, tables_.of(n, 0).floats(load16(codes)));
    use(1, tables_.of(n, 1).floats(load16(codes + kInt4Columns / 2)));
  }

  SPEQ_MEMBER void next(int rows, std::int64_t first, std::int64_t present, Block *blocks) {
    begin(rows, first);
    for (int n = 0; n < rows; ++n) {
      const std::uint8_t *codes = codes_ + n * stride_ + first / 2;
      fetch_ahead(codes + kQuadRows * stride_);
      for (int half = 0; half * kInt4Columns < present; ++half) {
        tables_.of(n, half).store(blocks[n].words + half * kInt4Columns,
                                  load16(codes + half * kInt4Columns / 2));
      }
      clear_behind(blocks[n], present);
    }
  }

private:
  std::int64_t stride_;
  const std::uint8_t *codes_;
  Int4QuadTables<WordTable> tables_;
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
class Avx2Nvfp4 {
public:
  using Block = WordBlock;

  Avx2Nvfp4(const Nvfp4Rows &matrix, std::int64_t quad)
      : codes_(matrix.codes + quad * kQuadRows * (matrix.columns / 2)),
        scales_(matrix.scales + quad * kQuadRows * (matrix.columns / kNvfp4Block)),
        code_stride_(matrix.columns / 2), scale_stride_(matrix.columns / kNvfp4Block),
        tables_(Nvfp4Tables::of(matrix)) {}

  SPEQ_MEMBER void begin(int, std::int64_t first) const {
    fetch_plane<kBlockColumns / 2>(codes_, code_stride_, first / 2);
  }

  template <typename Use>
  SPEQ_MEMBER void segments(int n, std::int64_t first, const Use &use) const {
    const std::uint8_t *codes = codes_ + n * code_stride_ + first / 2;
    const std::uint8_t *scales = scales_ + n * scale_stride_ + first / kNvfp4Block;
    use(0, floats(load16(codes), scales));
    use(1, floats(load16(codes + 16), scales + 2));
  }

  SPEQ_MEMBER void next(int rows, std::int64_t first, std::int64_t present, Block *blocks) {
    begin(rows, first);
    for (int n = 0; n < rows; ++n) {
      const std::uint8_t *codes = codes_ + n * code_stride_ + first / 2;
      const std::uint8_t *scales = scales_ + n * scale_stride_ + first / kNvfp4Block;
      for (std::int64_t at = 0; at < present; at += kNvfp4Columns) {
        table(scales + at / kNvfp4Block).store(blocks[n].words + at, load16(codes + at / 2));
      }
      clear_behind(blocks[n], present);
    }
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

  const std::uint8_t *codes_, *scales_;
  std::int64_t code_stride_, scale_stride_;
  const Nvfp4Tables &tables_;
};

using Avx2Scaled = Scaled<Avx2Fp8, Avx2Mxfp4, Avx2Int4, Avx2Nvfp4>;

} // namespace
} // namespace speq::cpu
