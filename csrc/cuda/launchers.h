// Host functions that launch the kernels, with plain pointers. Bindings check shapes before.
// What arguments mean is said in speq/kernels/reference.py. Whether experts have a gate, their
// activation says as well as their shape. Workspaces are device memory of the
// size that the function beside says; each returns what went wrong, or null. Biases are of the
// dtype of the rows, but for moe_int4.
#pragma once

#include <cstddef>
#include <cstdint>

#include "activation.h"
#include "scaled.h"

namespace speq::cuda {

enum class Dtype : int { float32, float64, bfloat16, float16 };

// The most rows of a call, and positions of their routes.
constexpr int kMaxCallRows = 16;
constexpr int kMaxCallPositions = 256;
// The most columns of an INT4 matrix.
constexpr std::int64_t kMaxInt4Columns = 46340 * 32;

struct Values {
  void *values;
  Dtype dtype;
};

struct Int4Values {
  const void *qweight, *scales;
  std::int64_t slots, rows, columns, groups;
};

const char *linear_int4(Values inputs, std::int64_t num_rows, Int4Values weights,
                        const std::int32_t *input_perm, Values out, void *stream);

struct Route {
  const std::int64_t *topk_ids; // [num_rows, top_k]
  std::int64_t num_rows, top_k;
  const std::int64_t *slots; // [experts]: base_slots or slot_table
  std::int64_t experts;
};

// Of experts that have biases: gate_up [experts, gate_up rows], gate before up, and down [experts,
// hidden_size]. Null where there are none.
struct ExpertBiases {
  const void *gate_up = nullptr, *down = nullptr;
  Dtype dtype = Dtype::float32;
};

std::size_t moe_int4_workspace(const Route &route, std::int64_t width);

const char *moe_int4(Values hidden_states, Route route, const float *topk_weights,
                     Int4Values gate_up, Int4Values down, const std::int32_t *input_perm,
                     Activation activation, ExpertBiases biases, Values out, void *workspace,
                     void *stream);

// Matrices of experts; slots may be further apart than they are large.
struct SlotValues {
  const void *values;
  Dtype dtype;
  std::int64_t slots, slot_stride, rows, columns;
};

std::size_t moe_grouped_workspace(const Route &route, std::int64_t width, Dtype dtype);

const char *moe_grouped(Values hidden_states, Route route, SlotValues gate_up, SlotValues down,
                        Activation activation, ExpertBiases biases, void *out, void *workspace,
                        void *stream);

// The columns of a matrix of a compact record are fewer.
constexpr std::int64_t kMaxCompactColumns = 1 << 16;

// Compact records (compact.h), whose index must be aligned.
struct Records {
  const void *records;
  std::int64_t slots, slot_stride, slot_bytes;
};

// The codes that records are residuals of, in base slots.
struct BaseExperts {
  const std::int64_t *base_slots; // [experts]; null where there is one
  Int4Values gate_up, down;
  const std::int32_t *input_perm; // [base slots, hidden_size] or null
};

std::size_t moe_compact_workspace(const Route &route, ExpertShape shape);

const char *moe_grouped_lossless(Values hidden_states, Route route, Records slots,
                                 ExpertShape shape, Activation activation, ExpertBiases biases,
                                 void *out, void *workspace, void *stream);

const char *moe_grouped_residual(Values hidden_states, Route route, Records slots, BaseExperts base,
                                 Activation activation, ExpertBiases biases, void *out,
                                 void *workspace, void *stream);

// Records of codes with scales (scaled.h), which are aligned to four bytes.
const char *moe_grouped_fp8(Values hidden_states, Route route, Records slots, ExpertShape shape,
                            Fp8Blocks blocks, Activation activation, ExpertBiases biases, void *out,
                            void *workspace, void *stream);

const char *moe_grouped_mxfp4(Values hidden_states, Route route, Records slots, ExpertShape shape,
                              Activation activation, ExpertBiases biases, void *out,
                              void *workspace, void *stream);

const char *moe_grouped_int4(Values hidden_states, Route route, Records slots, ExpertShape shape,
                             Int4Groups groups, Activation activation, ExpertBiases biases,
                             void *out, void *workspace, void *stream);

// divides: whether the scales of matrices do.
const char *moe_grouped_nvfp4(Values hidden_states, Route route, Records slots, ExpertShape shape,
                              bool divides, Activation activation, ExpertBiases biases, void *out,
                              void *workspace, void *stream);

const char *decode_fp8(Records record, ExpertShape shape, Fp8Blocks blocks, void *gate_up,
                       void *down, void *stream);

const char *decode_mxfp4(Records record, ExpertShape shape, void *gate_up, void *down,
                         void *stream);

const char *decode_int4(Records record, ExpertShape shape, Int4Groups groups, void *gate_up,
                        void *down, void *stream);

const char *decode_nvfp4(Records record, ExpertShape shape, bool divides, void *gate_up, void *down,
                         void *stream);

const char *decode_lossless(Records record, ExpertShape shape, void *gate_up, void *down,
                            void *stream);

const char *decode_residual(Records record, BaseExperts base, void *gate_up, void *down,
                            void *stream);

// A dense matrix in a record of its own.
struct MatrixShape {
  std::int64_t rows, columns;
};

// Of linear_lossless and linear_residual.
std::size_t linear_compact_workspace(std::int64_t num_rows, std::int64_t columns);

const char *linear_lossless(Values inputs, std::int64_t num_rows, Records record, MatrixShape shape,
                            const void *bias, Values out, void *workspace, void *stream);

const char *linear_residual(Values inputs, std::int64_t num_rows, Records record, Int4Values codes,
                            const void *bias, Values out, void *workspace, void *stream);

const char *decode_dense_lossless(Records record, MatrixShape shape, std::int64_t first,
                                  std::int64_t count, void *out, void *stream);

const char *decode_dense_residual(Records record, Int4Values codes, std::int64_t first,
                                  std::int64_t count, void *out, void *stream);

const char *rows_lossless(Records record, MatrixShape shape, const std::int64_t *ids,
                          std::int64_t count, void *out, void *stream);

const char *rows_residual(Records record, Int4Values codes, const std::int64_t *ids,
                          std::int64_t count, void *out, void *stream);

std::size_t read_sum_workspace();

const char *read_sum(const std::int64_t *words, std::int64_t num_words, std::int64_t *out,
                     void *workspace, void *stream);

} // namespace speq::cuda
