// A token of a head with a state over the vectors of an instruction set, which tiles.h describes.
#pragma once

#include <type_traits>

#include "cpu/blocks.h"

namespace speq::cpu {

// How a whole vector of columns is read and written, and how the first columns of one are.
template <typename V> struct WholeVector {
  typename V::Floats load(const float *at) const { return V::load(at); }
  void store(typename V::Floats values, float *at) const { V::store(values, at); }
};

template <typename V> struct PartOfVector {
  std::int64_t columns;
  typename V::Floats load(const float *at) const { return V::load_part(at, columns); }
  void store(typename V::Floats values, float *at) const {
    float whole[V::kLanes];
    V::store(values, whole);
    std::memcpy(at, whole, columns * sizeof(float));
  }
};

// N vectors of columns, over all rows of a state. The state is read once for what the key finds in
// it, and once more to be changed and asked.
template <typename V, int N, bool kByRow, typename Vectors>
static inline void delta_columns(float *state, std::int64_t rows, std::int64_t columns,
                                 std::int64_t first, const DeltaToken &token,
                                 const Vectors &vectors) {
  constexpr std::int64_t kLine = 64 / sizeof(float);
  typename V::Floats change[N], sums[N];
  SPEQ_UNROLL
  for (int n = 0; n < N; ++n) {
    change[n] = sums[n] = V::zero();
  }
  const float *from = state + first;
  for (std::int64_t row = 0; token.takes_back && row < rows; ++row, from += columns) {
    const auto key = V::all(kByRow ? token.key[row] * token.decays[row] : token.key[row]);
    SPEQ_UNROLL
    for (int n = 0; n < N; ++n) {
      if (n * V::kLanes % kLine == 0) {
        fetch_ahead(reinterpret_cast<const char *>(from + n * V::kLanes) + kAheadBytes);
      }
      change[n] = V::fmadd(key, vectors.load(from + n * V::kLanes), change[n]);
    }
  }
  const float of_all = token.decays[0];
  const auto beta = V::all(token.beta), less = V::all(kByRow ? -1.0f : -of_all);
  SPEQ_UNROLL
  for (int n = 0; n < N; ++n) {
    const auto value = vectors.load(token.value + first + n * V::kLanes);
    change[n] = V::mul(beta, token.takes_back ? V::fmadd(less, change[n], value) : value);
  }
  float *to = state + first;
  for (std::int64_t row = 0; row < rows; ++row, to += columns) {
    const auto key = V::all(token.key[row]), query = V::all(token.query[row]);
    const auto decay = V::all(kByRow ? token.decays[row] : of_all);
    SPEQ_UNROLL
    for (int n = 0; n < N; ++n) {
      float *at = to + n * V::kLanes;
      const auto changed = V::fmadd(key, change[n], V::mul(decay, vectors.load(at)));
      vectors.store(changed, at);
      sums[n] = V::fmadd(query, changed, sums[n]);
    }
  }
  SPEQ_UNROLL
  for (int n = 0; n < N; ++n) {
    vectors.store(sums[n], token.out + first + n * V::kLanes);
  }
}

template <typename V, bool kByRow>
static inline void delta_step_of(float *state, std::int64_t rows, std::int64_t columns,
                                 const DeltaToken &token) {
  // Changes and sums stay in registers.
  constexpr int kVectors = V::kRegisters >= 32 ? 8 : 4;
  std::int64_t first = 0;
  const auto step = [&](auto vectors) {
    constexpr int N = decltype(vectors)::value;
    for (; first + N * V::kLanes <= columns; first += N * V::kLanes) {
      delta_columns<V, N, kByRow>(state, rows, columns, first, token, WholeVector<V>{});
    }
  };
  step(std::integral_constant<int, kVectors>{});
  step(std::integral_constant<int, kVectors / 2>{});
  step(std::integral_constant<int, 1>{});
  if (first < columns) {
    delta_columns<V, 1, kByRow>(state, rows, columns, first, token,
                                PartOfVector<V>{columns - first});
  }
}

template <typename V>
static inline void delta_step(float *state, std::int64_t rows, std::int64_t columns,
                              const DeltaToken &token) {
  token.by_row ? delta_step_of<V, true>(state, rows, columns, token)
               : delta_step_of<V, false>(state, rows, columns, token);
}

} // namespace speq::cpu
