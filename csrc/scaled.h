// Experts that were published as codes with scales. Plain C++ without torch headers, so that every
// backend and every test can include it. speq/kernels/scaled_layout.py has the same in Python.
//
// A weight is the BF16 word nearest to its code's value times its block's scale, a product in
// float32. A record has sections at multiples of 64 bytes, those of each matrix one behind the
// other:
//
//   fp8    codes   gate, up [expert_width, hidden_size] and down [hidden_size, expert_width]: e4m3,
//                  without infinities
//          scales  float32, of blocks of rows and columns, of which the last are shorter: of 128
//                  by 128, of a row, or of a matrix
//   mxfp4  codes   gate_up [2 expert_width, hidden_size], whose even rows are of gate and odd ones
//                  of up, and down: e2m1, two to the byte, the first in its low half
//          scales  a byte, of blocks of 32 columns of a row: the power of 2 less 127. Experts
//                  must have a gate
//   int4   codes   gate, up and down: 0 to 15, two to the byte, the first in its low half
//          scales  BF16, or float16 as some publish them, of groups of neighbours of a row, whose
//                  size is a multiple of 32
//          zeros   in some checkpoints: the code of each group that stands for 0, of eight rows
//                  in a word, the first row in its lowest bits; in others it is 8
//   nvfp4  codes   gate, up and down: e2m1, as in mxfp4
//          scales  e4m3, of blocks of 16 columns of a row
//          matrix  a float32 of each matrix, by which its scales are multiplied or divided
//
// Behind the codes there are at least 64 bytes in either, so that vectors of codes may be read
// whole wherever one begins.
#pragma once

#include <cstddef>
#include <cstdint>

#include "compact.h"

namespace speq {

constexpr std::int64_t kMxfp4Block = 32;
static_assert(kBlockColumns % kMxfp4Block == 0);

constexpr std::int64_t kInt4Columns = 32; // which sizes of groups are multiples of
constexpr std::int64_t kZeroRows = 8;
constexpr int kInt4Zero = 8;
static_assert(kBlockColumns % kInt4Columns == 0);

// Groups of INT4: their columns, whether their zero points are in the record, and whether scales
// are float16.
struct Int4Groups {
  std::int64_t size;
  bool zeros, halves;
};

constexpr std::int64_t kNvfp4Block = 16;
constexpr std::int64_t kNvfp4Columns = 2 * kNvfp4Block; // which sizes are multiples of
static_assert(kBlockColumns % kNvfp4Columns == 0);

// What a code of FP8 stands for.
SPEQ_INLINE float e4m3_value(std::uint8_t code) {
  const std::uint32_t sign = std::uint32_t(code & 0x80) << 24, magnitude = code & 0x7F;
  if (magnitude == 0x7F) {
    return bits_as<float>(sign | 0x7FC00000u);
  }
  const float value =
      magnitude < 8 ? float(magnitude) * 0x1p-9f : bits_as<float>((magnitude << 20) + (120u << 23));
  return bits_as<float>(sign | bits_as<std::uint32_t>(value));
}

// What a code of MXFP4, below 16, stands for.
SPEQ_INLINE float e2m1_value(int code) {
  const int exponent = code >> 1 & 3, mantissa = code & 1;
  const float value =
      exponent == 0 ? 0.5f * float(mantissa) : 0.5f * float((2 + mantissa) << (exponent - 1));
  return bits_as<float>(bits_as<std::uint32_t>(value) | std::uint32_t(code & 8) << 28);
}

// Half of the power of 2 that a scale of MXFP4 stands for: the largest power is no float.
SPEQ_INLINE float e8m0_half(std::uint8_t scale) {
  return bits_as<float>(scale < 2 ? 0x00200000u << scale : std::uint32_t(scale - 1) << 23);
}

SPEQ_INLINE BFloat16 fp8_word(std::uint8_t code, float scale) {
  return to_bfloat16(e4m3_value(code) * scale);
}

SPEQ_INLINE BFloat16 mxfp4_word(int code, std::uint8_t scale) {
  return to_bfloat16(2.0f * e2m1_value(code) * e8m0_half(scale));
}

SPEQ_INLINE BFloat16 int4_word(int code, int zero, float scale) {
  return to_bfloat16(float(code - zero) * scale);
}

// What codes of a block of NVFP4 are multiplied by.
SPEQ_INLINE float nvfp4_scale(std::uint8_t scale, float of_matrix, bool divides) {
  return divides ? e4m3_value(scale) / of_matrix : e4m3_value(scale) * of_matrix;
}

SPEQ_INLINE BFloat16 nvfp4_word(int code, float scale) {
  return to_bfloat16(e2m1_value(code) * scale);
}

// Rows and columns of FP8 codes that share a scale: 1 row, or multiples of kQuadRows; multiples of
// kBlockColumns. 0: all of them.
struct Fp8Blocks {
  std::int64_t rows, columns;

