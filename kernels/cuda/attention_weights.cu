// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/attention_weights.cuh"
#include "kernels/cuda/dispatch.h"

namespace tandem::kernels::cuda {

int LaunchAttentionWeights(const Stream& stream, DType activation,
                           const AttentionWeightsParams& p) {
  if (p.heads == 0) return 0;
  return WithElement(activation, [&](auto element) {
    return WithKvElement(p.kv.dtype, [&](auto cached) {
      using T = decltype(element);
      using KV = decltype(cached);
      if constexpr (!std::is_same_v<T, float> && !std::is_same_v<T, KV> &&
                    !std::is_same_v<KV, Code>) {
        return kInvalidLaunch;  // no cache is so
      } else {
        using States = WeightsStatesKernel<T, KV>;
        using Sum = WeightsSumKernel<T, KV>;
        const int launched = Launch(stream, {p.heads, 1, 1}, States::kThreads,
                                    States::kSharedBytes, States{{p}});
        if (launched != 0) return launched;
        Stream behind = stream;
        behind.after_kernel = true;
        return Launch(behind,
                      {(p.position + Sum::kThreads) / Sum::kThreads, 1, 1},
                      Sum::kThreads, 0, Sum{{p}});
      }
    });
  });
}

}  // namespace tandem::kernels::cuda
