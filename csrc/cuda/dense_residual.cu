// Dense matrices in residual records, over the codes of the draft.
#include "cuda/decode_residual.h"
#include "cuda/dense_compact.h"

namespace speq::cuda {
namespace {

ResidualSlots dense_residual(const Records &record, const Int4Values &codes) {
  const CompactLayout layout = dense_layout(codes.rows, codes.columns, false);
  const Int4Matrix matrix = int4_matrix(codes);
  return {record_slots(record, layout), nullptr, 1, matrix, matrix};
}

} // namespace

Error linear_residual(Values inputs, std::int64_t num_rows, Records record, Int4Values codes,
                      const void *bias, Values out, void *workspace, void *stream) {
  return linear_dense(inputs, num_rows, dense_residual(record, codes), bias, out, workspace,
                      stream);
}

Error decode_dense_residual(Records record, Int4Values codes, std::int64_t first,
                            std::int64_t count, void *out, void *stream) {
  return decode_rows(dense_residual(record, codes), first, count, out, stream);
}

Error rows_residual(Records record, Int4Values codes, const std::int64_t *ids, std::int64_t count,
                    void *out, void *stream) {
  return rows_by_id(dense_residual(record, codes), ids, count, out, stream);
}

} // namespace speq::cuda
