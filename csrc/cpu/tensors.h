// Arguments of ops as the kernels take them: checks that guard memory, and views.
#pragma once

#include <optional>
#include <span>

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include "cpu/exact_rows.h"
#include "cpu/moe_int4.h"
#include "cpu/pool.h"

namespace speq::cpu {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline void check(const Tensor &tensor, const char *name, std::int64_t dim, ScalarType type) {
  STD_TORCH_CHECK(tensor.dim() == dim && tensor.is_contiguous() && tensor.scalar_type() == type,
                  name, " has another dtype, layout or number of dimensions than it must");
}

inline std::span<const std::int64_t> ids_of(const Tensor &tensor) {
  return {static_cast<const std::int64_t *>(tensor.const_data_ptr()), std::size_t(tensor.numel())};
}

inline Activation activation_of(std::int64_t code, double limit) {
  STD_TORCH_CHECK(code >= 0 && code < kActivations, "activation is ", code, "; it must be from 0 ",
                  "to ", kActivations - 1);
  return {ActivationName(code), float(limit)};
}

// Codes and scales of matrices [rows, columns] in the last two dimensions.
inline Int4Slots int4_slots(const Tensor &qweight, const Tensor &scales, std::int64_t rows,
                            std::int64_t columns, const char *name) {
  check(qweight, name, qweight.dim(), ScalarType::Byte);
  check(scales, name, qweight.dim(), ScalarType::Half);
  const std::int64_t last = qweight.dim() - 1, groups = scales.size(last);
  STD_TORCH_CHECK(
      (last == 1 || last == 2) && qweight.size(last - 1) == rows && scales.size(last - 1) == rows &&
          qweight.size(last) * 2 == columns && columns > 0 && groups > 0 && columns % groups == 0 &&
          (columns / groups) % 2 == 0 && (last == 1 || qweight.size(0) == scales.size(0)),
      name, ": qweight and scales do not describe matrices [", rows, ", ", columns, "]");
  return {static_cast<const std::uint8_t *>(qweight.const_data_ptr()),
          static_cast<const Float16 *>(scales.const_data_ptr()), rows, columns, columns / groups};
}

// A perm is checked when its experts are loaded: it is too long to check in every call.
inline const std::int32_t *perm_of(const std::optional<Tensor> &perm, std::int64_t matrices,
                                   std::int64_t columns) {
  if (!perm.has_value()) {
    return nullptr;
  }
  check(*perm, "input_perm", perm->dim(), ScalarType::Int);
  STD_TORCH_CHECK(perm->numel() == matrices * columns && perm->size(perm->dim() - 1) == columns,
                  "input_perm must name ", columns, " inputs of each of ", matrices, " matrices");
  return static_cast<const std::int32_t *>(perm->const_data_ptr());
}

// Biases [experts, size] of experts; null where there are none.
inline const void *bias_of(const std::optional<Tensor> &bias, const char *name,
                           std::int64_t experts, std::int64_t size, ScalarType type) {
  if (!bias.has_value()) {
    return nullptr;
  }
  check(*bias, name, 2, type);
  STD_TORCH_CHECK(bias->size(0) == experts && bias->size(1) == size, name, " must be [", experts,
                  ", ", size, "]");
  return bias->const_data_ptr();
}

// Of experts whose gate_up is [gate_up_rows, hidden_size] and down [rows, expert_width].
inline ExpertShape shape_of(std::int64_t gate_up_rows, std::int64_t hidden_size, std::int64_t rows,
                            std::int64_t expert_width) {
  const ExpertShape shape{hidden_size, expert_width, gate_up_rows != expert_width};
  STD_TORCH_CHECK(gate_up_rows == shape.gate_up_rows() && rows == hidden_size,
                  "gate_up must be [2F, H], or [F, H] without a gate, and down [H, F]");
  return shape;
}

inline Word word_of(const Tensor &tensor, const char *name) {
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

} // namespace speq::cpu
