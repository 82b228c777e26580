// SPDX-License-Identifier: Apache-2.0
// What operations work in beside their arguments (CudaQueue::Scratch): how
// much of it the largest ones need, which queue has what was set aside for
// them, and how a layer of many experts divides its own.

#ifndef TANDEM_KERNELS_CUDA_SCRATCH_H_
#define TANDEM_KERNELS_CUDA_SCRATCH_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "common/mutex.h"
#include "kernels/backend.h"
#include "kernels/cuda/cuda_queue.h"
#include "kernels/cuda/device_api.h"
#include "kernels/cuda/launch.h"
#include "kernels/experts.h"

namespace tandem::kernels::cuda {

// Thread-safe.
class ReservedScratch {
 public:
  explicit ReservedScratch(Device& device) : device_(device) {}

  // Backend::Reserve. `code_inputs`: columns of the widest matrix of
  // HasIntegerProducts.
  absl::Status Reserve(const WorkLimits& limits, DType activation,
                       int code_inputs);

  // The queue's working memory; a queue's first is what was set aside.
  std::byte* Take(CudaQueue& queue, CudaQueue::Scratch which, size_t bytes);

 private:
  Device& device_;
  Mutex mutex_;
  std::unique_ptr<Memory> reserved_[CudaQueue::kScratches] ABSL_GUARDED_BY(
      mutex_);
};

// What a layer of many experts works in, one part behind the other; of no
// memory, how much that is.
struct ExpertScratch {
  struct Shape {
    int rows, hidden, wide, experts, chosen;
  };

  ExpertScratch(std::byte* memory, const Shape& shape, DType activation)
      : memory_(memory) {
    const int64_t all_places = int64_t{shape.rows} * shape.chosen;
    const int64_t copies =
        MostExpertRows(shape.rows, shape.experts, shape.chosen);
    counts = Take<int32_t>(shape.experts);
    num_tiles = Take<int32_t>(1);
    places = Take<int32_t>(all_places);
    shares = Take<float>(all_places);
    // There are most of the smallest.
    tiles = Take<ExpertTile>(
        MostExpertTiles(shape.rows, shape.experts, shape.chosen, 8));
    const auto width = static_cast<int64_t>(SizeOf(activation));
    x = Take<std::byte>(copies * shape.hidden * width);
    hidden = Take<std::byte>(copies * shape.wide * width);
    y = Take<std::byte>(copies * shape.hidden * width);
  }

  size_t bytes() const { return bytes_; }

  int32_t* counts = nullptr;
  int32_t* num_tiles = nullptr;
  int32_t* places = nullptr;
  float* shares = nullptr;
  ExpertTile* tiles = nullptr;
  void* x = nullptr;
  void* hidden = nullptr;
  void* y = nullptr;

 private:
  template <typename T>
  T* Take(int64_t count) {
    const size_t begin = bytes_;
    bytes_ += (static_cast<size_t>(count) * sizeof(T) + 255) / 256 * 256;
    return memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + begin);
  }

  std::byte* const memory_;
  size_t bytes_ = 0;
};

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_KERNELS_CUDA_SCRATCH_H_
