// Activations of the feed-forward, in float32, on host and device.
#pragma once

#include <cmath>
#include <cstdint>

#include "portable.h"

namespace speq {

// In the order of ACTIVATIONS in speq/kernels/reference.py.
enum class Activation : std::int64_t { silu, swish, gelu, gelu_pytorch_tanh, relu };
constexpr std::int64_t kActivations = 5;

SPEQ_INLINE float activate(Activation activation, float x) {
  switch (activation) {
  case Activation::gelu:
    return 0.5f * x * (1.0f + erff(x * 0.70710678f));
  case Activation::gelu_pytorch_tanh:
    return 0.5f * x * (1.0f + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
  case Activation::relu:
    return x > 0.0f || x != x ? x : 0.0f; // NaN stays NaN
  default:
    return x / (1.0f + expf(-x));
  }
}

} // namespace speq
