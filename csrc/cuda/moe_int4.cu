// Rows through INT4 experts, in two launches: gate_up with activation, then down with the
// weighted sum over each route. Weights are read once for all rows of an expert.
#include "cuda/int4_matrix.h"
#include "cuda/launch.h"
#include "cuda/route.h"

namespace speq::cuda {
namespace {

// What the first launch leaves for the second, beside the rounded rows of `inner`.
struct Leader {
  std::int32_t count; // members; none where the position leads nobody
  std::int32_t slot;  // negative where the id or its slot does not exist
};

struct MoeInt4 {
  Inputs hidden_states;
  Route route;
  int positions;
  const float *topk_weights;
  Int4Matrix gate_up, down;
  std::int64_t slots;
  const std::int32_t *input_perm;
  Activation activation;
  ExpertBiases biases;
  void *out;
  Dtype out_dtype;
  int gate_up_batch, down_batch;
  int down_splits; // parts of a row of down, to a warp each
  // Workspace: [positions], [positions, positions] and [positions] rows.
  Leader *leaders;
  std::int32_t *members;
  Int8Block *inner;
};

// Columns of inner to a block: what is rounded together is made together.
constexpr int kInnerTile = kInt8Block;
static_assert(kInnerTile == kWarps * kRowsPerWarp, "lanes of a row make a column, of gate and up");
static_assert(kMaxBatch <= kWarps, "a warp rounds a row");

struct GateUpShared {
  Gathered route;
  float inner[kMaxBatch][kInnerTile];
  // Then the rounded rows.
};
static_assert(sizeof(GateUpShared) % kVectorBytes == 0);

SPEQ_DEVICE int slot_of(const MoeInt4 &p, int position) {
  const std::int64_t id = p.route.topk_ids[position];
  if (id < 0 || id >= p.route.experts) {
    return -1;
  }
  const std::int64_t slot = p.route.slots[id];
  return slot < 0 || slot >= p.slots ? -1 : int(slot);
}

__global__ void __launch_bounds__(kThreads, kInt4Blocks) moe_int4_gate_up(const MoeInt4 p) {
  SPEQ_SHARED_MEMORY(memory);
  auto &shared = *reinterpret_cast<GateUpShared *>(memory);
  auto *const inputs = reinterpret_cast<Int8Block *>(memory + sizeof(GateUpShared));

  const int tile = int(blockIdx.x), leader = int(blockIdx.y);
  const int count = gather(p.route.topk_ids, p.positions, leader, shared.route);
  const int slot = slot_of(p, leader);
  if (tile == 0) {
    if (threadIdx.x == 0) {
      p.leaders[leader] = {count, slot};
    }
    if (int(threadIdx.x) < count) {
      p.members[leader * p.positions + int(threadIdx.x)] = shared.route.members[threadIdx.x];
    }
  }
  if (count == 0 || slot < 0) {
    return;
  }

  const int width = p.down.columns, blocks = int8_blocks(p.gate_up.columns);
  const int local = int(threadIdx.x) / kRowLanes, column = tile * kInnerTile + local;
  const int row = column < width ? column : width - 1;
  // Without a gate, both are up's: what is read twice is in the cache.
  const Int4Row weights[2] = {int4_row(p.gate_up, slot, row),
                              int4_row(p.gate_up, slot, p.gate_up.rows - width + row)};
  prefetch_row(weights[0], 0, blocks);
  prefetch_row(weights[1], 0, blocks);
  const std::int32_t *perm =
      p.input_perm == nullptr ? nullptr : p.input_perm + std::int64_t(slot) * p.gate_up.columns;

  for (int first = 0; first < count; first += p.gate_up_batch) {
    const int rows = count - first < p.gate_up_batch ? count - first : p.gate_up_batch;
    const std::int32_t *members = shared.route.members + first;
    const int top_k = int(p.route.top_k);
    round_rows(p.hidden_states, perm, rows, [&](int r) { return members[r] / top_k; }, inputs);
    __syncthreads();
    with_row_count(rows, [&](auto row_count) {
      constexpr int kRows = decltype(row_count)::value;
      int start[kRows];
      row_starts(rows, blocks, [](int r) { return r; }, start);
      float sums[2][kRows];
      multiply(p.gate_up, weights, inputs, start, 0, blocks, sums);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (lane_id() % kRowLanes == r) {
          float gate = sums[0][r], up = sums[1][r];
          if (p.biases.gate_up != nullptr) {
            const std::int64_t id = p.route.topk_ids[leader], rows_of = p.gate_up.rows;
            gate += load_value(p.biases.gate_up, p.biases.dtype, id * rows_of + row);
            up += load_value(p.biases.gate_up, p.biases.dtype, (id + 1) * rows_of - width + row);
          }
          const float inner = activate(p.activation, gate, up, AsIs());
          shared.inner[r][local] = column < width ? inner : 0.0f;
        }
      }
    });
    __syncthreads();
    if (warp_id() < rows) {
      Int8Block *target = p.inner + members[warp_id()] * int8_blocks(width);
      round_block(shared.inner[warp_id()][lane_id()], target[tile]);
    }
  }
}
static_assert(kMaxBatch <= kRowLanes, "a lane activates a row");

// Columns of the output to a block: two for each row of weights that a warp reads at a time.
constexpr int kOutTile = 2 * kRowsPerWarp;

// Rows of one expert that a warp takes at a time.
struct Item {
  std::int32_t slot, rows;
  std::int32_t members; // where in MoeInt4::members their positions begin
};

struct DownShared {
  std::int32_t num_items;
  Item items[kMaxPositions];
  // Then parts of outputs, [down_splits, positions, kOutTile].
};

// One warp cuts the leaders' rows into items.
SPEQ_DEVICE void make_items(const MoeInt4 &p, DownShared &shared) {
  int before = 0;
  for (int base = 0; base < p.positions; base += kLanes) {
    const int position = base + lane_id();
    const Leader leader = position < p.positions ? p.leaders[position] : Leader{0, 0};
    const int items = (leader.count + p.down_batch - 1) / p.down_batch;
    int end = items; // of this lane and those below
    for (int distance = 1; distance < kLanes; distance *= 2) {
      const int below = __shfl_up_sync(kAllLanes, end, distance);
      end += lane_id() >= distance ? below : 0;
    }
    for (int item = 0; item < items; ++item) {
      const int first = item * p.down_batch, left = leader.count - first;
      shared.items[before + end - items + item] = {
          leader.slot, left < p.down_batch ? left : p.down_batch, position * p.positions + first};
    }
    before += __shfl_sync(kAllLanes, end, kLanes - 1);
  }
  if (lane_id() == 0) {
    shared.num_items = before;
  }
}

__global__ void __launch_bounds__(kThreads, kInt4Blocks) moe_int4_down(const MoeInt4 p) {
  SPEQ_SHARED_MEMORY(memory);
  auto &shared = *reinterpret_cast<DownShared *>(memory);
  auto *const parts = reinterpret_cast<float *>(memory + sizeof(DownShared));

  if (warp_id() == 0) {
    make_items(p, shared);
  }
  __syncthreads();

  const int blocks = int8_blocks(p.down.columns);
  const int first_column = int(blockIdx.x) * kOutTile, last_column = p.down.rows - 1;
  for (int i = warp_id(); i < shared.num_items * p.down_splits; i += kWarps) {
    const auto [slot, rows, first_member] = shared.items[i / p.down_splits];
    const int split = i % p.down_splits;
    const std::int32_t *members = p.members + first_member;
    float *part = parts + split * p.positions * kOutTile;
    if (slot < 0) {
      for (int j = lane_id(); j < rows * kOutTile; j += kLanes) {
        part[members[j / kOutTile] * kOutTile + j % kOutTile] = not_a_number();
      }
      continue;
    }
    const int local = lane_id() / kRowLanes, column = first_column + local;
    const Int4Row weights[2] = {
        int4_row(p.down, slot, column < last_column ? column : last_column),
        int4_row(p.down, slot,
                 column + kRowsPerWarp < last_column ? column + kRowsPerWarp : last_column)};
    const int begin = blocks * split / p.down_splits, end = blocks * (split + 1) / p.down_splits;
    const int num_rows = rows;
    with_row_count(num_rows, [&](auto row_count) {
      constexpr int kRows = decltype(row_count)::value;
      int start[kRows];
      row_starts(num_rows, blocks, [&](int r) { return members[r]; }, start);
      float sums[2][kRows];
      multiply(p.down, weights, p.inner, start, begin, end, sums);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (lane_id() % kRowLanes == r && r < num_rows) {
          float *target = part + members[r] * kOutTile + local;
          target[0] = sums[0][r];
          target[kRowsPerWarp] = sums[1][r];
        }
      }
    });
  }
  __syncthreads();

