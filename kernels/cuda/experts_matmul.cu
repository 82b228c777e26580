// SPDX-License-Identifier: Apache-2.0
// Which tiles multiply the rows of many experts. Speed alone depends on it.

#include <type_traits>

#include "kernels/cuda/dispatch.h"
#include "kernels/cuda/experts.cuh"
#include "kernels/cuda/matmul.cuh"
#include "kernels/cuda/matmul_codes.cuh"
#include "kernels/cuda/matmul_f32.cuh"

namespace tandem::kernels::cuda {
namespace {

template <typename Product>
int Run(const Stream& stream, const ExpertProductParams& p) {
  using Kernel = ExpertProductKernel<Product>;
  return Launch(stream,
                {p.most_tiles * Product::RowTiles(p.product.rows), 1, 1},
                Kernel::kThreads, Kernel::kSharedBytes, Kernel{p});
}

template <typename T, typename W>
int RunTiles(const Stream& stream, int tile_rows,
             const ExpertProductParams& p) {
  switch (tile_rows) {
    case 8:
      return Run<MatMulKernel<T, W, MatMul8>>(stream, p);
    case 32:
      return Run<MatMulKernel<T, W, MatMul32>>(stream, p);
    case 128:
      return Run<MatMulKernel<T, W, MatMul128>>(stream, p);
    default:
      return kInvalidLaunch;
  }
}

template <WeightType kWeight>
int RunF32(const Stream& stream, int tile_rows, const ExpertProductParams& p) {
  using Product = MatMulF32Kernel<kWeight>;
  if (tile_rows != Product::kTokens) return kInvalidLaunch;
  return Run<Product>(stream, p);
}

template <WeightType kWeight>
int RunCodes(const Stream& stream, DType activation, int tile_rows,
             const ExpertProductParams& p) {
  return WithElement(activation, [&](auto element) {
    using T = decltype(element);
    if constexpr (!std::is_same_v<T, float>) {
      if (tile_rows == 32) {
        return Run<MatMulCodesKernel<T, kWeight, MatMulCodes32>>(stream, p);
      }
      if (tile_rows == 128) {
        return Run<MatMulCodesKernel<T, kWeight, MatMulCodes128>>(stream, p);
      }
    }
    if (tile_rows != 8) return kInvalidLaunch;
    return Run<MatMulCodesKernel<T, kWeight, MatMulCodes8>>(stream, p);
  });
}

}  // namespace

int LaunchExpertProduct(const Stream& stream, DType activation, WeightType type,
                        int tile_rows, const ExpertProductParams& p) {
  if (p.most_tiles == 0 || p.product.rows == 0) return 0;
  const bool f32 = activation == DType::kF32;
  const bool bf16 = activation == DType::kBF16;
  switch (type) {
    case WeightType::kInt8:
      return RunCodes<WeightType::kInt8>(stream, activation, tile_rows, p);
    case WeightType::kInt4:
      return RunCodes<WeightType::kInt4>(stream, activation, tile_rows, p);
    case WeightType::kInt4Zeros:
      return RunCodes<WeightType::kInt4Zeros>(stream, activation, tile_rows, p);
    case WeightType::kE2m1:
      return RunCodes<WeightType::kE2m1>(stream, activation, tile_rows, p);
    case WeightType::kW8A8:
      return RunCodes<WeightType::kW8A8>(stream, activation, tile_rows, p);
    case WeightType::kF32:
      if (f32) return RunF32<WeightType::kF32>(stream, tile_rows, p);
      break;
    case WeightType::kBF16:
      if (f32) return RunF32<WeightType::kBF16>(stream, tile_rows, p);
      if (bf16) return RunTiles<BFloat16, BFloat16>(stream, tile_rows, p);
      break;
    case WeightType::kF16:
      if (f32) return RunF32<WeightType::kF16>(stream, tile_rows, p);
      if (!bf16) return RunTiles<Half, Half>(stream, tile_rows, p);
      break;
    case WeightType::kE4M3:
      return f32    ? RunF32<WeightType::kE4M3>(stream, tile_rows, p)
             : bf16 ? RunTiles<BFloat16, E4M3>(stream, tile_rows, p)
                    : RunTiles<Half, E4M3>(stream, tile_rows, p);
  }
  return kInvalidLaunch;  // such weights were never packed
}

}  // namespace tandem::kernels::cuda
