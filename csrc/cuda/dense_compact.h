// A compact dense matrix: its products by few rows, its words, and those of some of its rows. The
// only slot there is, and in it the only matrix.
#pragma once

#include "cuda/compact_quad.h"

namespace speq::cuda {

// Blocks that keep every multiprocessor of a large device busy. A quad is a warp's, for its streams
// are read from their start; where there are few quads, blocks leave warps idle.
constexpr int kDenseBlocks = 256;

inline int dense_warps(std::int64_t quads) {
  const std::int64_t warps = (quads + kDenseBlocks - 1) / kDenseBlocks;
  return int(warps < kWarps ? warps : kWarps);
}

inline Grid dense_grid(std::int64_t quads, int warps) {
  return {unsigned((quads + warps - 1) / warps), 1};
}

template <typename Slots> struct DenseProduct {
  const float *inputs; // [num_rows, stride], in the order of float_place
  int num_rows, stride;
  Slots weights;
  const void *bias; // [outputs] of the dtype of `out`, or null
  Values out;       // [num_rows, outputs]
  int outputs, warps;
};

template <typename Slots>
__global__ void __launch_bounds__(kThreads, kCompactBlocks)
    linear_compact(const DenseProduct<Slots> p) {
  const int quad = int(blockIdx.x) * p.warps + warp_id();
  if (warp_id() >= p.warps || quad * kRows >= p.outputs) {
    return;
  }
  // Segments in parts are for few shapes: their code has one row of inputs.
  const bool whole = p.weights.whole(0);
  constexpr int kMost = Slots::kMostRows;
  const int batch = whole ? kMost : 1;
  for (int first = 0; first < p.num_rows; first += batch) {
    const int rows = p.num_rows - first < batch ? p.num_rows - first : batch;
    float sum = 0.0f;
    int sum_lanes = kLanes; // lanes that have sums of the same row of inputs
    const auto take = [&](auto row_count, auto in_whole_segments) {
      constexpr int kBatch = decltype(row_count)::value;
      int start[kBatch];
#pragma unroll
      for (int r = 0; r < kBatch; ++r) {
        start[r] = (first + (r < rows ? r : rows - 1)) * p.stride;
      }
      const typename Slots::Matrix matrix = p.weights.matrix(0, 0, 0);
      constexpr bool kWhole = decltype(in_whole_segments)::value != 0;
      typename Slots::template Decoder<kWhole> decoder(matrix, found_again(quad));
      sum = multiply_quad<false>(decoder, p.inputs, start);
      sum_lanes = kLanes / kBatch;
    };
    if (whole) {
      with_row_count<kMost>(rows, [&](auto row_count) { take(row_count, Constant<1>()); });
    } else {
      take(Constant<1>(), Constant<0>());
    }
    const Lane lane;
    const int output = found_again(quad) * kRows + lane.row(), r = int(lane.id) / sum_lanes;
    const bool first_with_it = int(lane.id) % sum_lanes < kBlockLanes && !lane.ends_run();
    if (output < p.outputs && r < rows && first_with_it) {
      const float added = p.bias == nullptr ? 0.0f : load_value(p.bias, p.out.dtype, output);
      const std::int64_t target = std::int64_t(first + r) * p.outputs + output;
      store_value(sum + added, p.out.values, p.out.dtype, target);
    }
  }
}

// Rows [first, first + count) of the matrix, whole quads but for its last.
template <typename Slots> struct DenseDecode {
  Slots weights;
  BFloat16 *out;
  int first, count, warps;
};

template <typename Slots>
__global__ void __launch_bounds__(kThreads, kCompactBlocks)
    decode_dense(const DenseDecode<Slots> p) {
  const int quad = int(blockIdx.x) * p.warps + warp_id();
  if (warp_id() >= p.warps || quad * kRows >= p.count) {
    return;
  }
  const typename Slots::Matrix matrix = p.weights.matrix(0, 0, 0);
  write_rows(p.weights, 0, matrix, p.first / kRows + quad, p.out,
             [&](int row) { return p.out + std::int64_t(row - p.first) * matrix.columns; });
}

// Rows by their ids, a warp each.
template <typename Slots> struct DenseRows {
  Slots weights;
  const std::int64_t *ids; // [count]
  BFloat16 *out;           // [count, columns]
  int count, warps;
};

template <typename Slots>
__global__ void __launch_bounds__(kThreads, kCompactBlocks) rows_compact(const DenseRows<Slots> p) {
  const int item = int(blockIdx.x) * p.warps + warp_id();
  if (warp_id() >= p.warps || item >= p.count) {
    return;
  }
  const typename Slots::Matrix matrix = p.weights.matrix(0, 0, 0);
  BFloat16 *const out = p.out + std::int64_t(item) * matrix.columns;
  const std::int64_t id = p.ids[item];
  if (id < 0 || id >= matrix.rows) {
    for (int k = lane_id(); k < matrix.columns; k += kLanes) {
      out[k] = {0x7FC0}; // a row that does not exist is no number
    }
    return;
  }
  write_rows(p.weights, 0, matrix, int(id) / kRows, out,
             [&](int row) { return row == int(id) ? out : nullptr; });
}

// inputs [num_rows, columns] to out [num_rows, outputs].
template <typename Slots>
Error linear_dense(Values inputs, std::int64_t num_rows, const Slots &weights, const void *bias,
                   Values out, void *workspace, void *stream) {
  const std::int64_t columns = weights.layout.columns[0], outputs = weights.layout.rows[0];
  auto *const rows = static_cast<float *>(workspace);
  const Route route{nullptr, num_rows, 1, nullptr, 0};
  if (const Error error = widen_rows(inputs, columns, route, {}, rows, stream)) {
    return error;
  }
  const std::int64_t quads = quads_of(outputs);
  const int warps = dense_warps(quads);
  const DenseProduct<Slots> arguments{
      rows, int(num_rows), int(float_stride(columns)), weights, bias, out, int(outputs), warps};
  return launch(linear_compact<Slots>, dense_grid(quads, warps), 0, stream, arguments);
}

template <typename Slots>
Error decode_rows(const Slots &weights, std::int64_t first, std::int64_t count, void *out,
                  void *stream) {
  const std::int64_t quads = quads_of(count);
  const int warps = dense_warps(quads);
  const DenseDecode<Slots> arguments{weights, static_cast<BFloat16 *>(out), int(first), int(count),
                                     warps};
  return launch(decode_dense<Slots>, dense_grid(quads, warps), 0, stream, arguments);
}

template <typename Slots>
Error rows_by_id(const Slots &weights, const std::int64_t *ids, std::int64_t count, void *out,
                 void *stream) {
  const int warps = dense_warps(count);
  const DenseRows<Slots> arguments{weights, ids, static_cast<BFloat16 *>(out), int(count), warps};
  return launch(rows_compact<Slots>, dense_grid(count, warps), 0, stream, arguments);
}

} // namespace speq::cuda
