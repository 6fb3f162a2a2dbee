// What a warp does with a quad of a compact matrix, whatever its code: multiplies it, or writes its
// words.
#pragma once

#include "cuda/compact_matrix.h"
#include "cuda/dtype.h"
#include "cuda/float_rows.h"

namespace speq::cuda {

// Leaves 128 registers to a thread.
constexpr int kCompactBlocks = 2;

// The products of a warp's quad by the rows of inputs that begin at start[r]; of rows of float16,
// words are rounded to it. Lanes of a row of weights have the sum of row of inputs
// lane_id() * kBatch / kLanes.
template <bool kNarrow, int kBatch, typename Decoder>
SPEQ_DEVICE float multiply_quad(Decoder &decoder, const float *inputs, const int (&start)[kBatch]) {
  float partial[kBatch][kLaneColumns];
#pragma unroll
  for (int i = 0; i < kBatch * kLaneColumns; ++i) {
    partial[i / kLaneColumns][i % kLaneColumns] = 0.0f;
  }
  constexpr int kFloats = sizeof(uint4) / sizeof(float);
  const float *const of_lane = inputs + float_place(decoder.segment.lane.column());
  for_steps(decoder, [&](int step) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      // There always is a whole segment's vector. The branch keeps ptxas from loading the inputs of
      // all vectors ahead, for which registers do not suffice.
      if (kBatch > 1 && found_again(decoder.segment.present) <= i * kLaneColumns) {
        break;
      }
      std::uint32_t pairs[kLaneColumns / 2];
      decoder.words(i, pairs);
      // By halves: pairs take fewer registers than the floats of all.
#pragma unroll
      for (int first = 0; first < kLaneColumns; first += kFloats) {
        float words[kFloats];
#pragma unroll
        for (int v = 0; v < kFloats; ++v) {
          const std::uint32_t pair = pairs[(first + v) / 2];
          words[v] = bits_as<float>(v % 2 == 0 ? pair << 16 : pair & 0xFFFF0000u);
          words[v] = kNarrow ? narrowed(words[v]) : words[v];
        }
#pragma unroll
        for (int r = 0; r < kBatch; ++r) {
          const float *x = of_lane + start[r] + step + float_place(i * kLaneColumns + first);
          const uint4 vector = *reinterpret_cast<const uint4 *>(x);
          const std::uint32_t values[kFloats] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
          for (int v = 0; v < kFloats; ++v) {
            if (decoder.segment.has(i, first + v)) {
              float &sum = partial[r][first + v];
              sum = fmaf(words[v], bits_as<float>(values[v]), sum);
            }
          }
        }
      }
    }
  });
  float sum = 0.0f;
#pragma unroll
  for (int r = 0; r < kBatch; ++r) {
    const float total = total_of_segments(partial[r]);
    sum = lane_id() * kBatch / kLanes == r ? total : sum;
  }
  return sum;
}
static_assert(kMaxBatch <= kLanes / kBlockLanes);

// Writes the words of a quad: the lane's row to `row`, which is null where nobody wants it.
// kVector: whether rows have whole vectors, and these are aligned.
template <bool kVector, typename Decoder>
SPEQ_DEVICE void write_quad(Decoder &decoder, BFloat16 *row) {
  for_steps(decoder, [&](int step) {
    if (row == nullptr) {
      return;
    }
    BFloat16 *const at = row + step + decoder.segment.lane.column();
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      std::uint32_t pairs[kLaneColumns / 2];
      decoder.words(i, pairs);
      if constexpr (kVector) {
        reinterpret_cast<uint4 *>(at)[i] = {pairs[0], pairs[1], pairs[2], pairs[3]};
      } else {
#pragma unroll
        for (int v = 0; v < kLaneColumns; ++v) {
          if (decoder.segment.has(i, v)) {
            at[i * kLaneColumns + v] = {std::uint16_t(pairs[v / 2] >> 16 * (v % 2))};
          }
        }
      }
    }
  });
}

// The same with the decoder that a matrix takes; row_of(row) is where a row of it goes.
template <typename Slots, typename RowOf>
SPEQ_DEVICE void write_rows(const Slots &weights, int m, const typename Slots::Matrix &matrix,
                            int quad, const BFloat16 *out, RowOf row_of) {
  if (weights.whole(m) && reinterpret_cast<std::uintptr_t>(out) % sizeof(uint4) == 0) {
    typename Slots::template Decoder<true> decoder(matrix, quad);
    write_quad<true>(decoder, row_of(decoder.segment.row));
  } else {
    typename Slots::template Decoder<false> decoder(matrix, quad);
    write_quad<false>(decoder, row_of(decoder.segment.row));
  }
}

} // namespace speq::cuda
