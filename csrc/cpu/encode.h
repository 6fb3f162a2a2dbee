// Exact BF16 matrices into compact records (compact.h), all at a time or as they come, in order.
// The constructors find how large the record will be with them: of a lossless one by the counts of
// high bytes, of a residual one by its streams, which are made then.
#pragma once

#include <array>
#include <vector>

#include "cpu/micro_kernels.h"

namespace speq::cpu {

// The words of each matrix of a record: gate, up and down of an expert, or a dense one.
using ExactWords = std::array<const BFloat16 *, kExpertMatrices>;
// The draft's codes of the same matrices.
using RecordCodes = std::array<Int4Matrix, kExpertMatrices>;

// Which matrices of a record are encoded: from `first` on, up to `end`, behind the streams of those
// before.
struct RecordPart {
  std::int64_t first, end, stream_start;
};
// Of a dense matrix.
constexpr RecordPart kOnlyMatrix{0, 1, 0};

class CompactEncoder {
public:
  CompactEncoder(const CompactLayout &layout, const ExactWords &words, const RecordPart &part)
      : layout_(layout), words_(words), part_(part), stream_bytes_(part.stream_start) {}
  virtual ~CompactEncoder() = default;

  // The record's bytes with these matrices and those before.
  std::int64_t nbytes() const { return layout_.fixed_bytes() + stream_bytes_; }
  // Whether the index can tell where all streams begin.
  bool can_write() const { return stream_bytes_ < kStreamsEnd; }
  virtual void write(std::uint8_t *record) const = 0;

protected:
  WordQuad quad(std::int64_t matrix, std::int64_t row) const;
  std::uint8_t *first_entry(std::uint8_t *record) const;
  // Zeros behind each section: a record's bytes depend on the weights alone.
  void clear_gaps(std::uint8_t *record) const;

  CompactLayout layout_;
  ExactWords words_;
  RecordPart part_;
  // Of these matrices and of those before.
  std::int64_t stream_bytes_;
};

class LosslessEncoder : public CompactEncoder {
public:
  LosslessEncoder(const CompactLayout &layout, const ExactWords &words, const RecordPart &part);
  void write(std::uint8_t *record) const override;

private:
  ClassTable tables_[kExpertMatrices] = {};
};

class ResidualEncoder : public CompactEncoder {
public:
  ResidualEncoder(const CompactLayout &layout, const ExactWords &words, const RecordCodes &codes,
                  const RecordPart &part);
  void write(std::uint8_t *record) const override;

private:
  std::vector<std::uint32_t> index_;
  std::vector<std::uint8_t> streams_;
};

} // namespace speq::cpu
