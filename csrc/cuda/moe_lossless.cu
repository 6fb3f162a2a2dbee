// Exact experts in lossless records.
#include "cuda/decode_lossless.h"
#include "cuda/moe_compact.h"

namespace speq::cuda {
namespace {

LosslessSlots lossless_slots(const Records &records, const ExpertShape &shape) {
  return {record_slots(records, compact_layout(shape, true))};
}

} // namespace

Error moe_grouped_lossless(Values hidden_states, Route route, Records slots, ExpertShape shape,
                           Activation activation, ExpertBiases biases, void *out, void *workspace,
                           void *stream) {
  return moe_grouped_compact(hidden_states, route, lossless_slots(slots, shape), {}, activation,
                             biases, out, workspace, stream);
}

Error decode_lossless(Records record, ExpertShape shape, void *gate_up, void *down, void *stream) {
  return decode_expert(lossless_slots(record, shape), gate_up, down, stream);
}

} // namespace speq::cuda
