// Runs whole CUDA kernels on the host, so that tests need no GPU.
//
// Threads of a block are fibers of one thread of the system, blocks run one after the other. Both
// go forwards, backwards or shuffled, from launch to launch. A barrier or a warp operation that
// some of its threads never reach ends the process with a message. Shared memory is poisoned before
// each block and exactly as large as the launch asked for.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <type_traits>

#define __global__
#define __device__
#define __launch_bounds__(...)
#define __forceinline__ inline

#define threadIdx (::cuda_host::thread_index())
#define blockIdx (::cuda_host::block_index())
#define gridDim (::cuda_host::grid_size())

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

namespace cuda_host {

struct Index {
  unsigned x, y, z;
};

constexpr int kLanes = 32;

const Index &thread_index();
const Index &block_index();
const Index &grid_size();
unsigned char *shared_memory();

// Runs a launch to its end. `threads` are to be whole warps.
void run(const std::function<void()> &kernel, Index grid, int threads, std::size_t shared_bytes);

void barrier();

// Every lane of the warp brings a word and leaves with what all of them brought to this call, which
// stays readable until its next call. `operation` is to be the same in all lanes.
const std::uint64_t *exchange(const char *operation, unsigned mask, std::uint64_t word);

template <typename Value> std::uint64_t to_word(Value value) {
  if constexpr (std::is_same_v<Value, float>) {
    return std::bit_cast<std::uint32_t>(value);
  } else {
    static_assert(std::is_integral_v<Value>);
    return static_cast<std::uint64_t>(value);
  }
}

template <typename Value> Value from_word(std::uint64_t word) {
  if constexpr (std::is_same_v<Value, float>) {
    return std::bit_cast<float>(static_cast<std::uint32_t>(word));
  } else {
    return static_cast<Value>(word);
  }
}

inline int lane() { return static_cast<int>(thread_index().x) % kLanes; }

} // namespace cuda_host

inline void __syncthreads() { cuda_host::barrier(); }

inline void __syncwarp(unsigned mask = 0xFFFFFFFFu) { cuda_host::exchange("__syncwarp", mask, 0); }

template <typename Value> Value __shfl_sync(unsigned mask, Value value, int source) {
  const auto *words = cuda_host::exchange("__shfl_sync", mask, cuda_host::to_word(value));
  return cuda_host::from_word<Value>(words[source % cuda_host::kLanes]);
}

template <typename Value> Value __shfl_xor_sync(unsigned mask, Value value, int distance) {
  const auto *words = cuda_host::exchange("__shfl_xor_sync", mask, cuda_host::to_word(value));
  return cuda_host::from_word<Value>(words[(cuda_host::lane() ^ distance) % cuda_host::kLanes]);
}

template <typename Value> Value __shfl_up_sync(unsigned mask, Value value, int distance) {
  const auto *words = cuda_host::exchange("__shfl_up_sync", mask, cuda_host::to_word(value));
  const int source = cuda_host::lane() - distance;
  return cuda_host::from_word<Value>(words[source < 0 ? cuda_host::lane() : source]);
}

inline unsigned __ballot_sync(unsigned mask, bool vote) {
  const auto *words = cuda_host::exchange("__ballot_sync", mask, vote);
  unsigned votes = 0;
  for (int lane = 0; lane < cuda_host::kLanes; ++lane) {
    votes |= static_cast<unsigned>(words[lane]) << lane;
  }
  return votes;
}

inline unsigned __reduce_max_sync(unsigned mask, unsigned value) {
  const auto *words = cuda_host::exchange("__reduce_max_sync", mask, value);
  unsigned largest = 0;
  for (int lane = 0; lane < cuda_host::kLanes; ++lane) {
    largest = std::max(largest, static_cast<unsigned>(words[lane]));
  }
  return largest;
}

inline int __reduce_add_sync(unsigned mask, int value) {
  const auto *words = cuda_host::exchange("__reduce_add_sync", mask, static_cast<unsigned>(value));
  unsigned sum = 0;
  for (int lane = 0; lane < cuda_host::kLanes; ++lane) {
    sum += static_cast<unsigned>(words[lane]);
  }
  return static_cast<int>(sum);
}

inline int __popc(unsigned word) { return std::popcount(word); }

// The lowest set bit's place, counted from 1; 0 where there is none.
inline int __ffs(int word) { return word == 0 ? 0 : std::countr_zero(unsigned(word)) + 1; }

// The lower word of both, shifted right by the shift's low five bits.
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((std::uint64_t(high) << 32 | low) >> shift % 32);
}

// A load of what no thread of the launch writes.
template <typename Value> Value __ldg(const Value *address) { return *address; }

namespace cuda_host {

// PTX's prmt: bytes of low and high, eight in all, by the low three bits of the nibbles of
// `selectors`; with the fourth bit, the sign of the byte eight times.
inline unsigned permute_bytes(unsigned low, unsigned high, unsigned selectors) {
  const std::uint64_t bytes = std::uint64_t(high) << 32 | low;
  unsigned chosen = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned selector = selectors >> 4 * i & 15;
    const auto byte = static_cast<unsigned>(bytes >> 8 * (selector & 7) & 0xFF);
    chosen |= (selector < 8 ? byte : byte < 0x80 ? 0 : 0xFF) << 8 * i;
  }
  return chosen;
}

} // namespace cuda_host

// Four products of signed bytes, added to sum.
inline int __dp4a(int a, int b, int sum) {
  for (int byte = 0; byte < 4; ++byte) {
    sum += static_cast<signed char>(a >> 8 * byte) * static_cast<signed char>(b >> 8 * byte);
  }
  return sum;
}
