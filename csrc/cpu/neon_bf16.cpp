// NEON with products of bytes and of pairs of bfloat16. Those round to odd and flush what is
// subnormal, the same on every processor (BFDotAdd of the Arm architecture, FPCR.EBF = 0). BFMMLA
// adds two pairs, one after the other, as two BFDOT do.
#include "cpu/decode_neon.h"
#include "cpu/neon_vectors.h"
#include "cpu/pairs.h"

namespace speq::cpu {
namespace {

struct NeonPairs {
  using Vectors = Neon;
  using Words = bfloat16x8_t;
  using Floats = float32x4_t;
  static constexpr std::int64_t kWords = 8;

  static Words load(const BFloat16 *words) {
    return vreinterpretq_bf16_u16(vld1q_u16(&words->bits));
  }
  static Words all(const BFloat16 *at) {
    std::uint32_t pair;
    std::memcpy(&pair, at, sizeof pair);
    return vreinterpretq_bf16_u32(vdupq_n_u32(pair));
  }

  static Floats zero() { return vdupq_n_f32(0.0f); }
  static Floats load_sums(const float *sums) { return vld1q_f32(sums); }
  static void store(Floats v, float *sums) { vst1q_f32(sums, v); }
  static Floats dot(Words a, Words b, Floats sums) { return vbfdotq_f32(sums, a, b); }

  static float sum(Floats v) { return vaddvq_f32(v); } // neighbours first, as vpaddq_f32 has them
  static void store_sums(Floats a, Floats b, Floats c, Floats d, float *out) {
    vst1q_f32(out, vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)));
  }
};

constexpr std::int64_t kMatrixDepth = 4; // columns of weights to a BFMMLA

// 2 R rows by a panel: a vector has the sums of two rows by two columns.
template <int R>
void matrix_tile(const BFloat16 *rows, std::int64_t row_stride, const BFloat16 *panel,
                 std::int64_t depth, float *sums, std::int64_t sum_stride, bool adds) {
  constexpr int kTwos = kPanelColumns / 2;
  float32x4_t totals[R][kTwos];
  SPEQ_UNROLL
  for (int r = 0; r < R; ++r) {
    SPEQ_UNROLL
    for (int two = 0; two < kTwos; ++two) {
      const float *at = sums + 2 * r * sum_stride + 2 * two;
      totals[r][two] =
          adds ? vcombine_f32(vld1_f32(at), vld1_f32(at + sum_stride)) : vdupq_n_f32(0.0f);
    }
  }
  for (std::int64_t k = 0; k < depth; k += kMatrixDepth, panel += kMatrixDepth * kPanelColumns) {
    bfloat16x8_t words[R];
    SPEQ_UNROLL
    for (int r = 0; r < R; ++r) {
      const BFloat16 *at = rows + 2 * r * row_stride + k;
      words[r] =
          vreinterpretq_bf16_u16(vcombine_u16(vld1_u16(&at->bits), vld1_u16(&at[row_stride].bits)));
    }
    SPEQ_UNROLL
    for (int two = 0; two < kTwos; two += 2) {
      // Four columns of two rows of pairs; of a column both pairs are wanted side by side.
      const BFloat16 *at = panel + 4 * two;
      const uint32x4_t front = vreinterpretq_u32_u16(vld1q_u16(&at->bits));
      const uint32x4_t back = vreinterpretq_u32_u16(vld1q_u16(&at[2 * kPanelColumns].bits));
      const bfloat16x8_t one = vreinterpretq_bf16_u32(vzip1q_u32(front, back));
      const bfloat16x8_t other = vreinterpretq_bf16_u32(vzip2q_u32(front, back));
      SPEQ_UNROLL
      for (int r = 0; r < R; ++r) {
        totals[r][two] = vbfmmlaq_f32(totals[r][two], words[r], one);
        totals[r][two + 1] = vbfmmlaq_f32(totals[r][two + 1], words[r], other);
      }
    }
  }
  SPEQ_UNROLL
  for (int r = 0; r < R; ++r) {
    SPEQ_UNROLL
    for (int two = 0; two < kTwos; ++two) {
      float *at = sums + 2 * r * sum_stride + 2 * two;
      vst1_f32(at, vget_low_f32(totals[r][two]));
      vst1_f32(at + sum_stride, vget_high_f32(totals[r][two]));
    }
  }
}

// A sum runs over pairs in their order, whichever instruction adds them: BFDOT has the last row of
// an odd number, and a pair behind the last two.
void matrix_pairs(const PanelRows &rows, const Panels &panels, const PanelSums &sums) {
  const auto *from = static_cast<const BFloat16 *>(rows.first);
  const auto *first = static_cast<const BFloat16 *>(panels.first);
  const std::int64_t depth = panels.depth / kMatrixDepth * kMatrixDepth;
  const std::int64_t even = depth > 0 ? rows.count / 2 * 2 : 0;
  for (std::int64_t panel = 0; panel < panels.count; ++panel) {
    std::int64_t row = 0;
    const auto add = [&](auto twos) {
      constexpr int R = decltype(twos)::value;
      for (; row + 2 * R <= even; row += 2 * R) {
        matrix_tile<R>(from + row * rows.stride, rows.stride, first + panel * panels.stride, depth,
                       sums.first + row * sums.stride + panel * kPanelColumns, sums.stride,
                       sums.adds);
      }
    };
    add(std::integral_constant<int, 3>{});
    add(std::integral_constant<int, 1>{});
  }
  if (even > 0 && depth < panels.depth) {
    panel_product<PairStep<NeonPairs>>(
        {from + depth, even, rows.stride},
        {first + depth * kPanelColumns, panels.count, panels.stride, panels.depth - depth},
        {sums.first, sums.stride, true});
  }
  if (even < rows.count) {
    panel_product<PairStep<NeonPairs>>({from + even * rows.stride, rows.count - even, rows.stride},
                                       panels,
                                       {sums.first + even * sums.stride, sums.stride, sums.adds});
  }
}

constexpr MicroKernels by_matrices() {
  MicroKernels kernels =
      with_pairs<NeonPairs, PortableEncoders, NeonScaled, NeonLossless, PortableResidual>();
  kernels.panel_pairs = matrix_pairs;
  kernels.panel_pair_inputs = kernels.panel_inputs; // not measured: no such processor was at hand
  return kernels;
}

} // namespace

const MicroKernels neon_bf16_kernels = by_matrices();

} // namespace speq::cpu
