// Exact experts in records of MXFP4.
#include "cuda/decode_scaled.h"
#include "cuda/moe_compact.h"

namespace speq::cuda {
namespace {

Mxfp4Slots mxfp4_slots(const Records &records, const ExpertShape &shape) {
  return {scaled_slots(records, mxfp4_layout(shape))};
}

} // namespace

Error moe_grouped_mxfp4(Values hidden_states, Route route, Records slots, ExpertShape shape,
                        Activation activation, ExpertBiases biases, void *out, void *workspace,
                        void *stream) {
  return moe_grouped_compact(hidden_states, route, mxfp4_slots(slots, shape), {}, activation,
                             biases, out, workspace, stream);
}

Error decode_mxfp4(Records record, ExpertShape shape, void *gate_up, void *down, void *stream) {
  return decode_expert(mxfp4_slots(record, shape), gate_up, down, stream);
}

} // namespace speq::cuda
