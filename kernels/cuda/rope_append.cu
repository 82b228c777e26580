// SPDX-License-Identifier: Apache-2.0
#include "kernels/backend.h"
#include "kernels/cuda/dispatch.h"
#include "kernels/cuda/rope_append.cuh"

namespace tandem::kernels::cuda {
namespace {

template <typename Kernel>
int Run(const Stream& stream, const RopeAppendParams& p) {
  return Launch(stream, {p.num_rows, p.heads + 2 * p.kv.kv_heads, 1},
                Kernel::kThreads, Kernel::SharedBytes(p.query_norm != nullptr),
                Kernel{p});
}

}  // namespace

int LaunchRopeAppend(const Stream& stream, DType activation,
                     const RopeAppendParams& p) {
  if (p.num_rows == 0) return 0;
  return WithElement(activation, [&](auto t) {
    return WithKvElement(p.kv.dtype, [&](auto c) {
      // Few models have heads wider than 256.
      constexpr int kMostPairs = (kMaxHeadDim + 127) / 128;
      using T = decltype(t);
      using C = decltype(c);
      return p.kv.head_dim <= 256
                 ? Run<RopeAppendKernel<T, C, 2>>(stream, p)
                 : Run<RopeAppendKernel<T, C, kMostPairs>>(stream, p);
    });
  });
}

}  // namespace tandem::kernels::cuda
