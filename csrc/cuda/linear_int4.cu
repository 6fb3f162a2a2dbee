// Rows times one INT4 matrix.
//
// A block rounds the inputs for itself. Its warps share rows of weights out among them, and each
// row's columns too where a matrix has too few rows to keep the device busy.
#include "cuda/int4_matrix.h"
#include "cuda/launch.h"

namespace speq::cuda {
namespace {

struct LinearInt4 {
  Inputs inputs;
  int num_rows, batch;
  Int4Matrix weights;
  const std::int32_t *input_perm;
  void *out;
  Dtype out_dtype;
  int splits; // parts of a row's columns, to a warp each
};

// Rows of weights to a warp: two to a lane, so that inputs are loaded once for both.
constexpr int kWarpRows = 2 * kRowsPerWarp;

struct LinearShared {
  float parts[kMaxBatch][kWarps][kWarpRows];
  // Then the rounded rows.
};

__global__ void __launch_bounds__(kThreads, kInt4Blocks) linear_int4_kernel(const LinearInt4 p) {
  SPEQ_SHARED_MEMORY(memory);
  auto &shared = *reinterpret_cast<LinearShared *>(memory);
  auto *const inputs = reinterpret_cast<Int8Block *>(memory + sizeof(LinearShared));

  const int blocks = int8_blocks(p.weights.columns);
  const int split = warp_id() % p.splits;
  const int begin = blocks * split / p.splits, end = blocks * (split + 1) / p.splits;
  const int block_rows = kWarps / p.splits * kWarpRows, first_row = int(blockIdx.x) * block_rows;
  const int row = first_row + warp_id() / p.splits * kWarpRows + lane_id() / kRowLanes;
  const int last_row = p.weights.rows - 1;
  const Int4Row weights[2] = {
      int4_row(p.weights, 0, row < last_row ? row : last_row),
      int4_row(p.weights, 0, row + kRowsPerWarp < last_row ? row + kRowsPerWarp : last_row)};
  prefetch_row(weights[0], begin, end);
  prefetch_row(weights[1], begin, end);

  for (int first = 0; first < p.num_rows; first += p.batch) {
    const int rows = p.num_rows - first < p.batch ? p.num_rows - first : p.batch;
    round_rows(p.inputs, p.input_perm, rows, [&](int r) { return first + r; }, inputs);
    __syncthreads();
    with_row_count(rows, [&](auto count) {
      constexpr int kRows = decltype(count)::value;
      int start[kRows];
      row_starts(rows, blocks, [](int r) { return r; }, start);
      float sums[2][kRows];
      multiply(p.weights, weights, inputs, start, begin, end, sums);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (lane_id() % kRowLanes == 0) {
          float *parts = shared.parts[r][warp_id()] + lane_id() / kRowLanes;
          parts[0] = sums[0][r];
          parts[kRowsPerWarp] = sums[1][r];
        }
      }
    });
    __syncthreads();
    for (int item = int(threadIdx.x); item < rows * block_rows; item += kThreads) {
      const int r = item / block_rows, local = item % block_rows;
      if (first_row + local <= last_row) {
        float sum = 0.0f;
        for (int part = 0; part < p.splits; ++part) {
          const int warp = local / kWarpRows * p.splits + part;
          sum += shared.parts[r][warp][local % kWarpRows];
        }
        const std::int64_t target = std::int64_t(first + r) * p.weights.rows + first_row + local;
        store_value(sum, p.out, p.out_dtype, target);
      }
    }
  }
}

// Blocks that keep every multiprocessor of a large device busy.
constexpr int kWantedBlocks = 256;

} // namespace

Error linear_int4(Values inputs, std::int64_t num_rows, Int4Values weights,
                  const std::int32_t *input_perm, Values out, void *stream) {
  const Int4Matrix matrix = int4_matrix(weights);
  const int blocks = int8_blocks(matrix.columns);
  const std::size_t row_bytes = blocks * sizeof(Int8Block);
  // By the matrix alone, so that a row's sum does not depend on other rows.
  int splits = 1;
  const auto grid = [&] {
    const int block_rows = kWarps / splits * kWarpRows;
    return unsigned((matrix.rows + block_rows - 1) / block_rows);
  };
  while (splits < kWarps && grid() < kWantedBlocks && blocks >= 2 * splits * kRowLanes) {
    splits *= 2;
  }
  const int batch = batch_that_fits(batch_of(matrix, num_rows), row_bytes);
  const LinearInt4 arguments{{inputs.values, inputs.dtype, matrix.columns},
                             int(num_rows),
                             batch,
                             matrix,
                             input_perm,
                             out.values,
                             out.dtype,
                             splits};
  const std::size_t shared_bytes = sizeof(LinearShared) + batch * row_bytes;
  return launch(linear_int4_kernel, {grid(), 1}, shared_bytes, stream, arguments);
}

} // namespace speq::cuda
