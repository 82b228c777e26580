// SPDX-License-Identifier: Apache-2.0

#include "kernels/cuda/cuda_kv_cache.h"

#include <algorithm>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace tandem::kernels::cuda {
namespace {

inline constexpr int kMaxBlockSize = 256;

absl::Status CheckShape(const KvShape& shape, DType activation) {
  if (shape.other_layers > 0) {
    if (absl::Status other = CheckShape(shape.Other(), activation);
        !other.ok()) {
      return other;
    }
  }
  if (shape.num_layers < 1 || shape.kv_heads < 1 || shape.num_blocks < 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "KV cache of ", shape.num_layers, " layers, ", shape.kv_heads,
        " heads, ", shape.num_blocks, " blocks: each must be at least 1"));
  }
  if (shape.head_dim < 8 || shape.head_dim > kMaxHeadDim ||
      shape.head_dim % 8 != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("head_dim is ", shape.head_dim,
                     ", expected a multiple of 8 from 8 to ", kMaxHeadDim));
  }
  if (shape.block_size < 8 || shape.block_size > kMaxBlockSize ||
      shape.block_size % 8 != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("block_size is ", shape.block_size,
                     ", expected a multiple of 8 from 8 to ", kMaxBlockSize));
  }
  const bool kept = activation == DType::kF32 || shape.dtype == activation ||
                    IsQuantised(shape.dtype);
  if (!kept || shape.dtype == DType::kW8A8) {
    return absl::InvalidArgumentError(
        absl::StrCat("KV cache type is ", std::string(Name(shape.dtype)),
                     ", expected fp8, int8, int4 or the activations' ",
                     std::string(Name(activation)), " on a GPU"));
  }
  return absl::OkStatus();
}

// One launch's part of a slice, and what the whole slice measures.
struct Slice {
  KvSliceParams params;
  int64_t row_bytes = 0;  // of one position of one layer
  int64_t bytes = 0;
};

Slice SliceOf(const KvView& kv, const KvRange& range, DType wire,
              uint64_t digest_key) {
  Slice slice{};
  slice.row_bytes =
      KvRowBytes(wire, range.head_end - range.head_begin, kv.head_dim);
  const int64_t layer_bytes =
      slice.row_bytes * (range.position_end - range.position_begin);
  slice.bytes = layer_bytes * (range.layer_end - range.layer_begin);
  KvSliceParams& p = slice.params;
  p.kv = kv;
  p.layer_stride = layer_bytes;
  p.wire = wire;
  p.digest_key = digest_key;
  p.layer_begin = range.layer_begin;
  p.layer_end = range.layer_end;
  p.head_begin = range.head_begin;
  p.head_end = range.head_end;
  p.layer_shift = range.layer_shift;
  return slice;
}

// Launches whose block tables fit the parameters: cuts at block borders.
template <typename Launch>
void ForParts(Slice& slice, const KvRange& range, std::byte* staging,
              const Launch& launch) {
  KvSliceParams& p = slice.params;
  const int block_size = p.kv.block_size;
  int begin = range.position_begin;
  while (begin < range.position_end) {
    const int first = begin / block_size;
    const int end =
        std::min(range.position_end, (first + kKvBlocksPerLaunch) * block_size);
    p.position_begin = begin;
    p.position_end = end;
    p.staging =
        staging == nullptr
            ? nullptr
            : staging + slice.row_bytes * (begin - range.position_begin);
    const int blocks = (end + block_size - 1) / block_size - first;
    std::copy_n(range.block_table + first, blocks, p.blocks);
    launch(p);
    begin = end;
  }
}

// `staging` itself where kernels reach it, else memory of the device's.
std::byte* Reach(Device& device, CudaQueue& queue, std::byte* staging,
                 int64_t bytes) {
  if (device.Reaches(staging)) return staging;
  return queue.scratch(CudaQueue::kStaging, static_cast<size_t>(bytes));
}

void Copy(CudaQueue& queue, void* to, const void* from, int64_t bytes) {
  if (bytes == 0) return;
  queue.Copy(to, from, static_cast<size_t>(bytes));
}

}  // namespace

absl::StatusOr<std::unique_ptr<KvCache>> NewCudaKvCache(Device& device,
                                                        const KvShape& shape,
                                                        DType activation) {
  if (absl::Status status = CheckShape(shape, activation); !status.ok()) {
    return status;
  }
  const int64_t bytes =
      shape.bytes_per_position() * shape.block_size * shape.num_blocks;
  absl::StatusOr<std::unique_ptr<Memory>> memory =
      Memory::OnDevice(device, static_cast<size_t>(bytes));
  if (!memory.ok()) return memory.status();
  return std::unique_ptr<KvCache>(
      std::make_unique<CudaKvCache>(shape, *std::move(memory)));
}

void GatherKv(Device& device, CudaQueue& queue, const KvView& kv,
              const KvRange& range, DType wire, uint64_t digest_key,
              std::byte* staging, KvDigest* digest) {
  Slice slice = SliceOf(kv, range, wire, digest_key);
  KvDigest* const sum = queue.NewDigest();
  slice.params.digest = sum;
  std::byte* const target = Reach(device, queue, staging, slice.bytes);
  ForParts(slice, range, target, [&](const KvSliceParams& part) {
    queue.Check(LaunchKvGather(queue.stream(), part), "KV gather");
  });
  if (target != staging) Copy(queue, staging, target, slice.bytes);
  queue.SendDigest(sum, digest);
}

void ScatterKv(Device& device, CudaQueue& queue, const KvView& kv,
               const KvRange& range, DType wire, const std::byte* staging) {
  Slice slice = SliceOf(kv, range, wire, 0);
  std::byte* const source =
      Reach(device, queue, const_cast<std::byte*>(staging), slice.bytes);
  if (source != staging) Copy(queue, source, staging, slice.bytes);
  ForParts(slice, range, source, [&](const KvSliceParams& part) {
    queue.Check(LaunchKvScatter(queue.stream(), part), "KV scatter");
  });
}

void DigestKv(CudaQueue& queue, const KvView& kv, const KvRange& range,
              DType wire, uint64_t digest_key, KvDigest* digest) {
  Slice slice = SliceOf(kv, range, wire, digest_key);
  KvDigest* const sum = queue.NewDigest();
  slice.params.digest = sum;
  ForParts(slice, range, nullptr, [&](const KvSliceParams& part) {
    queue.Check(LaunchKvGather(queue.stream(), part), "KV digest");
  });
  queue.SendDigest(sum, digest);
}

}  // namespace tandem::kernels::cuda
