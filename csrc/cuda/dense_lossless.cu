// Dense matrices in lossless records.
#include "cuda/decode_lossless.h"
#include "cuda/dense_compact.h"

namespace speq::cuda {
namespace {

LosslessSlots dense_lossless(const Records &record, const MatrixShape &shape) {
  return {record_slots(record, dense_layout(shape.rows, shape.columns, true))};
}

} // namespace

Error linear_lossless(Values inputs, std::int64_t num_rows, Records record, MatrixShape shape,
                      const void *bias, Values out, void *workspace, void *stream) {
  return linear_dense(inputs, num_rows, dense_lossless(record, shape), bias, out, workspace,
                      stream);
}

Error decode_dense_lossless(Records record, MatrixShape shape, std::int64_t first,
                            std::int64_t count, void *out, void *stream) {
  return decode_rows(dense_lossless(record, shape), first, count, out, stream);
}

Error rows_lossless(Records record, MatrixShape shape, const std::int64_t *ids, std::int64_t count,
                    void *out, void *stream) {
  return rows_by_id(dense_lossless(record, shape), ids, count, out, stream);
}

} // namespace speq::cuda
