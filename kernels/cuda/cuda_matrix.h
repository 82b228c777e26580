// SPDX-License-Identifier: Apache-2.0
// Weight matrices in device memory, and how they get there: packed on the host
// (packed_weights.h), some rows of blocks at a time, and copied from pinned
// memory.

#ifndef TANDEM_KERNELS_CUDA_CUDA_MATRIX_H_
#define TANDEM_KERNELS_CUDA_CUDA_MATRIX_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/mutex.h"
#include "kernels/backend.h"
#include "kernels/cuda/cuda_queue.h"
#include "kernels/cuda/device_api.h"
#include "kernels/cuda/packed_weights.h"

namespace tandem::kernels::cuda {

class CudaMatrix final : public Matrix {
 public:
  CudaMatrix(int rows, int cols, DType dtype, WeightType type, RowOrder order,
             std::unique_ptr<Memory> weights, std::unique_ptr<Memory> scales,
             std::unique_ptr<Memory> input_order)
      : Matrix(rows, cols, dtype),
        type_(type),
        order_(order),
        weights_(std::move(weights)),
        scales_(std::move(scales)),
        input_order_(std::move(input_order)) {}

  WeightType type() const { return type_; }
  RowOrder order() const { return order_; }
  const std::byte* weights() const { return weights_->data(); }
  const float* scales() const {
    return scales_ == nullptr ? nullptr
                              : reinterpret_cast<const float*>(scales_->data());
  }
  // HostCodes', or null.
  const int32_t* input_order() const {
    return input_order_ == nullptr
               ? nullptr
               : reinterpret_cast<const int32_t*>(input_order_->data());
  }

 private:
  const WeightType type_;
  const RowOrder order_;
  const std::unique_ptr<Memory> weights_;
  const std::unique_ptr<Memory> scales_;
  const std::unique_ptr<Memory> input_order_;
};

// Makes a backend's matrices, one at a time. Thread-safe.
class MatrixPacker {
 public:
  // `activation`: the backend's.
  MatrixPacker(Device& device, DType activation)
      : device_(device), activation_(activation) {}

  // Backend::PackMatrix and PackCodes; kGated: PackGatedMatrix and
  // PackGatedCodes.
  absl::StatusOr<std::unique_ptr<Matrix>> Pack(const HostTensor& source,
                                               DType dtype, RowOrder order);
  absl::StatusOr<std::unique_ptr<Matrix>> Pack(const HostCodes& source,
                                               RowOrder order);

  // Behind the first matrix that was packed.
  absl::StatusOr<std::unique_ptr<Memory>> Uploaded(const void* from,
                                                   size_t bytes);

  // Columns of the widest HasIntegerProducts matrix so far.
  int most_code_inputs();

 private:
  // Packs rows [begin, end) of blocks into `to`, and their scales.
  using PackRows =
      absl::FunctionRef<void(int begin, int end, std::byte* to, float* scales)>;

  absl::StatusOr<std::unique_ptr<Matrix>> Pack(int64_t source_rows,
                                               int64_t source_cols, DType dtype,
                                               WeightType type, RowOrder order,
                                               const int32_t* input_order,
                                               PackRows pack);

  // Packs into pinned memory, one half of it while the other is copied.
  // `block_bytes`: of a row of blocks.
  absl::Status PackTo(std::byte* device, int64_t block_bytes, int blocks,
                      float* scales, PackRows pack);

  Device& device_;
  const DType activation_;
  Mutex mutex_;
  int most_code_inputs_ ABSL_GUARDED_BY(mutex_) = 0;
  std::unique_ptr<CudaQueue> uploads_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<Memory> packing_ ABSL_GUARDED_BY(mutex_);  // pinned
};

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_KERNELS_CUDA_CUDA_MATRIX_H_
