// Declares the ops that csrc/cuda/bindings.cpp binds, under a name of their own and beside those of
// speq/kernels/library.py, whose schemas these repeat.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(speq_cuda_on_host, m) {
  m.def("linear_int4_out(Tensor inputs, Tensor qweight, Tensor scales, Tensor? input_perm, "
        "Tensor(a!) out) -> ()");
  m.def("moe_int4_out(Tensor hidden_states, Tensor topk_ids, Tensor topk_weights, "
        "Tensor base_slots, Tensor gate_up_qweight, Tensor gate_up_scales, Tensor down_qweight, "
        "Tensor down_scales, Tensor? input_perm, int activation, Tensor(a!) out) -> ()");
  m.def("moe_grouped_out(Tensor hidden_states, Tensor topk_ids, Tensor slot_table, "
        "Tensor gate_up_proj, Tensor down_proj, int activation, Tensor(a!) out) -> ()");
  m.def("decode_lossless_out(Tensor record, Tensor(a!) gate_up_proj, Tensor(b!) down_proj) -> ()");
  m.def("moe_grouped_lossless_out(Tensor hidden_states, Tensor topk_ids, Tensor slot_table, "
        "Tensor slots, int expert_width, int activation, Tensor(a!) out) -> ()");
  m.def("decode_residual_out(Tensor record, Tensor gate_up_qweight, Tensor gate_up_scales, "
        "Tensor down_qweight, Tensor down_scales, Tensor(a!) gate_up_proj, Tensor(b!) down_proj) "
        "-> ()");
  m.def("moe_grouped_residual_out(Tensor hidden_states, Tensor topk_ids, Tensor slot_table, "
        "Tensor slots, Tensor base_slots, Tensor gate_up_qweight, Tensor gate_up_scales, "
        "Tensor down_qweight, Tensor down_scales, Tensor? input_perm, int activation, "
        "Tensor(a!) out) -> ()");
  m.def("read_sum_out(Tensor words, Tensor(a!) out) -> ()");
}
