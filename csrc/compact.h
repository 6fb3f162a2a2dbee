// How an exact BF16 expert is laid out in fewer bits: `lossless`, complete in itself, and
// `residual`, what the draft's INT4 code of a weight does not say. Plain C++ without torch headers,
// so that every backend and every test can include it. speq/kernels/compact_layout.py has the same
// in Python.
//
// An expert is three matrices: gate and up [expert_width, hidden_size], down [hidden_size,
// expert_width]. Where it has no gate, that has no rows. A dense matrix has a record of its own.
// Columns go in blocks of 64 and rows in quads of four; the last of either may be shorter, and
// every matrix begins a quad. A record has sections at multiples of 64 bytes:
//
//   lossless  high bytes  8 bytes a matrix: those that classes 0 to 6 stand for, and 0
//             index
//             classes     3 bits a weight, lowest first, in rows of whole bytes of eight weights
//             bytes       the low byte of each weight's word
//             streams     high bytes of class 7, the escapes
//   residual  index
//             bytes       the low byte of each weight's word
//             streams     the high bytes that codes do not tell
//
// The high byte of a word has its sign and all of its exponent but the lowest bit. To divide there
// costs a tenth of a bit more than to divide between exponent and mantissa, and saves what would
// put the two together again.
//
// The index has a uint32 for each quad, and one for the end: where the quad's streams begin. One
// stream runs from the front of them, one from the back; both block by block, and row by row within
// a block. The front (residual only) has three bits for each weight of code 0, in whole bytes, and
// in a quad that has exceptions their number, a byte, and their columns, a byte each. The back has
// the escapes of a row of a block in the order of their columns, the first such run last. Behind
// the streams lie 128 bytes, so that vectors may be read whole wherever one begins.
#pragma once

#include <cstddef>
#include <cstdint>

#include "half.h"
#include "int4.h"

namespace speq {

constexpr std::int64_t kBlockColumns = 64;
constexpr std::int64_t kQuadRows = 4;
constexpr std::int64_t kSlackBytes = 128;
constexpr std::int64_t kExpertMatrices = 3;
// In an entry of the index: weights of the quad whose codes are not zero have escapes.
constexpr std::uint32_t kHasExceptions = 1u << 31;
// The other bits of an entry tell a position, so the streams of a record end below it.
constexpr std::int64_t kStreamsEnd = kHasExceptions;

// Classes of three bits; of seven the escape tells.
constexpr int kClasses = 8;
constexpr int kEscape = 7;
// Of weights with code 0: the high byte is 0; below it and above it are the steps from the window.
constexpr int kZeroClass = 3;

// Bytes of 3-bit values.
SPEQ_INLINE std::int64_t class_bytes(std::int64_t values) { return (3 * values + 7) / 8; }

// Where the words of a code begin, in scales, by the code's magnitude. Of a word in a window the
// low byte tells the high one, for a window has 256 words: two octaves. That is more than what
// rounds to a code, so windows begin low enough to hold most of what GPTQ moves to it as well. Of
// code 0 the window's end, which is where its classes count down from.
constexpr float kWindowStarts[9] = {0.5f, 0.4375f, 0.75f, 1.25f, 2.0f, 2.5f, 3.0f, 3.5f, 4.0f};

// A scale that is no number would make words that differ between processors.
SPEQ_INLINE float window_scale(Float16 scale) {
  return (scale.bits & 0x7C00) == 0x7C00 ? 0.0f : to_float(scale);
}

// The first word of the window of a code, -8 to 7, under a scale. Products are exact.
SPEQ_INLINE std::uint16_t window_start(int code, float scale) {
  const float start = code < 0 ? -kWindowStarts[-code] : kWindowStarts[code];
  return std::uint16_t(bits_as<std::uint32_t>(start * scale) >> 16);
}

// The high byte of the word in a window, from its low byte.
SPEQ_INLINE std::uint8_t high_byte(std::uint16_t start, std::uint8_t low) {
  return std::uint8_t((start >> 8) + (low < (start & 0xFF)));
}

// The high byte that a class of code 0 stands for, under the start of its window.
SPEQ_INLINE std::uint8_t zero_high_byte(std::uint16_t start, int zero_class) {
  const int sign = zero_class > kZeroClass ? 0x80 : 0;
  const int steps = zero_class > kZeroClass ? zero_class - kZeroClass - 1 : zero_class;
  return zero_class == kZeroClass ? std::uint8_t(0)
                                  : std::uint8_t(sign | ((((start >> 8) & 0x7F) - steps) & 0x7F));
}

SPEQ_INLINE constexpr std::int64_t whole_lines(std::int64_t bytes) {
  return (bytes + 63) / 64 * 64;
}
SPEQ_INLINE constexpr std::int64_t quads_of(std::int64_t rows) {
  return (rows + kQuadRows - 1) / kQuadRows;
}
// Bytes of a row of classes.
SPEQ_INLINE constexpr std::int64_t class_stride(std::int64_t columns) {
  return (columns + 7) / 8 * 3;
}

// Sizes of an expert's matrices: gate, up and down.
struct ExpertShape {
  std::int64_t hidden_size, expert_width;
  bool gated = true;

