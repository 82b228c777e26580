// SPDX-License-Identifier: Apache-2.0
// As much of cuBLASLt's C interface (version 13) as the yardstick calls, found
// at run time: the library is half a gigabyte and no part of a build.

#ifndef TANDEM_BENCH_GPU_CUBLASLT_H_
#define TANDEM_BENCH_GPU_CUBLASLT_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace tandem::bench::cublaslt {

// Values of the library's enumerations.
inline constexpr int kBf16 = 14;        // CUDA_R_16BF
inline constexpr int kF32 = 0;          // CUDA_R_32F
inline constexpr int kComputeF32 = 68;  // CUBLAS_COMPUTE_32F
inline constexpr int kTransposed = 1;   // CUBLAS_OP_T
inline constexpr int kDescTransA = 3;   // CUBLASLT_MATMUL_DESC_TRANSA
inline constexpr int kMaxWorkspace =
    1;  // CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_..

struct Algorithm {
  uint64_t data[8];
};
struct Heuristic {
  Algorithm algorithm;
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
};

// Each returns 0, or a cublasStatus_t.
struct Library {
  int (*create)(void** handle);
  int (*destroy)(void* handle);
  size_t (*version)();
  int (*desc_create)(void** desc, int compute, int scale);
  int (*desc_set)(void* desc, int attribute, const void* value, size_t bytes);
  int (*desc_destroy)(void* desc);
  int (*layout_create)(void** layout, int type, uint64_t rows, uint64_t cols,
                       int64_t leading);
  int (*layout_destroy)(void* layout);
  int (*preference_create)(void** preference);
  int (*preference_set)(void* preference, int attribute, const void* value,
                        size_t bytes);
  int (*preference_destroy)(void* preference);
  int (*heuristic)(void* handle, void* desc, void* a, void* b, void* c, void* d,
                   void* preference, int wanted, Heuristic* results,
                   int* found);
  int (*matmul)(void* handle, void* desc, const void* alpha, const void* a,
                void* a_layout, const void* b, void* b_layout, const void* beta,
                const void* c, void* c_layout, void* d, void* d_layout,
                const Algorithm* algorithm, void* workspace,
                size_t workspace_bytes, void* stream);
  std::string path;
};

// From TANDEM_CUBLASLT, or where the dynamic linker finds it.
absl::StatusOr<Library> Load();

}  // namespace tandem::bench::cublaslt

#endif  // TANDEM_BENCH_GPU_CUBLASLT_H_
