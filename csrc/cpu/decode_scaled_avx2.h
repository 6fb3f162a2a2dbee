// Blocks of matrices of codes with scales with AVX2.
#pragma once

#include "cpu/decode_avx2.h"
#include "cpu/decode_scaled.h"

namespace speq::cpu {
namespace {

// FP8: of one scale a code has 128 words and their negatives, and those of an octave are those of
// the next one but for the exponent. So sixteen words tell all: of the eight mantissas of normal
// codes, and of the eight subnormal codes. What is added to them is the code's exponent.
class Avx2Fp8 {
public:
  using Block = WordBlock;

  Avx2Fp8(const Fp8Rows &matrix, std::int64_t quad)
      : matrix_(matrix), quad_(quad), columns_(matrix.columns),
        codes_(matrix.codes + quad * kQuadRows * columns_),
        scales_(matrix.row_scales(quad * kQuadRows)), low_(_mm256_setzero_si256()),
        high_(_mm256_setzero_si256()) {}

  SPEQ_MEMBER void next(int rows, std::int64_t first, std::int64_t present, Block *blocks) {
    fetch_plane<kBlockColumns>(codes_, columns_, first);
    if (first % kFp8Block == 0) {
      take_scale(scales_[first / kFp8Block]);
    }
    if (!shifts_) {
      PortableFp8(matrix_, quad_).next(rows, first, present, blocks);
      return;
    }
    for (int n = 0; n < rows; ++n) {
      const std::uint8_t *codes = codes_ + n * columns_ + first;
      store(load32(codes), blocks[n].words);
      store(load32(codes + 32), blocks[n].words + 32);
      clear_behind(blocks[n], present);
    }
  }

private:
  static constexpr int kBias = 10, kSubnormalBias = 9;

  // Under a scale as near to 1 as this, no word is subnormal and none infinite.
  static constexpr float kLeast = 0x1p-100f, kMost = 0x1p100f;

  SPEQ_MEMBER void take_scale(float scale) {
    const float magnitude = scale < 0 ? -scale : scale;
    shifts_ = magnitude >= kLeast && magnitude <= kMost;
    if (!shifts_) {
      return;
    }
    const __m256 normal = _mm256_setr_ps(8, 9, 10, 11, 12, 13, 14, 15);
    const __m256 subnormal = _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i of_normal = less_exponent(rounded(normal, scale), kBias);
    // Zero has no exponent that could be lessened.
    const __m256i zero =
        _mm256_castps_si256(_mm256_cmp_ps(subnormal, _mm256_setzero_ps(), _CMP_EQ_OQ));
    const __m256i product = rounded(subnormal, scale);
    const __m256i of_subnormal =
        _mm256_blendv_epi8(less_exponent(product, kSubnormalBias), product, zero);
    // Sixteen words in their order, of 16 bits each.
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(of_normal, of_subnormal),
                                                   _MM_SHUFFLE(3, 1, 2, 0));
    const __m256i bytes = _mm256_shuffle_epi8(
        words, _mm256_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15, 0, 2, 4, 6, 8,
                                10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));
    const __m256i planes = _mm256_permute4x64_epi64(bytes, _MM_SHUFFLE(3, 1, 2, 0));
    low_ = _mm256_permute4x64_epi64(planes, _MM_SHUFFLE(1, 0, 1, 0));
    high_ = _mm256_permute4x64_epi64(planes, _MM_SHUFFLE(3, 2, 3, 2));
  }

