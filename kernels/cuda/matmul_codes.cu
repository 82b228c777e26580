// SPDX-License-Identifier: Apache-2.0
// Which tiles multiply how many tokens by codes. Speed alone depends on it.

#include "kernels/cuda/dispatch.h"
#include "kernels/cuda/matmul_codes.cuh"
#include "kernels/cuda/quantise_rows.cuh"

namespace tandem::kernels::cuda {
namespace {

template <typename Kernel>
int Run(const Stream& stream, const MatMulParams& p) {
  const int blocks = Kernel::RowTiles(p.rows) * Kernel::TokenTiles(p.tokens);
  return Launch(stream, {blocks, 1, 1}, Kernel::kThreads, Kernel::kSharedBytes,
                Kernel{p});
}

template <typename T, WeightType kWeight>
int RunTiles(const Stream& stream, const MatMulParams& p) {
  if constexpr (!std::is_same_v<T, float>) {
    if (p.tokens <= MatMulCodes8::kTokens) {
      return Run<MatMulCodesKernel<T, kWeight, MatMulCodes8>>(stream, p);
    }
    if (p.tokens > 2 * MatMulCodes32::kTokens) {
      return Run<MatMulCodesKernel<T, kWeight, MatMulCodes128>>(stream, p);
    }
  }
  return Run<MatMulCodesKernel<T, kWeight, MatMulCodes32>>(stream, p);
}

}  // namespace

int LaunchQuantiseRows(const Stream& stream, DType activation,
                       const QuantiseRowsParams& p) {
  if (p.tokens == 0) return 0;
  return WithElement(activation, [&](auto element) {
    const int tiles = (p.tokens + kCodeTokens - 1) / kCodeTokens;
    if (p.whole) {
      using Whole = QuantiseWholeRowsKernel<decltype(element)>;
      return Launch(stream, {tiles * kCodeTokens, 1, 1}, Whole::Threads(p.cols),
                    Whole::kSharedBytes, Whole{p});
    }
    using Groups = QuantiseGroupsKernel<decltype(element)>;
    const int groups = WeightBlocks(p.cols) * kGroupsPerBlock;
    return Launch(stream,
                  {tiles, (groups + Groups::kGroups - 1) / Groups::kGroups, 1},
                  Groups::kThreads, 0, Groups{p});
  });
}

int LaunchMatMulCodes(const Stream& stream, DType activation, WeightType type,
                      const MatMulParams& p) {
  if (p.tokens == 0 || p.rows == 0) return 0;
  return WithElement(activation, [&](auto element) {
    using T = decltype(element);
    return type == WeightType::kInt8 ? RunTiles<T, WeightType::kInt8>(stream, p)
           : type == WeightType::kW8A8
               ? RunTiles<T, WeightType::kW8A8>(stream, p)
           : type == WeightType::kInt4
               ? RunTiles<T, WeightType::kInt4>(stream, p)
           : type == WeightType::kE2m1
               ? RunTiles<T, WeightType::kE2m1>(stream, p)
               : RunTiles<T, WeightType::kInt4Zeros>(stream, p);
  });
}

}  // namespace tandem::kernels::cuda
