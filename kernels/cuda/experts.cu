// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/dispatch.h"
#include "kernels/cuda/experts.cuh"

namespace tandem::kernels::cuda {
namespace {

template <typename Kernel, typename Params>
int Run(const Stream& stream, int rows, int dim, const Params& p) {
  if (rows == 0 || dim == 0) return 0;
  constexpr int kPerBlock = Kernel::kThreads * kChunk;
  return Launch(stream, {rows, (dim + kPerBlock - 1) / kPerBlock, 1},
                Kernel::kThreads, 0, Kernel{p});
}

}  // namespace

int LaunchExpertPlan(const Stream& stream, const ExpertPlanParams& p) {
  const int error =
      Launch(stream, {p.experts, 1, 1}, kExpertThreads,
             ExpertCountKernel::kSharedBytes, ExpertCountKernel{p});
  if (error != 0) return error;
  return Launch(stream, {p.experts, 1, 1}, kExpertThreads,
                ExpertPlaceKernel::kSharedBytes, ExpertPlaceKernel{p});
}

int LaunchSpreadRows(const Stream& stream, DType activation,
                     const SpreadRowsParams& p) {
  return WithElement(activation, [&](auto zero) {
    return Run<SpreadRowsKernel<decltype(zero)>>(stream, p.num_rows * p.chosen,
                                                 p.dim, p);
  });
}

int LaunchSumExperts(const Stream& stream, DType activation,
                     const SumExpertsParams& p) {
  return WithElement(activation, [&](auto zero) {
    return Run<SumExpertsKernel<decltype(zero)>>(stream, p.num_rows, p.dim, p);
  });
}

}  // namespace tandem::kernels::cuda
