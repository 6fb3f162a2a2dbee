// Binds the gated delta rule and the selective scan; bindings.cpp says how.

#include "cpu/delta_rule.h"
#include "cpu/op_list.h"
#include "cpu/tensors.h"

namespace {

using namespace speq::cpu;

void run(const Tensor &mixed, const Tensor &decays, const Tensor &betas, const char *of_betas,
         std::optional<float> eps, const Tensor &state, const Tensor &out) {
  check(mixed, "mixed", 2, ScalarType::Float);
  check(decays, "decays", decays.dim() == 3 ? 3 : 2, ScalarType::Float);
  check(betas, of_betas, 2, ScalarType::Float);
  check(state, "state", 3, ScalarType::Float);
  check(out, "out", 3, ScalarType::Float);
  const std::int64_t tokens = mixed.size(0), heads = state.size(0);
  const std::int64_t key_width = state.size(1), value_width = state.size(2);
  STD_TORCH_CHECK(heads > 0 && key_width > 0 && value_width > 0,
                  "state must be [heads, key width, value width], none of them 0");
  const std::int64_t keys = mixed.size(1) - heads * value_width;
  STD_TORCH_CHECK(keys > 0 && keys % (2 * key_width) == 0 && heads % (keys / (2 * key_width)) == 0,
                  "mixed must have queries and keys of heads that divide those of state, and "
                  "values of each of these; it has ",
                  mixed.size(1), " columns for a state [", heads, ", ", key_width, ", ",
                  value_width, "]");
  for (const Tensor *tensor : {&decays, &betas}) {
    STD_TORCH_CHECK(tensor->size(0) == tokens && tensor->size(1) == heads, "decays and ", of_betas,
                    " must have a row for each of mixed, and a column for each head of state");
  }
  STD_TORCH_CHECK(decays.dim() == 2 || decays.size(2) == key_width,
                  "decays of rows must be [T, heads, key width]");
  STD_TORCH_CHECK(out.size(0) == tokens && out.size(1) == heads && out.size(2) == value_width,
                  "out must be [T, heads, value width] of mixed's tokens and of state");
  if (tokens == 0) {
    return;
  }
  const auto floats = [](const Tensor &tensor) {
    return static_cast<const float *>(tensor.const_data_ptr());
  };
  const DeltaRule rule({
      tokens,
      keys / (2 * key_width),
      heads,
      key_width,
      value_width,
      eps,
      floats(mixed),
      floats(betas),
      floats(decays),
      decays.dim() == 3 ? key_width : 1,
      static_cast<float *>(state.mutable_data_ptr()),
      static_cast<float *>(out.mutable_data_ptr()),
  });
  const std::int64_t state_bytes = key_width * value_width * std::int64_t(sizeof(float));
  parallel_for(0, heads, grain((1 + tokens) * state_bytes),
               [&](std::int64_t begin, std::int64_t end) { rule.run(begin, end); });
}

void delta_rule_out(Tensor mixed, Tensor decays, Tensor betas, double eps, Tensor state,
                    Tensor out) {
  run(mixed, decays, betas, "betas", float(eps), state, out);
}

void selective_scan_out(Tensor mixed, Tensor decays, Tensor steps, Tensor state, Tensor out) {
  run(mixed, decays, steps, "steps", std::nullopt, state, out);
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(speq, CPU, m) {
  m.impl("delta_rule_out", SPEQ_BOX(delta_rule_out));
  m.impl("selective_scan_out", SPEQ_BOX(selective_scan_out));
}