  // The words of values times the scale, in the low halves of lanes.
  SPEQ_MEMBER static __m256i rounded(__m256 values, float scale) {
    const __m256i bits = _mm256_castps_si256(_mm256_mul_ps(values, _mm256_set1_ps(scale)));
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF));
    return _mm256_srli_epi32(_mm256_add_epi32(bits, up), 16);
  }

  SPEQ_MEMBER static __m256i less_exponent(__m256i words, int exponent) {
    return _mm256_sub_epi32(words, _mm256_set1_epi32(exponent << 7));
  }

  // The words of 32 codes.
  SPEQ_MEMBER void store(__m256i codes, BFloat16 *words) const {
    const __m256i magnitudes = _mm256_and_si256(codes, _mm256_set1_epi8(0x7F));
    const __m256i normal = _mm256_cmpgt_epi8(magnitudes, _mm256_set1_epi8(7));
    const __m256i places = _mm256_or_si256(_mm256_and_si256(codes, _mm256_set1_epi8(7)),
                                           _mm256_andnot_si256(normal, _mm256_set1_epi8(8)));
    const __m256i nan = _mm256_cmpeq_epi8(magnitudes, _mm256_set1_epi8(0x7F));
    // What becomes 0x7FC0 with the exponent of such a code.
    __m256i low =
        _mm256_blendv_epi8(_mm256_shuffle_epi8(low_, places), _mm256_set1_epi8(0x40), nan);
    __m256i high =
        _mm256_blendv_epi8(_mm256_shuffle_epi8(high_, places), _mm256_set1_epi8(0x78), nan);
    high = _mm256_xor_si256(high, _mm256_and_si256(codes, _mm256_set1_epi8(char(0x80))));
    const __m256i exponents = _mm256_and_si256(codes, _mm256_set1_epi8(0x78)),
                  none = _mm256_setzero_si256();
    const __m256i outer =
        _mm256_add_epi16(_mm256_unpacklo_epi8(low, high),
                         _mm256_slli_epi16(_mm256_unpacklo_epi8(exponents, none), 4));
    const __m256i inner =
        _mm256_add_epi16(_mm256_unpackhi_epi8(low, high),
                         _mm256_slli_epi16(_mm256_unpackhi_epi8(exponents, none), 4));
    store_halves(words, outer, inner);
  }

  const Fp8Rows &matrix_;
  std::int64_t quad_, columns_;
  const std::uint8_t *codes_;
  const float *scales_;
  bool shifts_ = false; // whether words of an octave are those of another, shifted
  __m256i low_, high_;  // bytes of the sixteen words, in both halves
};

// MXFP4: a code's word is one of sixteen of its scale, whose bytes two shuffles find.
class Avx2Mxfp4 {
public:
  using Block = WordBlock;

  Avx2Mxfp4(const Mxfp4Rows &matrix, std::int64_t quad)
      : matrix_(matrix), codes_(matrix.codes + quad * kQuadRows * matrix.code_stride),
        scales_(matrix.scales + quad * kQuadRows * matrix.scale_stride),
        tables_(Mxfp4Tables::get()) {}

  SPEQ_MEMBER void next(int rows, std::int64_t first, std::int64_t present, Block *blocks) {
    fetch_plane<kBlockColumns / 2>(codes_, matrix_.code_stride, first / 2);
    for (int n = 0; n < rows; ++n) {
      const std::uint8_t *codes = codes_ + n * matrix_.code_stride + first / 2;
      const std::uint8_t *scales = scales_ + n * matrix_.scale_stride + first / kMxfp4Block;
      store(load16(codes), tables_.of_scale[scales[0]], blocks[n].words);
      if (present > kMxfp4Block) {
        store(load16(codes + 16), tables_.of_scale[scales[1]], blocks[n].words + kMxfp4Block);
      }
      clear_behind(blocks[n], present);
    }
  }

private:
  // The words of 32 codes.
  SPEQ_MEMBER static void store(__m128i packed, const Mxfp4Tables::Bytes &of_scale,
                                BFloat16 *words) {
    const __m128i nibble = _mm_set1_epi8(0xF);
    const __m128i even = _mm_and_si128(packed, nibble);
    const __m128i odd = _mm_and_si128(_mm_srli_epi16(packed, 4), nibble);
    const __m256i codes = _mm256_inserti128_si256(
        _mm256_castsi128_si256(_mm_unpacklo_epi8(even, odd)), _mm_unpackhi_epi8(even, odd), 1);
    const __m256i low = _mm256_broadcastsi128_si256(load16(of_scale.low));
    const __m256i high = _mm256_broadcastsi128_si256(load16(of_scale.high));
    store_words(words, _mm256_shuffle_epi8(low, codes), _mm256_shuffle_epi8(high, codes));
  }

  const Mxfp4Rows &matrix_;
  const std::uint8_t *codes_, *scales_;
  const Mxfp4Tables &tables_;
};

using Avx2Scaled = Scaled<Avx2Fp8, Avx2Mxfp4>;

} // namespace
} // namespace speq::cpu
