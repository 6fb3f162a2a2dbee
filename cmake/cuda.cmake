# The CUDA kernels: for GPUs where there is an nvcc, seen or not a GPU, and for the host, for tests.
# Torch without CUDA is enough to build against: what it lacks, torch with CUDA brings at load time.

# The kernels run on the host, without a GPU, by tests/cuda_host.
add_library(speq_cuda_on_host SHARED EXCLUDE_FROM_ALL csrc/cuda/bindings.cpp
  csrc/cuda/compact_bindings.cpp csrc/cuda/dense_bindings.cpp csrc/cuda/scaled_bindings.cpp tests/cuda_host/kernels.cpp tests/cuda_host/shim.cpp)
target_link_libraries(speq_cuda_on_host PRIVATE speq_options)
target_include_directories(speq_cuda_on_host PRIVATE tests)
target_compile_options(speq_cuda_on_host PRIVATE -Wno-unknown-pragmas) # of nvcc

# Torch without CUDA then makes tensors of a device that tests stand in for.
find_library(TORCH_C10 c10 PATHS "${TORCH_PREFIX}/lib" NO_DEFAULT_PATH REQUIRED)
add_library(speq_host_guard SHARED EXCLUDE_FROM_ALL tests/cuda_host/guard.cpp)
target_include_directories(speq_host_guard SYSTEM PRIVATE "${TORCH_PREFIX}/include")
target_link_libraries(speq_host_guard PRIVATE "${TORCH_C10}")

option(SPEQ_CUDA "Build the CUDA kernels where there is an nvcc" ON)
if(NOT SPEQ_CUDA)
  return()
endif()
set(CMAKE_CUDA_ARCHITECTURES OFF) # said below
include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  message(STATUS "No nvcc: building without CUDA kernels")
  return()
endif()
enable_language(CUDA)

add_library(speq_cuda SHARED csrc/cuda/bindings.cpp csrc/cuda/compact_bindings.cpp
  csrc/cuda/dense_bindings.cpp csrc/cuda/architectures.cpp csrc/cuda/dense_lossless.cu
  csrc/cuda/dense_residual.cu csrc/cuda/float_rows.cu csrc/cuda/linear_int4.cu csrc/cuda/moe_grouped.cu csrc/cuda/moe_grouped_int4.cu csrc/cuda/moe_int4.cu
  csrc/cuda/moe_fp8.cu csrc/cuda/moe_lossless.cu csrc/cuda/moe_mxfp4.cu csrc/cuda/moe_nvfp4.cu csrc/cuda/moe_residual.cu
  csrc/cuda/read_sum.cu csrc/cuda/scaled_bindings.cpp)
target_link_libraries(speq_cuda PRIVATE speq_options)
target_compile_definitions(speq_cuda PRIVATE USE_CUDA)
# Without contraction cards round as processors do (sum_order.h, exponential.h).
target_compile_options(speq_cuda PRIVATE
  "$<$<COMPILE_LANGUAGE:CUDA>:-O3;--fmad=false;--threads=2;-Xcompiler=-Wall,-Wextra>")
if(SPEQ_WERROR)
  target_compile_options(speq_cuda PRIVATE
    "$<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings;-Xcompiler=-Werror>")
endif()
set_target_properties(speq_cuda PROPERTIES
  CXX_VISIBILITY_PRESET hidden
  CUDA_VISIBILITY_PRESET hidden
  CUDA_STANDARD 20
  CUDA_STANDARD_REQUIRED ON
  CUDA_RUNTIME_LIBRARY Static)

# Ampere, Ada, Hopper and Blackwell, and PTX of the last for what comes after.
set(architectures 80-real 86-real 89-real)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.8)
  list(APPEND architectures 90)
else()
  list(APPEND architectures 90-real 100-real 120)
endif()
set(SPEQ_CUDA_ARCHITECTURES "${architectures}" CACHE STRING
  "Cards that the CUDA kernels are built for, as in CMAKE_CUDA_ARCHITECTURES, by number")
foreach(architecture IN LISTS SPEQ_CUDA_ARCHITECTURES)
  if(NOT architecture MATCHES "^[0-9]+(-real|-virtual)?$")
    message(FATAL_ERROR "SPEQ_CUDA_ARCHITECTURES has '${architecture}'; give numbers such as "
                        "90-real, separated by semicolons")
  endif()
endforeach()
set_target_properties(speq_cuda PROPERTIES CUDA_ARCHITECTURES "${SPEQ_CUDA_ARCHITECTURES}")
list(JOIN SPEQ_CUDA_ARCHITECTURES " " built_for)
set_source_files_properties(csrc/cuda/architectures.cpp PROPERTIES
  COMPILE_DEFINITIONS "SPEQ_CUDA_ARCHITECTURES=\"${built_for}\"")

# Torch with CUDA holds the current stream in a library that torch without it lacks; libtorch.so,
# which both have, brings it along.
find_library(TORCH_ANY torch PATHS "${TORCH_PREFIX}/lib" NO_DEFAULT_PATH REQUIRED)
target_link_libraries(speq_cuda PRIVATE -Wl,--no-as-needed "${TORCH_ANY}" -Wl,--as-needed)
