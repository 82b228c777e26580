// SPDX-License-Identifier: Apache-2.0
// Attention of a step: spans of one row by the decode kernel, longer ones by
// the prefill kernel, side by side in the same step; f32 by its own.

#include <algorithm>

#include "kernels/cuda/attention_decode.cuh"
#include "kernels/cuda/attention_f32.cuh"
#include "kernels/cuda/attention_prefill.cuh"
#include "kernels/cuda/attention_wgmma.cuh"
#include "kernels/cuda/launch.h"

namespace tandem::kernels::cuda {
namespace {

static_assert(kSegmentKeys == kAttentionSegment);

// Counters at the front of the scratch memory; launches are cut so that they
// suffice.
inline constexpr int kMaxArrivals = 1 << 14;

int Segments(int positions) {
  // A window may begin inside one more.
  return (positions + kSegmentKeys - 1) / kSegmentKeys + 1;
}

AttentionKernelParams ParamsOf(const AttentionParams& p) {
  const int64_t element = static_cast<int64_t>(SizeOf(p.kv.dtype));
  AttentionKernelParams k;
  k.q = p.q;
  k.out = p.out;
  k.k = p.kv.data + p.kv.Offset(p.layer, 0, 0, 0, 0) * element;
  k.v = p.kv.data + p.kv.Offset(p.layer, 0, 1, 0, 0) * element;
  k.spans = p.spans;
  k.block_tables = p.block_tables;
  k.arrivals = static_cast<int32_t*>(p.scratch);
  k.partials = reinterpret_cast<float*>(k.arrivals + kMaxArrivals);
  k.q_stride = p.q_stride;
  k.out_stride = int64_t{p.heads} * p.kv.head_dim;
  k.block_stride = p.kv.block_stride();
  k.head_stride = p.kv.head_stride();
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

template <typename Decode, typename Prefill>
int Run(const Stream& stream, const AttentionParams& p,
        const Prefill& run_prefill) {
  AttentionKernelParams k = ParamsOf(p);
  const int heads = k.kv_heads * k.narrow_tiles;
  const int most = std::min(kMaxArrivals / heads, 65535);
  for (int begin = 0; begin < p.num_spans; begin += most) {
    const int spans = std::min(most, p.num_spans - begin);
    k.spans = p.spans + begin;
    int error = Launch(stream, {k.max_segments, heads, spans}, Decode::kThreads,
                       Decode::kSharedBytes, Decode{k});
    if (error == 0 && p.max_span_rows > 1) error = run_prefill(spans, k);
    if (error != 0) return error;
  }
  return 0;
}

// Slots are as many as leave room for two blocks of threads (decode) or one
// (prefill) on a multiprocessor; the widest heads need most of an A100's, and
// have no room for a warpgroup's results.
template <typename T>
int RunHeads(const Stream& stream, const AttentionParams& p) {
  const bool wgmma = stream.generation == 90;
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
  return Run<AttentionDecodeKernel<T, 256, 4>>(
      stream, p, [&](int spans, const AttentionKernelParams& k) {
        return RunPrefill<AttentionPrefillKernel<T, 256, 4, 2>>(stream, p,
                                                                spans, k);
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
  return sizeof(int32_t) * kMaxArrivals +
         sizeof(float) * static_cast<size_t>(spans) *
             static_cast<size_t>(heads) *
             static_cast<size_t>(Segments(positions)) *
             static_cast<size_t>(head_dim + 2);
}

int LaunchAttention(const Stream& stream, DType activation,
                    const AttentionParams& p) {
  if (p.num_spans == 0 || p.num_rows == 0) return 0;
  if (activation == DType::kF32) {
    return p.kv.dtype == DType::kF32    ? RunF32<float>(stream, p)
           : p.kv.dtype == DType::kBF16 ? RunF32<BFloat16>(stream, p)
                                        : RunF32<Half>(stream, p);
  }
  if (activation != p.kv.dtype) return kInvalidLaunch;
  return activation == DType::kBF16 ? RunHeads<BFloat16>(stream, p)
                                    : RunHeads<Half>(stream, p);
}

}  // namespace tandem::kernels::cuda
