// SPDX-License-Identifier: Apache-2.0

#include "kernels/cuda/cuda_matrix.h"

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/host_codes.h"

namespace tandem::kernels::cuda {
namespace {

WeightType WeightTypeOf(DType type) {
  return type == DType::kF32    ? WeightType::kF32
         : type == DType::kFp8  ? WeightType::kE4M3
         : type == DType::kInt8 ? WeightType::kInt8
         : type == DType::kInt4 ? WeightType::kInt4
         : type == DType::kW8A8 ? WeightType::kW8A8
         : type == DType::kBF16 ? WeightType::kBF16
                                : WeightType::kF16;
}

absl::Status CheckRows(int64_t rows, RowOrder order) {
  if (order == RowOrder::kPlain || rows % 2 == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("gated matrix of ", rows, " rows: must be an even number"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Matrix>> MatrixPacker::Pack(
    const HostTensor& source, DType dtype, RowOrder order) {
  if (absl::Status status = CheckRows(source.rows, order); !status.ok()) {
    return status;
  }
  if (absl::Status status = CheckInputs(dtype, source.cols); !status.ok()) {
    return status;
  }
  if (activation_ != DType::kF32 && dtype != activation_ &&
      !IsQuantised(dtype)) {
    return absl::InvalidArgumentError(
        absl::StrCat("matrices are ", std::string(Name(dtype)),
                     ", expected fp8, int8, int4, w8a8 or the activations' ",
                     std::string(Name(activation_)), " on a GPU"));
  }
  const WeightType type = WeightTypeOf(dtype);
  return Pack(source.data == nullptr ? 0 : source.rows, source.cols, dtype,
              type, order, nullptr,
              [&](int begin, int end, std::byte* to, float* scales) {
                PackRowBlocks(source, type, order, begin, end, to, scales);
              });
}

absl::StatusOr<std::unique_ptr<Matrix>> MatrixPacker::Pack(
    const HostCodes& source, RowOrder order) {
  if (absl::Status status = CheckRows(source.rows, order); !status.ok()) {
    return status;
  }
  if (absl::Status status = CheckCodes(source); !status.ok()) return status;
  return Pack(source.rows, source.cols, source.dtype, TypeOfCodes(source),
              order, source.order,
              [&](int begin, int end, std::byte* to, float* scales) {
                PackRowBlocks(source, order, begin, end, to, scales);
              });
}

absl::StatusOr<std::unique_ptr<Matrix>> MatrixPacker::Pack(
    int64_t source_rows, int64_t source_cols, DType dtype, WeightType type,
    RowOrder order, const int32_t* input_order, PackRows pack) {
  constexpr int64_t kMost = std::numeric_limits<int>::max() / 2;
  if (source_rows < 1 || source_cols < 1 || source_rows > kMost ||
      source_cols > kMost) {
    return absl::InvalidArgumentError(
        absl::StrCat("matrix of ", source_rows, " rows and ", source_cols,
                     " columns cannot be packed"));
  }
  const int rows = PackedRows(static_cast<int>(source_rows), order);
  const int cols = static_cast<int>(source_cols);
  absl::StatusOr<std::unique_ptr<Memory>> weights = Memory::OnDevice(
      device_, static_cast<size_t>(PackedBytes(rows, cols, type)));
  if (!weights.ok()) return weights.status();
  std::vector<float> scales(static_cast<size_t>(WeightBlocks(rows)) *
                            kWeightBlock);
  if (absl::Status status =
          PackTo((*weights)->data(), PackedBytes(kWeightBlock, cols, type),
                 WeightBlocks(rows), scales.data(), pack);
      !status.ok()) {
    return status;
  }
  std::unique_ptr<Memory> uploaded;
  if (HasRowScales(type)) {
    absl::StatusOr<std::unique_ptr<Memory>> memory =
        Uploaded(scales.data(), scales.size() * sizeof(float));
    if (!memory.ok()) return memory.status();
    if (HasIntegerProducts(type)) {
      MutexLock lock(&mutex_);
      most_code_inputs_ = std::max(most_code_inputs_, cols);
    }
    uploaded = *std::move(memory);
  }
  std::unique_ptr<Memory> ordered;
  if (input_order != nullptr) {
    absl::StatusOr<std::unique_ptr<Memory>> memory = Uploaded(
        input_order, static_cast<size_t>(source_cols) * sizeof(int32_t));
    if (!memory.ok()) return memory.status();
    ordered = *std::move(memory);
  }
  return std::unique_ptr<Matrix>(std::make_unique<CudaMatrix>(
      static_cast<int>(source_rows), cols, dtype, type, order,
      *std::move(weights), std::move(uploaded), std::move(ordered)));
}

absl::Status MatrixPacker::PackTo(std::byte* device, int64_t block_bytes,
                                  int blocks, float* scales, PackRows pack) {
  constexpr int64_t kHalfBytes = int64_t{32} << 20;
  const int per_half = static_cast<int>(
      std::clamp<int64_t>(kHalfBytes / block_bytes, 1, blocks));
  MutexLock lock(&mutex_);
  if (uploads_ == nullptr) {
    uploads_ = std::make_unique<CudaQueue>(device_, false);
  }
  const auto bytes = static_cast<size_t>(2 * (per_half * block_bytes));
  if (packing_ == nullptr || packing_->size() < bytes) {
    packing_ = nullptr;
    absl::StatusOr<std::unique_ptr<Memory>> memory =
        Memory::OnHost(device_, bytes);
    if (!memory.ok()) return memory.status();
    packing_ = *std::move(memory);
  }
  for (int begin = 0; begin < blocks; begin += per_half) {
    const int end = std::min(blocks, begin + per_half);
    std::byte* const half =
        packing_->data() + begin / per_half % 2 * (per_half * block_bytes);
    pack(begin, end, half, scales + ptrdiff_t{begin} * kWeightBlock);
    uploads_->Synchronize();  // of the other half
    uploads_->Copy(device + begin * block_bytes, half,
                   static_cast<size_t>((end - begin) * block_bytes));
  }
  uploads_->Synchronize();
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Memory>> MatrixPacker::Uploaded(const void* from,
                                                               size_t bytes) {
  absl::StatusOr<std::unique_ptr<Memory>> memory =
      Memory::OnDevice(device_, bytes);
  if (!memory.ok()) return memory;
  MutexLock lock(&mutex_);
  uploads_->Copy((*memory)->data(), from, bytes);
  uploads_->Synchronize();
  return memory;
}

int MatrixPacker::most_code_inputs() {
  MutexLock lock(&mutex_);
  return most_code_inputs_;
}

}  // namespace tandem::kernels::cuda
