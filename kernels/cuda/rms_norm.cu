// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/dispatch.h"
#include "kernels/cuda/rms_norm.cuh"

namespace tandem::kernels::cuda {

int LaunchRmsNorm(const Stream& stream, DType activation,
                  const RmsNormParams& p) {
  if (p.num_rows == 0 || p.dim == 0) return 0;
  return WithElement(activation, [&](auto zero) {
    using Kernel = RmsNormKernel<decltype(zero)>;
    return Launch(stream, {p.num_rows, 1, 1}, Kernel::kThreads,
                  Kernel::SharedBytes(p.dim), Kernel{p});
  });
}

}  // namespace tandem::kernels::cuda