  const int top_k = int(p.route.top_k), num_rows = int(p.route.num_rows);
  for (int i = int(threadIdx.x); i < num_rows * kOutTile; i += kThreads) {
    const int t = i / kOutTile, target = first_column + i % kOutTile;
    if (target > last_column) {
      continue;
    }
    float sum = 0.0f;
    for (int j = 0; j < top_k; ++j) {
      const int place = t * top_k + j;
      float output = 0.0f;
      for (int split = 0; split < p.down_splits; ++split) {
        output += parts[(split * p.positions + place) * kOutTile + i % kOutTile];
      }
      const std::int64_t id = p.route.topk_ids[place];
      if (p.biases.down != nullptr && id >= 0 && id < p.route.experts) {
        output += load_value(p.biases.down, p.biases.dtype, id * p.down.rows + target);
      }
      sum = fmaf(output, p.topk_weights[place], sum);
    }
    store_value(sum, p.out, p.out_dtype, std::int64_t(t) * p.down.rows + target);
  }
}

// Blocks of a row of down that keep the lanes of one warp busy.
constexpr int kSplitBlocks = 4 * kRowLanes;

constexpr std::size_t aligned(std::size_t bytes) {
  return (bytes + kVectorBytes - 1) / kVectorBytes * kVectorBytes;
}

} // namespace

