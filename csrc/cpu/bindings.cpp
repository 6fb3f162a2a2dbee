// Binds the CPU kernels to the schemas that speq/kernels/library.py declares, through torch's
// stable ABI. Arguments are checked once, in the public wrappers of speq/kernels/ops.py; the checks
// here only guard against memory errors when an op is called around them.

#include <atomic>
#include <optional>

#include "cpu/grouped_binding.h"
#include "cpu/linear_binding.h"
#include "cpu/moe_int4.h"
#include "cpu/op_list.h"
#include "cpu/tensors.h"

namespace {

using namespace speq;
using namespace speq::cpu;

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
                  double limit, Tensor out, std::optional<Tensor> gate_up_bias,
                  std::optional<Tensor> down_bias) {
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
  const std::int64_t width = down_qweight.size(2) * 2, num_slots = gate_up_qweight.size(0);
  const Activation act = activation_of(activation, limit);
  const std::int64_t gate_up_rows = ExpertShape{hidden_size, width, has_gate(act)}.gate_up_rows();
  STD_TORCH_CHECK(
      gate_up_bias.has_value() == down_bias.has_value() &&
          (!gate_up_bias.has_value() || gate_up_bias->scalar_type() == down_bias->scalar_type()),
      "gate_up_bias and down_bias must both be there, of one dtype, or neither");
  const std::int64_t experts = base_slots.size(0);
  Int4Biases biases;
  if (gate_up_bias.has_value()) {
    const ScalarType type = gate_up_bias->scalar_type();
    biases = {bias_of(gate_up_bias, "gate_up_bias", experts, gate_up_rows, type),
              bias_of(down_bias, "down_bias", experts, hidden_size, type),
              word_of(*gate_up_bias, "gate_up_bias")};
  }
  if (out.numel() == 0) {
    return;
  }
  const Buffer<float> values = to_floats(hidden_states, "hidden_states");
  const MoeInt4Problem problem{
      rows,
      topk_ids.size(1),
      values.data(),
      ids_of(topk_ids),
      static_cast<const float *>(topk_weights.const_data_ptr()),
      ids_of(base_slots),
      num_slots,
      int4_slots(gate_up_qweight, gate_up_scales, gate_up_rows, hidden_size, "gate_up"),
      int4_slots(down_qweight, down_scales, hidden_size, width, "down"),
      perm_of(input_perm, num_slots, hidden_size),
      act,
      biases,
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

RawWeights::Slots raw_slots(const Tensor &tensor, const char *name) {
  STD_TORCH_CHECK(tensor.dim() == 3 && tensor.stride(2) == 1 && tensor.stride(1) == tensor.size(2),
                  name, " must hold matrices whose rows follow one another");
  return {static_cast<const std::byte *>(tensor.const_data_ptr()),
          tensor.stride(0) * bytes_of(word_of(tensor, name))};
}

void moe_grouped_out(Tensor hidden_states, Tensor topk_ids, Tensor slot_table, Tensor gate_up_proj,
                     Tensor down_proj, std::int64_t activation, double limit, Tensor out,
                     std::optional<Tensor> gate_up_bias, std::optional<Tensor> down_bias) {
  const RawWeights::Slots gate_up = raw_slots(gate_up_proj, "gate_up_proj");
  const RawWeights::Slots down = raw_slots(down_proj, "down_proj");
  STD_TORCH_CHECK(gate_up_proj.scalar_type() == down_proj.scalar_type() &&
                      gate_up_proj.size(0) == down_proj.size(0),
                  "gate_up_proj and down_proj must be of one dtype, of as many slots");
  const ExpertShape shape =
      shape_of(gate_up_proj.size(1), gate_up_proj.size(2), down_proj.size(1), down_proj.size(2));
  run_grouped(
      {hidden_states, topk_ids, slot_table, out, gate_up_bias, down_bias},
      RawWeights(shape, gate_up_proj.size(0), word_of(gate_up_proj, "gate_up_proj"), gate_up, down),
      activation_of(activation, limit));
}

void linear_out(Tensor inputs, Tensor weight, std::optional<Tensor> bias, Tensor out) {
  check(weight, "weight", 2, inputs.scalar_type());
  STD_TORCH_CHECK(inputs.dim() == 2 && weight.size(1) == inputs.size(1),
                  "inputs [R, K] and weight [N, K] do not fit together");
  const Word word = word_of(weight, "weight");
  const std::int64_t columns = weight.size(1), row_bytes = columns * bytes_of(word);
  const auto *words = static_cast<const std::byte *>(weight.const_data_ptr());
  run_linear(inputs, weight.size(0), word, bias, out,
             [=](std::int64_t begin, std::int64_t end, const Inputs &of, float *const *outs) {
               dot_exact_for(word, of.stored)(words + begin * row_bytes, columns, end - begin,
                                              of.rows, of.count, outs);
             });
}

// Matrices of any of the kernels' dtypes, in rows of whole groups.
void quantize_int4_out(Tensor weight, std::int64_t group_size, Tensor qweight, Tensor scales) {
  STD_TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous(), "weight must be [N, K], contiguous");
  const std::int64_t rows = weight.size(0), columns = weight.size(1);
  check(qweight, "qweight", 2, ScalarType::Byte);
  check(scales, "scales", 2, ScalarType::Half);
  STD_TORCH_CHECK(group_size > 0 && group_size % 2 == 0 && columns % group_size == 0 &&
                      qweight.size(0) == rows && scales.size(0) == rows &&
                      qweight.size(1) * 2 == columns && scales.size(1) * group_size == columns,
                  "qweight [N, K / 2] and scales [N, K / group_size] do not fit weight [N, K]");
  auto *codes = static_cast<std::uint8_t *>(qweight.mutable_data_ptr());
  auto *steps = static_cast<Float16 *>(scales.mutable_data_ptr());
  with_type(weight, "weight", [&](auto *type) {
    using Word = std::remove_pointer_t<decltype(type)>;
    const auto *words = static_cast<const Word *>(weight.const_data_ptr());
    parallel_for(0, rows, grain(columns * sizeof(Word)), [&](std::int64_t begin, std::int64_t end) {
      std::vector<float> values(group_size);
      for (std::int64_t at = begin * columns; at < end * columns; at += group_size) {
        for (std::int64_t i = 0; i < group_size; ++i) {
          values[i] = to_float(words[at + i]);
        }
        steps[at / group_size] =
            micro_kernels().round_group(values.data(), group_size, codes + at / 2);
      }
    });
  });
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
  m.impl("linear_out", SPEQ_BOX(linear_out));
  m.impl("linear_int4_out", SPEQ_BOX(linear_int4_out));
  m.impl("moe_int4_out", SPEQ_BOX(moe_int4_out));
  m.impl("moe_grouped_out", SPEQ_BOX(moe_grouped_out));
  m.impl("quantize_int4_out", SPEQ_BOX(quantize_int4_out));
  m.impl("read_sum_out", SPEQ_BOX(read_sum_out));
}
