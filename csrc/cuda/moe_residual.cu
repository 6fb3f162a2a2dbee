// Exact experts in residual records, over the codes of the draft.
#include "cuda/decode_residual.h"
#include "cuda/moe_compact.h"

namespace speq::cuda {
namespace {

ResidualSlots residual_slots(const Records &records, const BaseExperts &base) {
  const ExpertShape shape{base.down.rows, base.down.columns,
                          base.gate_up.rows != base.down.columns};
  const CompactLayout layout = compact_layout(shape, false);
  return {record_slots(records, layout), base.base_slots, base.down.slots,
          int4_matrix(base.gate_up), int4_matrix(base.down)};
}

} // namespace

Error moe_grouped_residual(Values hidden_states, Route route, Records slots, BaseExperts base,
                           Activation activation, ExpertBiases biases, void *out, void *workspace,
                           void *stream) {
  const InputOrder order{base.input_perm, base.base_slots, base.down.slots};
  return moe_grouped_compact(hidden_states, route, residual_slots(slots, base), order, activation,
                             biases, out, workspace, stream);
}

Error decode_residual(Records record, BaseExperts base, void *gate_up, void *down, void *stream) {
  return decode_expert(residual_slots(record, base), gate_up, down, stream);
}

} // namespace speq::cuda