std::size_t moe_int4_workspace(const Route &route, std::int64_t width) {
  const std::size_t positions = route.num_rows * route.top_k;
  return aligned(positions * sizeof(Leader)) +
         aligned(positions * positions * sizeof(std::int32_t)) +
         positions * int8_blocks(int(width)) * sizeof(Int8Block);
}

Error moe_int4(Values hidden_states, Route route, const float *topk_weights, Int4Values gate_up,
               Int4Values down, const std::int32_t *input_perm, Activation activation,
               ExpertBiases biases, Values out, void *workspace, void *stream) {
  const std::size_t positions = route.num_rows * route.top_k;
  auto *const leaders = static_cast<unsigned char *>(workspace);
  unsigned char *const members = leaders + aligned(positions * sizeof(Leader));
  unsigned char *const inner = members + aligned(positions * positions * sizeof(std::int32_t));

  const Int4Matrix gate_up_matrix = int4_matrix(gate_up), down_matrix = int4_matrix(down);
  const std::size_t row_bytes = int8_blocks(gate_up_matrix.columns) * sizeof(Int8Block);
  const int batch = batch_that_fits(batch_of(gate_up_matrix, route.num_rows), row_bytes);
  const int down_blocks = int8_blocks(down_matrix.columns);
  // By the matrix alone, so that a row's sum does not depend on other rows.
  int splits = down_blocks / kSplitBlocks;
  splits = splits < 1 ? 1 : splits > kWarps ? kWarps : splits;

  const MoeInt4 arguments{{hidden_states.values, hidden_states.dtype, gate_up_matrix.columns},
                          route,
                          int(positions),
                          topk_weights,
                          gate_up_matrix,
                          down_matrix,
                          gate_up.slots,
                          input_perm,
                          activation,
                          biases,
                          out.values,
                          out.dtype,
                          batch,
                          batch_of(down_matrix, kMaxBatch),
                          splits,
                          reinterpret_cast<Leader *>(leaders),
                          reinterpret_cast<std::int32_t *>(members),
                          reinterpret_cast<Int8Block *>(inner)};
  if (positions > 0) {
    const Grid grid{unsigned(down_blocks), unsigned(positions)};
    const std::size_t shared_bytes = sizeof(GateUpShared) + batch * row_bytes;
    if (const Error error = launch(moe_int4_gate_up, grid, shared_bytes, stream, arguments)) {
      return error;
    }
  }
  const Grid grid{unsigned((down_matrix.rows + kOutTile - 1) / kOutTile), 1};
  const std::size_t shared_bytes =
      sizeof(DownShared) + positions * splits * kOutTile * sizeof(float);
  return launch(moe_int4_down, grid, shared_bytes, stream, arguments);
}

} // namespace speq::cuda
