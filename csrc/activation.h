// Activations of the feed-forward, in float32, on host and device.
#pragma once

#include <cstdint>

#include "exponential.h"

namespace speq {

// In the order of ACTIVATIONS in speq/kernels/reference.py.
enum class Activation : std::int64_t {
  silu,
  swish,
  gelu,
  gelu_pytorch_tanh,
  relu,
  clamped,
  relu2,
};
constexpr std::int64_t kActivations = 7;

// Whether experts with it have a gate, whose activation is multiplied by up; others activate up.
SPEQ_INLINE constexpr bool has_gate(Activation activation) {
  return activation != Activation::relu2;
}

// Of the clamped activation: where gate and up end, and how steep the sigmoid is.
constexpr float kClampLimit = 7.0f, kClampAlpha = 1.702f;

SPEQ_INLINE float activate(Activation activation, float x) {
  switch (activation) {
  case Activation::gelu:
    return 0.5f * x * (1.0f + error_function(x * 0.70710678f));
  case Activation::gelu_pytorch_tanh: // (1 + tanh(y)) / 2 is the sigmoid of 2 y
    return times_sigmoid(x, 1.59576912f * (x + 0.044715f * x * x * x));
  case Activation::relu:
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
SPEQ_INLINE float activate(Activation activation, float gate, float up, const Round &round) {
  if (activation == Activation::relu2) {
    const float positive = activate(Activation::relu, up);
    return positive * positive;
  }
  if (activation != Activation::clamped) {
    return round(activate(activation, gate)) * up;
  }
  // NaN stays NaN.
  gate = gate > kClampLimit ? kClampLimit : gate;
  up = up > kClampLimit ? kClampLimit : up < -kClampLimit ? -kClampLimit : up;
  const float share = round(times_sigmoid(1.0f, round(gate * kClampAlpha)));
  return round(up + 1.0f) * round(gate * share);
}

} // namespace speq
