// Exact BF16 matrices into compact records (compact.h). The constructors find how large the record
// will be: of a lossless one by the counts of high bytes, of a residual one by its streams, which
// are made then.
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
  CompactEncoder(const CompactLayout &layout, const ExactWords &words)
      : layout_(layout), words_(words) {}
  virtual ~CompactEncoder() = default;

  // The record's bytes.
  std::int64_t nbytes() const { return layout_.fixed_bytes() + stream_bytes_; }
  // Whether the index can tell where all streams begin.
  bool can_write() const { return stream_bytes_ < kStreamsEnd; }
  virtual void write(std::uint8_t *record) const = 0;

protected:
  WordQuad quad(int matrix, std::int64_t row) const;
  // Zeros behind each section: a record's bytes depend on the weights alone.
  void clear_gaps(std::uint8_t *record) const;

  CompactLayout layout_;
  ExactWords words_;
  std::int64_t stream_bytes_ = 0;
};

class LosslessEncoder : public CompactEncoder {
public:
  LosslessEncoder(const CompactLayout &layout, const ExactWords &words);
  void write(std::uint8_t *record) const override;

private:
  ClassTable tables_[kExpertMatrices] = {};
};

class ResidualEncoder : public CompactEncoder {
public:
  ResidualEncoder(const CompactLayout &layout, const ExactWords &words, const RecordCodes &codes);
  void write(std::uint8_t *record) const override;

private:
  std::vector<std::uint32_t> index_;
  std::vector<std::uint8_t> streams_;
};

} // namespace speq::cpu
