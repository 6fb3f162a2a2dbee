// Rows through exact experts in compact records, rebuilt in registers while they are multiplied:
// for lossless and residual records alike. Rows of inputs lie in float32.
#pragma once

#include "cuda/compact_matrix.h"
#include "cuda/dtype.h"
#include "cuda/float_rows.h"
#include "cuda/route.h"

namespace speq::cuda {

// Leaves 128 registers to a thread.
constexpr int kCompactBlocks = 2;
constexpr int kDown = 2; // of the matrices of an expert; 0 is gate, 1 is up

// One projection of the experts. A warp takes a quad of rows of weights; of gate and up, which make
// an output together, warps next to each other.
template <typename Slots> struct CompactProjection {
  const float *inputs; // row of position p: p / input_rank
  int input_stride, input_rank;
  Route route;
  int positions;
  Slots weights;
  bool gated;
  Activation activation;
  Dtype dtype; // what values are rounded to
  Values out;  // [positions, out_stride]
  int outputs, out_stride;
};

struct CompactShared {
  Gathered route;
  float up[kWarps][kLanes];
  float starts[16]; // for decoders of residuals
};

// Columns whose words are rebuilt before they are multiplied: a vector of inputs.
constexpr int kPartColumns = 2;

// sums[n * kBatch + r] = row n of a quad by the row of inputs that begins at start[r]; of each lane
// the part of its columns.
template <int kBatch, typename Decoder>
SPEQ_DEVICE void multiply_quad(Decoder &decoder, Dtype dtype, const float *inputs,
                               const int (&start)[kBatch], float (&sums)[kRows * kBatch]) {
#pragma unroll
  for (int i = 0; i < kRows * kBatch; ++i) {
    sums[i] = 0.0f;
  }
  for_steps(decoder, [&](int column) {
    const int end = column + kLaneColumns;
#pragma unroll 1
    for (; column < end; column += kPartColumns) {
      float words[kPartColumns][kRows];
#pragma unroll
      for (int v = 0; v < kPartColumns; ++v) {
        decoder.next(column + v, words[v]);
      }
      if (dtype == Dtype::float16) {
#pragma unroll
        for (int i = 0; i < kPartColumns * kRows; ++i) {
          words[i / kRows][i % kRows] = narrowed(words[i / kRows][i % kRows]);
        }
      }
#pragma unroll
      for (int r = 0; r < kBatch; ++r) {
        if (column < decoder.matrix.columns) {
          const auto pair = *reinterpret_cast<const std::uint64_t *>(inputs + start[r] + column);
          const std::uint32_t values[kPartColumns] = {std::uint32_t(pair),
                                                      std::uint32_t(pair >> 32)};
#pragma unroll
          for (int v = 0; v < kPartColumns; ++v) {
#pragma unroll
            for (int n = 0; n < kRows; ++n) {
              float &sum = sums[n * kBatch + r];
              const float x = bits_as<float>(values[v]);
              sum = column + v < decoder.matrix.columns ? fmaf(words[v][n], x, sum) : sum;
            }
          }
        }
      }
    }
  });
}

template <typename Slots>
__global__ void __launch_bounds__(kThreads, kCompactBlocks)
    moe_compact_projection(const CompactProjection<Slots> p) {
  SPEQ_SHARED_MEMORY(memory);
  auto &shared = *reinterpret_cast<CompactShared *>(memory);

  Slots::fill_starts(shared.starts); // seen by all behind the barriers of gather
  const int leader = int(blockIdx.y);
  const int count = gather(p.route.topk_ids, p.positions, leader, shared.route);
  const std::int64_t id = p.route.topk_ids[leader];
  bool bad = id < 0 || id >= p.route.experts;
  const std::int64_t slot = bad ? 0 : p.route.slots[id];
  bad = bad || (slot >= 0 && !p.weights.has(id, slot));
  if (count == 0 || slot < 0 || (bad && p.gated)) {
    return;
  }

  const int m = p.gated ? warp_id() % 2 : kDown;
  const int quad = (int(blockIdx.x) * kWarps + warp_id()) / (p.gated ? 2 : 1);
  const bool works = quad * kRows < p.outputs && !bad;
  const typename Slots::Matrix matrix = p.weights.matrix(m, bad ? 0 : id, bad ? 0 : slot);

  for (int first = 0; first < count; first += kMaxBatch) {
    const int rows = count - first < kMaxBatch ? count - first : kMaxBatch;
    const std::int32_t *members = shared.route.members + first;
    float sum = not_a_number();
    int sum_lanes = kBlockLanes; // lanes that have the same sum
    const auto take = [&](auto row_count) {
      constexpr int kBatch = decltype(row_count)::value;
      int start[kBatch];
      float sums[kRows * kBatch];
#pragma unroll
      for (int r = 0; r < kBatch; ++r) {
        start[r] = members[r < rows ? r : rows - 1] / p.input_rank * p.input_stride;
      }
      typename Slots::Decoder decoder(matrix, quad, shared.starts);
      multiply_quad<kBatch>(decoder, p.dtype, p.inputs, start, sums);
      sum = spread_sums(sums);
      sum_lanes = kBlockLanes / kBatch;
    };
    if (works) {
      with_row_count(rows, take);
    } else {
      sum_lanes = kBlockLanes / kMaxBatch;
    }
    if (p.gated) {
      // Rounded where transformers rounds.
      sum = rounded(sum, p.dtype);
      shared.up[warp_id()][lane_id()] = sum;
      __syncthreads();
      sum = rounded(activate(p.activation, sum), p.dtype) *
            shared.up[(warp_id() + 1) % kWarps][lane_id()];
      __syncthreads();
    }
    // Eight lanes have the sums of a row of weights.
    const int output = quad * kRows + lane_id() / kBlockLanes;
    const int place = lane_id() % kBlockLanes, r = place / sum_lanes;
    if (m != 1 && output < p.outputs && r < rows && place % sum_lanes == 0) {
      const std::int64_t target = std::int64_t(members[r]) * p.out_stride + output;
      store_value(rounded(sum, p.dtype), p.out.values, p.out.dtype, target);
    }
  }
}

template <typename Slots> struct CompactDecode {
  Slots weights;
  BFloat16 *gate_up, *down;
};

// The words of the only slot.
template <typename Slots>
__global__ void __launch_bounds__(kThreads, kCompactBlocks)
    decode_compact(const CompactDecode<Slots> p) {
  SPEQ_SHARED_MEMORY(memory);
  auto *const starts = reinterpret_cast<float *>(memory);
  Slots::fill_starts(starts);
  __syncthreads();
  const std::int64_t *first_quad = p.weights.layout.first_quad;
  const std::int64_t quad = std::int64_t(blockIdx.x) * kWarps + warp_id();
  if (quad >= first_quad[kExpertMatrices]) {
    return;
  }
  const int m = quad < first_quad[1] ? 0 : quad < first_quad[kDown] ? 1 : kDown;
  const typename Slots::Matrix matrix = p.weights.matrix(m, 0, 0);
  const int of_matrix = int(quad - first_quad[m]);
  BFloat16 *out = m == kDown ? p.down : p.gate_up + std::int64_t(m) * matrix.rows * matrix.columns;
  typename Slots::Decoder decoder(matrix, of_matrix, starts);
  for_steps(decoder, [&](int column) {
#pragma unroll 1
    for (int v = 0; v < kLaneColumns; ++v) {
      float words[kRows];
      decoder.next(column + v, words);
#pragma unroll
      for (int n = 0; n < kRows; ++n) {
        const int row = of_matrix * kRows + n;
        if (row < matrix.rows && column + v < matrix.columns) {
          out[std::int64_t(row) * matrix.columns + column + v] = {
              std::uint16_t(bits_as<std::uint32_t>(words[n]) >> 16)};
        }
      }
    }
  });
}

template <typename Slots> Error launch_projection(const CompactProjection<Slots> &p, void *stream) {
  const int quads = int(quads_of(p.outputs)) * (p.gated ? 2 : 1);
  const Grid grid{unsigned((quads + kWarps - 1) / kWarps), unsigned(p.positions)};
  return launch(moe_compact_projection<Slots>, grid, sizeof(CompactShared), stream, p);
}

// hidden_states [num_rows, hidden_size] to out [positions, hidden_size].
template <typename Slots>
Error moe_grouped_compact(Values hidden_states, const Route &route, const Slots &weights,
                          const InputOrder &order, Activation activation, void *out,
                          void *workspace, void *stream) {
  const int positions = int(route.num_rows * route.top_k);
  const std::int64_t hidden_size = weights.layout.columns[0], width = weights.layout.rows[0];
  auto *const inputs = static_cast<float *>(workspace);
  float *const inner = inputs + positions * float_stride(hidden_size);
  if (const Error error = widen_rows(hidden_states, hidden_size, route, order, inputs, stream)) {
    return error;
  }
  const Dtype dtype = hidden_states.dtype;
  const int inner_stride = int(float_stride(width));
  const CompactProjection<Slots> first{inputs,
                                       int(float_stride(hidden_size)),
                                       order.input_perm == nullptr ? int(route.top_k) : 1,
                                       route,
                                       positions,
                                       weights,
                                       true,
                                       activation,
                                       dtype,
                                       {inner, Dtype::float32},
                                       int(width),
                                       inner_stride};
  if (const Error error = launch_projection(first, stream)) {
    return error;
  }
  const CompactProjection<Slots> second{
      inner, inner_stride, 1,     route,        positions,        weights,
      false, activation,   dtype, {out, dtype}, int(hidden_size), int(hidden_size)};
  return launch_projection(second, stream);
}

template <typename Slots>
Error decode_expert(const Slots &weights, void *gate_up, void *down, void *stream) {
  const CompactDecode<Slots> arguments{weights, static_cast<BFloat16 *>(gate_up),
                                       static_cast<BFloat16 *>(down)};
  const std::int64_t quads = weights.layout.first_quad[kExpertMatrices];
  const Grid grid{unsigned((quads + kWarps - 1) / kWarps), 1};
  return launch(decode_compact<Slots>, grid, 16 * sizeof(float), stream, arguments);
}

} // namespace speq::cuda
