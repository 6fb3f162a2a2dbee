// The inner loops that are written once for each instruction set. All else is plain C++ over them.
#pragma once

#include <cstdint>

#include "compact.h"
#include "half.h"
#include "int4.h"
#include "scaled.h"

namespace speq::cpu {

// Columns of one step of the INT4 product: 64 bytes of codes.
constexpr std::int64_t kStepColumns = 128;
// A lane is 8 neighbouring columns: 4 bytes of codes, one 32-bit sum.
constexpr std::int64_t kLaneColumns = 8;
constexpr std::int64_t kStepLanes = kStepColumns / kLaneColumns;
// Columns that inputs of the exact product are padded to, with zeros.
constexpr std::int64_t kExactColumns = 32;

// INT8 inputs of one step, ordered as the nibbles of the codes fall out: low ones are even columns.
struct alignas(64) Int8Step {
  std::int8_t even[kStepColumns / 2];
  std::int8_t odd[kStepColumns / 2];
  std::int32_t start[kStepLanes]; // -8 times the sum of the lane's inputs: the codes' zero point
  float scale[kStepLanes];        // the scale of the block that the lane is in
};

// Steps that a row of inputs takes. Columns past its end are zero.
constexpr std::int64_t steps_of(std::int64_t columns) {
  return (columns + kStepColumns - 1) / kStepColumns;
}

// A symmetric INT4 matrix: qweight [rows, columns / 2], scales [rows, columns / group_size].
struct Int4Matrix {
  const std::uint8_t *qweight;
  const Float16 *scales;
  std::int64_t columns, group_size;

  SPEQ_MEMBER std::int64_t row_bytes() const { return columns / 2; }
  SPEQ_MEMBER std::int64_t row_groups() const { return columns / group_size; }
  // The same from a row on.
  SPEQ_MEMBER Int4Matrix from(std::int64_t row) const {
    return {qweight + row * row_bytes(), scales + row * row_groups(), columns, group_size};
  }
};

// A BF16 matrix of a compact record: a byte for each weight in `bytes`, and what the streams say.
struct CodedRows {
  std::int64_t rows, columns;
  const std::uint8_t *bytes, *streams;
  const std::uint32_t *index; // from the matrix's first quad on
  std::int64_t stream_bytes;

  SPEQ_MEMBER QuadStreams quad(std::int64_t quad) const {
    return quad_streams(index + quad, stream_bytes);
  }
};

struct LosslessRows : CodedRows {
  const std::uint8_t *high_bytes, *classes;
};

struct ResidualRows : CodedRows {
  Int4Matrix codes;
};

// Weight rows [begin, end) by `count` inputs: outs[r][n - begin] = row n . inputs[r].
using DotInt4 = void (*)(const Int4Matrix &matrix, std::int64_t begin, std::int64_t end,
                         const Int8Step *const *inputs, std::int64_t count, float *const *outs);

// The same of `rows` rows of words, whose first lies at `weights`, by inputs in float32 (`pairs`:
// in bfloat16). Accumulated in float32, in an order that depends on the columns alone.
using DotExact = void (*)(const void *weights, std::int64_t columns, std::int64_t rows,
                          const void *const *inputs, std::int64_t count, float *const *outs);

// The same of rows [begin, end) of a compact matrix, begin a multiple of a quad: rebuilt in
// registers while they are multiplied, and exactly what the products of their words are.
template <typename Rows>
using DotCoded = void (*)(const Rows &matrix, std::int64_t begin, std::int64_t end,
                          const void *const *inputs, std::int64_t count, float *const *outs);

// What a compact matrix is multiplied with, or read by; `pairs` null as above.
template <typename Rows> struct CodedKernels {
  DotCoded<Rows> dot, dot_pairs;
  // Words of the rows of a quad, `columns` of the matrix apart.
  void (*decode)(const Rows &matrix, std::int64_t quad, BFloat16 *words);
};

// Words of the rows of a quad, one row behind the other.
struct WordQuad {
  const BFloat16 *words;
  std::int64_t rows, columns;
};

// The high bytes that the classes of a lossless matrix stand for, and the class of each high byte.
struct ClassTable {
  std::uint8_t high_bytes[kClasses];
  alignas(64) std::uint8_t classes[256];
};

// Encodes a quad losslessly: low bytes and classes to where those of its rows lie in a record, and
// escapes to its stream. Returns the end of the stream; what lies less than kSlackBytes behind it
// may be overwritten.
using SplitQuad = std::uint8_t *(*)(const WordQuad &quad, const ClassTable &table,
                                    std::uint8_t *bytes, std::uint8_t *classes,
                                    std::uint8_t *stream);

// The two streams of a quad of residuals while they are filled, in one piece of memory: the front
// from its start upwards, the back, whose first run is the last, from its end downwards. Between
// them are kSlackBytes, into which vectors may be written whole.
struct FilledStreams {
  // Where the classes of a row of a block end, and the columns of those whose codes are not zero.
  struct BlockRow {
    std::uint8_t *classes_end;
    std::uint64_t exceptions;
  };
  std::uint8_t *front, *back;
  BlockRow *next_row;
  std::uint64_t exceptions; // any row's

