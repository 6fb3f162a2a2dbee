#include "cuda/dtype.h"
#include "cuda/float_rows.h"

namespace speq::cuda {
namespace {

struct WidenRows {
  Values rows;           // [*, columns]
  int columns, row_rank; // row of position p: p / row_rank
  Route route;
  InputOrder order;
  float *out; // [*, stride]
  int stride;
};

__global__ void __launch_bounds__(kThreads) widen_rows_kernel(const WidenRows p) {
  const int column = int(blockIdx.x) * kThreads + int(threadIdx.x), position = int(blockIdx.y);
  if (column >= p.columns) {
    return;
  }
  std::int64_t source = column;
  if (p.order.input_perm != nullptr) {
    const std::int64_t id = p.route.topk_ids[position];
    const bool known = id >= 0 && id < p.route.experts;
    const std::int64_t base = known ? p.order.base_slots[id] : -1;
    source =
        base >= 0 && base < p.order.base_count ? p.order.input_perm[base * p.columns + column] : -1;
  }
  // An input that does not exist is no number.
  float value = not_a_number();
  if (source >= 0 && source < p.columns) {
    const std::int64_t row = position / p.row_rank;
    value = load_value(p.rows.values, p.rows.dtype, row * p.columns + source);
  }
  p.out[std::int64_t(position) * p.stride + float_place(column)] = value;
}

} // namespace

std::size_t moe_compact_workspace(const Route &route, ExpertShape shape) {
  const std::int64_t positions = route.num_rows * route.top_k;
  const std::int64_t columns = float_stride(shape.hidden_size) + float_stride(shape.expert_width);
  return std::size_t(positions * columns) * sizeof(float);
}

std::size_t linear_compact_workspace(std::int64_t num_rows, std::int64_t columns) {
  return std::size_t(num_rows * float_stride(columns)) * sizeof(float);
}

Error widen_rows(Values rows, std::int64_t columns, const Route &route, const InputOrder &order,
                 float *out, void *stream) {
  const bool permuted = order.input_perm != nullptr;
  const WidenRows arguments{rows,  int(columns), permuted ? int(route.top_k) : 1, route,
                            order, out,          int(float_stride(columns))};
  const Grid grid{unsigned((columns + kThreads - 1) / kThreads),
                  unsigned(permuted ? route.num_rows * route.top_k : route.num_rows)};
  return launch(widen_rows_kernel, grid, 0, stream, arguments);
}

} // namespace speq::cuda
