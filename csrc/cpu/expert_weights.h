// Exact experts in slots, whatever code they are in: the products of their rows.
#pragma once

#include <cstddef>
#include <span>

#include "cpu/records.h"

namespace speq::cpu {

enum class Projection : int { gate, up, down };

class ExpertWeights {
public:
  ExpertWeights(const ExpertShape &shape, std::int64_t num_slots, Word word)
      : shape(shape), num_slots(num_slots), word(word) {}
  virtual ~ExpertWeights() = default;

  // Rows [first, first + rows) of a projection of the expert in a slot; first is a multiple of
  // four.
  virtual void dot(Projection projection, std::int64_t expert, std::int64_t slot,
                   std::int64_t first, std::int64_t rows, const Inputs &inputs,
                   float *const *outs) const = 0;

  // The words of such rows, of type `word`: where they lie, or written to `room`, which holds whole
  // quads of rows.
  virtual const void *words(Projection projection, std::int64_t expert, std::int64_t slot,
                            std::int64_t first, std::int64_t rows, std::byte *room) const = 0;

  // The order that an expert's inputs are multiplied in, where that is not their own.
  virtual const std::int32_t *input_perm(std::int64_t) const { return nullptr; }
  virtual bool has_input_perm() const { return false; }

  std::int64_t columns(Projection projection) const { return shape.columns(int(projection)); }
  // The first row of a projection in the matrix where up is below gate.
  std::int64_t first_row(Projection projection) const {
    return projection == Projection::up ? shape.rows(int(Projection::gate)) : 0;
  }

  const ExpertShape shape;
  const std::int64_t num_slots;
  const Word word;
};

// Plain words: gate_up [S, 2F, H], or [S, F, H] without a gate, and down [S, H, F], in slots that
// lie some bytes apart.
class RawWeights : public ExpertWeights {
public:
  struct Slots {
    const std::byte *words;
    std::int64_t slot_bytes;
  };
  RawWeights(const ExpertShape &shape, std::int64_t num_slots, Word word, Slots gate_up, Slots down)
      : ExpertWeights(shape, num_slots, word), gate_up_(gate_up), down_(down) {}

  void dot(Projection projection, std::int64_t expert, std::int64_t slot, std::int64_t first,
           std::int64_t rows, const Inputs &inputs, float *const *outs) const override;
  const void *words(Projection projection, std::int64_t expert, std::int64_t slot,
                    std::int64_t first, std::int64_t rows, std::byte *room) const override;

private:
  Slots gate_up_, down_;
};

// Records in slots [S, slot_bytes] that lie `stride` bytes apart.
struct RecordSlots {
  const std::uint8_t *records;
  std::int64_t count, slot_bytes, stride;

  Record record(std::int64_t slot) const { return {records + slot * stride, slot_bytes}; }
};

class LosslessWeights : public ExpertWeights {
public:
  // slot_bytes must be at least those of a record without streams.
  LosslessWeights(const ExpertShape &shape, RecordSlots slots);

  static std::int64_t fixed_bytes(const ExpertShape &shape);
  LosslessRows rows(Projection projection, std::int64_t slot) const;
  void dot(Projection projection, std::int64_t expert, std::int64_t slot, std::int64_t first,
           std::int64_t rows, const Inputs &inputs, float *const *outs) const override;
  const void *words(Projection projection, std::int64_t expert, std::int64_t slot,
                    std::int64_t first, std::int64_t rows, std::byte *room) const override;

private:
  CompactLayout layout_;
  RecordSlots slots_;
};

// Experts published as codes with scales, in records of one size. Format: one of scaled.h's
template <typename Format> class ScaledWeights : public ExpertWeights {
public:
  ScaledWeights(const ExpertShape &shape, Format format, RecordSlots slots)
      : ExpertWeights(shape, slots.count, Word::bfloat16), format_(format),
        layout_(format.layout(shape)), slots_(slots) {}

  auto rows(Projection projection, std::int64_t slot) const {
    return format_.rows(layout_, slots_.record(slot).bytes, int(projection));
  }
  void dot(Projection projection, std::int64_t, std::int64_t slot, std::int64_t first,
           std::int64_t count, const Inputs &inputs, float *const *outs) const override {
    dot_rows(rows(projection, slot), first, first + count, inputs, outs);
  }
  const void *words(Projection projection, std::int64_t, std::int64_t slot, std::int64_t first,
                    std::int64_t count, std::byte *room) const override {
    return decode_rows(rows(projection, slot), first, first + count, room);
  }

private:
  Format format_;
  ScaledLayout layout_;
  RecordSlots slots_;
};

// The codes that records are residuals of: by expert, its base slot.
struct BaseExperts {
  std::span<const std::int64_t> base_slots; // [E]
  std::int64_t count;                       // of base slots
  const std::uint8_t *gate_up_qweight, *down_qweight;
  const Float16 *gate_up_scales, *down_scales;
  std::int64_t gate_up_group_size, down_group_size;
  const std::int32_t *input_perm; // [N, hidden_size] or null
};

class ResidualWeights : public ExpertWeights {
public:
  ResidualWeights(const ExpertShape &shape, RecordSlots slots, BaseExperts base);

  static std::int64_t fixed_bytes(const ExpertShape &shape);
  // Throws std::out_of_range where the expert's base slot does not exist.
  ResidualRows rows(Projection projection, std::int64_t expert, std::int64_t slot) const;
  void dot(Projection projection, std::int64_t expert, std::int64_t slot, std::int64_t first,
           std::int64_t rows, const Inputs &inputs, float *const *outs) const override;
  const void *words(Projection projection, std::int64_t expert, std::int64_t slot,
                    std::int64_t first, std::int64_t rows, std::byte *room) const override;
  const std::int32_t *input_perm(std::int64_t expert) const override;
  bool has_input_perm() const override { return base_.input_perm != nullptr; }

private:
  std::int64_t base_slot(std::int64_t expert) const;

  CompactLayout layout_;
  RecordSlots slots_;
  BaseExperts base_;
};

// Experts whose words are rounded to the dtype of the rows that they multiply, as transformers
// converts a checkpoint's. Only where that loses bits: other words are multiplied as they are.
class RoundedWeights : public ExpertWeights {
public:
  RoundedWeights(const ExpertWeights &weights, Word dtype)
      : ExpertWeights(weights.shape, weights.num_slots, dtype), weights_(weights) {}

  static bool loses_bits(Word word, Word dtype) { return dtype != word && dtype != Word::float32; }

  void dot(Projection projection, std::int64_t expert, std::int64_t slot, std::int64_t first,
           std::int64_t rows, const Inputs &inputs, float *const *outs) const override;
  const void *words(Projection projection, std::int64_t expert, std::int64_t slot,
                    std::int64_t first, std::int64_t rows, std::byte *room) const override;
  const std::int32_t *input_perm(std::int64_t expert) const override {
    return weights_.input_perm(expert);
  }
  bool has_input_perm() const override { return weights_.has_input_perm(); }

private:
  const ExpertWeights &weights_;
};

} // namespace speq::cpu
