// Binds the ops over compact dense matrices; the others are in bindings.cpp, which says how.

#include <stdexcept>
#include <string>

#include "cpu/linear_binding.h"
#include "cpu/op_list.h"
#include "cpu/record_binding.h"

namespace {

using namespace speq;
using namespace speq::cpu;

// Columns above it would give a quad more bytes of streams than an entry of the index can tell.
constexpr std::int64_t kMostColumns = 1 << 27;

CompactLayout layout_of(std::int64_t rows, std::int64_t columns, bool lossless) {
  STD_TORCH_CHECK(rows > 0 && columns > 0 && columns < kMostColumns, "a matrix of ", rows, " by ",
                  columns, " is empty or too large for a compact record");
  return dense_layout(rows, columns, lossless);
}

LosslessRows lossless_matrix(const Tensor &record, std::int64_t rows, std::int64_t columns) {
  const CompactLayout layout = layout_of(rows, columns, true);
  return lossless_rows(layout, record_of(record, layout.fixed_bytes()), 0);
}

ResidualRows residual_matrix(const Tensor &record, const Tensor &qweight, const Tensor &scales,
                             std::int64_t columns) {
  STD_TORCH_CHECK(qweight.dim() == 2, "qweight must be a matrix");
  const CompactLayout layout = layout_of(qweight.size(0), columns, false);
  const Int4Slots codes = int4_slots(qweight, scales, qweight.size(0), columns, "dense");
  return residual_rows(layout, record_of(record, layout.fixed_bytes()), 0, codes.matrix(0));
}

const BFloat16 *words_of(const Tensor &weight) {
  check(weight, "weight", 2, ScalarType::BFloat16);
  return static_cast<const BFloat16 *>(weight.const_data_ptr());
}

void encode_dense_lossless_out(Tensor weight, Tensor record, Tensor nbytes) {
  const BFloat16 *words = words_of(weight);
  LosslessEncoder encoder(layout_of(weight.size(0), weight.size(1), true), {words}, kOnlyMatrix);
  encode(encoder, record, nbytes);
}

void encode_dense_residual_out(Tensor weight, Tensor qweight, Tensor scales, Tensor record,
                               Tensor nbytes) {
  const BFloat16 *words = words_of(weight);
  const std::int64_t rows = weight.size(0), columns = weight.size(1);
  const Int4Slots codes = int4_slots(qweight, scales, rows, columns, "dense");
  ResidualEncoder encoder(layout_of(rows, columns, false), {words}, {codes.matrix(0)}, kOnlyMatrix);
  encode(encoder, record, nbytes);
}

// Words of the rows from `first` on, as many as `weight` has.
template <typename Rows> void decode(const Rows &matrix, std::int64_t first, Tensor &weight) {
  check(weight, "weight", 2, ScalarType::BFloat16);
  const std::int64_t end = first + weight.size(0);
  STD_TORCH_CHECK(weight.size(1) == matrix.columns && first >= 0 && first % kQuadRows == 0 &&
                      end <= matrix.rows && (end % kQuadRows == 0 || end == matrix.rows),
                  "weight must take whole quads of rows of the matrix");
  decode_quads(matrix, first / kQuadRows, quads_of(end),
               static_cast<BFloat16 *>(weight.mutable_data_ptr()));
}

void decode_dense_lossless_out(Tensor record, std::int64_t rows, std::int64_t first,
                               Tensor weight) {
  STD_TORCH_CHECK(weight.dim() == 2, "weight must be a matrix");
  decode(lossless_matrix(record, rows, weight.size(1)), first, weight);
}

void decode_dense_residual_out(Tensor record, Tensor qweight, Tensor scales, std::int64_t first,
                               Tensor weight) {
  check(weight, "weight", 2, ScalarType::BFloat16);
  decode(residual_matrix(record, qweight, scales, weight.size(1)), first, weight);
}

template <typename Rows>
void linear(const Tensor &inputs, const Rows &matrix, const std::optional<Tensor> &bias,
            Tensor &out) {
  run_linear(inputs, matrix.rows, Word::bfloat16, bias, out,
             [&](std::int64_t begin, std::int64_t end, const Inputs &of, float *const *outs) {
               dot_rows(matrix, begin, end, of, outs);
             });
}

void linear_lossless_out(Tensor inputs, Tensor record, std::optional<Tensor> bias, Tensor out) {
  STD_TORCH_CHECK(inputs.dim() == 2 && out.dim() == 2, "inputs and out must be matrices");
  linear(inputs, lossless_matrix(record, out.size(1), inputs.size(1)), bias, out);
}

void linear_residual_out(Tensor inputs, Tensor record, Tensor qweight, Tensor scales,
                         std::optional<Tensor> bias, Tensor out) {
  STD_TORCH_CHECK(inputs.dim() == 2, "inputs must be a matrix");
  linear(inputs, residual_matrix(record, qweight, scales, inputs.size(1)), bias, out);
}

// Row ids[i] of the matrix into row i of out. A quad is decoded for each of them.
template <typename Rows> void rows_of(const Rows &matrix, const Tensor &ids, Tensor &out) {
  check(ids, "ids", 1, ScalarType::Long);
  check(out, "out", 2, ScalarType::BFloat16);
  STD_TORCH_CHECK(out.size(0) == ids.numel() && out.size(1) == matrix.columns,
                  "out must have a row for each of ids");
  for (const std::int64_t id : ids_of(ids)) {
    if (id < 0 || id >= matrix.rows) {
      throw std::out_of_range("ids holds " + std::to_string(id) + "; there are " +
                              std::to_string(matrix.rows) + " rows");
    }
  }
  auto *words = static_cast<BFloat16 *>(out.mutable_data_ptr());
  const std::int64_t columns = matrix.columns;
  const auto decode = coded_kernels(matrix).decode;
  parallel_for(0, ids.numel(), grain(kQuadRows * columns * bytes_of(Word::bfloat16)),
               [&](std::int64_t begin, std::int64_t end) {
                 Buffer<BFloat16> quad(kQuadRows * columns);
                 for (std::int64_t i = begin; i < end; ++i) {
                   const std::int64_t id = ids_of(ids)[i];
                   decode(matrix, id / kQuadRows, quad.data());
                   std::copy_n(quad.data() + id % kQuadRows * columns, columns,
                               words + i * columns);
                 }
               });
}

void rows_lossless_out(Tensor record, std::int64_t rows, Tensor ids, Tensor out) {
  STD_TORCH_CHECK(out.dim() == 2, "out must be a matrix");
  rows_of(lossless_matrix(record, rows, out.size(1)), ids, out);
}

void rows_residual_out(Tensor record, Tensor qweight, Tensor scales, Tensor ids, Tensor out) {
  STD_TORCH_CHECK(out.dim() == 2, "out must be a matrix");
  rows_of(residual_matrix(record, qweight, scales, out.size(1)), ids, out);
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(speq, CPU, m) {
  m.impl("encode_dense_lossless_out", SPEQ_BOX(encode_dense_lossless_out));
  m.impl("decode_dense_lossless_out", SPEQ_BOX(decode_dense_lossless_out));
  m.impl("linear_lossless_out", SPEQ_BOX(linear_lossless_out));
  m.impl("rows_lossless_out", SPEQ_BOX(rows_lossless_out));
  m.impl("encode_dense_residual_out", SPEQ_BOX(encode_dense_residual_out));
  m.impl("decode_dense_residual_out", SPEQ_BOX(decode_dense_residual_out));
  m.impl("linear_residual_out", SPEQ_BOX(linear_residual_out));
  m.impl("rows_residual_out", SPEQ_BOX(rows_residual_out));
}
