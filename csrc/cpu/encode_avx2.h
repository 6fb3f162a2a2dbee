// Blocks of words into compact records with AVX2.
#pragma once

#include "cpu/decode_avx2.h"
#include "cpu/encode_portable.h"

namespace speq::cpu {
namespace {

// Low and high bytes of 32 words, in their order.
struct Avx2Bytes {
  explicit Avx2Bytes(const BFloat16 *words) {
    const auto *bytes = reinterpret_cast<const std::uint8_t *>(words);
    const __m256i first = load32(bytes), second = load32(bytes + 32);
    const __m256i kept = _mm256_set1_epi16(0xFF);
    low = in_order(_mm256_and_si256(first, kept), _mm256_and_si256(second, kept));
    high = in_order(_mm256_srli_epi16(first, 8), _mm256_srli_epi16(second, 8));
  }
  __m256i low, high;

private:
  // Packing takes from the halves of vectors in turn.
  static __m256i in_order(__m256i first, __m256i second) {
    return _mm256_permute4x64_epi64(_mm256_packus_epi16(first, second), 0xD8);
  }
};

// 32 values of three bits into twelve bytes.
inline void pack_classes(__m256i classes, std::uint8_t *packed) {
  const __m256i pairs = _mm256_maddubs_epi16(classes, _mm256_set1_epi16(8 << 8 | 1));
  const __m256i fours = _mm256_madd_epi16(pairs, _mm256_set1_epi32(64 << 16 | 1));
  const __m256i eights = _mm256_or_si256(fours, _mm256_srli_epi64(fours, 32 - 12));
  const __m256i together = _mm256_shuffle_epi8(
      eights, _mm256_setr_epi8(0, 1, 2, 8, 9, 10, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, //
                               0, 1, 2, 8, 9, 10, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1));
  const auto first = std::uint64_t(_mm256_extract_epi64(together, 0));
  const auto second = std::uint64_t(_mm256_extract_epi64(together, 2));
  const std::uint64_t front = first | second << 48;
  const auto back = std::uint32_t(second >> 16);
  std::memcpy(packed, &front, sizeof front);
  std::memcpy(packed + sizeof front, &back, sizeof back);
}

class Avx2Split {
public:
  explicit Avx2Split(const ClassTable &table) {
    for (int of = 0; of < kEscape; ++of) {
      high_bytes_[of] = _mm256_set1_epi8(char(table.high_bytes[of]));
    }
  }

  SPEQ_MEMBER int block(const BFloat16 *words, std::uint8_t *bytes, std::uint8_t *classes,
                        std::uint8_t *escapes) const {
    __m256i found[2]; // what is missing to class 7
    SPEQ_UNROLL
    for (int half = 0; half < 2; ++half) {
      const Avx2Bytes of(words + 32 * half);
      store32(bytes + 32 * half, of.low);
      found[half] = _mm256_setzero_si256();
      SPEQ_UNROLL
      for (int i = 0; i < kEscape; ++i) {
        const __m256i same = _mm256_cmpeq_epi8(of.high, high_bytes_[i]);
        found[half] = _mm256_or_si256(found[half],
                                      _mm256_and_si256(same, _mm256_set1_epi8(char(kEscape - i))));
      }
      pack_classes(_mm256_sub_epi8(_mm256_set1_epi8(kEscape), found[half]), classes + 12 * half);
    }
    const __m256i none = _mm256_setzero_si256();
    int count = 0;
    for_each_bit(bits_of(_mm256_cmpeq_epi8(found[0], none), _mm256_cmpeq_epi8(found[1], none)),
                 [&](int column) { escapes[count++] = high_byte_of(words[column]); });
    return count;
  }

private:
  __m256i high_bytes_[kEscape];
};

class Avx2Filler {
public:
  static bool takes(const Int4Matrix &codes) { return Avx2Windows::takes(codes); }

  explicit Avx2Filler(const Int4Matrix &codes) : windows_(codes) {}

  void begin(std::int64_t rows, std::int64_t first) { windows_.reach(rows, first); }

  void row(std::int64_t n, const BFloat16 *words, const std::uint8_t *qweight, std::int64_t present,
           FilledStreams &streams) {
    alignas(32) std::uint8_t classes[kBlockColumns];
    __m256i zeros[2], told[2], escapes[2];
    SPEQ_UNROLL
    for (int half = 0; half < 2; ++half) {
      const Avx2Bytes of(words + 32 * half);
      const __m256i codes = codes_of_32(qweight + 16 * half);
      zeros[half] = _mm256_cmpeq_epi8(codes, _mm256_set1_epi8(kInt4ZeroPoint));
      const Avx2Windows::Tables tables = windows_.of_half(n, half);
      told[half] = _mm256_cmpeq_epi8(tables.high_bytes(codes, of.low), of.high);
      const __m256i zero_classes = classes_of(tables.zero_high, of.high);
      escapes[half] = _mm256_cmpeq_epi8(zero_classes, _mm256_set1_epi8(kEscape));
      store32(classes + 32 * half, zero_classes);
    }
    const std::uint64_t zero_bits = bits_of(zeros[0], zeros[1]) & first_bits(present);
    const std::uint64_t exceptions =
        ~(bits_of(zeros[0], zeros[1]) | bits_of(told[0], told[1])) & first_bits(present);
    add_row(words, classes, zero_bits, (bits_of(escapes[0], escapes[1]) & zero_bits) | exceptions,
            exceptions, streams);
  }

private:
  // Of words of code 0 by their high bytes; zero_high: by class the high byte that it stands for.
  static __m256i classes_of(__m256i zero_high, __m256i high) {
    const __m256i top = _mm256_shuffle_epi8(zero_high, _mm256_setzero_si256());
    const __m256i steps = _mm256_sub_epi8(top, _mm256_and_si256(high, _mm256_set1_epi8(0x7F)));
    const __m256i few =
        _mm256_cmpeq_epi8(_mm256_min_epu8(steps, _mm256_set1_epi8(kZeroClass - 1)), steps);
    const __m256i negative = _mm256_cmpgt_epi8(_mm256_setzero_si256(), high);
    const __m256i stepped =
        _mm256_add_epi8(steps, _mm256_and_si256(negative, _mm256_set1_epi8(kZeroClass + 1)));
    const __m256i classes = _mm256_blendv_epi8(_mm256_set1_epi8(kEscape), stepped, few);
    return _mm256_blendv_epi8(classes, _mm256_set1_epi8(kZeroClass),
                              _mm256_cmpeq_epi8(high, _mm256_setzero_si256()));
  }

  Avx2Windows windows_;
};

using Avx2Encoders = Encoders<Avx2Split, Avx2Filler, PortableFiller>;

} // namespace
} // namespace speq::cpu
