// SPDX-License-Identifier: Apache-2.0
// What attention.cu and attention_quantised.cu share: from the host's
// parameters to the kernels', and a launch of both kernels cut to the scratch
// memory's counters.

#ifndef TANDEM_KERNELS_CUDA_ATTENTION_LAUNCH_CUH_
#define TANDEM_KERNELS_CUDA_ATTENTION_LAUNCH_CUH_

#include <algorithm>
#include <limits>

#include "kernels/cuda/attention.cuh"
#include "kernels/cuda/launch.h"

namespace tandem::kernels::cuda {

static_assert(kSegmentKeys == kAttentionSegment);

// Counters at the front of the scratch memory; launches are cut so that they
// suffice.
inline constexpr int kMaxArrivals = 1 << 14;

inline int Segments(int positions) {
  // A window may begin inside one more.
  return (positions + kSegmentKeys - 1) / kSegmentKeys + 1;
}

// Of one span, and how many spans' are within so many bytes; one's always are.
inline size_t PartialBytes(int heads, int head_dim, int segments) {
  return sizeof(float) * static_cast<size_t>(heads) *
         static_cast<size_t>(segments) * static_cast<size_t>(head_dim + 2);
}
inline int SpansWithin(size_t bytes, size_t of_span) {
  return static_cast<int>(
      std::clamp<size_t>(bytes / of_span, 1, std::numeric_limits<int>::max()));
}

inline AttentionKernelParams ParamsOf(const AttentionParams& p) {
  const int64_t element = static_cast<int64_t>(SizeOf(p.kv.dtype));
  AttentionKernelParams k;
  k.q = p.q;
  k.out = p.out;
  k.k = p.kv.data + p.kv.Offset(p.layer, 0, 0, 0, 0) * element;
  k.v = p.kv.data + p.kv.Offset(p.layer, 0, 1, 0, 0) * element;
  k.k_scales = p.kv.data + p.kv.ScaleOffset(p.layer, 0, 0, 0, 0);
  k.v_scales = p.kv.data + p.kv.ScaleOffset(p.layer, 0, 1, 0, 0);
  k.kv = p.kv.dtype;
  k.spans = p.spans;
  k.block_tables = p.block_tables;
  k.arrivals = static_cast<int32_t*>(p.scratch);
  k.partials = reinterpret_cast<float*>(k.arrivals + kMaxArrivals);
  k.q_stride = p.q_stride;
  k.out_stride = int64_t{p.heads} * p.kv.head_dim;
  k.block_stride = p.kv.block_stride();
  k.head_stride = p.kv.head_stride();
  k.head_scales = p.kv.head_scales();
  k.scale_stride = p.kv.scale_stride();
  k.slot_stride = p.kv.slot_stride();
  k.kv_heads = p.kv.kv_heads;
  k.group = p.heads / p.kv.kv_heads;
  k.head_dim = p.kv.head_dim;
  k.block_size = p.kv.block_size;
  k.block_reciprocal = static_cast<uint32_t>(
      ((uint64_t{1} << 32) + static_cast<uint64_t>(k.block_size) - 1) /
      static_cast<uint64_t>(k.block_size));
  k.window = p.window;
  k.narrow_tiles = (k.group + 15) / 16;
  k.max_segments = Segments(p.window > 0 ? std::min(p.window, p.max_positions)
                                         : p.max_positions);
  k.scale = p.scale;
  k.soft_cap = p.soft_cap;
  k.sinks = p.sinks;
  return k;
}

// Spans of more than one row.
template <typename Kernel>
int RunPrefill(const Stream& stream, const AttentionParams& p, int spans,
               const AttentionKernelParams& k) {
  const int tiles =
      (p.max_span_rows * k.group + Kernel::kRows - 1) / Kernel::kRows;
  return Launch(stream, {tiles, k.kv_heads, spans}, Kernel::kThreads,
                Kernel::kSharedBytes, Kernel{k});
}
// The same, of heads that AttentionWideKernel takes.
template <typename Kernel>
int RunWide(const Stream& stream, const AttentionParams& p, int spans,
            const AttentionKernelParams& k) {
  return Launch(stream, {p.max_span_rows * k.narrow_tiles, k.kv_heads, spans},
                Kernel::kThreads, Kernel::kSharedBytes, Kernel{k});
}

// launch(spans, k) of at most so many spans at once, until one fails.
template <typename LaunchSpans>
int ForSpans(const AttentionParams& p, AttentionKernelParams k, int most,
             const LaunchSpans& launch) {
  most = std::min(most, 65535);
  for (int begin = 0; begin < p.num_spans; begin += most) {
    k.spans = p.spans + begin;
    const int error = launch(std::min(most, p.num_spans - begin), k);
    if (error != 0) return error;
  }
  return 0;
}

template <typename Decode, typename Prefill>
int Run(const Stream& stream, const AttentionParams& p,
        const Prefill& run_prefill) {
  const AttentionKernelParams k = ParamsOf(p);
  const int heads = k.kv_heads * k.narrow_tiles;
  const size_t of_span = PartialBytes(p.heads, k.head_dim, k.max_segments);
  const int error = ForSpans(
      p, k,
      std::min(kMaxArrivals / heads, SpansWithin(p.partial_bytes, of_span)),
      [&](int spans, const AttentionKernelParams& part) {
        return Launch(stream, {k.max_segments, heads, spans}, Decode::kThreads,
                      Decode::kSharedBytes, Decode{part});
      });
  if (error != 0 || p.max_span_rows == 1) return error;
  return ForSpans(p, k, p.num_spans, run_prefill);
}

// Over a quantised cache; activations are bf16 or f16.
int LaunchQuantisedAttention(const Stream& stream, DType activation,
                             const AttentionParams& p);

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_KERNELS_CUDA_ATTENTION_LAUNCH_CUH_
