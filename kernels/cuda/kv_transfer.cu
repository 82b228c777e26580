// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/dispatch.h"
#include "kernels/cuda/kv_transfer.cuh"

namespace tandem::kernels::cuda {
namespace {

Dim3 BlocksOf(const KvSliceParams& p) {
  return {(p.position_end - p.position_begin + kKvPositions - 1) / kKvPositions,
          p.layer_end - p.layer_begin, 1};
}

bool Empty(const KvSliceParams& p) {
  return p.position_begin >= p.position_end || p.layer_begin >= p.layer_end ||
         p.head_begin >= p.head_end;
}

}  // namespace

int LaunchKvGather(const Stream& stream, const KvSliceParams& p) {
  if (Empty(p)) return 0;
  return WithKvElement(p.kv.dtype, [&](auto cached) {
    return WithKvElement(p.wire, [&](auto wire) {
      using Kernel = KvGatherKernel<decltype(cached), decltype(wire)>;
      return Launch(stream, BlocksOf(p), Kernel::kThreads,
                    Kernel::SharedBytes(p), Kernel{p});
    });
  });
}

int LaunchKvScatter(const Stream& stream, const KvSliceParams& p) {
  if (Empty(p)) return 0;
  return WithKvElement(p.kv.dtype, [&](auto cached) {
    return WithKvElement(p.wire, [&](auto wire) {
      using Kernel = KvScatterKernel<decltype(cached), decltype(wire)>;
      return Launch(stream, BlocksOf(p), Kernel::kThreads, 0, Kernel{p});
    });
  });
}

int LaunchKvCopyBlock(const Stream& stream, const KvCopyBlockParams& p) {
  const int64_t bytes =
      p.kv.block_stride() * static_cast<int64_t>(SizeOf(p.kv.dtype));
  constexpr int kPerBlock = KvCopyBlockKernel::kThreads * 16;
  return Launch(
      stream,
      {static_cast<int>((bytes + kPerBlock - 1) / kPerBlock), p.num_layers, 1},
      KvCopyBlockKernel::kThreads, 0, KvCopyBlockKernel{p, bytes});
}

}  // namespace tandem::kernels::cuda
