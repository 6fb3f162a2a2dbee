// Values whose dtype is known at run time only. Not for inner loops over weights.
#pragma once

#include <cstdint>

#include "cuda/device.h"

namespace speq::cuda {

SPEQ_DEVICE float load_value(const void *values, Dtype dtype, std::int64_t index) {
  switch (dtype) {
  case Dtype::float32:
    return static_cast<const float *>(values)[index];
  case Dtype::float64:
    return to_float(static_cast<const double *>(values)[index]);
  case Dtype::bfloat16:
    return to_float(static_cast<const BFloat16 *>(values)[index]);
  default:
    return widen(static_cast<const Float16 *>(values)[index]);
  }
}

SPEQ_DEVICE void store_value(float value, void *values, Dtype dtype, std::int64_t index) {
  switch (dtype) {
  case Dtype::float32:
    return store(value, static_cast<float *>(values)[index]);
  case Dtype::float64:
    return store(value, static_cast<double *>(values)[index]);
  case Dtype::bfloat16:
    return store(value, static_cast<BFloat16 *>(values)[index]);
  default:
    return store(value, static_cast<Float16 *>(values)[index]);
  }
}

// Values as they are after a visit to dtype.
struct Rounding {
  Dtype dtype;

  SPEQ_MEMBER float operator()(float value) const {
    switch (dtype) {
    case Dtype::bfloat16:
      return rounded_to<BFloat16>(value);
    case Dtype::float16:
      return rounded_to<Float16>(value);
    default:
      return value;
    }
  }
};

SPEQ_DEVICE float rounded(float value, Dtype dtype) { return Rounding{dtype}(value); }

} // namespace speq::cuda
