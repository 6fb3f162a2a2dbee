// Exact BF16 matrices into compact records (compact.h). Two passes over the weights, each over
// ranges of quads that threads may share: one makes the streams, which tell how large the record
// will be, and one writes it.
#pragma once

#include <array>
#include <vector>

#include "cpu/micro_kernels.h"

namespace speq::cpu {

// The words of each matrix of a record: gate, up and down of an expert, or a dense one.
using ExactWords = std::array<const BFloat16 *, kExpertMatrices>;
// The draft's codes of the same matrices.
using RecordCodes = std::array<Int4Matrix, kExpertMatrices>;

class CompactEncoder {
public:
  CompactEncoder(const CompactLayout &layout, const ExactWords &words);
  virtual ~CompactEncoder() = default;

  std::int64_t quads() const { return layout_.quads(); }
  void measure(std::int64_t begin, std::int64_t end);
  // The record's bytes, once all quads are measured.
  std::int64_t finish();
  // Whether the index, which is finished, can tell where all streams begin.
  bool can_write() const { return stream_bytes_ < kStreamsEnd; }
  // Write quads of a record of so many bytes.
  void write(std::int64_t begin, std::int64_t end, std::uint8_t *record) const;

protected:
  // Rows of a matrix, up to four.
  struct Quad {
    int matrix;
    std::int64_t row, rows;
  };
  // The two streams of a quad while they are filled, in one piece of memory: the front from its
  // start upwards, the back, whose first run is the last, from its end downwards.
  class Streams {
  public:
    explicit Streams(std::int64_t columns);

    void clear();
    // Classes of a row of a block, eight to a word of bytes; the last word's rest is zeros.
    void add_classes(const std::uint64_t *eights, int count);
    void add_escapes(const std::uint8_t *run, int count);
    // Behind the classes of a row of a block: the columns of those whose codes are not zero.
    void add_exceptions(std::uint64_t columns);

    bool has_exceptions() const { return has_exceptions_; }
    // Both, as they lie in a record.
    std::vector<std::uint8_t> joined() const;

  private:
    struct BlockRow {
      std::uint8_t *classes_end;
      std::uint64_t exceptions;
    };
    std::vector<std::uint8_t> room_;
    std::uint8_t *front_, *back_;
    std::vector<BlockRow> block_rows_;
    bool has_exceptions_;
  };

  const BFloat16 *row(int matrix, std::int64_t row) const;

  CompactLayout layout_;

private:
  virtual void fill(const Quad &quad, Streams &streams) const = 0;
  virtual void write_classes(const Quad &, std::uint8_t *) const {}
  virtual void write_head(std::uint8_t *) const {}

  Quad quad(std::int64_t index) const;
  void clear_gaps(std::uint8_t *record) const;
  void write_bytes(const Quad &quad, std::uint8_t *record) const;

  ExactWords words_;
  std::int64_t stream_bytes_ = 0;
  std::vector<std::uint32_t> index_; // sizes, until `finish` makes positions of them
  std::vector<std::vector<std::uint8_t>> streams_;
};

class LosslessEncoder : public CompactEncoder {
public:
  LosslessEncoder(const CompactLayout &layout, const ExactWords &words);

private:
  void fill(const Quad &quad, Streams &streams) const override;
  void write_classes(const Quad &quad, std::uint8_t *record) const override;
  void write_head(std::uint8_t *record) const override;

  std::uint8_t high_bytes_[kExpertMatrices][kClasses] = {};
  std::array<std::uint8_t, 256> classes_[kExpertMatrices];
};

class ResidualEncoder : public CompactEncoder {
public:
  ResidualEncoder(const CompactLayout &layout, const ExactWords &words, const RecordCodes &codes);

private:
  void fill(const Quad &quad, Streams &streams) const override;

  RecordCodes codes_;
};

} // namespace speq::cpu