  SPEQ_MEMBER void end_row(std::uint64_t of_row) {
    *next_row++ = {front, of_row};
    exceptions |= of_row;
  }
};

// Fills the streams of a quad; `codes` begin with its first row.
using FillStreams = void (*)(const WordQuad &quad, const Int4Matrix &codes, FilledStreams &streams);

// For each query q: sums[q][i] += the sum over `count` rows of words, `columns` each, of the
// query's weights by their words, in the order of the rows.
using AddRows = void (*)(const void *words, std::int64_t columns, std::int64_t count,
                         const float *const *weights, std::int64_t queries, float *const *sums);

// Of a softmax that is taken block by block: its largest value, and the sum of exponentials below.
struct SoftmaxSum {
  float most, sum;
};

// A token of a head with a state: a query, a key and decays between 0 and 1 of the state's rows, a
// value and an output of its columns. The gated delta rule takes back what the key finds in the
// state, the selective scan of Mamba-2 does not.
struct DeltaToken {
  const float *query, *key, *decays, *value;
  float beta;
  float *out;
  bool takes_back, by_row; // whether decays are one of each row, or one in all
};

// The token over a state [rows, columns], which it changes. A column's sums are added up row by
// row.
using DeltaStep = void (*)(float *state, std::int64_t rows, std::int64_t columns,
                           const DeltaToken &token);

// A matrix's columns in panels, each [depth, kPanelColumns]: a step down all columns of a panel is
// contiguous. Of bfloat16, two rows of the matrix lie side by side: [depth / 2, kPanelColumns, 2].
constexpr std::int64_t kPanelColumns = 16;
struct Panels {
  const void *first;
  std::int64_t count, stride; // elements from one panel to the next
  std::int64_t depth;
};
struct PanelRows {
  const void *first;
  std::int64_t count, stride;
};
// adds: the products are added to what is there.
struct PanelSums {
  float *first;
  std::int64_t stride;
  bool adds;
};
// Sums over the depth, from its begin to its end, whatever rows and panels there are besides.
using PanelProduct = void (*)(const PanelRows &rows, const Panels &panels, const PanelSums &sums);

constexpr std::int64_t kNeverInPanels = INT64_MAX;

struct MicroKernels {
  DotInt4 dot_int4; // group sizes for which `takes_group` holds
  DotExact dot_float32, dot_bfloat16, dot_float16;
  DotExact dot_bfloat16_pairs; // null where the processor has no such product
  // Round block `block` of a row, `columns` (at most 32) values, to INT8 in place in its steps.
  void (*round_block)(const float *values, std::int64_t columns, Int8Step *steps,
                      std::int64_t block);
  // Round a group of an even number of finite values to codes, two to the byte; their scale.
  Float16 (*round_group)(const float *values, std::int64_t count, std::uint8_t *codes);
  std::int64_t (*read_sum)(const std::int64_t *words, std::int64_t count);
  CodedKernels<LosslessRows> lossless;
  CodedKernels<ResidualRows> residual;
  AddRows add_float32, add_bfloat16, add_float16;
  // `scale` times the values to exponentials, relative to the largest value up to now; returns what
  // earlier exponentials have to be multiplied by.
  float (*soften)(float *values, std::int64_t count, float scale, SoftmaxSum &total);
  CodedKernels<Fp8Rows> fp8;
  CodedKernels<Mxfp4Rows> mxfp4;
  CodedKernels<Int4Rows> int4;
  CodedKernels<Nvfp4Rows> nvfp4;
  DeltaStep delta_step;
  PanelProduct panels, panel_pairs; // of floats; of bfloat16, null where no pairs are multiplied
  void (*round_bfloat16)(const float *values, std::int64_t count, BFloat16 *words);
  void (*widen_bfloat16)(const BFloat16 *words, std::int64_t count, float *values);
  // Inputs from which it was faster to lay them into panels than to multiply them as they lie.
  std::int64_t panel_inputs, panel_pair_inputs;
  SplitQuad split_quad;
  FillStreams fill_streams;
};

// Whether a vectorised dot_int4 takes a group size; the portable one takes all even ones.
constexpr bool takes_group(std::int64_t group_size, std::int64_t columns) {
  return group_size == columns || group_size == 32 || group_size == 64 ||
         group_size % kStepColumns == 0;
}

extern const MicroKernels portable_kernels;
#ifdef SPEQ_X86
extern const MicroKernels avx2_kernels;
extern const MicroKernels avx512_kernels;
extern const MicroKernels avx512_vnni_kernels;
extern const MicroKernels avx512_vbmi2_kernels;
extern const MicroKernels avx512_bf16_kernels;
extern const MicroKernels avx512_amx_kernels;
// Panels of pairs of bfloat16, by vectors and by the tiles of AMX.
void vector_pairs(const PanelRows &rows, const Panels &panels, const PanelSums &sums);
void tile_pairs(const PanelRows &rows, const Panels &panels, const PanelSums &sums);
#endif
#ifdef SPEQ_AARCH64
extern const MicroKernels neon_kernels;
extern const MicroKernels neon_dot_kernels;
extern const MicroKernels neon_bf16_kernels;
#endif

} // namespace speq::cpu
