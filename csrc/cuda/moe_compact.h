// Rows through exact experts in compact records, rebuilt in registers while they are multiplied:
// for lossless and residual records alike. Rows of inputs lie in float32.
#pragma once

#include "cuda/compact_quad.h"
#include "cuda/route.h"

namespace speq::cuda {

constexpr int kUp = 1, kDown = 2; // of the matrices of an expert; 0 is gate

// One projection of the experts. A warp takes a quad of rows of weights; of gate and up, which make
// an output together, warps next to each other.
template <typename Slots> struct CompactProjection {
  const float *inputs; // row of position p: p / input_rank
  int input_stride, input_rank;
  Route route;
  int positions;
  Slots weights;
  const void *bias; // [experts, rows of weights] of `dtype`, or null
  bool gated;       // whether rows of gate and of up make an output
  int matrix;       // the only one where they do not
  Activation activation;
  Dtype dtype; // what values are rounded to
  Values out;  // [positions, out_stride]
  int outputs, out_stride;
  bool out_in_places; // whether outputs are inputs of the next projection, see float_place
};

struct CompactShared {
  Gathered route;
  float up[kThreads];
};

// kNarrow: whether rows are of float16.
template <typename Slots, bool kNarrow>
__global__ void __launch_bounds__(kThreads, kCompactBlocks)
    moe_compact_projection(const CompactProjection<Slots> p) {
  SPEQ_SHARED_MEMORY(memory);
  auto &shared = *reinterpret_cast<CompactShared *>(memory);

  const int leader = int(blockIdx.y);
  const int count = gather(p.route.topk_ids, p.positions, leader, shared.route);
  const std::int64_t id = p.route.topk_ids[leader];
  bool bad = id < 0 || id >= p.route.experts;
  const std::int64_t slot = bad ? 0 : p.route.slots[id];
  bad = bad || (slot >= 0 && !p.weights.has(id, slot));
  const bool activates = p.matrix != kDown;
  if (count == 0 || slot < 0 || (bad && activates)) {
    return;
  }
  const int expert = int(id), expert_slot = int(slot); // where they are not bad, they are small

  const int m = p.gated ? warp_id() % 2 : p.matrix;
  const int quad = (int(blockIdx.x) * kWarps + warp_id()) / (p.gated ? 2 : 1);
  const bool works = quad * kRows < p.outputs && !bad;
  // Segments in parts are for few shapes: their code has one row of inputs.
  const bool whole = p.weights.whole(m);
  constexpr int kMost = Slots::kMostRows;
  const int batch = whole ? kMost : 1;

  for (int first = 0; first < count; first += batch) {
    const int rows = count - first < batch ? count - first : batch;
    const std::int32_t *members = shared.route.members + first;
    float sum = not_a_number();
    int sum_lanes = kLanes; // lanes that have sums of the same row of inputs
    const auto take = [&](auto row_count, auto in_whole_segments) {
      constexpr int kBatch = decltype(row_count)::value;
      int start[kBatch];
#pragma unroll
      for (int r = 0; r < kBatch; ++r) {
        start[r] = members[r < rows ? r : rows - 1] / p.input_rank * p.input_stride;
      }
      const typename Slots::Matrix matrix =
          p.weights.matrix(m, found_again(expert), found_again(expert_slot));
      constexpr bool kWhole = decltype(in_whole_segments)::value != 0;
      typename Slots::template Decoder<kWhole> decoder(matrix, found_again(quad));
      sum = multiply_quad<kNarrow>(decoder, p.inputs, start);
      sum_lanes = kLanes / kBatch;
    };
    if (!works) {
      sum_lanes = kLanes / kMost;
    } else if (whole) {
      with_row_count<kMost>(rows, [&](auto row_count) { take(row_count, Constant<1>()); });
    } else {
      take(Constant<1>(), Constant<0>());
    }
    const Lane lane;
    const int output = found_again(quad) * kRows + lane.row(), r = int(lane.id) / sum_lanes;
    // Rounded where transformers rounds.
    const Rounding round{p.dtype};
    if (p.bias != nullptr && output < p.outputs) {
      // Read anew: registers are short in the loops above. Of no expert the sum is no number.
      const std::int64_t of_rows = p.route.topk_ids[found_again(int(blockIdx.y))];
      if (of_rows >= 0 && of_rows < p.route.experts) {
        const int rows_of_weights = p.gated ? 2 * p.outputs : p.outputs;
        const std::int64_t row = p.gated && m == kUp ? p.outputs + output : output;
        sum = round(sum) + load_value(p.bias, p.dtype, of_rows * rows_of_weights + row);
      }
    }
    if (activates) {
      sum = round(sum);
    }
    if (activates && !p.gated) {
      sum = activate(p.activation, sum, sum, round);
    }
    if (p.gated) {
      const int thread = found_again(int(threadIdx.x));
      shared.up[thread] = sum;
      __syncthreads();
      sum = activate(p.activation, sum, shared.up[(thread + kLanes) % kThreads], round);
      __syncthreads();
    }
    const bool first_with_it = int(lane.id) % sum_lanes < kBlockLanes && !lane.ends_run();
    if (!(p.gated && m == kUp) && output < p.outputs && r < rows && first_with_it) {
      const int column = p.out_in_places ? float_place(output) : output;
      const std::int64_t target = std::int64_t(members[r]) * p.out_stride + column;
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
  const std::int64_t *first_quad = p.weights.layout.first_quad;
  const std::int64_t quad = std::int64_t(blockIdx.x) * kWarps + warp_id();
  if (quad >= first_quad[kExpertMatrices]) {
    return;
  }
  const int m = quad < first_quad[1] ? 0 : quad < first_quad[kDown] ? 1 : kDown;
  const typename Slots::Matrix matrix = p.weights.matrix(m, 0, 0);
  const int of_matrix = int(quad - first_quad[m]);
  const std::int64_t above = m == kUp ? p.weights.layout.rows[0] : 0;
  BFloat16 *out = m == kDown ? p.down : p.gate_up + above * matrix.columns;
  write_rows(p.weights, m, matrix, of_matrix, out,
             [&](int row) { return out + std::int64_t(row) * matrix.columns; });
}

template <typename Slots> Error launch_projection(const CompactProjection<Slots> &p, void *stream) {
  const int quads = int(quads_of(p.outputs)) * (p.gated ? 2 : 1);
  const Grid grid{unsigned((quads + kWarps - 1) / kWarps), unsigned(p.positions)};
  const auto kernel = p.dtype == Dtype::float16 ? moe_compact_projection<Slots, true>
                                                : moe_compact_projection<Slots, false>;
  return launch(kernel, grid, sizeof(CompactShared), stream, p);
}

// hidden_states [num_rows, hidden_size] to out [positions, hidden_size].
template <typename Slots>
Error moe_grouped_compact(Values hidden_states, const Route &route, const Slots &weights,
                          const InputOrder &order, Activation activation, ExpertBiases biases,
                          void *out, void *workspace, void *stream) {
  const int positions = int(route.num_rows * route.top_k);
  const std::int64_t hidden_size = weights.layout.columns[kUp], width = weights.layout.rows[kUp];
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
                                       biases.gate_up,
                                       has_gate(activation),
                                       kUp,
                                       activation,
                                       dtype,
                                       {inner, Dtype::float32},
                                       int(width),
                                       inner_stride,
                                       true};
  if (const Error error = launch_projection(first, stream)) {
    return error;
  }
  const CompactProjection<Slots> second{
      inner, inner_stride, 1,          route, positions,    weights,          biases.down,
      false, kDown,        activation, dtype, {out, dtype}, int(hidden_size), int(hidden_size),
      false};
  return launch_projection(second, stream);
}

template <typename Slots>
Error decode_expert(const Slots &weights, void *gate_up, void *down, void *stream) {
  const CompactDecode<Slots> arguments{weights, static_cast<BFloat16 *>(gate_up),
                                       static_cast<BFloat16 *>(down)};
  const std::int64_t quads = weights.layout.first_quad[kExpertMatrices];
  const Grid grid{unsigned((quads + kWarps - 1) / kWarps), 1};
  return launch(decode_compact<Slots>, grid, 0, stream, arguments);
}

} // namespace speq::cuda
