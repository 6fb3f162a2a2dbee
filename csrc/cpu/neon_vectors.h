// The vectors of NEON, for tiles.h. Compiled with and without products of bytes; everything here
// has internal linkage.
#pragma once

#include <arm_neon.h>

#include "cpu/tiles.h"

namespace speq::cpu {
namespace {

struct Neon {
  using Floats = float32x4_t;
  using Bytes = uint8x16_t;
  static constexpr int kLanes = 4, kBytes = 16, kRegisters = 32;

  static Floats zero() { return vdupq_n_f32(0.0f); }
  static Floats all(float value) { return vdupq_n_f32(value); }
  static void store(Floats v, float *values) { vst1q_f32(values, v); }
  static Floats mul(Floats a, Floats b) { return vmulq_f32(a, b); }
  static Floats fmadd(Floats a, Floats b, Floats sum) { return vfmaq_f32(sum, a, b); }
  static float sum(Floats v) { return vaddvq_f32(v); }

  static Floats load(const float *words) { return vld1q_f32(words); }
  static Floats load(const BFloat16 *words) {
    return vreinterpretq_f32_u32(vshll_n_u16(halves(words), 16));
  }
  static Floats load(const Float16 *words) {
    return vcvt_f32_f16(vreinterpret_f16_u16(halves(words)));
  }

  template <typename Word> static Floats load_part(const Word *words, std::int64_t count) {
    Word whole[kLanes] = {};
    std::memcpy(whole, words, count * sizeof(Word));
    return load(whole);
  }

  static Bytes load_bytes(const std::uint8_t *bytes) { return vld1q_u8(bytes); }

  struct Nibbles {
    explicit Nibbles(Bytes bytes)
        : low(vreinterpretq_s8_u8(vandq_u8(bytes, vdupq_n_u8(0xF)))),
          high(vreinterpretq_s8_u8(vshrq_n_u8(bytes, 4))) {}
    Floats dot(const std::int8_t *even, const std::int8_t *odd, const std::int32_t *start) const {
      const int8x16_t by_low = vld1q_s8(even), by_high = vld1q_s8(odd);
#ifdef __ARM_FEATURE_DOTPROD
      const int32x4_t sums = vdotq_s32(vld1q_s32(start), low, by_low);
      return vcvtq_f32_s32(vdotq_s32(sums, high, by_high));
#else
      // Codes are below 16: two products of at most 15 * 127 fit into 16 bits.
      const int16x8_t front = vmlal_s8(vmull_s8(vget_low_s8(low), vget_low_s8(by_low)),
                                       vget_low_s8(high), vget_low_s8(by_high));
      const int16x8_t back = vmlal_high_s8(vmull_high_s8(low, by_low), high, by_high);
      const int32x4_t sums = vpaddq_s32(vpaddlq_s16(front), vpaddlq_s16(back));
      return vcvtq_f32_s32(vaddq_s32(vld1q_s32(start), sums));
#endif
    }
    int8x16_t low, high;
  };

  // A load is a quarter of a step, and has one scale.
  template <int kPerStep> static Floats spread(const Float16 *scales) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(scales->bits)));
  }

private:
  static uint16x4_t halves(const void *words) {
    uint16x4_t loaded;
    std::memcpy(&loaded, words, sizeof loaded);
    return loaded;
  }
};

} // namespace
} // namespace speq::cpu
