// SPDX-License-Identifier: Apache-2.0
#include "engine/checkpoint/widen.h"

#include <bit>
#include <cmath>
#include <cstring>

namespace tandem::engine {

using kernels::DType;

float WidenBF16(uint16_t bits) {
  return std::bit_cast<float>(uint32_t{bits} << 16);
}

float WidenF16(uint16_t bits) {
  const uint32_t sign = uint32_t{bits & 0x8000u} << 16;
  const uint32_t exponent = bits >> 10 & 0x1f;
  const uint32_t mantissa = bits & 0x3ff;
  if (exponent == 0) {  // zero, and subnormals: multiples of 2^-24
    const float magnitude = std::ldexp(static_cast<float>(mantissa), -24);
    return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | sign);
  }
  const uint32_t wide = exponent == 31 ? 255 : exponent + (127 - 15);
  return std::bit_cast<float>(sign | wide << 23 | mantissa << 13);
}

void Append(const kernels::HostTensor& tensor, DType dtype,
            std::vector<std::byte>& out) {
  const size_t count =
      static_cast<size_t>(tensor.rows) * static_cast<size_t>(tensor.cols);
  const size_t begin = out.size();
  out.resize(begin + count * kernels::SizeOf(dtype));
  if (count == 0) return;
  if (tensor.dtype == dtype) {
    memcpy(out.data() + begin, tensor.data, count * kernels::SizeOf(dtype));
    return;
  }
  const auto widen = tensor.dtype == DType::kBF16 ? WidenBF16 : WidenF16;
  for (size_t i = 0; i < count; ++i) {
    uint16_t bits;
    memcpy(&bits, tensor.data + i * sizeof(bits), sizeof(bits));
    const float value = widen(bits);
    memcpy(out.data() + begin + i * sizeof(value), &value, sizeof(value));
  }
}

void AppendFloats(const kernels::HostTensor& tensor, std::vector<float>& out) {
  std::vector<std::byte> bytes;
  Append(tensor, DType::kF32, bytes);
  const size_t begin = out.size();
  out.resize(begin + bytes.size() / sizeof(float));
  if (!bytes.empty()) memcpy(out.data() + begin, bytes.data(), bytes.size());
}

kernels::HostTensor Transpose(const kernels::HostTensor& tensor,
                              std::vector<std::byte>& out) {
  const size_t size = kernels::SizeOf(tensor.dtype);
  const auto rows = static_cast<size_t>(tensor.rows);
  const auto cols = static_cast<size_t>(tensor.cols);
  out.resize(rows * cols * size);
  for (size_t r = 0; r < rows; ++r) {
    for (size_t c = 0; c < cols; ++c) {
      memcpy(out.data() + (c * rows + r) * size,
             tensor.data + (r * cols + c) * size, size);
    }
  }
  return {out.data(), tensor.dtype, tensor.cols, tensor.rows};
}

kernels::HostTensor RowsInOrder(const kernels::HostTensor& tensor,
                                const std::vector<int>& order,
                                std::vector<std::byte>& out) {
  if (order.empty()) return tensor;
  const size_t size =
      static_cast<size_t>(tensor.cols) * kernels::SizeOf(tensor.dtype);
  out.assign(tensor.data,
             tensor.data + static_cast<size_t>(tensor.rows) * size);
  for (size_t i = 0; i < order.size(); ++i) {
    memcpy(out.data() + i * size,
           tensor.data + static_cast<size_t>(order[i]) * size, size);
  }
  return {out.data(), tensor.dtype, tensor.rows, tensor.cols};
}

}  // namespace tandem::engine
