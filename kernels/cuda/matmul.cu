// SPDX-License-Identifier: Apache-2.0
// Which tiles multiply how many tokens. Speed alone depends on the choice.

#include <algorithm>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/matmul.cuh"
#include "kernels/cuda/matmul_f32.cuh"
#include "kernels/cuda/matmul_stream.cuh"
#include "kernels/cuda/matmul_wgmma.cuh"

namespace tandem::kernels::cuda {
namespace {

template <typename Kernel>
int Run(const Stream& stream, const MatMulParams& p) {
  const int blocks = Kernel::RowTiles(p.rows) * Kernel::TokenTiles(p.tokens);
  return Launch(stream, {blocks, 1, 1}, Kernel::kThreads, Kernel::kSharedBytes,
                Kernel{p});
}

// Waves of tiles times the time of one: its products, at the share of the
// matrix units' rate that its operands' way through shared memory and the L2
// cache leaves (guessed from bytes per product; to be measured).
template <typename Kernel>
int64_t CostOf(const Stream& stream, const MatMulParams& p, int percent) {
  const int64_t tiles =
      int64_t{Kernel::RowTiles(p.rows)} * Kernel::TokenTiles(p.tokens);
  const int64_t waves =
      (tiles + stream.multiprocessors - 1) / stream.multiprocessors;
  return waves * Kernel::kRows * Kernel::kTokens * 100 / percent;
}

// The cheapest tiles; of equals the larger.
template <typename T, typename W>
int RunWarpgroups(const Stream& stream, DType activation,
                  const MatMulParams& p) {
  using Large = MatMulWgmmaKernel<T, W, 2, 256, 4>;
  using Square = MatMulWgmmaKernel<T, W, 2, 128, 6>;
  using Narrow = MatMulWgmmaKernel<T, W, 1, 128, 7>;
  using Small = MatMulWgmmaKernel<T, W, 1, 64, 8>;
  const int64_t large = CostOf<Large>(stream, p, 100);
  const int64_t square = CostOf<Square>(stream, p, 85);
  const int64_t narrow = CostOf<Narrow>(stream, p, 70);
  const int64_t small = CostOf<Small>(stream, p, 50);
  const int64_t least = std::min({large, square, narrow, small});
  if (large == least) return RunWarpgroups<Large>(stream, activation, p);
  if (square == least) return RunWarpgroups<Square>(stream, activation, p);
  if (narrow == least) return RunWarpgroups<Narrow>(stream, activation, p);
  return RunWarpgroups<Small>(stream, activation, p);
}

template <typename T, typename W, typename Tiles>
int RunStream(const Stream& stream, DType activation, const MatMulParams& p) {
  using Kernel = MatMulStreamKernel<T, W, Tiles>;
  return LaunchStaying<Kernel>(stream, activation,
                               Kernel::kBlocksPerMultiprocessor, p);
}

// With a copy engine. Warpgroups take 64 rows, so with few tokens a matrix
// must have rows for all multiprocessors.
template <typename T, typename W>
int RunCopied(const Stream& stream, DType activation, const MatMulParams& p) {
  const bool warpgroups = stream.generation == 90;
  if (p.tokens <= 8) return RunStream<T, W, MatMul8>(stream, activation, p);
  if (p.tokens <= 16) return RunStream<T, W, MatMul16>(stream, activation, p);
  if (p.tokens <= 64 && warpgroups &&
      WeightBlocks(p.rows) >= stream.multiprocessors) {
    return RunWarpgroups<T, W>(stream, activation, p);
  }
  if (p.tokens <= 32) return RunStream<T, W, MatMul32>(stream, activation, p);
  if (p.tokens <= 64) return RunStream<T, W, MatMul64>(stream, activation, p);
  if (warpgroups) return RunWarpgroups<T, W>(stream, activation, p);
  return Run<MatMulKernel<T, W, MatMul128>>(stream, p);
}

template <typename T, typename W>
int RunTiles(const Stream& stream, DType activation, const MatMulParams& p) {
  // What code was compiled for; later ones run compute_80's, without copies.
  const int family = stream.generation / 10;
  if ((family == 9 || family == 10) && TokensAreTiles(p)) {
    return RunCopied<T, W>(stream, activation, p);
  }
  if (p.tokens <= 8) return Run<MatMulKernel<T, W, MatMul8>>(stream, p);
  if (p.tokens <= 16) return Run<MatMulKernel<T, W, MatMul16>>(stream, p);
  if (p.tokens <= 32) return Run<MatMulKernel<T, W, MatMul32>>(stream, p);
  if (p.tokens <= 64) return Run<MatMulKernel<T, W, MatMul64>>(stream, p);
  return Run<MatMulKernel<T, W, MatMul128>>(stream, p);
}

template <WeightType kWeight>
int RunF32(const Stream& stream, const MatMulParams& p) {
  using Kernel = MatMulF32Kernel<kWeight>;
  return Launch(stream,
                {(p.tokens + Kernel::kTokens - 1) / Kernel::kTokens,
                 WeightBlocks(p.rows), 1},
                Kernel::kThreads, Kernel::kSharedBytes, Kernel{p});
}

}  // namespace

int LaunchMatMul(const Stream& stream, DType activation, WeightType type,
                 const MatMulParams& p) {
  if (p.tokens == 0 || p.rows == 0) return 0;
  if (HasIntegerProducts(type)) return kInvalidLaunch;  // of LaunchMatMulCodes
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
      case WeightType::kInt8:
      case WeightType::kInt4:
      case WeightType::kInt4Zeros:
      case WeightType::kE2m1:
      case WeightType::kW8A8:
        break;
    }
  }
  if (activation == DType::kBF16 && type == WeightType::kBF16) {
    return RunTiles<BFloat16, BFloat16>(stream, activation, p);
  }
  if (activation == DType::kBF16 && type == WeightType::kE4M3) {
    return RunTiles<BFloat16, E4M3>(stream, activation, p);
  }
  if (activation == DType::kF16 && type == WeightType::kF16) {
    return RunTiles<Half, Half>(stream, activation, p);
  }
  if (activation == DType::kF16 && type == WeightType::kE4M3) {
    return RunTiles<Half, E4M3>(stream, activation, p);
  }
  return kInvalidLaunch;  // such weights were never packed
}

}  // namespace tandem::kernels::cuda
