// The seam between host code and kernels: a launch, on a stream of CUDA or through the shim.
#pragma once

#include <cstddef>

#include "cuda/device.h"

namespace speq::cuda {

struct Grid {
  unsigned x, y;
};

// What a launch says went wrong; null for nothing.
using Error = const char *;

// What every device grants a block without being asked.
constexpr std::size_t kSharedBytes = 48 << 10;

// Rows of a batch, halved until their copies in shared memory leave room for other blocks.
inline int batch_that_fits(int batch, std::size_t row_bytes) {
  while (batch > 1 && batch * row_bytes > kSharedBytes) {
    batch /= 2;
  }
  return batch;
}

#ifdef __CUDACC__
// Lets a kernel have as much dynamic shared memory as its device grants, the same whatever the
// launch: what one launch was granted, the next does not take away.
inline Error allow_most_shared_memory(const void *kernel) {
  int device = 0, most = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
  }
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
#endif

template <typename Arguments>
Error launch(void (*kernel)(Arguments), Grid grid, std::size_t shared_bytes,
             [[maybe_unused]] void *stream, const Arguments &arguments) {
#ifdef __CUDACC__
  if (shared_bytes > kSharedBytes) {
    if (const Error error = allow_most_shared_memory(reinterpret_cast<const void *>(kernel))) {
      return error;
    }
  }
  kernel<<<dim3(grid.x, grid.y), kThreads, shared_bytes, static_cast<cudaStream_t>(stream)>>>(
      arguments);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
#else
  cuda_host::run([&] { kernel(arguments); }, {grid.x, grid.y, 1}, kThreads, shared_bytes);
  return nullptr;
#endif
}

} // namespace speq::cuda

// The shared memory of a block, all of it dynamic: its size is then exact on the host, where
// AddressSanitizer watches it.
#ifdef __CUDACC__
#define SPEQ_SHARED_MEMORY(name) extern __shared__ __align__(16) unsigned char name[]
#else
#define SPEQ_SHARED_MEMORY(name) unsigned char *const name = cuda_host::shared_memory()
#endif
