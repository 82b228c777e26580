// SPDX-License-Identifier: Apache-2.0

#include "kernels/cpu/matrix_packing.h"

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/cpu/code_matrix.h"
#include "kernels/cpu/packed_matrix.h"
#include "kernels/host_codes.h"

namespace tandem::kernels::cpu {
namespace {

absl::Status BadMatrix(int64_t rows, int64_t cols) {
  return absl::InvalidArgumentError(absl::StrCat(
      "matrix of ", rows, " rows and ", cols, " columns cannot be packed"));
}

// A matrix whose panels pack(panel, target, scales) fills.
absl::StatusOr<std::unique_ptr<Matrix>> Pack(
    ThreadPool& pool, DeviceAllocator& allocator, int64_t rows, int64_t cols,
    DType dtype, CodeKind kind, std::vector<int32_t> order,
    absl::FunctionRef<void(int, std::byte*, float*)> pack) {
  constexpr int64_t kMost = std::numeric_limits<int>::max() / 2;
  if (rows < 1 || cols < 1 || rows > kMost || cols > kMost) {
    return BadMatrix(rows, cols);
  }
  const int panels = PackedMatrix::Panels(static_cast<int>(rows));
  const int64_t panel_bytes =
      HasIntegerProducts(dtype)
          ? CodePanelBytes(static_cast<int>(cols), kind)
          : PackedMatrix::PanelBytes(static_cast<int>(cols), dtype);
  absl::StatusOr<DeviceMemory> memory =
      DeviceMemory::Make(allocator, static_cast<size_t>(panels * panel_bytes));
  if (!memory.ok()) return memory.status();
  std::byte* const data = memory->data();
  std::vector<float> scales(IsQuantised(dtype) ? static_cast<size_t>(rows) : 0);
  {
    ThreadPool::Team team(&pool);
    team.ForEach(panels, [&](int panel, int) {
      pack(panel, data + panel * panel_bytes, scales.data());
    });
  }
  return std::unique_ptr<Matrix>(std::make_unique<PackedMatrix>(
      static_cast<int>(rows), static_cast<int>(cols), dtype, *std::move(memory),
      std::move(scales), kind, std::move(order)));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Matrix>> PackMatrix(ThreadPool& pool,
                                                   DeviceAllocator& allocator,
                                                   bool raised,
                                                   const HostTensor& source,
                                                   DType dtype) {
  if (source.data == nullptr) return BadMatrix(source.rows, source.cols);
  if (dtype == DType::kF16) {
    return absl::InvalidArgumentError(
        absl::StrCat("matrices are kept as f32, bf16, fp8, int8, int4 or w8a8 "
                     "on a CPU, not ",
                     std::string(Name(dtype))));
  }
  if (absl::Status status = CheckInputs(dtype, source.cols); !status.ok()) {
    return status;
  }
  const bool codes = HasIntegerProducts(dtype);
  const CodeKind kind = KindOf(dtype, raised);
  return Pack(pool, allocator, source.rows, source.cols, dtype, kind, {},
              [&](int panel, std::byte* target, float* scales) {
                if (codes) {
                  PackCodePanel(source, kind, panel, target, scales);
                } else {
                  PackPanel(source, dtype, panel, target, scales);
                }
              });
}

absl::StatusOr<std::unique_ptr<Matrix>> PackCodes(ThreadPool& pool,
                                                  DeviceAllocator& allocator,
                                                  bool raised,
                                                  const HostCodes& source) {
  if (absl::Status status = CheckCodes(source); !status.ok()) return status;
  const CodeKind kind = source.e2m1 ? CodeKind::kE2m1
                        : source.zeros != nullptr
                            ? CodeKind::kInt4Zeros
                            : KindOf(source.dtype, raised);
  std::vector<int32_t> order;
  if (source.order != nullptr) {
    // A row is put in order there.
    constexpr size_t kMost = ThreadPool::kMemberScratchBytes / sizeof(float);
    if (static_cast<size_t>(source.cols) > kMost) {
      return BadMatrix(source.rows, source.cols);
    }
    order.assign(source.order, source.order + source.cols);
  }
  return Pack(pool, allocator, source.rows, source.cols, source.dtype, kind,
              std::move(order),
              [&](int panel, std::byte* target, float* scales) {
                if (source.dtype == DType::kFp8) {
                  PackFp8Panel(source, panel, target, scales);
                } else {
                  PackCodePanel(source, kind, panel, target, scales);
                }
              });
}

}  // namespace tandem::kernels::cpu
