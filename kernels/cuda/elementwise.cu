// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/dispatch.h"
#include "kernels/cuda/elementwise.cuh"

namespace tandem::kernels::cuda {
namespace {

template <typename Kernel, typename Params>
int Run(const Stream& stream, int rows, int size, const Params& p) {
  if (rows == 0 || size == 0) return 0;
  constexpr int kPerBlock = Kernel::kThreads * kChunk;
  return Launch(stream, {rows, (size + kPerBlock - 1) / kPerBlock, 1},
                Kernel::kThreads, 0, Kernel{p});
}

}  // namespace

int LaunchEmbed(const Stream& stream, DType activation, WeightType type,
                const EmbedParams& p) {
  return WithElement(activation, [&](auto zero) {
    using T = decltype(zero);
    const auto run = [&](auto kernel) {
      return Run<decltype(kernel)>(stream, p.num_rows, p.cols, p);
    };
    switch (type) {
      case WeightType::kF32:
        return run(EmbedKernel<T, WeightType::kF32>{});
      case WeightType::kBF16:
        return run(EmbedKernel<T, WeightType::kBF16>{});
      case WeightType::kF16:
        return run(EmbedKernel<T, WeightType::kF16>{});
      case WeightType::kE4M3:
        return run(EmbedKernel<T, WeightType::kE4M3>{});
      case WeightType::kInt8:
        return run(EmbedKernel<T, WeightType::kInt8>{});
      case WeightType::kInt4:
        return run(EmbedKernel<T, WeightType::kInt4>{});
      case WeightType::kInt4Zeros:
        return run(EmbedKernel<T, WeightType::kInt4Zeros>{});
      case WeightType::kE2m1:
        return run(EmbedKernel<T, WeightType::kE2m1>{});
      case WeightType::kW8A8:
        return run(EmbedKernel<T, WeightType::kW8A8>{});
    }
    return kInvalidLaunch;
  });
}

int LaunchAddAndScale(const Stream& stream, DType activation,
                      const AddAndScaleParams& p) {
  return WithElement(activation, [&](auto zero) {
    return Run<AddAndScaleKernel<decltype(zero)>>(stream, p.num_rows, p.dim, p);
  });
}

int LaunchActivate(const Stream& stream, DType activation,
                   const ActivateParams& p) {
  return WithElement(activation, [&](auto zero) {
    return Run<ActivateKernel<decltype(zero)>>(stream, p.num_rows, p.dim, p);
  });
}

int LaunchRoute(const Stream& stream, const RouteParams& p) {
  if (p.num_rows == 0) return 0;
  constexpr int kThreads = RouteKernel::kThreads;
  return Launch(stream, {(p.num_rows + kThreads - 1) / kThreads, 1, 1},
                kThreads, 0, RouteKernel{p});
}

int LaunchScaleLogits(const Stream& stream, const ScaleLogitsParams& p) {
  return Run<ScaleLogitsKernel>(stream, p.count, p.vocab, p);
}

int LaunchGatherRows(const Stream& stream, DType activation,
                     const GatherRowsParams& p) {
  return WithElement(activation, [&](auto zero) {
    return Run<GatherRowsKernel<decltype(zero)>>(stream, p.count, p.dim, p);
  });
}

}  // namespace tandem::kernels::cuda
