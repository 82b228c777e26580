# The CUDA toolkit and how kernels are compiled: preset `cuda`. nvcc is taken
# from TANDEM_CUDA_ROOT, which scripts/setup.sh --cuda prepares.

set(TANDEM_CUDA_ROOT ${PROJECT_SOURCE_DIR}/build/cuda-toolkit CACHE PATH
    "CUDA 13 toolkit (scripts/setup.sh --cuda)")
if(NOT EXISTS ${TANDEM_CUDA_ROOT}/bin/nvcc)
  message(FATAL_ERROR "no ${TANDEM_CUDA_ROOT}/bin/nvcc: run "
                      "scripts/setup.sh --cuda, or set TANDEM_CUDA_ROOT")
endif()
set(CMAKE_CUDA_COMPILER ${TANDEM_CUDA_ROOT}/bin/nvcc)
set(CMAKE_CUDA_HOST_COMPILER ${CMAKE_CXX_COMPILER})
# CMake 3.25 does not know 100f: the targets are ours to name.
set(CMAKE_CUDA_ARCHITECTURES OFF)
if(CCACHE_PROGRAM)
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${CCACHE_PROGRAM})
endif()
enable_language(CUDA)
# Nor does it know how nvcc 13 spells C++20.
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED OFF)
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
  set(TANDEM_CUDA_STANDARD -std=c++20)
endif()

# Real code for A100, H100/H200 and B200 (wgmma needs the `a`, tcgen05 the
# `f`), and PTX of the first for what comes between and after. No
# -use_fast_math: what may be approximate is said where it is used.
set(TANDEM_CUDA_FLAGS
  "SHELL:-gencode arch=compute_80,code=[sm_80,compute_80]"
  "SHELL:-gencode arch=compute_90a,code=sm_90a"
  "SHELL:-gencode arch=compute_100f,code=sm_100f"
  ${TANDEM_CUDA_STANDARD} -O3 -DNDEBUG --expt-relaxed-constexpr --fmad=false --ftz=true
  "SHELL:-Werror all-warnings" "SHELL:-Xcompiler -fPIC,-Wall")
if(NOT TANDEM_CUDA_OPTIMISE)
  list(APPEND TANDEM_CUDA_FLAGS --Ofast-compile=max)
endif()

# What the CUDA stage of scripts/test.sh builds: everything that is not in the
# other builds already.
add_custom_target(cuda-parts)
