// Binds the ops over experts that were published as codes with scales; the others are in
// bindings.cpp, which says how.

#include <torch/csrc/stable/library.h>

#include "cuda/record_binding.h"
#include "scaled.h"

namespace {

using namespace speq::cuda;
using speq::Activation;
using speq::ExpertShape;
using OptionalTensor = std::optional<Tensor>;

// Decodes a record of at least nbytes. launch: takes it, two places for words and a stream.
template <typename Launch>
void decode_record(const char *op, const Tensor &record, std::int64_t nbytes, Tensor &gate_up_proj,
                   Tensor &down_proj, const Launch &launch) {
  STD_TORCH_CHECK(record.dim() == 1 && same_device({&record, &gate_up_proj, &down_proj}), op,
                  ": arguments are on different devices, or many records");
  const Records records = records_of(op, record, nbytes);
  const Call call(record);
  check(op, launch(records, gate_up_proj.mutable_data_ptr(), down_proj.mutable_data_ptr(),
                   call.stream()));
}

// Arguments that the ops of all formats have.
struct GroupedTensors {
  Tensor hidden_states, topk_ids, slot_table, slots;
  Activation activation;
  Tensor out;
  OptionalTensor gate_up_bias, down_bias;
};

ExpertShape expert_shape(const char *op, const Tensor &hidden_states, std::int64_t expert_width,
                         const Activation &activation) {
  STD_TORCH_CHECK(hidden_states.dim() == 2, op, ": hidden_states must be [T, H]");
  return shape_of(op, hidden_states.size(1), expert_width, speq::has_gate(activation));
}

// Runs experts in slots of at least nbytes. launch: takes rows and their route, the slots, an
// activation, biases, a place for products, a workspace and a stream.
template <typename Launch>
void run_grouped(const char *op, const GroupedTensors &given, const ExpertShape &shape,
                 std::int64_t nbytes, const Launch &launch) {
  const Records records = records_of(op, given.slots, nbytes);
  const Grouped grouped = grouped_of(op, given.hidden_states, given.topk_ids, given.slot_table,
                                     given.slots, shape.hidden_size, given.out);
  const ExpertBiases biases =
      same_biases_of(op, given.gate_up_bias, given.down_bias, given.hidden_states,
                     grouped.route.experts, shape.gate_up_rows());
  if (grouped.route.num_rows * grouped.route.top_k == 0) {
    return;
  }
  const Call call(given.hidden_states);
  Tensor memory = workspace(given.hidden_states, moe_compact_workspace(grouped.route, shape));
  check(op, launch(grouped.hidden_states, grouped.route, records, given.activation, biases,
                   grouped.out, memory.mutable_data_ptr(), call.stream()));
}

speq::Fp8Blocks fp8_blocks(const char *op, std::int64_t rows, std::int64_t columns) {
  const speq::Fp8Blocks blocks{rows, columns};
  STD_TORCH_CHECK(blocks.valid(), op, ": blocks are ", rows, " by ", columns,
                  " and must have 1 row or multiples of ", speq::kQuadRows, ", and multiples of ",
                  speq::kBlockColumns, " columns");
  return blocks;
}

void decode_fp8_out(Tensor record, std::int64_t block_rows, std::int64_t block_columns,
                    Tensor gate_up_proj, Tensor down_proj) {
  constexpr const char *op = "decode_fp8";
  const ExpertShape shape = exact_shape(op, gate_up_proj, down_proj);
  const speq::Fp8Blocks blocks = fp8_blocks(op, block_rows, block_columns);
  const std::int64_t nbytes = speq::fp8_layout(shape, blocks).nbytes;
  decode_record(op, record, nbytes, gate_up_proj, down_proj, [&](const Records &held, auto... to) {
    return decode_fp8(held, shape, blocks, to...);
  });
}

void moe_grouped_fp8_out(Tensor hidden_states, Tensor topk_ids, Tensor slot_table, Tensor slots,
                         std::int64_t expert_width, std::int64_t block_rows,
                         std::int64_t block_columns, std::int64_t activation, double limit,
                         Tensor out, OptionalTensor gate_up_bias, OptionalTensor down_bias) {
  constexpr const char *op = "moe_grouped_fp8";
  const Activation act = activation_of(op, activation, limit);
  const ExpertShape shape = expert_shape(op, hidden_states, expert_width, act);
  const speq::Fp8Blocks blocks = fp8_blocks(op, block_rows, block_columns);
  const std::int64_t nbytes = speq::fp8_layout(shape, blocks).nbytes;
  run_grouped(op, {hidden_states, topk_ids, slot_table, slots, act, out, gate_up_bias, down_bias},
              shape, nbytes,
              [&](const Values &rows, const Route &route, const Records &held, auto... to) {
                return moe_grouped_fp8(rows, route, held, shape, blocks, to...);
              });
}

void check_blocks(const char *op, const ExpertShape &shape) {
  STD_TORCH_CHECK(shape.hidden_size % speq::kMxfp4Block == 0 &&
                      shape.expert_width % speq::kMxfp4Block == 0,
                  op, ": experts must have sizes that are multiples of ", speq::kMxfp4Block);
  STD_TORCH_CHECK(shape.gated, op, ": experts must have a gate");
}

void decode_mxfp4_out(Tensor record, Tensor gate_up_proj, Tensor down_proj) {
  constexpr const char *op = "decode_mxfp4";
  const ExpertShape shape = exact_shape(op, gate_up_proj, down_proj);
  check_blocks(op, shape);
  const std::int64_t nbytes = speq::mxfp4_layout(shape).nbytes;
  decode_record(op, record, nbytes, gate_up_proj, down_proj,
                [&](const Records &held, auto... to) { return decode_mxfp4(held, shape, to...); });
}

void moe_grouped_mxfp4_out(Tensor hidden_states, Tensor topk_ids, Tensor slot_table, Tensor slots,
                           std::int64_t expert_width, std::int64_t activation, double limit,
                           Tensor out, OptionalTensor gate_up_bias, OptionalTensor down_bias) {
  constexpr const char *op = "moe_grouped_mxfp4";
  const Activation act = activation_of(op, activation, limit);
  const ExpertShape shape = expert_shape(op, hidden_states, expert_width, act);
  check_blocks(op, shape);
  const std::int64_t nbytes = speq::mxfp4_layout(shape).nbytes;
  run_grouped(op, {hidden_states, topk_ids, slot_table, slots, act, out, gate_up_bias, down_bias},
              shape, nbytes,
              [&](const Values &rows, const Route &route, const Records &held, auto... to) {
                return moe_grouped_mxfp4(rows, route, held, shape, to...);
              });
}

// Groups of a size that both widths are multiples of.
speq::Int4Groups groups_of(const char *op, const ExpertShape &shape, std::int64_t group_size,
                           bool zeros, bool halves) {
  STD_TORCH_CHECK(group_size > 0 && group_size % speq::kInt4Columns == 0 &&
                      shape.hidden_size % group_size == 0 && shape.expert_width % group_size == 0,
                  op, ": experts must have sizes that are multiples of group_size, and that of ",
                  speq::kInt4Columns);
  return {group_size, zeros, halves};
}

void decode_int4_out(Tensor record, std::int64_t group_size, bool zeros, bool halves,
                     Tensor gate_up_proj, Tensor down_proj) {
  constexpr const char *op = "decode_int4";
  const ExpertShape shape = exact_shape(op, gate_up_proj, down_proj);
  const speq::Int4Groups groups = groups_of(op, shape, group_size, zeros, halves);
  const std::int64_t nbytes = speq::int4_layout(shape, groups).nbytes;
  decode_record(op, record, nbytes, gate_up_proj, down_proj, [&](const Records &held, auto... to) {
    return decode_int4(held, shape, groups, to...);
  });
}

void moe_grouped_int4_out(Tensor hidden_states, Tensor topk_ids, Tensor slot_table, Tensor slots,
                          std::int64_t expert_width, std::int64_t group_size, bool zeros,
                          bool halves, std::int64_t activation, double limit, Tensor out,
                          OptionalTensor gate_up_bias, OptionalTensor down_bias) {
  constexpr const char *op = "moe_grouped_int4";
  const Activation act = activation_of(op, activation, limit);
  const ExpertShape shape = expert_shape(op, hidden_states, expert_width, act);
  const speq::Int4Groups groups = groups_of(op, shape, group_size, zeros, halves);
  const std::int64_t nbytes = speq::int4_layout(shape, groups).nbytes;
  run_grouped(op, {hidden_states, topk_ids, slot_table, slots, act, out, gate_up_bias, down_bias},
              shape, nbytes,
              [&](const Values &rows, const Route &route, const Records &held, auto... to) {
                return moe_grouped_int4(rows, route, held, shape, groups, to...);
              });
}

void check_columns(const char *op, const ExpertShape &shape) {
  STD_TORCH_CHECK(shape.hidden_size % speq::kNvfp4Columns == 0 &&
                      shape.expert_width % speq::kNvfp4Columns == 0,
                  op, ": experts must have sizes that are multiples of ", speq::kNvfp4Columns);
}

void decode_nvfp4_out(Tensor record, bool divides, Tensor gate_up_proj, Tensor down_proj) {
  constexpr const char *op = "decode_nvfp4";
  const ExpertShape shape = exact_shape(op, gate_up_proj, down_proj);
  check_columns(op, shape);
  const std::int64_t nbytes = speq::nvfp4_layout(shape).nbytes;
  decode_record(op, record, nbytes, gate_up_proj, down_proj, [&](const Records &held, auto... to) {
    return decode_nvfp4(held, shape, divides, to...);
  });
}

void moe_grouped_nvfp4_out(Tensor hidden_states, Tensor topk_ids, Tensor slot_table, Tensor slots,
                           std::int64_t expert_width, bool divides, std::int64_t activation,
                           double limit, Tensor out, OptionalTensor gate_up_bias,
                           OptionalTensor down_bias) {
  constexpr const char *op = "moe_grouped_nvfp4";
  const Activation act = activation_of(op, activation, limit);
  const ExpertShape shape = expert_shape(op, hidden_states, expert_width, act);
  check_columns(op, shape);
  const std::int64_t nbytes = speq::nvfp4_layout(shape).nbytes;
  run_grouped(op, {hidden_states, topk_ids, slot_table, slots, act, out, gate_up_bias, down_bias},
              shape, nbytes,
              [&](const Values &rows, const Route &route, const Records &held, auto... to) {
                return moe_grouped_nvfp4(rows, route, held, shape, divides, to...);
              });
}

void bind(torch::stable::detail::StableLibrary &m) {
  m.impl("decode_fp8_out", TORCH_BOX(&decode_fp8_out));
  m.impl("moe_grouped_fp8_out", TORCH_BOX(&moe_grouped_fp8_out));
  m.impl("decode_mxfp4_out", TORCH_BOX(&decode_mxfp4_out));
  m.impl("moe_grouped_mxfp4_out", TORCH_BOX(&moe_grouped_mxfp4_out));
  m.impl("decode_int4_out", TORCH_BOX(&decode_int4_out));
  m.impl("moe_grouped_int4_out", TORCH_BOX(&moe_grouped_int4_out));
  m.impl("decode_nvfp4_out", TORCH_BOX(&decode_nvfp4_out));
  m.impl("moe_grouped_nvfp4_out", TORCH_BOX(&moe_grouped_nvfp4_out));
}

} // namespace

#ifdef USE_CUDA
STABLE_TORCH_LIBRARY_IMPL(speq, CUDA, m) { bind(m); }
#else
STABLE_TORCH_LIBRARY_IMPL(speq_cuda_on_host, CPU, m) { bind(m); }
#endif
