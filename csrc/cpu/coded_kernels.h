// The products of compact matrices over the vectors of an instruction set, as tiles.h has them of
// plain weights.
#pragma once

#include "cpu/coded_tile.h"
#include "cpu/encode_portable.h"
#include "cpu/tiles.h"

namespace speq::cpu {
namespace {

template <typename V> struct FloatProduct {
  struct Sum {
    alignas(64) float partial[kPartialSums];
  };
  using Of = Segments<V>;
  static constexpr int kMostInputs = most_inputs(V::kRegisters);
  SPEQ_MEMBER static void clear(Sum &sum) {
    SPEQ_UNROLL
    for (int i = 0; i < kPartialSums; i += V::kLanes) {
      V::store(V::zero(), sum.partial + i);
    }
  }
  static float total(const Sum &sum) { return total_of(sum.partial); }

  static typename V::Floats load(const WordBlock &block, std::int64_t at) {
    return Of::load(block.words + at);
  }
  template <typename Block> static typename V::Floats load(const Block &block, std::int64_t at) {
    return block.load_apart(at);
  }

  template <bool kWhole, typename Block>
  static void add(Sum *sums, const Block *blocks, const void *input, std::int64_t first,
                  std::int64_t present) {
    static_assert(sizeof(Sum) == kPartialSums * sizeof(float));
    const auto *values = static_cast<const float *>(input);
    float last[kWhole ? 1 : kBlockColumns] = {};
    if (!kWhole) { // inputs may end where columns do
      std::memcpy(last, values, present * sizeof(float));
      values = last;
    }
    SPEQ_UNROLL
    for (std::int64_t begin = 0; begin < kBlockColumns; begin += Of::kColumns) {
      Of::template add<false, kQuadRows, 1>(
          sums->partial + first_partial(first + begin),
          [&](int n, std::int64_t at) { return load(blocks[n], begin + at); },
          [&](int, std::int64_t at) { return Of::load(values + begin + at); });
    }
  }
  static const void *at(const void *input, std::int64_t first) {
    return static_cast<const float *>(input) + first;
  }
};

// Decoders of matrices of codes with scales.
template <typename Fp8, typename Mxfp4, typename Int4, typename Nvfp4> struct Scaled {
  using OfFp8 = Fp8;
  using OfMxfp4 = Mxfp4;
  using OfInt4 = Int4;
  using OfNvfp4 = Nvfp4;
};

// All kernels over vectors V, with encoders and with decoders of coded matrices, the last one for
// all residuals.
template <typename V, typename Encoders, typename Scaled, typename Lossless, typename... Residual>
constexpr MicroKernels with_coded() {
  MicroKernels kernels = kernels_over<V>;
  kernels.split_quad = Encoders::split;
  kernels.fill_streams = Encoders::fill;
  constexpr DotExact kDot = dot_exact<V, BFloat16>;
  kernels.lossless = {dot_coded<FloatProduct<V>, Lossless, kDot, LosslessRows>, nullptr,
                      decode_quad<Lossless, LosslessRows>};
  kernels.residual = {dot_residual<FloatProduct<V>, kDot, Residual...>, nullptr,
                      decode_residual<Residual...>};
  using OfFp8 = typename Scaled::OfFp8;
  using OfMxfp4 = typename Scaled::OfMxfp4;
  using OfInt4 = typename Scaled::OfInt4;
  using OfNvfp4 = typename Scaled::OfNvfp4;
  kernels.fp8 = {dot_coded<FloatProduct<V>, OfFp8, kDot, Fp8Rows>, nullptr,
                 decode_quad<OfFp8, Fp8Rows>};
  kernels.mxfp4 = {dot_coded<FloatProduct<V>, OfMxfp4, kDot, Mxfp4Rows>, nullptr,
                   decode_quad<OfMxfp4, Mxfp4Rows>};
  kernels.int4 = {dot_coded<FloatProduct<V>, OfInt4, kDot, Int4Rows>, nullptr,
                  decode_quad<OfInt4, Int4Rows>};
  kernels.nvfp4 = {dot_coded<FloatProduct<V>, OfNvfp4, kDot, Nvfp4Rows>, nullptr,
                   decode_quad<OfNvfp4, Nvfp4Rows>};
  return kernels;
}

} // namespace
} // namespace speq::cpu
