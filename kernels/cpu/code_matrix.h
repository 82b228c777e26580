// SPDX-License-Identifier: Apache-2.0
// The layout of int8, int4 and W8A8 weights on CPUs, and of the activations
// that meet them (kernels/quantise.h has the numbers). Panels of 32 outputs as
// in packed_matrix.h; within one, for every 64 inputs, two units of 16 outputs:
//
//   scales  [2 groups][16] f16, but for W8A8
//   zeros   [2 groups][16] i16, of int4 with zeros alone
//   int8    [2 groups][8 quads][16 outputs][4 inputs] two's complement, or with
//           128 added, as vpdpbusd takes them; and so W8A8
//   int4    [2 groups][4][16 outputs][4 inputs] bytes: the low nibble belongs
//           to quad v, the high one to quad v + 4; 0 .. 15, 8 means zero
//
// A 32-bit lane is what one integer dot product takes, a unit's block is whole
// cache lines, and a panel is one stream. Outputs and inputs that are not
// there have scale 0.

#ifndef TANDEM_KERNELS_CPU_CODE_MATRIX_H_
#define TANDEM_KERNELS_CPU_CODE_MATRIX_H_

#include <cstddef>
#include <cstdint>

#include "kernels/types.h"

namespace tandem::kernels::cpu {

inline constexpr int kCodeInputs = 2 * kCodeGroup;  // of a unit's block
inline constexpr int kUnit = 16;

// Raised ones have 128 added; kInt4Zeros is kInt4 with a zero for each group;
// kE2m1 lies as kInt4 does, and stands for kTwiceE2m1.
enum class CodeKind {
  kInt8,
  kInt8Raised,
  kW8A8,
  kW8A8Raised,
  kInt4,
  kInt4Zeros,
  kE2m1
};

constexpr bool IsW8A8(CodeKind kind) {
  return kind == CodeKind::kW8A8 || kind == CodeKind::kW8A8Raised;
}
constexpr bool IsRaised(CodeKind kind) {
  return kind == CodeKind::kInt8Raised || kind == CodeKind::kW8A8Raised;
}
// Whether a code is a byte.
constexpr bool IsEightBit(CodeKind kind) {
  return kind == CodeKind::kInt8 || kind == CodeKind::kInt8Raised ||
         IsW8A8(kind);
}
// How codes of `dtype` without zeros lie, where int8 is `raised` or not.
constexpr CodeKind KindOf(DType dtype, bool raised) {
  return dtype == DType::kInt4 ? CodeKind::kInt4
         : dtype == DType::kW8A8
             ? raised ? CodeKind::kW8A8Raised : CodeKind::kW8A8
         : raised ? CodeKind::kInt8Raised
                  : CodeKind::kInt8;
}

// Of a unit's block: where codes begin, and where it ends.
constexpr int64_t CodesBegin(CodeKind kind) {
  return IsW8A8(kind) ? 0 : kind == CodeKind::kInt4Zeros ? 128 : 64;
}
constexpr int64_t CodeUnitBytes(CodeKind kind) {
  return CodesBegin(kind) + int64_t{2} * (IsEightBit(kind) ? 8 : 4) * 64;
}
constexpr int CodeBlocks(int cols) {
  return (cols + kCodeInputs - 1) / kCodeInputs;
}
constexpr int64_t CodePanelBytes(int cols, CodeKind kind) {
  return int64_t{CodeBlocks(cols)} * 2 * CodeUnitBytes(kind);
}

// Activations of one row, quantised: at most 12 blocks of 64 inputs. A row of
// k inputs has RowPieces(k) of these; a matrix lies as [pieces][rows], with
// kRowPiecesRead - 1 more behind that may be read, whatever is there. For W8A8
// a piece is one group: scales[0] is the row's, minus[0] of all its codes.
struct RowPiece {
  static constexpr int kBlocks = 12;
  int8_t codes[kBlocks * kCodeInputs];
  float scales[kBlocks * 2];
  int32_t minus[kBlocks * 2];  // -128 times the sum of a group's codes
};
inline constexpr int kRowPiecesRead = 16;
constexpr int RowPieces(int cols) {
  return (CodeBlocks(cols) + RowPiece::kBlocks - 1) / RowPiece::kBlocks;
}
// First block of piece `piece`: pieces are even. Most rows are one, and tiles
// are short enough to notice a division.
constexpr int PieceBegin(int cols, int piece) {
  const int pieces = RowPieces(cols);
  if (piece == 0) return 0;
  if (piece == pieces) return CodeBlocks(cols);
  return static_cast<int>(int64_t{CodeBlocks(cols)} * piece / pieces);
}

// Quantises the rows of panel `panel` of `source` to a kind without zeros, into
// `target` [CodePanelBytes]; and each row's power of two, of W8A8 its scale,
// into `rows` [rows].
void PackCodePanel(const HostTensor& source, CodeKind kind, int panel,
                   std::byte* target, float* rows);
// The same of what was quantised before. A scale for each row goes to `rows`;
// others are rounded to f16 beside a power of two.
void PackCodePanel(const HostCodes& source, CodeKind kind, int panel,
                   std::byte* target, float* rows);

// out [cols] = one output's weights, `lane` of its panel, without what
// PackCodePanel puts into `rows`.
void UnpackCodeRow(const std::byte* panel, CodeKind kind, int lane, int cols,
                   float* out);

}  // namespace tandem::kernels::cpu

#endif  // TANDEM_KERNELS_CPU_CODE_MATRIX_H_
