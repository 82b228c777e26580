// SPDX-License-Identifier: Apache-2.0
// Products of f32 inputs: each output is one chain of fused multiply-adds over
// its inputs in ascending order.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/matmul.cc"
#include "hwy/foreach_target.h"  // re-includes this file per target
// clang-format off
#include "kernels/cpu/matmul-inl.h"
// clang-format on

#include "kernels/cpu/kernel_table.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::kernels::cpu::HWY_NAMESPACE {
#if TANDEM_SIMD_TARGET

void MatMulRows(const MatMulPiece& p) {
  if (p.type == DType::kF32) {
    MatMulOf<F32Weights>(p);
  } else {
    MatMulOf<Bf16Weights>(p);
  }
}

#endif  // TANDEM_SIMD_TARGET
}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tandem::kernels::cpu {

void AddMatMul(KernelTable& table) {
  const bool wide = table.isa == Isa::kAvx512;
  switch (table.inputs) {
    case CpuInputs::kF32:
      table.matmul = wide ? N_AVX3::MatMulRows : N_AVX2::MatMulRows;
      break;
    case CpuInputs::kBf16:
      table.matmul = table.pairs ? N_AVX3::MatMulPairs
                     : wide      ? N_AVX3::MatMulRounded
                                 : N_AVX2::MatMulRounded;
      break;
    case CpuInputs::kBf16Amx:
      table.matmul = table.dot == Dot::kAmx ? N_AVX3::MatMulTiles
                     : wide                 ? N_AVX3::MatMulGrouped
                                            : N_AVX2::MatMulGrouped;
      break;
  }
}

}  // namespace tandem::kernels::cpu
#endif  // HWY_ONCE
