// SPDX-License-Identifier: Apache-2.0

#include "kernels/cpu/packed_matrix.h"

#include <algorithm>
#include <cstring>

#include "kernels/cpu/convert.h"
#include "kernels/quantise.h"

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

// Rows of fp8 are quantised like vectors of a KV cache.
VectorQuantiser RowQuantiser(const HostTensor& source, int64_t row) {
  uint32_t most = 0;
  for (int64_t col = 0; col < source.cols; ++col) {
    most = std::max(most, MagnitudeKey(LoadElement(source.data, source.dtype,
                                                   row * source.cols + col)));
  }
  return {DType::kFp8, most};
}

void PackFp8Rows(const HostTensor& source, int64_t begin, int lanes,
                 std::byte* target, float* scales) {
  for (int lane = 0; lane < lanes; ++lane) {
    const VectorQuantiser quantiser = RowQuantiser(source, begin + lane);
    scales[begin + lane] = quantiser.scale;
    const int64_t row = (begin + lane) * source.cols;
    for (int64_t col = 0; col < source.cols; ++col) {
      const float value = LoadElement(source.data, source.dtype, row + col);
      *reinterpret_cast<uint16_t*>(target + Bf16Offset(lane, col)) =
          Bf16FromFloat(FloatFromE4M3(quantiser(value)));
    }
  }
}

}  // namespace

void PackPanel(const HostTensor& source, DType dtype, int panel,
               std::byte* target, float* scales) {
  const int64_t begin = int64_t{panel} * kPanel;
  const int lanes =
      static_cast<int>(std::min<int64_t>(kPanel, source.rows - begin));
  std::memset(target, 0,
              static_cast<size_t>(PackedMatrix::PanelBytes(
                  static_cast<int>(source.cols), dtype)));
  if (dtype == DType::kFp8) {
    PackFp8Rows(source, begin, lanes, target, scales);
    return;
  }
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

void PackFp8Panel(const HostCodes& source, int panel, std::byte* target,
                  float* scales) {
  const int64_t begin = int64_t{panel} * kPanel;
  const int lanes =
      static_cast<int>(std::min<int64_t>(kPanel, source.rows - begin));
  std::memset(target, 0,
              static_cast<size_t>(PackedMatrix::PanelBytes(
                  static_cast<int>(source.cols), DType::kFp8)));
  for (int lane = 0; lane < lanes; ++lane) {
    const int64_t row = begin + lane;
    scales[row] = source.scales[row];
    for (int64_t col = 0; col < source.cols; ++col) {
      *reinterpret_cast<uint16_t*>(target + Bf16Offset(lane, col)) =
          Bf16FromFloat(FloatFromE4M3(source.codes[row * source.cols + col]));
    }
  }
}

void UnpackRow(const PackedMatrix& matrix, int64_t row, float* out) {
  const int cols = matrix.cols();
  const int lane = static_cast<int>(row % kPanel);
  const std::byte* const panel =
      matrix.data() + row / kPanel * matrix.panel_bytes();
  if (matrix.dtype() == DType::kF32) {
    const float* const in = reinterpret_cast<const float*>(panel) + lane;
    for (int col = 0; col < cols; ++col) out[col] = in[int64_t{col} * kPanel];
    return;
  }
  const float scale = matrix.scales() == nullptr ? 1.0f : matrix.scales()[row];
  if (matrix.has_codes()) {
    UnpackCodeRow(panel, matrix.kind(), lane, cols, out);
    for (int col = 0; col < cols; ++col) out[col] = out[col] * scale;
    return;
  }
  for (int col = 0; col < cols; ++col) {
    out[col] = FloatFromBf16(*reinterpret_cast<const uint16_t*>(
                   panel + Bf16Offset(lane, col))) *
               scale;
  }
}

}  // namespace tandem::kernels::cpu