  SPEQ_MEMBER bool valid() const {
    return (rows == 1 || (rows >= 0 && rows % kQuadRows == 0)) && columns >= 0 &&
           columns % kBlockColumns == 0;
  }
  // Whether each row of a quad has scales of its own.
  SPEQ_MEMBER bool by_row() const { return rows == 1; }
  SPEQ_MEMBER std::int64_t down(std::int64_t matrix_rows) const { return of(matrix_rows, rows); }
  SPEQ_MEMBER std::int64_t across(std::int64_t matrix_columns) const {
    return of(matrix_columns, columns);
  }
  SPEQ_MEMBER std::int64_t of_row(std::int64_t row) const { return rows == 0 ? 0 : row / rows; }

private:
  SPEQ_MEMBER static std::int64_t of(std::int64_t size, std::int64_t block) {
    return block == 0 ? size > 0 : (size + block - 1) / block;
  }
};

// Where the sections of a record lie, in bytes from its start: of gate, up and down.
struct ScaledLayout {
  std::int64_t rows[kExpertMatrices], columns[kExpertMatrices];
  std::int64_t first_quad[kExpertMatrices + 1];
  std::int64_t codes[kExpertMatrices], scales[kExpertMatrices], nbytes;
  std::int64_t third[kExpertMatrices]; // zero points of INT4, the matrix's scale of NVFP4
};

SPEQ_INLINE ScaledLayout sized(const ExpertShape &shape) {
  ScaledLayout layout{};
  for (int m = 0; m < kExpertMatrices; ++m) {
    layout.rows[m] = shape.rows(m);
    layout.columns[m] = shape.columns(m);
    layout.first_quad[m + 1] = layout.first_quad[m] + quads_of(layout.rows[m]);
  }
  return layout;
}

SPEQ_INLINE ScaledLayout fp8_layout(const ExpertShape &shape, Fp8Blocks blocks) {
  ScaledLayout layout = sized(shape);
  std::int64_t at = 0;
  for (int m = 0; m < kExpertMatrices; ++m) {
    layout.codes[m] = at;
    at += whole_lines(layout.rows[m] * layout.columns[m]);
  }
  for (int m = 0; m < kExpertMatrices; ++m) {
    layout.scales[m] = at;
    at +=
        whole_lines(blocks.down(layout.rows[m]) * blocks.across(layout.columns[m]) * sizeof(float));
  }
  layout.nbytes = at;
  return layout;
}

// Rows of gate and of up are two rows of the record apart.
constexpr std::int64_t kInTurns = 2;

SPEQ_INLINE ScaledLayout mxfp4_layout(const ExpertShape &shape) {
  ScaledLayout layout = sized(shape);
  const auto [hidden_size, expert_width, gated] = shape;
  const std::int64_t gate_codes = hidden_size / 2, gate_scales = hidden_size / kMxfp4Block;
  const std::int64_t down_codes = expert_width / 2, down_scales = expert_width / kMxfp4Block;
  std::int64_t at = 0;
  layout.codes[0] = at;
  layout.codes[1] = at + gate_codes;
  at += whole_lines(kInTurns * expert_width * gate_codes);
  layout.codes[2] = at;
  at += whole_lines(hidden_size * down_codes);
  layout.scales[0] = at;
  layout.scales[1] = at + gate_scales;
  at += whole_lines(kInTurns * expert_width * gate_scales);
  layout.scales[2] = at;
  layout.nbytes = at + whole_lines(hidden_size * down_scales);
  return layout;
}

// Both sizes must be multiples of a group's.
SPEQ_INLINE ScaledLayout int4_layout(const ExpertShape &shape, Int4Groups groups) {
  ScaledLayout layout = sized(shape);
  std::int64_t at = 0;
  for (int m = 0; m < kExpertMatrices; ++m) {
    layout.codes[m] = at;
    at += whole_lines(layout.rows[m] * layout.columns[m] / 2);
  }
  for (int m = 0; m < kExpertMatrices; ++m) {
    layout.scales[m] = at;
    at += whole_lines(layout.rows[m] * (layout.columns[m] / groups.size) * sizeof(std::uint16_t));
  }
  for (int m = 0; groups.zeros && m < kExpertMatrices; ++m) {
    layout.third[m] = at;
    at += whole_lines((layout.rows[m] + kZeroRows - 1) / kZeroRows *
                      (layout.columns[m] / groups.size) * sizeof(std::uint32_t));
  }
  layout.nbytes = at;
  return layout;
}

// Both sizes must be multiples of kNvfp4Columns.
SPEQ_INLINE ScaledLayout nvfp4_layout(const ExpertShape &shape) {
  ScaledLayout layout = sized(shape);
  std::int64_t at = 0;
  for (int m = 0; m < kExpertMatrices; ++m) {
    layout.codes[m] = at;
    at += whole_lines(layout.rows[m] * layout.columns[m] / 2);
  }
  for (int m = 0; m < kExpertMatrices; ++m) {
    layout.scales[m] = at;
    at += whole_lines(layout.rows[m] * (layout.columns[m] / kNvfp4Block));
  }
  for (int m = 0; m < kExpertMatrices; ++m) {
    layout.third[m] = at;
    at += layout.rows[m] > 0 ? whole_lines(sizeof(float)) : 0;
  }
  layout.nbytes = at;
  return layout;
}

// A matrix of FP8 codes, `columns` bytes to a row.
struct Fp8Rows {
  std::int64_t rows, columns;
  const std::uint8_t *codes;
  const float *scales;
  Fp8Blocks blocks;

