// The CUDA kernels, compiled for the host.
#include "cuda/linear_int4.cu"
#include "cuda/moe_grouped.cu"
#include "cuda/moe_int4.cu"
#include "cuda/read_sum.cu"
