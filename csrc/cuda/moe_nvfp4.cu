// Exact experts in records of NVFP4.
#include "cuda/decode_scaled.h"
#include "cuda/moe_compact.h"

namespace speq::cuda {
namespace {

Nvfp4Slots nvfp4_slots(const Records &records, const ExpertShape &shape, bool divides) {
  return {scaled_slots(records, nvfp4_layout(shape)), divides};
}

} // namespace

Error moe_grouped_nvfp4(Values hidden_states, Route route, Records slots, ExpertShape shape,
                        bool divides, Activation activation, ExpertBiases biases, void *out,
                        void *workspace, void *stream) {
  return moe_grouped_compact(hidden_states, route, nvfp4_slots(slots, shape, divides), {},
                             activation, biases, out, workspace, stream);
}

Error decode_nvfp4(Records record, ExpertShape shape, bool divides, void *gate_up, void *down,
                   void *stream) {
  return decode_expert(nvfp4_slots(record, shape, divides), gate_up, down, stream);
}

} // namespace speq::cuda
