// SPDX-License-Identifier: Apache-2.0
// How weight matrices [rows = outputs, cols = inputs] lie in device memory.
// Rows and columns are padded with zeros to multiples of 64 and cut into
// blocks of 64 x 64, all blocks of 64 rows one after the other; a block is
// contiguous and already what shared memory is to hold, so that every kernel
// fetches it as it is.
//
//   bf16, f16  128 bytes per row, its eight 16-byte chunks permuted: chunk c
//              of row r is at c ^ (r % 8), the 128-byte swizzle of wgmma, in
//              which eight rows of one chunk lie in different banks
//   e4m3       per 16 rows 1 KB in the order of the registers of a matrix
//              instruction: [step / 2][lane][step % 2][8], the eight being
//              rows g, g, g + 8, g + 8, g, g, g + 8, g + 8 at columns 2t,
//              2t + 1 (the last four at 8 more), g = lane / 4, t = lane % 4
//   int8       per 16 rows 1 KB in the order of the registers of an integer
//              matrix instruction, a group of 32 columns: [group][lane][16],
//              the 16 being 4 of row g, 4 of g + 8, 4 of g, 4 of g + 8 at
//              columns 8t .. 8t + 3 (the last eight at 4 more). An integer sum
//              has no order, so which input is which of the instruction's is
//              free, as long as tokens agree (matmul_codes.cuh)
//   int4       per 16 rows 512 bytes, [lane][group][row g, row g + 8][4], byte
//              i being columns 8t + i (low half) and 8t + i + 4 (high half);
//              two's complement, or with zeros 0 .. 15 and then the zeros, a
//              byte each, [group][row], or e2m1, but never -0
//   of both    then f16 scales, [group][row]
//   W8A8       as int8, without scales
//   f32        [64 columns][64 rows]: a warp reads one input of its rows
//
// Matrices of gates and of what they are multiplied with are interleaved:
// of each 16 rows the first eight are gates, the others their partners, so
// that a thread that holds a gate's output (row g of a matrix instruction)
// holds its partner's (g + 8).

#ifndef TANDEM_KERNELS_CUDA_PACKED_WEIGHTS_H_
#define TANDEM_KERNELS_CUDA_PACKED_WEIGHTS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/types.h"

#ifdef __CUDACC__
#define TANDEM_HOST_DEVICE __host__ __device__
#else
#define TANDEM_HOST_DEVICE
#endif

