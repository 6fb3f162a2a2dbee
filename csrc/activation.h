// Activations of the feed-forward, in float32, on host and device.
#pragma once

#include <cstdint>

#include "exponential.h"

namespace speq {

// In the order of ACTIVATIONS in speq/kernels/reference.py.
enum class ActivationName : std::int64_t {
  silu,
  swish,
  gelu,
  gelu_pytorch_tanh,
  relu,
  clamped,
  relu2,
  silu_before_limit,
};
constexpr std::int64_t kActivations = 8;

// With a gate, up ends at `limit` and -limit, and the gate at `limit`; infinity: nowhere.
struct Activation {
  ActivationName name;
  float limit;
};

// Whether experts with it have a gate, whose activation is multiplied by up; others activate up.
SPEQ_INLINE constexpr bool has_gate(const Activation &activation) {
  return activation.name != ActivationName::relu2;
}

// How steep the sigmoid of the clamped activation is.
constexpr float kClampAlpha = 1.702f;

SPEQ_INLINE float activate(ActivationName name, float x) {
  switch (name) {
  case ActivationName::gelu:
    return 0.5f * x * (1.0f + error_function(x * 0.70710678f));
  case ActivationName::gelu_pytorch_tanh: // (1 + tanh(y)) / 2 is the sigmoid of 2 y
    return times_sigmoid(x, 1.59576912f * (x + 0.044715f * x * x * x));
  case ActivationName::relu:
    return x > 0.0f || x != x ? x : 0.0f; // NaN stays NaN
  default:
    return times_sigmoid(x, x);
  }
}

// Rounds nothing.
struct AsIs {
  SPEQ_MEMBER float operator()(float value) const { return value; }
};

// What comes between an expert's projections. `round` rounds each step as transformers does it; the
// last one is the caller's. Without a gate, both are up.
template <typename Round>
SPEQ_INLINE float activate(const Activation &activation, float gate, float up, const Round &round) {
  const ActivationName name = activation.name;
  if (name == ActivationName::relu2) {
    const float positive = activate(ActivationName::relu, up);
    return positive * positive;
  }
  const bool before = name == ActivationName::silu_before_limit;
  if (before) {
    gate = round(activate(name, gate));
  }
  const float limit = round(activation.limit);
  // NaN stays NaN.
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : up < -limit ? -limit : up;
  if (name != ActivationName::clamped) {
    return (before ? gate : round(activate(name, gate))) * up;
  }
  const float share = round(times_sigmoid(1.0f, round(gate * kClampAlpha)));
  return round(up + 1.0f) * round(gate * share);
}

} // namespace speq
