// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/dispatch.h"
#include "kernels/cuda/layer_norm.cuh"

namespace tandem::kernels::cuda {

int LaunchLayerNorm(const Stream& stream, DType activation,
                    const LayerNormParams& p) {
  if (p.num_rows == 0 || p.dim == 0) return 0;
  return WithElement(activation, [&](auto zero) {
    using Kernel = LayerNormKernel<decltype(zero)>;
    return Launch(stream, {p.num_rows, p.heads, 1}, Kernel::kThreads,
                  Kernel::SharedBytes(p.dim), Kernel{p});
  });
}

}  // namespace tandem::kernels::cuda
