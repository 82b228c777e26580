// SPDX-License-Identifier: Apache-2.0
// Element types and host tensors: what checkpoints hold and what backends take.

#ifndef TANDEM_KERNELS_TYPES_H_
#define TANDEM_KERNELS_TYPES_H_

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace tandem::kernels {

enum class DType : uint8_t { kF32, kBF16, kF16 };

constexpr size_t SizeOf(DType type) { return type == DType::kF32 ? 4 : 2; }
constexpr std::string_view Name(DType type) {
  return type == DType::kF32 ? "f32" : type == DType::kBF16 ? "bf16" : "f16";
}

// A row-major matrix (or, with rows = 1, a vector) in host memory that the
// caller keeps: typically a mapped checkpoint. May be unaligned.
struct HostTensor {
  const std::byte* data = nullptr;
  DType dtype = DType::kF32;
  int64_t rows = 0;
  int64_t cols = 0;
};

}  // namespace tandem::kernels

#endif  // TANDEM_KERNELS_TYPES_H_
