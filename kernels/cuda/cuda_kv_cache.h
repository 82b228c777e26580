// SPDX-License-Identifier: Apache-2.0
// The KV cache in device memory, and the launches that carry ranges of it to
// and from the wire (Backend::KvGather and what follows it).

#ifndef TANDEM_KERNELS_CUDA_CUDA_KV_CACHE_H_
#define TANDEM_KERNELS_CUDA_CUDA_KV_CACHE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/cuda/cuda_queue.h"
#include "kernels/cuda/device_api.h"
#include "kernels/cuda/launch.h"

namespace tandem::kernels::cuda {

class CudaKvCache final : public KvCache {
 public:
  CudaKvCache(const KvShape& shape, std::unique_ptr<Memory> memory)
      : KvCache(shape, OtherOf(shape, memory->data())),
        view_(ViewOf(shape, memory->data())),
        memory_(std::move(memory)) {}

  const KvView& view() const { return view_; }

 private:
  // What `whole` has for layers with other heads.
  CudaKvCache(const KvShape& whole, std::byte* data)
      : KvCache(whole.Other()), view_(ViewOf(whole.Other(), data)) {
    view_.layers_in_one = whole.other_layers;
    view_.place = ViewOf(whole, data).place;
  }

  static std::unique_ptr<KvCache> OtherOf(const KvShape& shape,
                                          std::byte* data) {
    if (shape.other_layers == 0) return nullptr;
    return std::unique_ptr<KvCache>(new CudaKvCache(shape, data));
  }
  static KvView ViewOf(const KvShape& shape, std::byte* data) {
    const int64_t bytes =
        shape.bytes_per_position() / shape.num_layers * shape.block_size;
    return {.data = data,
            .dtype = shape.dtype,
            .num_blocks = shape.num_blocks,
            .kv_heads = shape.kv_heads,
            .head_dim = shape.head_dim,
            .block_size = shape.block_size,
            .place = bytes / static_cast<int64_t>(SizeOf(shape.dtype))};
  }

  KvView view_;                           // const once it is made
  const std::unique_ptr<Memory> memory_;  // of the other: none
};

// INVALID_ARGUMENT: not a shape for a GPU with activations of `activation`.
absl::StatusOr<std::unique_ptr<KvCache>> NewCudaKvCache(Device& device,
                                                        const KvShape& shape,
                                                        DType activation);

// Backend::KvGather, KvScatter and KvDigestOf, put on the queue. Staging that
// kernels do not reach is copied by way of memory of the device's.
void GatherKv(Device& device, CudaQueue& queue, const KvView& kv,
              const KvRange& range, DType wire, uint64_t digest_key,
              std::byte* staging, KvDigest* digest);
void ScatterKv(Device& device, CudaQueue& queue, const KvView& kv,
               const KvRange& range, DType wire, const std::byte* staging);
void DigestKv(CudaQueue& queue, const KvView& kv, const KvRange& range,
              DType wire, uint64_t digest_key, KvDigest* digest);

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_KERNELS_CUDA_CUDA_KV_CACHE_H_