  // The scales of the blocks that a row is in.
  SPEQ_MEMBER const float *row_scales(std::int64_t row) const {
    return scales + blocks.of_row(row) * blocks.across(columns);
  }
};

// A matrix of MXFP4 codes, whose rows lie some bytes apart.
struct Mxfp4Rows {
  std::int64_t rows, columns;
  const std::uint8_t *codes, *scales;
  std::int64_t code_stride, scale_stride;
};

// A matrix of INT4 codes.
struct Int4Rows {
  std::int64_t rows, columns;
  const std::uint8_t *codes;
  const std::uint16_t *scales;
  const std::uint32_t *zeros; // null: all are kInt4Zero
  std::int64_t group_size;
  bool halves; // whether scales are float16

  SPEQ_MEMBER std::int64_t row_groups() const { return columns / group_size; }
  SPEQ_MEMBER float scale(std::int64_t row, std::int64_t group) const {
    return scale_of(scales[row * row_groups() + group]);
  }
  // Its lowest 16 bits are zero in every NaN, so that sums of bits for rounding keep one.
  SPEQ_MEMBER float scale_of(std::uint16_t bits) const {
    if (!halves) {
      return to_float(BFloat16{bits});
    }
    return (bits & 0x7FFF) > 0x7C00 ? bits_as<float>(0x7FC00000u) : to_float(Float16{bits});
  }
  SPEQ_MEMBER int zero(std::int64_t row, std::int64_t group) const {
    return zeros == nullptr
               ? kInt4Zero
               : int(zeros[row / kZeroRows * row_groups() + group] >> 4 * (row % kZeroRows) & 0xF);
  }
};

SPEQ_INLINE Int4Rows int4_rows(const ScaledLayout &layout, const std::uint8_t *record,
                               Int4Groups groups, int m) {
  return {layout.rows[m],
          layout.columns[m],
          record + layout.codes[m],
          reinterpret_cast<const std::uint16_t *>(record + layout.scales[m]),
          groups.zeros ? reinterpret_cast<const std::uint32_t *>(record + layout.third[m])
                       : nullptr,
          groups.size,
          groups.halves};
}

// A matrix of NVFP4 codes.
struct Nvfp4Rows {
  std::int64_t rows, columns;
  const std::uint8_t *codes, *scales;
  float of_matrix;
  bool divides; // whether of_matrix divides scales

