// Blocks of words into compact records with AVX-512 VBMI and VBMI2.
#pragma once

#include "cpu/decode_vbmi2.h"
#include "cpu/encode_avx2.h"

namespace speq::cpu {
namespace {

// Low and high bytes of 64 words.
struct VectorBytes {
  explicit VectorBytes(const BFloat16 *words) {
    alignas(64) static constexpr auto every_second = [] {
      struct {
        std::uint8_t low[64], high[64];
      } of{};
      for (int i = 0; i < 64; ++i) {
        of.low[i] = std::uint8_t(2 * i);
        of.high[i] = std::uint8_t(2 * i + 1);
      }
      return of;
    }();
    const __m512i first = _mm512_loadu_si512(words), second = _mm512_loadu_si512(words + 32);
    low = _mm512_permutex2var_epi8(first, load64(every_second.low), second);
    high = _mm512_permutex2var_epi8(first, load64(every_second.high), second);
  }
  __m512i low, high;
};

// 64 values of three bits in 24 bytes.
inline __m256i packed_classes(__m512i classes) {
  alignas(64) static constexpr auto together = [] {
    struct {
      std::uint8_t from[64];
    } of{};
    for (int i = 0; i < 24; ++i) {
      of.from[i] = std::uint8_t(i / 3 * 8 + i % 3);
    }
    return of;
  }();
  const __m512i pairs = _mm512_maddubs_epi16(classes, _mm512_set1_epi16(8 << 8 | 1));
  const __m512i fours = _mm512_madd_epi16(pairs, _mm512_set1_epi32(64 << 16 | 1));
  const __m512i eights = _mm512_or_si512(fours, _mm512_srli_epi64(fours, 32 - 12));
  return _mm512_castsi512_si256(_mm512_permutexvar_epi8(load64(together.from), eights));
}

class VectorSplit {
public:
  explicit VectorSplit(const ClassTable &table) {
    for (int quarter = 0; quarter < 4; ++quarter) {
      classes_[quarter] = load64(table.classes + 64 * quarter);
    }
  }

  SPEQ_MEMBER int block(const BFloat16 *words, std::uint8_t *bytes, std::uint8_t *classes,
                        std::uint8_t *escapes) const {
    const VectorBytes of(words);
    const __m512i found = _mm512_mask_blend_epi8(
        _mm512_movepi8_mask(of.high), _mm512_permutex2var_epi8(classes_[0], of.high, classes_[1]),
        _mm512_permutex2var_epi8(classes_[2], of.high, classes_[3]));
    const __mmask64 escaped = _mm512_cmpeq_epi8_mask(found, _mm512_set1_epi8(kEscape));
    const __m256i packed = packed_classes(found);
    _mm512_storeu_si512(bytes, of.low);
    store16u(classes, _mm256_castsi256_si128(packed));
    _mm_storel_epi64(reinterpret_cast<__m128i *>(classes + 16),
                     _mm256_extracti128_si256(packed, 1));
    // Some processors compress bytes into memory very slowly.
    _mm512_storeu_si512(escapes, _mm512_maskz_compress_epi8(escaped, of.high));
    return __builtin_popcountll(escaped);
  }

private:
  static void store16u(std::uint8_t *bytes, __m128i values) {
    _mm_storeu_si128(reinterpret_cast<__m128i *>(bytes), values);
  }

  __m512i classes_[4];
};

class VectorFiller {
public:
  static bool takes(const Int4Matrix &codes) { return VectorWindows::takes(codes); }

  explicit VectorFiller(const Int4Matrix &codes) : windows_(codes) {}

  void begin(std::int64_t rows, std::int64_t first) { windows_.reach(rows, first); }

  SPEQ_MEMBER void row(std::int64_t n, const BFloat16 *words, const std::uint8_t *qweight,
                       std::int64_t present, FilledStreams &streams) {
    const VectorBytes of(words);
    const VectorWindows::Tables &tables = windows_.of(n);
    const __m512i codes = codes_at(qweight, kBlockColumns);
    const __mmask64 mask = first_of_64(present);
    const __mmask64 zeros =
        _mm512_mask_cmpeq_epi8_mask(mask, codes, _mm512_set1_epi8(kInt4ZeroPoint));
    const __mmask64 exceptions =
        _mm512_mask_cmpneq_epi8_mask(mask & ~zeros, tables.high_bytes(codes, of.low), of.high);
    const __m512i classes = classes_of(tables.zero_high, of.high);
    const __mmask64 escapes =
        exceptions | _mm512_mask_cmpeq_epi8_mask(zeros, classes, _mm512_set1_epi8(kEscape));
    // More than there are, which the next overwrites.
    store32(streams.front, packed_classes(_mm512_maskz_compress_epi8(zeros, classes)));
    streams.front += class_bytes(__builtin_popcountll(zeros));
    if (escapes != 0) {
      const int count = __builtin_popcountll(escapes);
      streams.back -= count;
      _mm512_mask_storeu_epi8(streams.back, first_of_64(count),
                              _mm512_maskz_compress_epi8(escapes, of.high));
    }
    streams.end_row(exceptions);
  }

private:
  // Of words of code 0 by their high bytes; zero_high: by class the high byte that it stands for.
  static __m512i classes_of(const __m512i &zero_high, __m512i high) {
    const __m512i top = _mm512_shuffle_epi8(zero_high, _mm512_setzero_si512());
    const __m512i steps = _mm512_sub_epi8(top, _mm512_and_si512(high, _mm512_set1_epi8(0x7F)));
    const __mmask64 few = _mm512_cmplt_epu8_mask(steps, _mm512_set1_epi8(kZeroClass));
    const __m512i stepped = _mm512_mask_add_epi8(steps, _mm512_movepi8_mask(high), steps,
                                                 _mm512_set1_epi8(kZeroClass + 1));
    const __m512i classes = _mm512_mask_mov_epi8(_mm512_set1_epi8(kEscape), few, stepped);
    return _mm512_mask_mov_epi8(classes, _mm512_testn_epi8_mask(high, high),
                                _mm512_set1_epi8(kZeroClass));
  }

  VectorWindows windows_;
};

using VectorEncoders = Encoders<VectorSplit, VectorFiller, Avx2Filler, PortableFiller>;

} // namespace
} // namespace speq::cpu
