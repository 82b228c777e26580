// SPDX-License-Identifier: Apache-2.0
// The one layout of weights on CPUs. Outputs lie in panels of 32 (the last
// one padded with zeros), inputs in ascending order within a panel:
//
//   f32   [panels][cols][32]
//   bf16  [panels][(cols + 1) / 2][2 halves][16 outputs][2 inputs]
//   fp8   as bf16, which holds every code exactly: no smaller than bf16, the
//         same numbers as on a GPU; and a scale for each output
//   int8, int4, W8A8: code_matrix.h
//
// A 32-bit lane of bf16 holds two inputs of one output: the even one widens
// by a shift, the odd one by a mask. Every product, however many rows it has,
// reads this layout and sums each output over its inputs in order, so all of
// them give the same bits.

#ifndef TANDEM_KERNELS_CPU_PACKED_MATRIX_H_
#define TANDEM_KERNELS_CPU_PACKED_MATRIX_H_

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cpu/allocator.h"
#include "kernels/cpu/code_matrix.h"

namespace tandem::kernels::cpu {

inline constexpr int kPanel = 32;

class PackedMatrix final : public Matrix {
 public:
  // `scales` [rows], of quantised ones alone. `kind` is of integer products,
  // `order` [cols] HostCodes' or empty.
  PackedMatrix(int rows, int cols, DType dtype, DeviceMemory memory,
               std::vector<float> scales, CodeKind kind = CodeKind::kInt8,
               std::vector<int32_t> order = {})
      : Matrix(rows, cols, dtype),
        memory_(std::move(memory)),
        scales_(std::move(scales)),
        kind_(kind),
        order_(std::move(order)) {}

  static int64_t PanelBytes(int cols, DType dtype) {
    return dtype == DType::kF32 ? int64_t{cols} * kPanel * 4
                                : int64_t{(cols + 1) / 2} * kPanel * 4;
  }
  static int Panels(int rows) { return (rows + kPanel - 1) / kPanel; }

  int panels() const { return Panels(rows()); }
  int64_t panel_bytes() const {
    return has_codes() ? CodePanelBytes(cols(), kind_)
                       : PanelBytes(cols(), dtype());
  }
  // Whether the layout is code_matrix.h's.
  bool has_codes() const { return HasIntegerProducts(dtype()); }
  CodeKind kind() const { return kind_; }
  const std::byte* data() const { return memory_.data(); }
  // What finished outputs are multiplied by, or null.
  const float* scales() const {
    return scales_.empty() ? nullptr : scales_.data();
  }

  // The input that each column is of, or null.
  const int32_t* order() const {
    return order_.empty() ? nullptr : order_.data();
  }

 private:
  const DeviceMemory memory_;
  const std::vector<float> scales_;
  const CodeKind kind_;
  const std::vector<int32_t> order_;
};

// Writes panel `panel` of `source` into `target` [PanelBytes], zero padded,
// and the scales of its rows into `scales` [rows] if dtype is fp8.
void PackPanel(const HostTensor& source, DType dtype, int panel,
               std::byte* target, float* scales);
// The same of codes in kFp8.
void PackFp8Panel(const HostCodes& source, int panel, std::byte* target,
                  float* scales);

// out [cols] = row `row` of a packed matrix without an order, widened, scale
// included.
void UnpackRow(const PackedMatrix& matrix, int64_t row, float* out);

}  // namespace tandem::kernels::cpu

#endif  // TANDEM_KERNELS_CPU_PACKED_MATRIX_H_
