// Blocks of words into compact records, in plain C++: what every instruction set's encoders share,
// and to read those by.
#pragma once

#include <algorithm>
#include <bit>
#include <cstring>

#include "cpu/micro_kernels.h"

namespace speq::cpu {
namespace {

// Bytes in the order of memory, so that a byte of a word is a weight of eight.
static_assert(std::endian::native == std::endian::little);

inline std::uint8_t high_byte_of(BFloat16 word) { return std::uint8_t(word.bits >> 8); }

// Three bits of each byte of eight, one behind the other.
inline std::uint32_t packed(std::uint64_t eight) {
  eight = (eight | eight >> 5) & 0x003F'003F'003F'003F;
  eight = (eight | eight >> 10) & 0x0000'0FFF'0000'0FFF;
  return std::uint32_t((eight | eight >> 20) & 0xFF'FFFF);
}

// The lowest bit of each byte of eight that is an escape.
inline std::uint64_t escapes_in(std::uint64_t eight) {
  static_assert(kEscape == 7);
  return eight & eight >> 1 & eight >> 2 & 0x0101'0101'0101'0101;
}

// Calls body(column) for each bit that is set, the lowest first.
template <typename Body> void for_each_bit(std::uint64_t bits, const Body &body) {
  for (; bits != 0; bits &= bits - 1) {
    body(std::countr_zero(bits));
  }
}

// Splits whole blocks of a lossless matrix: `block` writes 64 low bytes, 24 bytes of classes and
// the high bytes of escapes, behind which it may write, and returns how many of those there are.
class PortableSplit {
public:
  explicit PortableSplit(const ClassTable &table) : table_(table) {}

  int block(const BFloat16 *words, std::uint8_t *bytes, std::uint8_t *classes,
            std::uint8_t *escapes) const {
    int count = 0;
    for (int k = 0; k < kBlockColumns; k += 8, classes += 3) {
      std::uint64_t eight = 0;
      for (int i = 0; i < 8; ++i) {
        bytes[k + i] = std::uint8_t(words[k + i].bits);
        eight |= std::uint64_t(table_.classes[high_byte_of(words[k + i])]) << 8 * i;
      }
      const std::uint32_t bits = packed(eight);
      std::memcpy(classes, &bits, 3);
      for_each_bit(escapes_in(eight),
                   [&](int bit) { escapes[count++] = high_byte_of(words[k + bit / 8]); });
    }
    return count;
  }

private:
  const ClassTable &table_;
};

// From the last block to the first, as the stream goes.
template <typename Split>
std::uint8_t *split_quad(const WordQuad &quad, const ClassTable &table, std::uint8_t *bytes,
                         std::uint8_t *classes, std::uint8_t *stream) {
  const Split split(table);
  const std::int64_t columns = quad.columns, stride = class_stride(columns);
  std::int64_t first = columns / kBlockColumns * kBlockColumns;
  if (const std::int64_t present = columns - first; present > 0) {
    for (std::int64_t n = quad.rows - 1; n >= 0; --n) {
      BFloat16 words[kBlockColumns];
      for (BFloat16 &word : words) { // of class 0, so that no bit is set behind the columns
        word.bits = std::uint16_t(table.high_bytes[0] << 8);
      }
      std::memcpy(words, quad.words + n * columns + first, present * sizeof words[0]);
      std::uint8_t block_bytes[kBlockColumns], block_classes[3 * kBlockColumns / 8];
      stream += split.block(words, block_bytes, block_classes, stream);
      std::memcpy(bytes + n * columns + first, block_bytes, present);
      std::memcpy(classes + n * stride + class_bytes(first), block_classes, class_stride(present));
    }
  }
  for (first -= kBlockColumns; first >= 0; first -= kBlockColumns) {
    for (std::int64_t n = quad.rows - 1; n >= 0; --n) {
      stream += split.block(quad.words + n * columns + first, bytes + n * columns + first,
                            classes + n * stride + class_bytes(first), stream);
    }
  }
  return stream;
}

// Adds a row of a block: columns of code 0, with a class for each column; of escapes; and of those
// escapes whose codes are not zero.
inline void add_row(const BFloat16 *words, const std::uint8_t *classes, std::uint64_t zeros,
                    std::uint64_t escapes, std::uint64_t exceptions, FilledStreams &streams) {
  std::uint8_t run[kBlockColumns] = {};
  int count = 0;
  for_each_bit(zeros, [&](int column) { run[count++] = classes[column]; });
  for (int k = 0; k < count; k += 8) {
    std::uint64_t eight;
    std::memcpy(&eight, run + k, sizeof eight);
    const std::uint32_t bits = packed(eight);
    std::memcpy(streams.front + 3 * k / 8, &bits, sizeof bits); // a byte too much
  }
  streams.front += class_bytes(count);
  streams.back -= std::popcount(escapes);
  std::uint8_t *next = streams.back;
  for_each_bit(escapes, [&](int column) { *next++ = high_byte_of(words[column]); });
  streams.end_row(exceptions);
}

// Fills the streams of a quad. `begin` is told of a block, `row` of each of its rows: whole blocks
// of words and codes, of which `present` columns are in the matrix.
class PortableFiller {
public:
  static bool takes(const Int4Matrix &) { return true; }

  explicit PortableFiller(const Int4Matrix &codes) : codes_(codes) {}

  void begin(std::int64_t, std::int64_t first) { first_ = first; }

  void row(std::int64_t n, const BFloat16 *words, const std::uint8_t *qweight, std::int64_t present,
           FilledStreams &streams) {
    Windows &windows = windows_[n];
    std::uint8_t classes[kBlockColumns];
    std::uint64_t zeros = 0, escapes = 0, exceptions = 0;
    for (std::int64_t k = 0; k < present;) {
      const std::int64_t group = (first_ + k) / codes_.group_size;
      const std::int64_t end = std::min(present, (group + 1) * codes_.group_size - first_);
      if (group != windows.group) {
        windows.fill(group, codes_.scales[n * codes_.row_groups() + group]);
      }
      std::uint64_t of_code_0 = 0;
      for (; k < end; ++k) {
        const int code = qweight[k / 2] >> k % 2 * 4 & 0xF;
        const int told = high_byte(windows.starts[code], std::uint8_t(words[k].bits));
        of_code_0 |= std::uint64_t(code == kInt4ZeroPoint) << k;
        exceptions |= std::uint64_t(told != high_byte_of(words[k])) << k;
      }
      zeros |= of_code_0;
      for_each_bit(of_code_0, [&](int column) {
        const int high = high_byte_of(words[column]);
        classes[column] = std::uint8_t(zero_class_of(windows.starts[kInt4ZeroPoint], high));
        escapes |= std::uint64_t(classes[column] == kEscape) << column;
      });
    }
    exceptions &= ~zeros;
    add_row(words, classes, zeros, escapes | exceptions, exceptions, streams);
  }

private:
  // The windows of all codes under a group's scale, by the code as it is stored.
  struct Windows {
    std::int64_t group = -1;
    std::uint16_t starts[16];

    void fill(std::int64_t of, Float16 stored) {
      group = of;
      const float scale = window_scale(stored);
      for (int i = 0; i < 16; ++i) {
        starts[i] = window_start(i - kInt4ZeroPoint, scale);
      }
    }
  };

  // The class of a word of code 0, by its high byte.
  static int zero_class_of(std::uint16_t start, int high) {
    if (high == 0) {
      return kZeroClass;
    }
    const int steps = (start >> 8 & 0x7F) - (high & 0x7F);
    const int sign = high < 0x80 ? 0 : kZeroClass + 1;
    return steps >= 0 && steps < kZeroClass ? sign + steps : kEscape;
  }

  const Int4Matrix &codes_;
  std::int64_t first_ = 0;
  Windows windows_[kQuadRows];
};

// A filler of vectors says which groups it takes; the next one that does takes the others.
template <typename Filler, typename... Others>
void fill_streams(const WordQuad &quad, const Int4Matrix &codes, FilledStreams &streams) {
  if constexpr (sizeof...(Others) > 0) {
    if (!Filler::takes(codes)) {
      return fill_streams<Others...>(quad, codes, streams);
    }
  }
  Filler filler(codes);
  std::int64_t first = 0;
  for (; first + kBlockColumns <= quad.columns; first += kBlockColumns) {
    filler.begin(quad.rows, first);
    for (std::int64_t n = 0; n < quad.rows; ++n) {
      filler.row(n, quad.words + n * quad.columns + first,
                 codes.qweight + n * codes.row_bytes() + first / 2, kBlockColumns, streams);
    }
  }
  if (const std::int64_t present = quad.columns - first; present > 0) {
    filler.begin(quad.rows, first);
    for (std::int64_t n = 0; n < quad.rows; ++n) {
      BFloat16 words[kBlockColumns] = {};
      std::uint8_t qweight[kBlockColumns / 2] = {};
      std::memcpy(words, quad.words + n * quad.columns + first, present * sizeof words[0]);
      std::memcpy(qweight, codes.qweight + n * codes.row_bytes() + first / 2, present / 2);
      filler.row(n, words, qweight, present, streams);
    }
  }
}

// The encoders of an instruction set.
template <typename Split, typename... Fillers> struct Encoders {
  static constexpr SplitQuad split = split_quad<Split>;
  static constexpr FillStreams fill = fill_streams<Fillers...>;
};
using PortableEncoders = Encoders<PortableSplit, PortableFiller>;

} // namespace
} // namespace speq::cpu
