// What kernels need of CUDA beyond the language. Where no nvcc compiles, the shim of
// tests/cuda_host stands in for it, so that whole kernels run on the host.
#pragma once

#include <cstdint>

#include "cuda/launchers.h"
#include "half.h"

#ifndef __CUDACC__
#include "cuda_host/shim.h"
#endif

#define SPEQ_DEVICE __device__ __forceinline__

namespace speq::cuda {

constexpr int kLanes = 32;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;
// Every kernel is launched with as many.
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kLanes;
// Rows whose sums stay in registers while a weight passes by.
constexpr int kMaxBatch = 4;
// Neighbouring columns that a lane multiplies: a vector of BF16.
constexpr int kLaneColumns = 8;

// Code for Blackwell takes more registers than code for those before it.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr bool kBlackwell = true;
#else
constexpr bool kBlackwell = false;
#endif

// A position is a place of a route, t * top_k + j; a thread looks after each.
constexpr int kMaxPositions = kMaxCallPositions;
static_assert(kMaxPositions <= kThreads);

SPEQ_DEVICE int lane_id() { return int(threadIdx.x) % kLanes; }
SPEQ_DEVICE int warp_id() { return int(threadIdx.x) / kLanes; }

// Sixteen bytes of weights, which nobody on this multiprocessor will read again soon.
SPEQ_DEVICE uint4 load_streamed(const void *address) {
#ifdef __CUDA_ARCH__
  uint4 words;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
      : "l"(address));
  return words;
#else
  return *static_cast<const uint4 *>(address);
#endif
}

// Four bytes of the eight of `low` and `high`, by the low three bits of the nibbles of `selectors`;
// the fourth bit of a nibble asks for copies of the byte's sign instead. (__byte_perm has no
// signs.)
SPEQ_DEVICE std::uint32_t permute_bytes(std::uint32_t low, std::uint32_t high,
                                        std::uint32_t selectors) {
#ifdef __CUDACC__
  std::uint32_t chosen;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(chosen) : "r"(low), "r"(high), "r"(selectors));
  return chosen;
#else
  return cuda_host::permute_bytes(low, high, selectors);
#endif
}

// Bits of `chosen` where those of `mask` are set, else of `other`, in one instruction.
SPEQ_DEVICE std::uint32_t select_bits(std::uint32_t mask, std::uint32_t chosen,
                                      std::uint32_t other) {
#ifdef __CUDA_ARCH__
  std::uint32_t bits;
  asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(bits) : "r"(mask), "r"(chosen), "r"(other));
  return bits;
#else
  return (mask & chosen) | (~mask & other);
#endif
}

constexpr int kCacheLine = 128;

// Begin to move a line to the L2 cache; holds no register while it is under way.
SPEQ_DEVICE void prefetch([[maybe_unused]] const void *address) {
#ifdef __CUDA_ARCH__
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
#endif
}

// to_float, in one instruction.
SPEQ_DEVICE float widen(Float16 value) {
#ifdef __CUDA_ARCH__
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
  return wide;
#else
  return to_float(value);
#endif
}

// value as it is after a visit to float16, in two instructions.
SPEQ_DEVICE float narrowed(float value) {
#ifdef __CUDA_ARCH__
  Float16 narrow;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(value));
  return widen(narrow);
#else
  return rounded_to<Float16>(value);
#endif
}

// value and that of the lane so far below, where there is one. All lanes of a warp ask at once.
SPEQ_DEVICE int plus_lower_lane(int value, int distance) {
#ifdef __CUDA_ARCH__
  asm volatile("{ .reg .pred below; .reg .s32 other;\n"
               "  shfl.sync.up.b32 other|below, %0, %1, 0, -1;\n"
               "  @below add.s32 %0, %0, other; }"
               : "+r"(value)
               : "r"(distance));
  return value;
#else
  const int other = __shfl_up_sync(kAllLanes, value, distance);
  return value + (lane_id() >= distance ? other : 0);
#endif
}

// The same value, which the compiler takes for another: what follows from it is found again, where
// registers to keep it in would be too many.
SPEQ_DEVICE int found_again(int value) {
#ifdef __CUDA_ARCH__
  asm volatile("" : "+r"(value));
#endif
  return value;
}

SPEQ_DEVICE float not_a_number() { return bits_as<float>(0x7FC00000u); }

// The sum over neighbouring lanes, in each of them; always in the same order.
template <int kNeighbours> SPEQ_DEVICE float sum_of_lanes(float value) {
  for (int distance = kNeighbours / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, distance);
  }
  return value;
}

template <int kValue> struct Constant {
  static constexpr int value = kValue;
};

// Calls run with the least row count compiled for that is at least `rows`, at most kMost.
template <int kMost = kMaxBatch, typename Run> SPEQ_DEVICE void with_row_count(int rows, Run run) {
  if (rows == 1) {
    run(Constant<1>());
  } else if (kMost == 2 || rows == 2) {
    run(Constant<2>());
  } else {
    run(Constant<kMost>());
  }
}

} // namespace speq::cuda
