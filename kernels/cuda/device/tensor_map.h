// SPDX-License-Identifier: Apache-2.0
// A matrix in device memory as the copy engine of sm_90 and later sees it:
// row-major, of 16-bit elements, fetched in tiles of 64 columns that lie in
// shared memory as warpgroup matrix steps read them (wgmma.h). Made by the
// host for each launch and passed with it, inside of the kernel's parameters.

#ifndef TANDEM_KERNELS_CUDA_DEVICE_TENSOR_MAP_H_
#define TANDEM_KERNELS_CUDA_DEVICE_TENSOR_MAP_H_

#include <cstddef>
#include <cstdint>

#include "kernels/types.h"

#ifdef __CUDACC__
#include <cuda.h>
#include <cuda_runtime.h>
#endif

namespace tandem::kernels::cuda {

inline constexpr int kTileColumns = 64;

// [rows, cols], rows `stride` elements apart. Tiles of tile_rows x 64, at
// most 256 rows. REQUIRES: data is a multiple of 16 bytes, stride of 8.
struct TensorSource {
  const void* data;
  DType type;  // kBF16 or kF16
  int rows;
  int cols;
  int64_t stride;
  int tile_rows;
};

#ifdef __CUDACC__

struct TensorMap {
  CUtensorMap map;  // aligned to 64
};

// Returns 0 or a cudaError_t.
inline int MakeTensorMap(const TensorSource& source, TensorMap* map) {
  // The driver's own function: the runtime has none.
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t error = cudaGetDriverEntryPointByVersion(
        "cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess
               ? reinterpret_cast<Encode>(function)
               : nullptr;
  }();
  if (encode == nullptr) return cudaErrorNotSupported;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(source.cols),
                               static_cast<cuuint64_t>(source.rows)};
  const cuuint64_t stride_bytes = static_cast<cuuint64_t>(source.stride) * 2;
  const cuuint32_t tile[2] = {kTileColumns,
                              static_cast<cuuint32_t>(source.tile_rows)};
  const cuuint32_t steps[2] = {1, 1};
  const CUresult result = encode(
      &map->map,
      source.type == DType::kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                  : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
      2, const_cast<void*>(source.data), sizes, &stride_bytes, tile, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? 0 : cudaErrorInvalidValue;
}

#else

struct TensorMap {
  TensorSource source;
};

inline int MakeTensorMap(const TensorSource& source, TensorMap* map) {
  map->source = source;
  return 0;
}

#endif  // __CUDACC__

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_KERNELS_CUDA_DEVICE_TENSOR_MAP_H_
