// Rows through exact experts, in two launches of one kernel: gate_up with activation, then down.
#include "cuda/dtype.h"
#include "cuda/launch.h"
#include "cuda/route.h"

namespace speq::cuda {
namespace {

// One projection of the experts. An output comes of a pair of rows of weights: of gate and up, or
// of two neighbours of down, which make an output each.
struct Projection {
  const void *inputs; // row of position p: p / input_rank
  Dtype dtype;        // of inputs and outputs
  int input_rank;
  Route route;
  int positions;
  SlotValues weights;
  const void *bias; // [experts, weights.rows] of `dtype`, or null
  bool gated;
  Activation activation;
  void *out; // [positions, outputs]
  int outputs;
  bool marks_bad_ids; // with NaN
};

// Stands for dtypes, or layouts, that are read value by value.
struct AnyValue {};

constexpr int kVectorBytes = 16;
// Leaves 80 registers to a thread, or 128.
constexpr int kResidentBlocks = kBlackwell ? 2 : 3;
// Vectors of each of its two rows of weights that a lane has under way at a time.
constexpr int kLoads = 2;

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

// sums[w][r] = the rows of weights that begin at value start[w], times the rows of inputs that
// begin at value input[r]. Each row is added up in the same order, however many there are.
template <typename Value, int kRows>
SPEQ_DEVICE void multiply(const Projection &p, const std::int64_t (&start)[2],
                          const int (&input)[kRows], float (&sums)[2][kRows]) {
  constexpr int kValues = kVectorBytes / sizeof(Value);
  const auto *weights = static_cast<const Value *>(p.weights.values);
  const auto *inputs = static_cast<const Value *>(p.inputs);
  const int vectors = int(p.weights.columns) / kValues;
#pragma unroll 1 // loads beyond kLoads would spill
  for (int first = lane_id(); first < vectors; first += kLoads * kLanes) {
    uint4 packed[kLoads][2];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int vector = first + i * kLanes;
      if (vector < vectors) {
        packed[i][0] = load_streamed(weights + start[0] + vector * kValues);
        packed[i][1] = load_streamed(weights + start[1] + vector * kValues);
      }
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int vector = first + i * kLanes;
      if (vector < vectors) {
        float weight[2][kValues];
        unpack<Value>(packed[i][0], weight[0]);
        unpack<Value>(packed[i][1], weight[1]);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          float x[kValues];
          unpack<Value>(*reinterpret_cast<const uint4 *>(inputs + input[r] + vector * kValues), x);
#pragma unroll
          for (int v = 0; v < kValues; ++v) {
            sums[0][r] = fmaf(weight[0][v], x[v], sums[0][r]);
            sums[1][r] = fmaf(weight[1][v], x[v], sums[1][r]);
          }
        }
      }
    }
  }
}

// In the order of vectors of BF16.
SPEQ_DEVICE void multiply_any(const Projection &p, const std::int64_t (&start)[2], int input,
                              float (&sums)[2][1]) {
  const int columns = int(p.weights.columns);
  for (int first = lane_id() * kLaneColumns; first < columns; first += kLanes * kLaneColumns) {
    for (int column = first; column < first + kLaneColumns && column < columns; ++column) {
      const float x = load_value(p.inputs, p.dtype, input + column);
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        const float weight = load_value(p.weights.values, p.weights.dtype, start[w] + column);
        sums[w][0] = fmaf(rounded(weight, p.dtype), x, sums[w][0]);
      }
    }
  }
}

template <typename Value>
__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    moe_grouped_projection(const Projection p) {
  constexpr bool kAny = std::is_same_v<Value, AnyValue>;
  constexpr int kBatch = kAny ? 1 : kMaxBatch;
  SPEQ_SHARED_MEMORY(memory);
  auto &shared = *reinterpret_cast<Gathered *>(memory);

  const int leader = int(blockIdx.y);
  const int count = gather(p.route.topk_ids, p.positions, leader, shared);
  const std::int64_t id = p.route.topk_ids[leader];
  bool bad = id < 0 || id >= p.route.experts;
  const std::int64_t slot = bad ? 0 : p.route.slots[id];
  bad = bad || slot >= p.weights.slots;

  const int columns = int(p.weights.columns);
  // A warp's rows of weights.
  const int pair = int(blockIdx.x) * kWarps + warp_id();
  const int outputs = p.gated ? 1 : 2, output = pair * outputs;
  if (count == 0 || slot < 0 || output >= p.outputs || (bad && !p.marks_bad_ids)) {
    return;
  }
  const bool second_output = !p.gated && output + 1 < p.outputs;
  const int second = p.gated ? output + p.outputs : second_output ? output + 1 : output;
  const std::int64_t base = slot * p.weights.slot_stride;
  const std::int64_t start[2] = {base + output * p.weights.columns,
                                 base + second * p.weights.columns};

  for (int first = 0; first < count; first += kBatch) {
    const int rows = count - first < kBatch ? count - first : kBatch;
    const std::int32_t *members = shared.members + first;
    // What lane r makes of row r.
    float of_first = not_a_number(), of_second = not_a_number();
    const auto take = [&](auto row_count) {
      constexpr int kRows = decltype(row_count)::value;
      int input[kRows];
      float sums[2][kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        input[r] = members[r < rows ? r : rows - 1] / p.input_rank * columns;
        sums[0][r] = sums[1][r] = 0.0f;
      }
      if constexpr (kAny) {
        multiply_any(p, start, input[0], sums);
      } else {
        multiply<Value>(p, start, input, sums);
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float first_sum = sum_of_lanes<kLanes>(sums[0][r]);
        const float second_sum = sum_of_lanes<kLanes>(sums[1][r]);
        if (lane_id() == r) {
          of_first = first_sum;
          of_second = second_sum;
        }
      }
    };
    if (!bad) {
      if constexpr (kAny) {
        take(Constant<1>());
      } else {
        with_row_count(rows, take);
      }
    }
    if (lane_id() < rows) {
      const std::int64_t target = std::int64_t(members[lane_id()]) * p.outputs + output;
      // Rounded where transformers rounds.
      const Rounding round{p.dtype};
      if (p.bias != nullptr && !bad) {
        // Read and computed anew: registers are short in the loop above.
        const std::int64_t of_expert =
            p.route.topk_ids[members[lane_id()]] * p.weights.rows + output;
        const int beside = p.gated ? p.outputs : second_output;
        of_first = round(of_first) + load_value(p.bias, p.dtype, of_expert);
        of_second = round(of_second) + load_value(p.bias, p.dtype, of_expert + beside);
      }
      if (p.gated) {
        of_first = activate(p.activation, round(of_first), round(of_second), round);
      }
      store_value(of_first, p.out, p.dtype, target);
      if (second_output) {
        store_value(of_second, p.out, p.dtype, target + 1);
      }
    }
  }
}

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
  const int pairs = p.gated ? p.outputs : (p.outputs + 1) / 2;
  const Grid grid{unsigned((pairs + kWarps - 1) / kWarps), unsigned(p.positions)};
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
                         true,
                         activation,
                         workspace,
                         int(down.columns),
                         false};
  if (const Error error = project(first, stream)) {
    return error;
  }
  const Projection second{
      workspace, hidden_states.dtype, 1,   route,          positions, down, biases.down,
      false,     activation,          out, int(down.rows), true};
  return project(second, stream);
}

} // namespace speq::cuda
