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
      : KvCache(shape), memory_(std::move(memory)) {}

  KvView view() const {
    return {memory_->data(),  shape().dtype,    shape().num_blocks,
            shape().kv_heads, shape().head_dim, shape().block_size};
  }

 private:
  const std::unique_ptr<Memory> memory_;
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
