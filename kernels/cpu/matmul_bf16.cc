// SPDX-License-Identifier: Apache-2.0
// Products of inputs rounded to bf16, with weights of bf16 (and of fp8, which
// lie as bf16): each output is one chain of fused multiply-adds over pairs of
// inputs, of each pair the odd one first. That is what vdpbf16ps does with a
// pair in one instruction, twice the arithmetic of others; where a CPU lacks
// it, the same chains are built from f32, with the same bits.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/matmul_bf16.cc"
#include "hwy/foreach_target.h"  // re-includes this file per target
// clang-format off
#include "kernels/cpu/matmul-inl.h"
// clang-format on

#include "kernels/cpu/kernel_table.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::kernels::cpu::HWY_NAMESPACE {
#if TANDEM_SIMD_TARGET

void MatMulRounded(const MatMulPiece& p) {
  if (p.type == DType::kF32) return MatMulRows(p);
  MatMulOf<Bf16OddFirst>(p);
}
#if HWY_TARGET == HWY_AVX3
void MatMulPairs(const MatMulPiece& p) {
  if (p.type == DType::kF32) return MatMulRows(p);
  MatMulOf<Bf16Pairs>(p);
}
#endif

#endif  // TANDEM_SIMD_TARGET
}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
