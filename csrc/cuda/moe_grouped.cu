// Rows through exact experts, in two launches of one kernel: gate_up with activation, then down.
#include "cuda/dtype.h"
#include "cuda/launch.h"
#include "cuda/quad_lanes.h"
#include "cuda/route.h"

namespace speq::cuda {
namespace {

// One projection of the experts. A warp has four rows of weights: two of gate and the two of up
// that make outputs with them, or four of down.
struct Projection {
  const void *inputs; // row of position p: p / input_rank
  Dtype dtype;        // of inputs and outputs
  int input_rank;
  Route route;
  int positions;
  SlotValues weights;
  const void *bias; // [experts, weights.rows] of `dtype`, or null
  bool gated;       // whether rows of gate and of up make an output
  bool activates;   // whether outputs are activated
  Activation activation;
  void *out; // [positions, outputs]
  int outputs;
  bool marks_bad_ids; // with NaN
};

// Stands for dtypes, or layouts, that are read value by value.
struct AnyValue {};

constexpr int kVectorBytes = 16;
// Leaves 128 registers to a thread.
constexpr int kResidentBlocks = 2;
// Vectors that a lane has under way at a time.
constexpr int kLoads = kBlackwell ? 2 : 4;

template <typename Value> SPEQ_DEVICE void unpack(uint4 vector, float *values) {
  const std::uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(Value) == sizeof(float)) {
      values[i] = bits_as<float>(words[i]);
    } else if constexpr (std::is_same_v<Value, BFloat16>) {
      values[2 * i] = bits_as<float>(words[i] << 16);
      values[2 * i + 1] = bits_as<float>(words[i] & 0xFFFF0000u);
    } else {
      values[2 * i] = widen(Float16{std::uint16_t(words[i] & 0xFFFFu)});
      values[2 * i + 1] = widen(Float16{std::uint16_t(words[i] >> 16)});
    }
  }
}

// Partial sums of the lane's row of weights, which begins at value `start`, by the rows of inputs
// that begin at value input[r].
template <typename Value, int kBatch>
SPEQ_DEVICE void multiply(const Projection &p, std::int64_t start, const int (&input)[kBatch],
                          float (&partial)[kBatch][kLaneColumns]) {
  constexpr int kValues = kVectorBytes / sizeof(Value);
  const auto *weights = static_cast<const Value *>(p.weights.values) + start;
  const auto *inputs = static_cast<const Value *>(p.inputs);
  const int columns = int(p.weights.columns);
#pragma unroll 1 // loads beyond kLoads would spill
  for (int segment = Lane().column(); segment < columns; segment += kStepColumns) {
#pragma unroll
    for (int first = 0; first < kSegment; first += kLoads * kValues) {
      uint4 packed[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int column = segment + first + i * kValues;
        if (column < columns) {
          // Lanes read half sectors: the other half is in the cache when they want it.
          packed[i] = __ldg(reinterpret_cast<const uint4 *>(weights + column));
        }
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int column = segment + first + i * kValues;
        if (column < columns) {
          float weight[kValues];
          unpack<Value>(packed[i], weight);
#pragma unroll
          for (int r = 0; r < kBatch; ++r) {
            float x[kValues];
            unpack<Value>(*reinterpret_cast<const uint4 *>(inputs + input[r] + column), x);
#pragma unroll
            for (int v = 0; v < kValues; ++v) {
              float &sum = partial[r][(i * kValues + v) % kLaneColumns];
              sum = fmaf(weight[v], x[v], sum);
            }
          }
        }
      }
    }
  }
}

SPEQ_DEVICE void multiply_any(const Projection &p, std::int64_t start, int input,
                              float (&partial)[1][kLaneColumns]) {
  const int columns = int(p.weights.columns);
  for (int segment = Lane().column(); segment < columns; segment += kStepColumns) {
    for (int first = segment; first < segment + kSegment; first += kLaneColumns) {
#pragma unroll
      for (int v = 0; v < kLaneColumns; ++v) {
        if (first + v < columns) {
          const float x = load_value(p.inputs, p.dtype, input + first + v);
          const float weight = load_value(p.weights.values, p.weights.dtype, start + first + v);
          partial[0][v] = fmaf(rounded(weight, p.dtype), x, partial[0][v]);
        }
      }
    }
  }
}