  SPEQ_MEMBER float scale(std::uint8_t code) const { return nvfp4_scale(code, of_matrix, divides); }
};

SPEQ_INLINE Nvfp4Rows nvfp4_rows(const ScaledLayout &layout, const std::uint8_t *record,
                                 bool divides, int m) {
  return {layout.rows[m],
          layout.columns[m],
          record + layout.codes[m],
          record + layout.scales[m],
          *reinterpret_cast<const float *>(record + layout.third[m]),
          divides};
}

SPEQ_INLINE Fp8Rows fp8_rows(const ScaledLayout &layout, const std::uint8_t *record,
                             Fp8Blocks blocks, int m) {
  return {layout.rows[m], layout.columns[m], record + layout.codes[m],
          reinterpret_cast<const float *>(record + layout.scales[m]), blocks};
}

SPEQ_INLINE Mxfp4Rows mxfp4_rows(const ScaledLayout &layout, const std::uint8_t *record, int m) {
  const std::int64_t apart = m == kExpertMatrices - 1 ? 1 : kInTurns, columns = layout.columns[m];
  return {layout.rows[m],           columns,
          record + layout.codes[m], record + layout.scales[m],
          apart * (columns / 2),    apart * (columns / kMxfp4Block)};
}

// The formats: layouts of records, and the matrices in them. Both sizes of experts must be
// multiples of `columns`. in_turns: rows of gate and of up are, so that there must be a gate.
struct Fp8Format {
  static constexpr bool in_turns = false;
  static constexpr std::int64_t columns = 1;
  Fp8Blocks blocks;
  ScaledLayout layout(const ExpertShape &shape) const { return fp8_layout(shape, blocks); }
  Fp8Rows rows(const ScaledLayout &layout, const std::uint8_t *record, int m) const {
    return fp8_rows(layout, record, blocks, m);
  }
};

struct Mxfp4Format {
  static constexpr bool in_turns = true;
  static constexpr std::int64_t columns = kMxfp4Block;
  ScaledLayout layout(const ExpertShape &shape) const { return mxfp4_layout(shape); }
  Mxfp4Rows rows(const ScaledLayout &layout, const std::uint8_t *record, int m) const {
    return mxfp4_rows(layout, record, m);
  }
};

struct Int4Format {
  static constexpr bool in_turns = false;
  Int4Groups groups;
  std::int64_t columns = groups.size;
  ScaledLayout layout(const ExpertShape &shape) const { return int4_layout(shape, groups); }
  Int4Rows rows(const ScaledLayout &layout, const std::uint8_t *record, int m) const {
    return int4_rows(layout, record, groups, m);
  }
};

struct Nvfp4Format {
  static constexpr bool in_turns = false;
  static constexpr std::int64_t columns = kNvfp4Columns;
  bool divides;
  ScaledLayout layout(const ExpertShape &shape) const { return nvfp4_layout(shape); }
  Nvfp4Rows rows(const ScaledLayout &layout, const std::uint8_t *record, int m) const {
    return nvfp4_rows(layout, record, divides, m);
  }
};

} // namespace speq
