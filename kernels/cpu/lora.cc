// SPDX-License-Identifier: Apache-2.0
// Low-rank adapters (Backend::AddLora), one row each. Both factors lie such
// that lanes are outputs; the sums over inputs are chains of their own.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/lora.cc"
#include "hwy/foreach_target.h"  // re-includes this file per target
// clang-format off
#include "kernels/cpu/simd-inl.h"
// clang-format on

#include "kernels/cpu/kernel_table.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::kernels::cpu::HWY_NAMESPACE {
#if TANDEM_SIMD_TARGET

// Segments at once: a chain alone waits for its own last sum.
inline constexpr int kSegments = 4;

HWY_INLINE F16 LoadUpTo16(const float* p, int count) {
  return count >= 16 ? Load16(p) : LoadFirst16(p, count);
}

void LoraShrinkRow(int cols, int rank, const float* a, const float* x,
                   float* h) {
  for (int j = 0; j < rank; j += 16) {
    const int lanes = HWY_MIN(16, rank - j);
    F16 sum = Set16(0.0f);
    int k = 0;
    for (; k + kSegments * kLoraSegment <= cols;
         k += kSegments * kLoraSegment) {
      F16 chain[kSegments];
      for (F16& c : chain) c = Set16(0.0f);
      for (int i = k; i < k + kLoraSegment; ++i) {
        for (int s = 0; s < kSegments; ++s) {
          const int at = i + s * kLoraSegment;
          chain[s] =
              Fma(Set16(x[at]), LoadUpTo16(a + int64_t{at} * rank + j, lanes),
                  chain[s]);
        }
      }
      for (const F16& c : chain) sum = Add(sum, c);
    }
    for (; k < cols; k += kLoraSegment) {
      F16 chain = Set16(0.0f);
      const int end = HWY_MIN(cols, k + kLoraSegment);
      for (int i = k; i < end; ++i) {
        chain = Fma(Set16(x[i]), LoadUpTo16(a + int64_t{i} * rank + j, lanes),
                    chain);
      }
      sum = Add(sum, chain);
    }
    StoreFirst16(sum, h + j, lanes);
  }
}

void LoraExpandRow(int rank, int rows, const float* b, const float* h,
                   float scale, float* out) {
  constexpr int kVectors = 4;
  int o = 0;
  for (; o + kVectors * 16 <= rows; o += kVectors * 16) {
    F16 chain[kVectors];
    for (F16& c : chain) c = Set16(0.0f);
    for (int j = 0; j < rank; ++j) {
      const float* const from = b + int64_t{j} * rows + o;
      for (int v = 0; v < kVectors; ++v) {
        chain[v] = Fma(Set16(h[j]), Load16(from + v * 16), chain[v]);
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      float* const to = out + o + v * 16;
      Store16(Fma(Set16(scale), chain[v], Load16(to)), to);
    }
  }
  for (; o < rows; o += 16) {
    const int lanes = HWY_MIN(16, rows - o);
    F16 chain = Set16(0.0f);
    for (int j = 0; j < rank; ++j) {
      chain = Fma(Set16(h[j]), LoadFirst16(b + int64_t{j} * rows + o, lanes),
                  chain);
    }
    StoreFirst16(Fma(Set16(scale), chain, LoadFirst16(out + o, lanes)), out + o,
                 lanes);
  }
}

#endif  // TANDEM_SIMD_TARGET
}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tandem::kernels::cpu {

void AddLoraRows(KernelTable& table) {
  const bool wide = table.isa == Isa::kAvx512;
  table.lora_shrink = wide ? N_AVX3::LoraShrinkRow : N_AVX2::LoraShrinkRow;
  table.lora_expand = wide ? N_AVX3::LoraExpandRow : N_AVX2::LoraExpandRow;
}

}  // namespace tandem::kernels::cpu
#endif  // HWY_ONCE