template <typename Value>
__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    moe_grouped_projection(const Projection p) {
  constexpr bool kAny = std::is_same_v<Value, AnyValue>;
  constexpr int kMost = kAny ? 1 : kMaxBatch;
  SPEQ_SHARED_MEMORY(memory);
  auto &shared = *reinterpret_cast<Gathered *>(memory);

  const int leader = int(blockIdx.y);
  const int count = gather(p.route.topk_ids, p.positions, leader, shared);
  const std::int64_t id = p.route.topk_ids[leader];
  bool bad = id < 0 || id >= p.route.experts;
  const std::int64_t slot = bad ? 0 : p.route.slots[id];
  bad = bad || slot >= p.weights.slots;

  const int columns = int(p.weights.columns);
  const int of_warp = p.gated ? kRows / 2 : kRows;
  const int first_output = (int(blockIdx.x) * kWarps + warp_id()) * of_warp;
  if (count == 0 || slot < 0 || first_output >= p.outputs || (bad && !p.marks_bad_ids)) {
    return;
  }
  const Lane lane;
  const int output = first_output + lane.row() % of_warp;
  const bool makes_output = output < p.outputs && lane.row() < of_warp;
  // A row that is not there is read as the warp's first.
  const int of_part = output < p.outputs ? output : first_output;
  const int row = lane.row() < of_warp ? of_part : p.outputs + of_part;
  const std::int64_t start = slot * p.weights.slot_stride + std::int64_t(row) * columns;

  for (int first = 0; first < count; first += kMost) {
    const int rows = count - first < kMost ? count - first : kMost;
    const std::int32_t *members = shared.members + first;
    float sum = not_a_number(); // of the input that the lane's segment has the number of
    const auto take = [&](auto row_count) {
      constexpr int kBatch = decltype(row_count)::value;
      int input[kBatch];
      float partial[kBatch][kLaneColumns];
#pragma unroll
      for (int r = 0; r < kBatch; ++r) {
        input[r] = members[r < rows ? r : rows - 1] / p.input_rank * columns;
#pragma unroll
        for (int v = 0; v < kLaneColumns; ++v) {
          partial[r][v] = 0.0f;
        }
      }
      if constexpr (kAny) {
        multiply_any(p, start, input[0], partial);
      } else {
        multiply<Value>(p, start, input, partial);
      }
#pragma unroll
      for (int r = 0; r < kBatch; ++r) {
        const float total = total_of_segments(partial[r]);
        sum = Lane().segment() == r ? total : sum;
      }
    };
    if (!bad) {
      if constexpr (kAny) {
        take(Constant<1>());
      } else {
        with_row_count(rows, take);
      }
    }
    // Rounded where transformers rounds.
    const Rounding round{p.dtype};
    const int member = lane.segment() < rows ? lane.segment() : 0;
    if (p.bias != nullptr && !bad) {
      const std::int64_t of_expert = p.route.topk_ids[members[member]] * p.weights.rows;
      sum = round(sum) + load_value(p.bias, p.dtype, of_expert + row);
    }
    if (p.activates) {
      constexpr int kRowsApart = kRunLanes * kRows / 2;
      const float up = p.gated ? __shfl_xor_sync(kAllLanes, sum, kRowsApart) : sum;
      sum = activate(p.activation, round(sum), round(up), round);
    }
    if (makes_output && lane.segment() < rows) {
      const std::int64_t target = std::int64_t(members[member]) * p.outputs + output;
      store_value(sum, p.out, p.dtype, target);
    }
  }
}
static_assert(kMaxBatch <= kStepSegments);

int value_bytes(Dtype dtype) {
  return dtype == Dtype::float64 ? 8 : dtype == Dtype::float32 ? 4 : 2;
}

// Whether rows of inputs and of weights consist of aligned vectors of one dtype.
bool has_vectors(const Projection &p) {
  const std::uintptr_t places =
      reinterpret_cast<std::uintptr_t>(p.inputs) |
      reinterpret_cast<std::uintptr_t>(p.weights.values) |
      std::uintptr_t((p.weights.columns | p.weights.slot_stride) * value_bytes(p.dtype));
  return p.dtype == p.weights.dtype && places % kVectorBytes == 0;
}

Error project(const Projection &p, void *stream) {
  const int of_block = kWarps * (p.gated ? kRows / 2 : kRows);
  const Grid grid{unsigned((p.outputs + of_block - 1) / of_block), unsigned(p.positions)};
  const std::size_t shared_bytes = sizeof(Gathered);
  if (!has_vectors(p)) {
    return launch(moe_grouped_projection<AnyValue>, grid, shared_bytes, stream, p);
  }
  switch (p.dtype) {
  case Dtype::bfloat16:
    return launch(moe_grouped_projection<BFloat16>, grid, shared_bytes, stream, p);
  case Dtype::float16:
    return launch(moe_grouped_projection<Float16>, grid, shared_bytes, stream, p);
  default:
    return launch(moe_grouped_projection<float>, grid, shared_bytes, stream, p);
  }
}

} // namespace

std::size_t moe_grouped_workspace(const Route &route, std::int64_t width, Dtype dtype) {
  return std::size_t(route.num_rows * route.top_k * width) * value_bytes(dtype);
}

Error moe_grouped(Values hidden_states, Route route, SlotValues gate_up, SlotValues down,
                  Activation activation, ExpertBiases biases, void *out, void *workspace,
                  void *stream) {
  const int positions = int(route.num_rows * route.top_k);
  const Projection first{hidden_states.values,
                         hidden_states.dtype,
                         int(route.top_k),
                         route,
                         positions,
                         gate_up,
                         biases.gate_up,
                         has_gate(activation),
                         true,
                         activation,
                         workspace,
                         int(down.columns),
                         false};
  if (const Error error = project(first, stream)) {
    return error;
  }
  const Projection second{workspace, hidden_states.dtype, 1,     route, positions,
                          down,      biases.down,         false, false, activation,
                          out,       int(down.rows),      true};
  return project(second, stream);
}

} // namespace speq::cuda
