// What lets one header be compiled by g++ for the host and by nvcc for both sides.
#pragma once

// Functions in shared headers have internal linkage: the same header is compiled for several
// instruction sets, and the linker must not choose one of the copies for all. Members, which cannot
// have that, leave no copy behind.
#ifdef __CUDACC__
#define SPEQ_INLINE __host__ __device__ static inline
#define SPEQ_MEMBER __host__ __device__ __forceinline__
#else
#define SPEQ_INLINE static inline
#define SPEQ_MEMBER __attribute__((always_inline)) inline
#endif
