// The CUDA kernels, compiled for the host.
#include "cuda/float_rows.cu"
#include "cuda/linear_int4.cu"
#include "cuda/moe_grouped.cu"
#include "cuda/moe_int4.cu"
#include "cuda/moe_lossless.cu"
#include "cuda/moe_residual.cu"
#include "cuda/read_sum.cu"
