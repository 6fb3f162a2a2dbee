// Blocks of matrices of codes with scales in plain C++, and what decoders of vectors share with it.
#pragma once

#include "cpu/decode_portable.h"
#include "scaled.h"

namespace speq::cpu {
namespace {

// The scales of a quad's rows, whose blocks follow one another. Rows of a block share a place.
class Fp8QuadScales {
public:
  Fp8QuadScales(const Fp8Rows &matrix, std::int64_t quad)
      : scales_(matrix.row_scales(quad * kQuadRows)),
        width_(matrix.blocks.columns == 0 ? matrix.columns + kBlockColumns : matrix.blocks.columns),
        stride_(matrix.blocks.by_row() ? matrix.blocks.across(matrix.columns) : 0) {}

  // Where a row's scale is kept.
  SPEQ_MEMBER int place(int n) const { return stride_ == 0 ? 0 : n; }

  // Takes the scales of the blocks that begin at a column, if any do. Columns come in order.
  template <typename Take> SPEQ_MEMBER void next(int rows, std::int64_t first, const Take &take) {
    if (first == begin_) {
      for (int n = 0; n < (stride_ == 0 ? 1 : rows); ++n) {
        take(n, scales_[n * stride_]);
      }
      ++scales_;
      begin_ += width_;
    }
  }

private:
  const float *scales_;         // of the next block
  std::int64_t width_, stride_; // stride_: between rows; 0: they share their scales
  std::int64_t begin_ = 0;      // where the next block does
};

class PortableFp8 {
public:
  using Block = WordBlock;

  PortableFp8(const Fp8Rows &matrix, std::int64_t quad)
      : columns_(matrix.columns), codes_(matrix.codes + quad * kQuadRows * columns_),
        scales_(matrix, quad) {}

  void next(int rows, std::int64_t first, std::int64_t present, Block *blocks) {
    scales_.next(rows, first, [&](int n, float scale) { of_rows_[n] = scale; });
    for (int n = 0; n < rows; ++n) {
      const float scale = of_rows_[scales_.place(n)];
      blocks[n] = {};
      for (std::int64_t i = 0; i < present; ++i) {
        blocks[n].words[i] = fp8_word(codes_[n * columns_ + first + i], scale);
      }
    }
  }

private:
  std::int64_t columns_;
  const std::uint8_t *codes_;
  Fp8QuadScales scales_;
  float of_rows_[kQuadRows] = {};
};

// The words of all codes under each scale, low and high bytes apart: a decoder's tables.
struct Mxfp4Tables {
  struct alignas(32) Bytes {
    std::uint8_t low[16], high[16];
  };
  Bytes of_scale[256];

  static const Mxfp4Tables &get() {
    static const Mxfp4Tables tables;
    return tables;
  }

private:
  Mxfp4Tables() {
    for (int scale = 0; scale < 256; ++scale) {
      for (int code = 0; code < 16; ++code) {
        const std::uint16_t word = mxfp4_word(code, std::uint8_t(scale)).bits;
        of_scale[scale].low[code] = std::uint8_t(word);
        of_scale[scale].high[code] = std::uint8_t(word >> 8);
      }
    }
  }
};

class PortableMxfp4 {
public:
  using Block = WordBlock;

  PortableMxfp4(const Mxfp4Rows &matrix, std::int64_t quad)
      : matrix_(matrix), row_(quad * kQuadRows), tables_(Mxfp4Tables::get()) {}

  void next(int rows, std::int64_t first, std::int64_t present, Block *blocks) {
    for (int n = 0; n < rows; ++n) {
      const std::uint8_t *codes = matrix_.codes + (row_ + n) * matrix_.code_stride + first / 2;
      const std::uint8_t *scales =
          matrix_.scales + (row_ + n) * matrix_.scale_stride + first / kMxfp4Block;
      blocks[n] = {};
      for (std::int64_t i = 0; i < present; ++i) {
        const Mxfp4Tables::Bytes &bytes = tables_.of_scale[scales[i / kMxfp4Block]];
        const int code = i % 2 == 0 ? codes[i / 2] & 0xF : codes[i / 2] >> 4;
        blocks[n].words[i] = word_of(bytes.high[code], bytes.low[code]);
      }
    }
  }

private:
  const Mxfp4Rows &matrix_;
  std::int64_t row_;
  const Mxfp4Tables &tables_;
};

class PortableInt4 {
public:
  using Block = WordBlock;

  PortableInt4(const Int4Rows &matrix, std::int64_t quad)
      : matrix_(matrix), row_(quad * kQuadRows) {}

  void next(int rows, std::int64_t first, std::int64_t present, Block *blocks) {
    for (int n = 0; n < rows; ++n) {
      const std::int64_t row = row_ + n;
      const std::uint8_t *codes = matrix_.codes + row * (matrix_.columns / 2) + first / 2;
      blocks[n] = {};
      for (std::int64_t begin = 0; begin < present; begin += kInt4Columns) {
        const std::int64_t group = (first + begin) / matrix_.group_size;
        const float scale = matrix_.scale(row, group);
        const int zero = matrix_.zero(row, group);
        for (std::int64_t i = begin; i < begin + kInt4Columns; ++i) {
          const int code = i % 2 == 0 ? codes[i / 2] & 0xF : codes[i / 2] >> 4;
          blocks[n].words[i] = int4_word(code, zero, scale);
        }
      }
    }
  }

private:
  const Int4Rows &matrix_;
  std::int64_t row_;
};

class PortableNvfp4 {
public:
  using Block = WordBlock;

  PortableNvfp4(const Nvfp4Rows &matrix, std::int64_t quad)
      : matrix_(matrix), row_(quad * kQuadRows) {}

  void next(int rows, std::int64_t first, std::int64_t present, Block *blocks) {
    for (int n = 0; n < rows; ++n) {
      const std::int64_t at = (row_ + n) * matrix_.columns + first;
      const std::uint8_t *codes = matrix_.codes + at / 2;
      blocks[n] = {};
      for (std::int64_t begin = 0; begin < present; begin += kNvfp4Block) {
        const float scale = matrix_.scale(matrix_.scales[(at + begin) / kNvfp4Block]);
        for (std::int64_t i = begin; i < begin + kNvfp4Block; ++i) {
          const int code = i % 2 == 0 ? codes[i / 2] & 0xF : codes[i / 2] >> 4;
          blocks[n].words[i] = nvfp4_word(code, scale);
        }
      }
    }
  }

private:
  const Nvfp4Rows &matrix_;
  std::int64_t row_;
};

} // namespace
} // namespace speq::cpu
