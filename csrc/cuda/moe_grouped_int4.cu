// Exact experts in records of INT4 as they were published; those of drafts are in moe_int4.cu.
#include "cuda/decode_scaled.h"
#include "cuda/moe_compact.h"

namespace speq::cuda {
namespace {

GroupedInt4Slots int4_slots(const Records &records, const ExpertShape &shape, Int4Groups groups) {
  return {scaled_slots(records, int4_layout(shape, groups)), groups};
}

} // namespace

Error moe_grouped_int4(Values hidden_states, Route route, Records slots, ExpertShape shape,
                       Int4Groups groups, Activation activation, ExpertBiases biases, void *out,
                       void *workspace, void *stream) {
  return moe_grouped_compact(hidden_states, route, int4_slots(slots, shape, groups), {}, activation,
                             biases, out, workspace, stream);
}

Error decode_int4(Records record, ExpertShape shape, Int4Groups groups, void *gate_up, void *down,
                  void *stream) {
  return decode_expert(int4_slots(record, shape, groups), gate_up, down, stream);
}

} // namespace speq::cuda
