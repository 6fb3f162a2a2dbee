// Binds the CPU kernels to the schemas that speq/ops.py declares, through torch's stable ABI.
// Arguments are checked once, in the public wrappers of speq/ops.py; the checks here only guard
// against memory errors when an op is called around them.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include "cpu/unpack_int4.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Codes one thread should have before it is worth waking another.
constexpr std::int64_t kGrainCodes = 1 << 15;

template <typename Out>
void unpack(const Tensor &qweight, const Tensor &scales, Tensor &out, std::int64_t group_size) {
  const std::int64_t rows = out.size(0), columns = out.size(1);
  const auto *codes = static_cast<const std::uint8_t *>(qweight.const_data_ptr());
  const auto *scale = static_cast<const speq::Float16 *>(scales.const_data_ptr());
  auto *values = static_cast<Out *>(out.mutable_data_ptr());
  torch::stable::parallel_for(
      0, rows, 1 + kGrainCodes / columns, [&](std::int64_t begin, std::int64_t end) {
        speq::cpu::unpack_int4<Out>(codes, scale, values, begin, end, columns, group_size);
      });
}

void unpack_int4_out(Tensor qweight, Tensor scales, Tensor out) {
  STD_TORCH_CHECK(qweight.dim() == 2 && scales.dim() == 2 && out.dim() == 2 &&
                      qweight.is_contiguous() && scales.is_contiguous() && out.is_contiguous() &&
                      qweight.scalar_type() == ScalarType::Byte &&
                      scales.scalar_type() == ScalarType::Half,
                  "unpack_int4: qweight must be a contiguous uint8 matrix, scales a contiguous "
                  "float16 matrix and out a contiguous matrix");
  const std::int64_t rows = out.size(0), columns = out.size(1);
  if (rows == 0 || columns == 0) {
    return;
  }
  const std::int64_t groups = scales.size(1);
  STD_TORCH_CHECK(qweight.size(0) == rows && scales.size(0) == rows &&
                      qweight.size(1) * 2 == columns && groups > 0 && columns % groups == 0 &&
                      (columns / groups) % 2 == 0,
                  "unpack_int4: qweight, scales and out do not describe one matrix");
  const std::int64_t group_size = columns / groups;
  switch (out.scalar_type()) {
  case ScalarType::Float:
    return unpack<float>(qweight, scales, out, group_size);
  case ScalarType::Double:
    return unpack<double>(qweight, scales, out, group_size);
  case ScalarType::BFloat16:
    return unpack<speq::BFloat16>(qweight, scales, out, group_size);
  case ScalarType::Half:
    return unpack<speq::Float16>(qweight, scales, out, group_size);
  default:
    STD_TORCH_CHECK(false, "unpack_int4: out must be float32, float64, bfloat16 or float16");
  }
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(speq, CPU, m) { m.impl("unpack_int4_out", TORCH_BOX(&unpack_int4_out)); }
