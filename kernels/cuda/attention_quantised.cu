// SPDX-License-Identifier: Apache-2.0
// Attention of a step over a quantised cache: the kernels of attention.cu with
// another stream of keys and values. Warpgroups have none yet.

#include "kernels/cuda/attention_decode.cuh"
#include "kernels/cuda/attention_launch.cuh"
#include "kernels/cuda/attention_prefill.cuh"
#include "kernels/cuda/attention_quantised.cuh"
#include "kernels/cuda/attention_wide.cuh"

namespace tandem::kernels::cuda {
namespace {

template <typename Decode, typename Prefill>
int RunBoth(const Stream& stream, const AttentionParams& p) {
  return Run<Decode>(stream, p, [&](int spans, const AttentionKernelParams& k) {
    return RunPrefill<Prefill>(stream, p, spans, k);
  });
}

template <typename T, int D, int kDecodeSlots, int kWarps, int kPrefillSlots>
int RunWith(const Stream& stream, const AttentionParams& p) {
  return RunBoth<
      AttentionDecodeKernel<T, D, kDecodeSlots, QuantisedKeyStream>,
      AttentionPrefillKernel<T, D, kWarps, kPrefillSlots, QuantisedKeyStream>>(
      stream, p);
}

// As many slots as for keys of 16 bits, which take more room.
template <typename T>
int RunHeads(const Stream& stream, const AttentionParams& p) {
  if (p.kv.head_dim <= 64) return RunWith<T, 64, 6, 8, 6>(stream, p);
  if (p.kv.head_dim <= 128) return RunWith<T, 128, 5, 8, 4>(stream, p);
  if (p.kv.head_dim <= 256) return RunWith<T, 256, 4, 4, 2>(stream, p);
  return Run<AttentionDecodeKernel<T, kMaxHeadDim, 5, QuantisedKeyStream>>(
      stream, p, [&](int spans, const AttentionKernelParams& k) {
        return RunWide<
            AttentionWideKernel<T, kMaxHeadDim, 5, QuantisedKeyStream>>(
            stream, p, spans, k);
      });
}

}  // namespace

int LaunchQuantisedAttention(const Stream& stream, DType activation,
                             const AttentionParams& p) {
  return activation == DType::kBF16 ? RunHeads<BFloat16>(stream, p)
                                    : RunHeads<Half>(stream, p);
}

}  // namespace tandem::kernels::cuda
