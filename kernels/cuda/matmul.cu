// SPDX-License-Identifier: Apache-2.0
// Which tiles multiply how many tokens. Speed alone depends on the choice.

#include "kernels/cuda/launch.h"
#include "kernels/cuda/matmul.cuh"
#include "kernels/cuda/matmul_f32.cuh"
#include "kernels/cuda/matmul_wgmma.cuh"

namespace tandem::kernels::cuda {
namespace {

template <typename Kernel>
int Run(const Stream& stream, const MatMulParams& p) {
  const int blocks = Kernel::RowTiles(p.rows) * Kernel::TokenTiles(p.tokens);
  return Launch(stream, {blocks, 1, 1}, Kernel::kThreads, Kernel::kSharedBytes,
                Kernel{p});
}

// The largest tiles of which there is one for each multiprocessor.
template <typename T>
int RunWarpgroups(const Stream& stream, const MatMulParams& p) {
  using Large = MatMulWgmmaKernel<T, 2, 256, 4>;
  using Middle = MatMulWgmmaKernel<T, 2, 128, 4>;
  using Small = MatMulWgmmaKernel<T, 1, 128, 4>;
  const int wanted = stream.multiprocessors;
  if (Large::RowTiles(p.rows) * Large::TokenTiles(p.tokens) >= wanted) {
    return Run<Large>(stream, p);
  }
  if (Middle::RowTiles(p.rows) * Middle::TokenTiles(p.tokens) >= wanted) {
    return Run<Middle>(stream, p);
  }
  return Run<Small>(stream, p);
}

template <typename T, typename W>
int RunTiles(const Stream& stream, const MatMulParams& p) {
  if (p.tokens <= 8) return Run<MatMulKernel<T, W, MatMul8>>(stream, p);
  if (p.tokens <= 16) return Run<MatMulKernel<T, W, MatMul16>>(stream, p);
  if (p.tokens <= 32) return Run<MatMulKernel<T, W, MatMul32>>(stream, p);
  if (p.tokens <= 64) return Run<MatMulKernel<T, W, MatMul64>>(stream, p);
  if constexpr (sizeof(W) == sizeof(T)) {
    if (stream.generation == 90) return RunWarpgroups<T>(stream, p);
  }
  return Run<MatMulKernel<T, W, MatMul128>>(stream, p);
}

template <WeightType kWeight>
int RunF32(const Stream& stream, const MatMulParams& p) {
  using Kernel = MatMulF32Kernel<kWeight>;
  return Launch(stream,
                {WeightBlocks(p.rows),
                 (p.tokens + Kernel::kTokens - 1) / Kernel::kTokens, 1},
                Kernel::kThreads, Kernel::kSharedBytes, Kernel{p});
}

}  // namespace

int LaunchMatMul(const Stream& stream, DType activation, WeightType type,
                 const MatMulParams& p) {
  if (p.tokens == 0 || p.rows == 0) return 0;
  if (activation == DType::kF32) {
    switch (type) {
      case WeightType::kF32:
        return RunF32<WeightType::kF32>(stream, p);
      case WeightType::kBF16:
        return RunF32<WeightType::kBF16>(stream, p);
      case WeightType::kF16:
        return RunF32<WeightType::kF16>(stream, p);
      case WeightType::kE4M3:
        return RunF32<WeightType::kE4M3>(stream, p);
    }
  }
  if (activation == DType::kBF16 && type == WeightType::kBF16) {
    return RunTiles<BFloat16, BFloat16>(stream, p);
  }
  if (activation == DType::kBF16 && type == WeightType::kE4M3) {
    return RunTiles<BFloat16, E4M3>(stream, p);
  }
  if (activation == DType::kF16 && type == WeightType::kF16) {
    return RunTiles<Half, Half>(stream, p);
  }
  if (activation == DType::kF16 && type == WeightType::kE4M3) {
    return RunTiles<Half, E4M3>(stream, p);
  }
  return kInvalidLaunch;  // such weights were never packed
}

}  // namespace tandem::kernels::cuda
