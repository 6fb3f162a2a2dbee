// Exact experts in records of FP8.
#include "cuda/decode_scaled.h"
#include "cuda/moe_compact.h"

namespace speq::cuda {
namespace {

Fp8Slots fp8_slots(const Records &records, const ExpertShape &shape, Fp8Blocks blocks) {
  return {scaled_slots(records, fp8_layout(shape, blocks)), blocks};
}

} // namespace

Error moe_grouped_fp8(Values hidden_states, Route route, Records slots, ExpertShape shape,
                      Fp8Blocks blocks, Activation activation, ExpertBiases biases, void *out,
                      void *workspace, void *stream) {
  return moe_grouped_compact(hidden_states, route, fp8_slots(slots, shape, blocks), {}, activation,
                             biases, out, workspace, stream);
}

Error decode_fp8(Records record, ExpertShape shape, Fp8Blocks blocks, void *gate_up, void *down,
                 void *stream) {
  return decode_expert(fp8_slots(record, shape, blocks), gate_up, down, stream);
}

} // namespace speq::cuda
