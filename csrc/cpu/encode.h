// Exact BF16 matrices into compact records (compact.h). Two passes over the weights, each over
// ranges of quads that threads may share: one finds how large the record will be, one writes it.
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
  // The two streams of a quad as they are filled: runs of the back in the order of their making.
  struct Streams {
    std::vector<std::uint8_t> front, back;
    std::vector<std::size_t> runs;
    bool has_exceptions = false;

    void end_run(std::size_t begin) { runs.push_back(back.size() - begin); }
  };

  const BFloat16 *row(int matrix, std::int64_t row) const;

  CompactLayout layout_;

private:
  virtual Streams streams_of(const Quad &quad) const = 0;
  virtual void write_planes(const Quad &quad, std::uint8_t *record) const = 0;
  virtual void write_head(std::uint8_t *) const {}

  Quad quad(std::int64_t index) const;
  void clear_gaps(std::uint8_t *record) const;

  ExactWords words_;
  std::int64_t stream_bytes_ = 0;
  std::vector<std::uint32_t> index_; // sizes, until `finish` makes positions of them
};

class LosslessEncoder : public CompactEncoder {
public:
  LosslessEncoder(const CompactLayout &layout, const ExactWords &words);

private:
  Streams streams_of(const Quad &quad) const override;
  void write_planes(const Quad &quad, std::uint8_t *record) const override;
  void write_head(std::uint8_t *record) const override;

  std::uint8_t exponents_[kExpertMatrices][kClasses] = {};
  std::array<std::uint8_t, 256> classes_[kExpertMatrices];
};

class ResidualEncoder : public CompactEncoder {
public:
  ResidualEncoder(const CompactLayout &layout, const ExactWords &words, const RecordCodes &codes);

private:
  Streams streams_of(const Quad &quad) const override;
  void write_planes(const Quad &quad, std::uint8_t *record) const override;

  // Adds a quad's streams, and says whether codes other than 0 had escapes; these are written only
  // where `exceptions` says that the quad has some.
  bool fill(const Quad &quad, bool exceptions, Streams &streams) const;

  RecordCodes codes_;
};

} // namespace speq::cpu
