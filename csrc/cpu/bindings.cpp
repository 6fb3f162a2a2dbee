// Binds the CPU kernels to the schemas that speq/native.py declares, through torch's stable ABI.
// Arguments are checked once, in the public wrappers of speq/ops.py; the checks here only guard
// against memory errors when an op is called around them.

#include <atomic>
#include <optional>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include "cpu/linear.h"
#include "cpu/moe_grouped.h"
#include "cpu/moe_int4.h"

namespace {

using namespace speq;
using namespace speq::cpu;
using torch::headeronly::ScalarType;
using torch::stable::parallel_for;
using torch::stable::Tensor;

// Bytes of weights a thread should have before it is worth waking another.
constexpr std::int64_t kGrainBytes = 128 << 10;

std::int64_t grain(std::int64_t bytes_per_item) {
  return 1 + kGrainBytes / std::max<std::int64_t>(bytes_per_item, 1);
}

void check(const Tensor &tensor, const char *name, std::int64_t dim, ScalarType type) {
  STD_TORCH_CHECK(tensor.dim() == dim && tensor.is_contiguous() && tensor.scalar_type() == type,
                  name, " has another dtype, layout or number of dimensions than it must");
}

std::span<const std::int64_t> ids_of(const Tensor &tensor) {
  return {static_cast<const std::int64_t *>(tensor.const_data_ptr()), std::size_t(tensor.numel())};
}

Activation activation_of(std::int64_t code) {
  STD_TORCH_CHECK(code >= 0 && code < kActivations, "activation is ", code, "; it must be from 0 ",
                  "to ", kActivations - 1);
  return Activation(code);
}

// Calls body with a null pointer to the C++ type of a tensor's elements.
template <typename Body> void with_type(const Tensor &tensor, const char *name, const Body &body) {
  switch (tensor.scalar_type()) {
  case ScalarType::Float:
    return body(static_cast<float *>(nullptr));
  case ScalarType::Double:
    return body(static_cast<double *>(nullptr));
  case ScalarType::BFloat16:
    return body(static_cast<BFloat16 *>(nullptr));
  case ScalarType::Half:
    return body(static_cast<Float16 *>(nullptr));
  default:
    STD_TORCH_CHECK(false, name, " must be float32, float64, bfloat16 or float16");
  }
}

Buffer<float> to_floats(const Tensor &tensor, const char *name) {
  STD_TORCH_CHECK(tensor.is_contiguous(), name, " must be contiguous");
  const std::int64_t count = tensor.numel();
  Buffer<float> floats(count);
  with_type(tensor, name, [&](auto *type) {
    const auto *words =
        static_cast<const std::remove_pointer_t<decltype(type)> *>(tensor.const_data_ptr());
    for (std::int64_t i = 0; i < count; ++i) {
      floats[i] = to_float(words[i]);
    }
  });
  return floats;
}

void from_floats(const Buffer<float> &floats, Tensor &out) {
  STD_TORCH_CHECK(out.is_contiguous(), "out must be contiguous");
  const std::int64_t count = out.numel();
  with_type(out, "out", [&](auto *type) {
    auto *words = static_cast<decltype(type)>(out.mutable_data_ptr());
    for (std::int64_t i = 0; i < count; ++i) {
      store(floats.data()[i], words[i]);
    }
  });
}

// Codes and scales of matrices [rows, columns] in the last two dimensions.
Int4Slots int4_slots(const Tensor &qweight, const Tensor &scales, std::int64_t rows,
                     std::int64_t columns, const char *name) {
  check(qweight, name, qweight.dim(), ScalarType::Byte);
  check(scales, name, qweight.dim(), ScalarType::Half);
  const std::int64_t last = qweight.dim() - 1, groups = scales.size(last);
  STD_TORCH_CHECK(
      qweight.size(last - 1) == rows && scales.size(last - 1) == rows &&
          qweight.size(last) * 2 == columns && groups > 0 && columns % groups == 0 &&
          (columns / groups) % 2 == 0 && (last < 2 || qweight.size(0) == scales.size(0)),
      name, ": qweight and scales do not describe matrices [", rows, ", ", columns, "]");
  return {static_cast<const std::uint8_t *>(qweight.const_data_ptr()),
          static_cast<const Float16 *>(scales.const_data_ptr()), rows, columns, columns / groups};
}

// What a perm holds is checked where a bank is made: it is too long to look at in every call.
const std::int32_t *perm_of(const std::optional<Tensor> &perm, std::int64_t matrices,
                            std::int64_t columns) {
  if (!perm.has_value()) {
    return nullptr;
  }
  check(*perm, "input_perm", perm->dim(), ScalarType::Int);
  STD_TORCH_CHECK(perm->numel() == matrices * columns && perm->size(perm->dim() - 1) == columns,
                  "input_perm must name ", columns, " inputs of each of ", matrices, " matrices");
  return static_cast<const std::int32_t *>(perm->const_data_ptr());
}

void linear_int4_out(Tensor inputs, Tensor qweight, Tensor scales, std::optional<Tensor> input_perm,
                     Tensor out) {
  STD_TORCH_CHECK(inputs.dim() == 2 && out.dim() == 2 && qweight.dim() == 2 &&
                      inputs.size(0) == out.size(0),
                  "inputs, qweight and out must be matrices, inputs and out of as many rows");
  const std::int64_t rows = inputs.size(0), columns = inputs.size(1);
  if (out.numel() == 0) {
    return;
  }
  const Int4Slots slots = int4_slots(qweight, scales, out.size(1), columns, "linear_int4");
  const std::int32_t *perm = perm_of(input_perm, 1, columns);
  const Buffer<float> values = to_floats(inputs, "inputs");
  Int8Rows rounded(rows, columns);
  Buffer<float> results(rows * slots.rows);
  std::vector<const Int8Step *> steps(rows);
  for (std::int64_t row = 0; row < rows; ++row) {
    rounded.round_row(row, values.data() + row * columns, perm);
    steps[row] = rounded.row(row);
  }
  const Int4Matrix matrix = slots.matrix(0);
  const DotInt4 dot = dot_int4_for(matrix);
  parallel_for(0, slots.rows, grain(columns / 2), [&](std::int64_t begin, std::int64_t end) {
    std::vector<float *> outs(rows);
    for (std::int64_t row = 0; row < rows; ++row) {
      outs[row] = results.data() + row * slots.rows + begin;
    }
    dot(matrix, begin, end, steps.data(), rows, outs.data());
  });
  from_floats(results, out);
}

void moe_int4_out(Tensor hidden_states, Tensor topk_ids, Tensor topk_weights, Tensor base_slots,
                  Tensor gate_up_qweight, Tensor gate_up_scales, Tensor down_qweight,
                  Tensor down_scales, std::optional<Tensor> input_perm, std::int64_t activation,
                  Tensor out) {
  STD_TORCH_CHECK(hidden_states.dim() == 2 && out.dim() == 2 &&
                      out.size(0) == hidden_states.size(0) &&
                      out.size(1) == hidden_states.size(1) && gate_up_qweight.dim() == 3 &&
                      down_qweight.dim() == 3 && gate_up_qweight.size(0) == down_qweight.size(0),
                  "hidden_states and out must be matrices of one shape, gate_up and down experts "
                  "in as many base slots");
  check(topk_ids, "topk_ids", 2, ScalarType::Long);
  check(topk_weights, "topk_weights", 2, ScalarType::Float);
  check(base_slots, "base_slots", 1, ScalarType::Long);
  const std::int64_t rows = hidden_states.size(0), hidden_size = hidden_states.size(1);
  STD_TORCH_CHECK(topk_ids.size(0) == rows && topk_weights.size(0) == rows &&
                      topk_weights.size(1) == topk_ids.size(1),
                  "topk_ids and topk_weights must have a row for each of hidden_states");
  if (out.numel() == 0) {
    return;
  }
  const std::int64_t width = down_qweight.size(2) * 2, num_slots = gate_up_qweight.size(0);
  const Buffer<float> values = to_floats(hidden_states, "hidden_states");
  const MoeInt4Problem problem{
      rows,
      topk_ids.size(1),
      values.data(),
      ids_of(topk_ids),
      static_cast<const float *>(topk_weights.const_data_ptr()),
      ids_of(base_slots),
      num_slots,
      int4_slots(gate_up_qweight, gate_up_scales, 2 * width, hidden_size, "gate_up"),
      int4_slots(down_qweight, down_scales, hidden_size, width, "down"),
      perm_of(input_perm, num_slots, hidden_size),
      activation_of(activation),
  };
  MoeInt4 moe(problem);
  Buffer<float> results(rows * hidden_size);
  parallel_for(0, moe.inputs(), grain(hidden_size * 4),
               [&](std::int64_t begin, std::int64_t end) { moe.round_inputs(begin, end); });
  parallel_for(0, moe.inner_tiles(), grain(MoeInt4::kTile * hidden_size),
               [&](std::int64_t begin, std::int64_t end) { moe.gate_up(begin, end); });
  const std::int64_t down_bytes = MoeInt4::kTile * width / 2 * (topk_ids.size(1));
  parallel_for(0, moe.out_tiles(), grain(down_bytes),
               [&](std::int64_t begin, std::int64_t end) { moe.down(begin, end, results.data()); });
  from_floats(results, out);
}

Word word_of(const Tensor &tensor, const char *name) {
  switch (tensor.scalar_type()) {
  case ScalarType::Float:
    return Word::float32;
  case ScalarType::BFloat16:
    return Word::bfloat16;
  case ScalarType::Half:
    return Word::float16;
  default:
    STD_TORCH_CHECK(false, name, " must be float32, bfloat16 or float16");
  }
}

ExactSlots exact_slots(const Tensor &tensor, const char *name) {
  STD_TORCH_CHECK(tensor.dim() == 3 && tensor.stride(2) == 1 && tensor.stride(1) == tensor.size(2),
                  name, " must hold matrices whose rows follow one another");
  const Word word = word_of(tensor, name);
  return {static_cast<const std::byte *>(tensor.const_data_ptr()),
          tensor.stride(0) * bytes_of(word), tensor.size(1), tensor.size(2), word};
}

void moe_grouped_out(Tensor hidden_states, Tensor topk_ids, Tensor slot_table, Tensor gate_up_proj,
                     Tensor down_proj, std::int64_t activation, Tensor out) {
  STD_TORCH_CHECK(hidden_states.dim() == 2 && hidden_states.is_contiguous() && out.dim() == 3 &&
                      out.is_contiguous() && out.scalar_type() == hidden_states.scalar_type(),
                  "hidden_states [T, H] and out [T, K, H] must be contiguous and of one dtype");
  check(topk_ids, "topk_ids", 2, ScalarType::Long);
  check(slot_table, "slot_table", 1, ScalarType::Long);
  const std::int64_t rows = hidden_states.size(0), hidden_size = hidden_states.size(1);
  STD_TORCH_CHECK(topk_ids.size(0) == rows && out.size(0) == rows &&
                      out.size(1) == topk_ids.size(1) && out.size(2) == hidden_size,
                  "topk_ids must be [T, K] and out [T, K, H] of hidden_states [T, H]");
  if (out.numel() == 0) {
    return;
  }
  const ExactSlots gate_up = exact_slots(gate_up_proj, "gate_up_proj");
  const ExactSlots down = exact_slots(down_proj, "down_proj");
  STD_TORCH_CHECK(gate_up.columns == hidden_size && down.rows == hidden_size &&
                      gate_up.rows == 2 * down.columns && gate_up.word == down.word &&
                      gate_up_proj.size(0) == down_proj.size(0),
                  "gate_up_proj must be [S, 2F, H] and down_proj [S, H, F], of one dtype");
  const MoeGroupedProblem problem{
      rows,
      topk_ids.size(1),
      hidden_states.const_data_ptr(),
      word_of(hidden_states, "hidden_states"),
      ids_of(topk_ids),
      ids_of(slot_table),
      gate_up_proj.size(0),
      gate_up,
      down,
      activation_of(activation),
      out.mutable_data_ptr(),
  };
  MoeGrouped moe(problem);
  const std::int64_t word_bytes = bytes_of(gate_up.word);
  parallel_for(0, moe.inner_tiles(), grain(2 * moe.width_tile() * hidden_size * word_bytes),
               [&](std::int64_t begin, std::int64_t end) { moe.gate_up(begin, end); });
  parallel_for(0, moe.out_tiles(), grain(moe.hidden_tile() * down.columns * word_bytes),
               [&](std::int64_t begin, std::int64_t end) { moe.down(begin, end); });
}

void linear_out(Tensor inputs, Tensor weight, std::optional<Tensor> bias, Tensor out) {
  const ScalarType type = inputs.scalar_type();
  check(inputs, "inputs", 2, type);
  check(weight, "weight", 2, type);
  check(out, "out", 2, type);
  const std::int64_t rows = inputs.size(0), columns = inputs.size(1), outputs = weight.size(0);
  STD_TORCH_CHECK(weight.size(1) == columns && out.size(0) == rows && out.size(1) == outputs,
                  "inputs [R, K], weight [N, K] and out [R, N] do not fit together");
  if (bias.has_value()) {
    check(*bias, "bias", 1, type);
    STD_TORCH_CHECK(bias->size(0) == outputs, "bias must have an element for each output");
  }
  const Word word = word_of(inputs, "inputs");
  if (out.numel() == 0) {
    return;
  }
  const Linear linear({
      rows,
      columns,
      outputs,
      word,
      inputs.const_data_ptr(),
      weight.const_data_ptr(),
      bias.has_value() ? bias->const_data_ptr() : nullptr,
      out.mutable_data_ptr(),
  });
  parallel_for(0, outputs, grain(columns * bytes_of(word)),
               [&](std::int64_t begin, std::int64_t end) { linear.run(begin, end); });
}

void read_sum_out(Tensor words, Tensor out) {
  check(words, "words", 1, ScalarType::Long);
  check(out, "out", 1, ScalarType::Long);
  STD_TORCH_CHECK(out.numel() == 1, "out must hold one word");
  const auto *values = static_cast<const std::int64_t *>(words.const_data_ptr());
  std::atomic<std::uint64_t> sum{0};
  parallel_for(0, words.numel(), grain(8), [&](std::int64_t begin, std::int64_t end) {
    sum += std::uint64_t(micro_kernels().read_sum(values + begin, end - begin));
  });
  *static_cast<std::int64_t *>(out.mutable_data_ptr()) = std::int64_t(sum.load());
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(speq, CPU, m) {
  m.impl("linear_out", TORCH_BOX(&linear_out));
  m.impl("linear_int4_out", TORCH_BOX(&linear_int4_out));
  m.impl("moe_int4_out", TORCH_BOX(&moe_int4_out));
  m.impl("moe_grouped_out", TORCH_BOX(&moe_grouped_out));
  m.impl("read_sum_out", TORCH_BOX(&read_sum_out));
}
