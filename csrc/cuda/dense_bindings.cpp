// Binds the ops over compact dense matrices; the others are in bindings.cpp, which says how.

#include <torch/csrc/stable/library.h>

#include "compact.h"
#include "cuda/tensors.h"

namespace {

using namespace speq::cuda;

MatrixShape shape_of(const char *op, std::int64_t rows, std::int64_t columns) {
  STD_TORCH_CHECK(rows > 0 && columns > 0 && rows < INT32_MAX && columns < kMaxCompactColumns, op,
                  ": a matrix of ", rows, " by ", columns, " is empty or too large");
  return {rows, columns};
}

Records record_of(const char *op, const Tensor &record, const MatrixShape &shape, bool lossless) {
  constexpr std::int64_t kEntry = alignof(std::uint32_t);
  const std::int64_t fixed_bytes =
      speq::dense_layout(shape.rows, shape.columns, lossless).fixed_bytes();
  STD_TORCH_CHECK(is(record, ScalarType::Byte, 1) && record.numel() >= fixed_bytes &&
                      record.numel() < INT32_MAX &&
                      reinterpret_cast<std::uintptr_t>(record.const_data_ptr()) % kEntry == 0,
                  op, ": record must have from ", fixed_bytes, " to ", INT32_MAX,
                  " bytes of uint8, aligned to four");
  return {record.const_data_ptr(), 1, 0, record.numel()};
}

Int4Values codes_of(const char *op, const Tensor &record, const Tensor &qweight,
                    const Tensor &scales) {
  const Int4Values codes = int4_values(op, qweight, scales, 2);
  shape_of(op, codes.rows, codes.columns);
  STD_TORCH_CHECK(same_device({&record, &qweight, &scales}), op,
                  ": arguments are on different devices");
  return codes;
}

MatrixShape shape_of(const Int4Values &codes) { return {codes.rows, codes.columns}; }

// Runs a product, where there is anything to compute; launch(inputs, bias, out, memory, stream).
template <typename Launch>
void linear(const char *op, const Tensor &inputs, const MatrixShape &shape, const Tensor &record,
            const std::optional<Tensor> &bias, const Tensor &out, const Launch &launch) {
  const ScalarType type = inputs.scalar_type();
  STD_TORCH_CHECK(is(inputs, type, 2) && is(out, type, 2) && type != ScalarType::Double &&
                      inputs.size(1) == shape.columns && out.size(1) == shape.rows &&
                      out.size(0) == inputs.size(0) && inputs.size(0) <= kMaxCallRows &&
                      same_device({&inputs, &record, &out}),
                  op, ": inputs or out are too many, not contiguous or not of the matrix");
  STD_TORCH_CHECK(!bias || (is(*bias, type, 1) && bias->size(0) == shape.rows &&
                            same_device({&inputs, &*bias})),
                  op, ": bias must be contiguous, of the dtype of inputs, one for each output");
  if (inputs.size(0) == 0) {
    return;
  }
  const Call call(inputs);
  Tensor memory = workspace(inputs, linear_compact_workspace(inputs.size(0), shape.columns));
  check(op, launch(values(op, inputs), bias ? bias->const_data_ptr() : nullptr, values(op, out),
                   memory.mutable_data_ptr(), call.stream()));
}

void linear_lossless_out(Tensor inputs, Tensor record, std::optional<Tensor> bias, Tensor out) {
  constexpr const char *op = "linear_lossless";
  STD_TORCH_CHECK(inputs.dim() == 2 && out.dim() == 2, op, ": inputs and out must be matrices");
  const MatrixShape shape = shape_of(op, out.size(1), inputs.size(1));
  const Records records = record_of(op, record, shape, true);
  linear(op, inputs, shape, record, bias, out,
         [&](Values rows, const void *added, Values to, void *memory, void *stream) {
           return linear_lossless(rows, inputs.size(0), records, shape, added, to, memory, stream);
         });
}

void linear_residual_out(Tensor inputs, Tensor record, Tensor qweight, Tensor scales,
                         std::optional<Tensor> bias, Tensor out) {
  constexpr const char *op = "linear_residual";
  const Int4Values codes = codes_of(op, record, qweight, scales);
  const Records records = record_of(op, record, shape_of(codes), false);
  linear(op, inputs, shape_of(codes), record, bias, out,
         [&](Values rows, const void *added, Values to, void *memory, void *stream) {
           return linear_residual(rows, inputs.size(0), records, codes, added, to, memory, stream);
         });
}

// Checks rows from `first` on of a matrix.
void check_rows(const char *op, const Tensor &record, std::int64_t first, const Tensor &weight,
                const MatrixShape &shape) {
  const std::int64_t end = first + weight.size(0);
  STD_TORCH_CHECK(is(weight, ScalarType::BFloat16, 2) && weight.size(1) == shape.columns &&
                      first >= 0 && first % speq::kQuadRows == 0 && end <= shape.rows &&
                      (end % speq::kQuadRows == 0 || end == shape.rows) &&
                      same_device({&record, &weight}),
                  op, ": weight must take whole quads of rows of the matrix");
}

void decode_dense_lossless_out(Tensor record, std::int64_t rows, std::int64_t first,
                               Tensor weight) {
  constexpr const char *op = "decode_dense_lossless";
  STD_TORCH_CHECK(weight.dim() == 2, op, ": weight must be a matrix");
  const MatrixShape shape = shape_of(op, rows, weight.size(1));
  const Records records = record_of(op, record, shape, true);
  check_rows(op, record, first, weight, shape);
  if (weight.size(0) > 0) {
    const Call call(record);
    check(op, decode_dense_lossless(records, shape, first, weight.size(0),
                                    weight.mutable_data_ptr(), call.stream()));
  }
}

void decode_dense_residual_out(Tensor record, Tensor qweight, Tensor scales, std::int64_t first,
                               Tensor weight) {
  constexpr const char *op = "decode_dense_residual";
  STD_TORCH_CHECK(weight.dim() == 2, op, ": weight must be a matrix");
  const Int4Values codes = codes_of(op, record, qweight, scales);
  const Records records = record_of(op, record, shape_of(codes), false);
  check_rows(op, record, first, weight, shape_of(codes));
  if (weight.size(0) > 0) {
    const Call call(record);
    check(op, decode_dense_residual(records, codes, first, weight.size(0),
                                    weight.mutable_data_ptr(), call.stream()));
  }
}

void check_ids(const char *op, const Tensor &record, const Tensor &ids, const Tensor &out) {
  STD_TORCH_CHECK(is(ids, ScalarType::Long, 1) && is(out, ScalarType::BFloat16, 2) &&
                      out.size(0) == ids.size(0) && ids.size(0) < INT32_MAX &&
                      same_device({&record, &ids, &out}),
                  op, ": ids must be int64, and out bfloat16 with a row for each of them");
}

void rows_lossless_out(Tensor record, std::int64_t rows, Tensor ids, Tensor out) {
  constexpr const char *op = "rows_lossless";
  check_ids(op, record, ids, out);
  const MatrixShape shape = shape_of(op, rows, out.size(1));
  const Records records = record_of(op, record, shape, true);
  if (ids.size(0) > 0) {
    const Call call(record);
    check(op, rows_lossless(records, shape, data<std::int64_t>(ids), ids.size(0),
                            out.mutable_data_ptr(), call.stream()));
  }
}

void rows_residual_out(Tensor record, Tensor qweight, Tensor scales, Tensor ids, Tensor out) {
  constexpr const char *op = "rows_residual";
  check_ids(op, record, ids, out);
  const Int4Values codes = codes_of(op, record, qweight, scales);
  STD_TORCH_CHECK(out.size(1) == codes.columns, op, ": out must have the columns of the matrix");
  const Records records = record_of(op, record, shape_of(codes), false);
  if (ids.size(0) > 0) {
    const Call call(record);
    check(op, rows_residual(records, codes, data<std::int64_t>(ids), ids.size(0),
                            out.mutable_data_ptr(), call.stream()));
  }
}

void bind(torch::stable::detail::StableLibrary &m) {
  m.impl("linear_lossless_out", TORCH_BOX(&linear_lossless_out));
  m.impl("linear_residual_out", TORCH_BOX(&linear_residual_out));
  m.impl("decode_dense_lossless_out", TORCH_BOX(&decode_dense_lossless_out));
  m.impl("decode_dense_residual_out", TORCH_BOX(&decode_dense_residual_out));
  m.impl("rows_lossless_out", TORCH_BOX(&rows_lossless_out));
  m.impl("rows_residual_out", TORCH_BOX(&rows_residual_out));
}

} // namespace

#ifdef USE_CUDA
STABLE_TORCH_LIBRARY_IMPL(speq, CUDA, m) { bind(m); }
#else
STABLE_TORCH_LIBRARY_IMPL(speq_cuda_on_host, CPU, m) { bind(m); }
#endif