namespace tandem::kernels::cuda {

enum class WeightType : uint8_t {
  kF32,
  kBF16,
  kF16,
  kE4M3,
  kInt8,
  kInt4,
  kInt4Zeros,  // with a zero for each group
  kE2m1,       // in place of kInt4's codes
  kW8A8,
};

inline constexpr int kWeightBlock = 64;  // rows and columns of a block

TANDEM_HOST_DEVICE constexpr bool IsFourBit(WeightType type) {
  return type == WeightType::kInt4 || type == WeightType::kInt4Zeros ||
         type == WeightType::kE2m1;
}
// Codes with a scale for each group of kCodeGroup columns and an f32 for each
// row (kernels/quantise.h).
TANDEM_HOST_DEVICE constexpr bool IsGrouped(WeightType type) {
  return type == WeightType::kInt8 || IsFourBit(type);
}
// Codes that meet quantised tokens.
TANDEM_HOST_DEVICE constexpr bool HasIntegerProducts(WeightType type) {
  return IsGrouped(type) || type == WeightType::kW8A8;
}
// Scales of all rows are multiplied with finished chains.
TANDEM_HOST_DEVICE constexpr bool HasRowScales(WeightType type) {
  return type == WeightType::kE4M3 || HasIntegerProducts(type);
}
TANDEM_HOST_DEVICE constexpr int WeightBlocks(int size) {
  return (size + kWeightBlock - 1) / kWeightBlock;
}
inline constexpr int kGroupsPerBlock = kWeightBlock / kCodeGroup;
inline constexpr int kBlockScaleBytes = kGroupsPerBlock * kWeightBlock * 2;
inline constexpr int kBlockZeroBytes = kGroupsPerBlock * kWeightBlock;
TANDEM_HOST_DEVICE constexpr int BlockBytes(WeightType type) {
  constexpr int kWeights = kWeightBlock * kWeightBlock;
  return type == WeightType::kF32    ? kWeights * 4
         : type == WeightType::kE4M3 ? kWeights
         : type == WeightType::kW8A8 ? kWeights
         : type == WeightType::kInt8 ? kWeights + kBlockScaleBytes
         : type == WeightType::kInt4Zeros
             ? kWeights / 2 + kBlockZeroBytes + kBlockScaleBytes
         : IsFourBit(type) ? kWeights / 2 + kBlockScaleBytes
                           : kWeights * 2;
}
TANDEM_HOST_DEVICE constexpr int64_t PackedBytes(int rows, int cols,
                                                 WeightType type) {
  return int64_t{WeightBlocks(rows)} * WeightBlocks(cols) * BlockBytes(type);
}

// Offset in bytes of one weight; of int4 in the byte's high half if column % 8
// is 4 or more.
TANDEM_HOST_DEVICE constexpr int64_t PackedOffset(int row, int col, int cols,
                                                  WeightType type) {
  const int64_t block =
      int64_t{row / kWeightBlock} * WeightBlocks(cols) + col / kWeightBlock;
  const int r = row % kWeightBlock;
  const int c = col % kWeightBlock;
  int within = 0;
  if (type == WeightType::kF32) {
    within = (c * kWeightBlock + r) * 4;
  } else if (type == WeightType::kInt8 || type == WeightType::kW8A8) {
    const int lane = r % 8 * 4 + c % 32 / 8;
    within = r / 16 * 1024 + c / 32 * 512 + lane * 16 + c % 8 / 4 * 8 +
             r % 16 / 8 * 4 + c % 4;
  } else if (IsFourBit(type)) {
    const int lane = r % 8 * 4 + c % 32 / 8;
    within = r / 16 * 512 + lane * 16 + c / 32 * 8 + r % 16 / 8 * 4 + c % 4;
  } else if (type == WeightType::kE4M3) {
    const int step = c / 16;
    const int lane = r % 8 * 4 + c % 8 / 2;
    const int element = c % 16 / 8 * 4 + r % 16 / 8 * 2 + c % 2;
    within =
        r / 16 * 1024 + step / 2 * 512 + lane * 16 + step % 2 * 8 + element;
  } else {
    within = r * 128 + ((c / 8) ^ (r % 8)) * 16 + c % 8 * 2;
  }
  return block * BlockBytes(type) + within;
}

// Offset in bytes of the scale of int8 or int4 at a row and column.
TANDEM_HOST_DEVICE constexpr int64_t PackedScale(int row, int col, int cols,
                                                 WeightType type) {
  const int64_t block =
      int64_t{row / kWeightBlock} * WeightBlocks(cols) + col / kWeightBlock;
  return (block + 1) * BlockBytes(type) - kBlockScaleBytes +
         int64_t{2} * (col % kWeightBlock / kCodeGroup * kWeightBlock +
                       row % kWeightBlock);
}

// Offset in bytes of the zero of int4 with zeros at a row and column.
TANDEM_HOST_DEVICE constexpr int64_t PackedZero(int row, int col, int cols) {
  constexpr WeightType kType = WeightType::kInt4Zeros;
  const int64_t block =
      int64_t{row / kWeightBlock} * WeightBlocks(cols) + col / kWeightBlock;
  return (block + 1) * BlockBytes(kType) - kBlockScaleBytes - kBlockZeroBytes +
         int64_t{col % kWeightBlock / kCodeGroup} * kWeightBlock +
         row % kWeightBlock;
}

enum class RowOrder : uint8_t { kPlain, kGated };

// Rows of the packed matrix, its own padding apart. Gated: whole groups of 16.
TANDEM_HOST_DEVICE constexpr int PackedRows(int rows, RowOrder order) {
  return order == RowOrder::kGated ? (rows / 2 + 7) / 8 * 16 : rows;
}
// The row of the source [rows, cols] that packed row `row` is; -1: zeros.
TANDEM_HOST_DEVICE constexpr int SourceRow(int row, int rows, RowOrder order) {
  if (order == RowOrder::kPlain) return row < rows ? row : -1;
  const int gate = row / 16 * 8 + row % 8;
  return gate >= rows / 2 ? -1 : row % 16 < 8 ? gate : rows / 2 + gate;
}

// ---- Host side.

// A matrix as device memory is to hold it. `scales` [PackedRows], of
// HasRowScales alone: what each finished output is multiplied by.
struct PackedWeights {
  std::vector<std::byte> bytes;
  std::vector<float> scales;
};

// Converts (rounding to nearest, ties to even). Rows of e4m3 and W8A8, and
// groups of int8 and int4, are quantised as kernels/quantise.h says. Works on
// all of the machine's processors.
PackedWeights PackWeights(const HostTensor& source, WeightType type,
                          RowOrder order = RowOrder::kPlain);
// The same of what was quantised before, as the type of its codes.
PackedWeights PackWeights(const HostCodes& source,
                          RowOrder order = RowOrder::kPlain);
WeightType TypeOfCodes(const HostCodes& source);

// Rows [begin, end) of blocks of a packed matrix, into `to`, and their scales
// [64 * (end - begin)] if there are any.
void PackRowBlocks(const HostTensor& source, WeightType type, RowOrder order,
                   int begin, int end, std::byte* to, float* scales);
void PackRowBlocks(const HostCodes& source, RowOrder order, int begin, int end,
                   std::byte* to, float* scales);

// The number that a packed weight stands for, scale included. `row` is of the
// packed matrix.
float UnpackWeight(const PackedWeights& packed, int row, int col, int cols,
                   WeightType type);

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_KERNELS_CUDA_PACKED_WEIGHTS_H_
