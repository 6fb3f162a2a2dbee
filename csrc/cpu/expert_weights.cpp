#include "cpu/expert_weights.h"

#include <stdexcept>
#include <string>

namespace speq::cpu {

const void *RawWeights::words(Projection projection, std::int64_t, std::int64_t slot,
                              std::int64_t first, std::int64_t, std::byte *) const {
  const Slots &slots = projection == Projection::down ? down_ : gate_up_;
  const std::int64_t row = first + first_row(projection);
  return slots.words + slot * slots.slot_bytes + row * columns(projection) * bytes_of(word);
}

void RawWeights::dot(Projection projection, std::int64_t expert, std::int64_t slot,
                     std::int64_t first, std::int64_t rows, const Inputs &inputs,
                     float *const *outs) const {
  dot_exact_for(word, inputs.stored)(words(projection, expert, slot, first, rows, nullptr),
                                     columns(projection), rows, inputs.rows, inputs.count, outs);
}

LosslessWeights::LosslessWeights(const ExpertShape &shape, RecordSlots slots)
    : ExpertWeights(shape, slots.count, Word::bfloat16), layout_(compact_layout(shape, true)),
      slots_(slots) {}

std::int64_t LosslessWeights::fixed_bytes(const ExpertShape &shape) {
  return compact_layout(shape, true).fixed_bytes();
}

LosslessRows LosslessWeights::rows(Projection projection, std::int64_t slot) const {
  return lossless_rows(layout_, slots_.record(slot), int(projection));
}

void LosslessWeights::dot(Projection projection, std::int64_t, std::int64_t slot,
                          std::int64_t first, std::int64_t count, const Inputs &inputs,
                          float *const *outs) const {
  dot_rows(rows(projection, slot), first, first + count, inputs, outs);
}

const void *LosslessWeights::words(Projection projection, std::int64_t, std::int64_t slot,
                                   std::int64_t first, std::int64_t count, std::byte *room) const {
  return decode_rows(rows(projection, slot), first, first + count, room);
}

ResidualWeights::ResidualWeights(const ExpertShape &shape, RecordSlots slots, BaseExperts base)
    : ExpertWeights(shape, slots.count, Word::bfloat16), layout_(compact_layout(shape, false)),
      slots_(slots), base_(base) {}

std::int64_t ResidualWeights::fixed_bytes(const ExpertShape &shape) {
  return compact_layout(shape, false).fixed_bytes();
}

std::int64_t ResidualWeights::base_slot(std::int64_t expert) const {
  const std::int64_t slot = base_.base_slots[expert];
  if (slot < 0 || slot >= base_.count) {
    throw std::out_of_range("base_slots holds " + std::to_string(slot) + "; there are " +
                            std::to_string(base_.count) + " base slots");
  }
  return slot;
}

ResidualRows ResidualWeights::rows(Projection projection, std::int64_t expert,
                                   std::int64_t slot) const {
  const bool down = projection == Projection::down;
  const std::int64_t width = columns(projection);
  const std::int64_t group_size = down ? base_.down_group_size : base_.gate_up_group_size;
  const std::int64_t of_expert = down ? shape.hidden_size : shape.gate_up_rows();
  const std::int64_t first = base_slot(expert) * of_expert + first_row(projection);
  const std::uint8_t *qweight = down ? base_.down_qweight : base_.gate_up_qweight;
  const Float16 *scales = down ? base_.down_scales : base_.gate_up_scales;
  return residual_rows(
      layout_, slots_.record(slot), int(projection),
      {qweight + first * (width / 2), scales + first * (width / group_size), width, group_size});
}

void ResidualWeights::dot(Projection projection, std::int64_t expert, std::int64_t slot,
                          std::int64_t first, std::int64_t count, const Inputs &inputs,
                          float *const *outs) const {
  dot_rows(rows(projection, expert, slot), first, first + count, inputs, outs);
}

const void *ResidualWeights::words(Projection projection, std::int64_t expert, std::int64_t slot,
                                   std::int64_t first, std::int64_t count, std::byte *room) const {
  return decode_rows(rows(projection, expert, slot), first, first + count, room);
}

const std::int32_t *ResidualWeights::input_perm(std::int64_t expert) const {
  return has_input_perm() ? base_.input_perm + base_slot(expert) * shape.hidden_size : nullptr;
}

const void *RoundedWeights::words(Projection projection, std::int64_t expert, std::int64_t slot,
                                  std::int64_t first, std::int64_t rows, std::byte *room) const {
  const std::int64_t width = columns(projection);
  Buffer<std::byte> unrounded(quads_of(rows) * kQuadRows * width * bytes_of(weights_.word));
  const void *from = weights_.words(projection, expert, slot, first, rows, unrounded.data());
  with_type(weights_.word, [&](auto stored) {
    with_type(word, [&](auto rounded) {
      const auto *values = static_cast<const decltype(stored) *>(from);
      auto *out = reinterpret_cast<decltype(rounded) *>(room);
      for (std::int64_t i = 0; i < rows * width; ++i) {
        store(to_float(values[i]), out[i]);
      }
    });
  });
  return room;
}

void RoundedWeights::dot(Projection projection, std::int64_t expert, std::int64_t slot,
                         std::int64_t first, std::int64_t rows, const Inputs &inputs,
                         float *const *outs) const {
  const std::int64_t width = columns(projection);
  Buffer<std::byte> room(rows * width * bytes_of(word));
  dot_exact_for(word, inputs.stored)(words(projection, expert, slot, first, rows, room.data()),
                                     width, rows, inputs.rows, inputs.count, outs);
}

} // namespace speq::cpu
