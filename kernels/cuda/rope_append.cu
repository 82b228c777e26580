// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/dispatch.h"
#include "kernels/cuda/rope_append.cuh"

namespace tandem::kernels::cuda {

int LaunchRopeAppend(const Stream& stream, DType activation,
                     const RopeAppendParams& p) {
  if (p.num_rows == 0) return 0;
  return WithElement(activation, [&](auto t) {
    return WithKvElement(p.kv.dtype, [&](auto c) {
      using Kernel = RopeAppendKernel<decltype(t), decltype(c)>;
      return Launch(stream, {p.num_rows, p.heads + 2 * p.kv.kv_heads, 1},
                    Kernel::kThreads,
                    Kernel::SharedBytes(p.query_norm != nullptr), Kernel{p});
    });
  });
}

}  // namespace tandem::kernels::cuda