  SPEQ_MEMBER std::int64_t rows(int matrix) const {
    return matrix == kExpertMatrices - 1 ? hidden_size : matrix == 0 && !gated ? 0 : expert_width;
  }
  SPEQ_MEMBER std::int64_t columns(int matrix) const {
    return matrix == kExpertMatrices - 1 ? expert_width : hidden_size;
  }
  // Rows of gate and up in one matrix, gate over up.
  SPEQ_MEMBER std::int64_t gate_up_rows() const { return rows(0) + rows(1); }
};

// Where the sections of a record lie, in bytes from its start; those of each matrix.
struct CompactLayout {
  int matrices;
  std::int64_t rows[kExpertMatrices], columns[kExpertMatrices];
  std::int64_t first_quad[kExpertMatrices + 1];
  std::int64_t index, classes[kExpertMatrices], bytes[kExpertMatrices], streams;

  SPEQ_MEMBER std::int64_t quads() const { return first_quad[matrices]; }
  SPEQ_MEMBER std::int64_t fixed_bytes() const { return streams + kSlackBytes; }
};

// Places the sections of a record whose matrices, rows and columns are known.
SPEQ_INLINE CompactLayout with_sections(CompactLayout layout, bool lossless) {
  for (int m = 0; m < layout.matrices; ++m) {
    layout.first_quad[m + 1] = layout.first_quad[m] + quads_of(layout.rows[m]);
  }
  std::int64_t at = lossless ? whole_lines(layout.matrices * kClasses) : 0;
  layout.index = at;
  at += whole_lines((layout.quads() + 1) * sizeof(std::uint32_t));
  for (int m = 0; m < layout.matrices && lossless; ++m) {
    layout.classes[m] = at;
    at += whole_lines(layout.rows[m] * class_stride(layout.columns[m]));
  }
  for (int m = 0; m < layout.matrices; ++m) {
    layout.bytes[m] = at;
    at += whole_lines(layout.rows[m] * layout.columns[m]);
  }
  layout.streams = at;
  return layout;
}

// Of an expert: gate, up and down.
SPEQ_INLINE CompactLayout compact_layout(const ExpertShape &shape, bool lossless) {
  CompactLayout layout{};
  layout.matrices = kExpertMatrices;
  for (int m = 0; m < kExpertMatrices; ++m) {
    layout.rows[m] = shape.rows(m);
    layout.columns[m] = shape.columns(m);
  }
  return with_sections(layout, lossless);
}

// Of one dense matrix.
SPEQ_INLINE CompactLayout dense_layout(std::int64_t rows, std::int64_t columns, bool lossless) {
  CompactLayout layout{};
  layout.matrices = 1;
  layout.rows[0] = rows;
  layout.columns[0] = columns;
  return with_sections(layout, lossless);
}

// Positions within the streams of a quad. Whatever an index says, both stay within the streams, so
// that a damaged record reads nothing outside itself.
struct QuadStreams {
  std::int64_t front, back, end;
  bool has_exceptions;

  // Give the position of `bytes` bytes of either stream, and go on behind them. Without branches,
  // which would part the steps of rows that go together.
  SPEQ_MEMBER std::int64_t take_front(std::int64_t bytes) {
    const std::int64_t at = front, left = end - front - bytes;
    front = end - (left & ~(left >> 63));
    return at;
  }
  SPEQ_MEMBER std::int64_t take_back(std::int64_t bytes) {
    back -= bytes;
    return back &= ~(back >> 63);
  }
};

// The streams of the quad that an entry of the index belongs to; end: bytes of all streams.
SPEQ_INLINE QuadStreams quad_streams(const std::uint32_t *entry, std::int64_t end) {
  const std::int64_t front = entry[0] & ~kHasExceptions, back = entry[1] & ~kHasExceptions;
  return {front < end ? front : end, back < end ? back : end, end,
          (entry[0] & kHasExceptions) != 0};
}

} // namespace speq
