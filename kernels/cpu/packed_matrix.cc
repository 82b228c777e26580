// SPDX-License-Identifier: Apache-2.0

#include "kernels/cpu/packed_matrix.h"

#include <algorithm>
#include <cstring>

#include "kernels/cpu/convert.h"

namespace tandem::kernels::cpu {
namespace {

// Byte offset of (lane, input) within a bf16 panel.
int64_t Bf16Offset(int lane, int64_t col) {
  return (col / 2) * (int64_t{4} * kPanel) + int64_t{4} * lane + (col % 2) * 2;
}

uint16_t LoadBf16(const std::byte* data, DType type, int64_t index) {
  if (type == DType::kBF16) {
    uint16_t bits;
    std::memcpy(&bits, data + index * 2, 2);
    return bits;
  }
  return Bf16FromFloat(LoadElement(data, type, index));
}

}  // namespace

void PackPanel(const HostTensor& source, DType dtype, int panel,
               std::byte* target) {
  const int64_t begin = int64_t{panel} * kPanel;
  const int lanes =
      static_cast<int>(std::min<int64_t>(kPanel, source.rows - begin));
  std::memset(target, 0,
              static_cast<size_t>(PackedMatrix::PanelBytes(
                  static_cast<int>(source.cols), dtype)));
  // Stripes of inputs keep the target's lines in the first-level cache while
  // the 32 source rows are read side by side.
  constexpr int64_t kStripe = 128;
  for (int64_t stripe = 0; stripe < source.cols; stripe += kStripe) {
    const int64_t end = std::min(stripe + kStripe, source.cols);
    for (int lane = 0; lane < lanes; ++lane) {
      const int64_t row = (begin + lane) * source.cols;
      if (dtype == DType::kF32) {
        float* const out = reinterpret_cast<float*>(target) + lane;
        for (int64_t col = stripe; col < end; ++col) {
          out[col * kPanel] = LoadElement(source.data, source.dtype, row + col);
        }
      } else {
        for (int64_t col = stripe; col < end; ++col) {
          *reinterpret_cast<uint16_t*>(target + Bf16Offset(lane, col)) =
              LoadBf16(source.data, source.dtype, row + col);
        }
      }
    }
  }
}

void UnpackRow(const std::byte* data, int cols, DType dtype, int64_t row,
               float* out) {
  const int lane = static_cast<int>(row % kPanel);
  const std::byte* const panel =
      data + row / kPanel * PackedMatrix::PanelBytes(cols, dtype);
  if (dtype == DType::kF32) {
    const float* const in = reinterpret_cast<const float*>(panel) + lane;
    for (int col = 0; col < cols; ++col) out[col] = in[int64_t{col} * kPanel];
    return;
  }
  for (int col = 0; col < cols; ++col) {
    out[col] = FloatFromBf16(
        *reinterpret_cast<const uint16_t*>(panel + Bf16Offset(lane, col)));
  }
}

}  // namespace tandem::kernels::cpu
