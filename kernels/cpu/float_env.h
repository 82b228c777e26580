// SPDX-License-Identifier: Apache-2.0
// Denormals off: one percent of them in the weights makes a product six times
// slower. It changes bits, so every thread that computes, and every reference
// in a test, does this first.

#ifndef TANDEM_KERNELS_CPU_FLOAT_ENV_H_
#define TANDEM_KERNELS_CPU_FLOAT_ENV_H_

#include <immintrin.h>

namespace tandem::kernels::cpu {

// Flush-to-zero (results) and denormals-are-zero (operands), for the calling
// thread.
inline void FlushDenormals() { _mm_setcsr(_mm_getcsr() | 0x8040u); }

class ScopedFlushDenormals {
 public:
  ScopedFlushDenormals() : saved_(_mm_getcsr()) { FlushDenormals(); }
  ~ScopedFlushDenormals() { _mm_setcsr(saved_); }
  ScopedFlushDenormals(const ScopedFlushDenormals&) = delete;
  ScopedFlushDenormals& operator=(const ScopedFlushDenormals&) = delete;

 private:
  const unsigned saved_;
};

}  // namespace tandem::kernels::cpu

#endif  // TANDEM_KERNELS_CPU_FLOAT_ENV_H_
