// SPDX-License-Identifier: Apache-2.0
// Attention of a step: spans of one row by the decode kernel, longer ones by
// a prefill kernel, side by side in the same step; f32 by its own.

#include <algorithm>

#include "kernels/cuda/attention_decode.cuh"
#include "kernels/cuda/attention_f32.cuh"
#include "kernels/cuda/attention_launch.cuh"
#include "kernels/cuda/attention_prefill.cuh"
#include "kernels/cuda/attention_wgmma.cuh"
#include "kernels/cuda/attention_wide.cuh"
#include "kernels/cuda/dispatch.h"
#include "kernels/cuda/launch.h"

namespace tandem::kernels::cuda {
namespace {

template <typename Kernel>
int RunWgmma(const Stream& stream, const AttentionParams& p, int spans,
             const AttentionKernelParams& k) {
  const int tiles =
      (p.max_span_rows * k.group + Kernel::kRows - 1) / Kernel::kRows;
  const int blocks =
      std::min(tiles * k.kv_heads * spans, stream.multiprocessors);
  return Launch(stream, {blocks, 1, 1}, Kernel::kThreads, Kernel::kSharedBytes,
                Kernel{k, tiles, spans});
}

// Slots are as many as leave room for two blocks of threads (decode) or one
// (prefill) on a multiprocessor; heads of 256 need most of an A100's, and have
// no room for a warpgroup's results. Wider ones are latent attention's.
template <typename T>
int RunHeads(const Stream& stream, const AttentionParams& p) {
  // Soft caps are rare: warpgroups, short of registers, have none.
  const bool wgmma = stream.generation == 90 && p.soft_cap <= 0;
  if (p.kv.head_dim <= 64) {
    return Run<AttentionDecodeKernel<T, 64, 6>>(
        stream, p, [&](int spans, const AttentionKernelParams& k) {
          return wgmma ? RunWgmma<AttentionWgmmaKernel<T, 64, 8>>(stream, p,
                                                                  spans, k)
                       : RunPrefill<AttentionPrefillKernel<T, 64, 8, 6>>(
                             stream, p, spans, k);
        });
  }
  if (p.kv.head_dim <= 128) {
    return Run<AttentionDecodeKernel<T, 128, 5>>(
        stream, p, [&](int spans, const AttentionKernelParams& k) {
          return wgmma ? RunWgmma<AttentionWgmmaKernel<T, 128, 4>>(stream, p,
                                                                   spans, k)
                       : RunPrefill<AttentionPrefillKernel<T, 128, 8, 4>>(
                             stream, p, spans, k);
        });
  }
  if (p.kv.head_dim <= 256) {
    return Run<AttentionDecodeKernel<T, 256, 4>>(
        stream, p, [&](int spans, const AttentionKernelParams& k) {
          return RunPrefill<AttentionPrefillKernel<T, 256, 4, 2>>(stream, p,
                                                                  spans, k);
        });
  }
  return Run<AttentionDecodeKernel<T, kMaxHeadDim, 5>>(
      stream, p, [&](int spans, const AttentionKernelParams& k) {
        return RunWide<AttentionWideKernel<T, kMaxHeadDim, 5>>(stream, p, spans,
                                                               k);
      });
}

template <typename KV>
int RunF32(const Stream& stream, const AttentionParams& p) {
  using Kernel = AttentionF32Kernel<KV>;
  return Launch(stream, {p.num_rows, p.heads, 1}, Kernel::kThreads,
                Kernel::kSharedBytes, Kernel{ParamsOf(p), p.num_spans});
}

}  // namespace

size_t AttentionScratchBytes(int spans, int heads, int head_dim,
                             int positions) {
  // Not whole spans: of a window's, which are smaller, more go at once.
  const size_t of_span = PartialBytes(heads, head_dim, Segments(positions));
  return sizeof(int32_t) * kMaxArrivals +
         std::min(of_span * static_cast<size_t>(spans),
                  std::max(kAttentionPartialBytes, of_span));
}

int LaunchAttention(const Stream& stream, DType activation,
                    const AttentionParams& p) {
  if (p.num_spans == 0 || p.num_rows == 0) return 0;
  if (activation == DType::kF32) {
    return WithKvElement(p.kv.dtype, [&](auto element) {
      return RunF32<decltype(element)>(stream, p);
    });
  }
  if (IsQuantised(p.kv.dtype)) {
    return LaunchQuantisedAttention(stream, activation, p);
  }
  if (activation != p.kv.dtype) return kInvalidLaunch;
  return activation == DType::kBF16 ? RunHeads<BFloat16>(stream, p)
                                    : RunHeads<Half>(stream, p);
}

}  // namespace tandem::kernels::cuda
