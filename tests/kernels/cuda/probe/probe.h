// SPDX-License-Identifier: Apache-2.0
// Single instructions as launch functions, by way of the wrappers that the
// kernels use: what the bits of everything else stand on. Compiled as the
// kernels are, for the device and for the emulator.

#ifndef TANDEM_TESTS_KERNELS_CUDA_PROBE_PROBE_H_
#define TANDEM_TESTS_KERNELS_CUDA_PROBE_PROBE_H_

#include <cstdint>

#include "kernels/cuda/launch.h"

namespace tandem::kernels::cuda {

inline constexpr int kProbeRows = 64;
inline constexpr int kProbeInputs = 64;  // four steps of 16

enum class ProbeStep : uint8_t {
  kMma,             // mma.sync m16n8k16
  kWgmma,           // wgmma m64nNk16, both operands in shared memory
  kWgmmaRegisters,  // wgmma m64nNk16, A in registers
};

// d = c and then `steps` matrix steps of a * b^T onto it.
struct ProbeMatrixParams {
  const uint16_t* a;  // [cases, kProbeRows, kProbeInputs], bf16 or f16
  const uint16_t* b;  // [cases, tokens, kProbeInputs]
  const float* c;     // [cases, kProbeRows, tokens]
  float* d;           // [cases, kProbeRows, tokens]
  int cases;
  int tokens;  // 8, 16, 32, 64, 128 or 256
  int steps;   // 1 to 4
};
int LaunchProbeMatrix(const Stream& stream, ProbeStep step, bool half,
                      const ProbeMatrixParams& params);

enum class ProbeFunction : uint8_t {
  kExp2,
  kExp,
  kSqrt,
  kDiv,
  kFmaChain,  // y = fma(x, y, x), eight times
  kToBf16,    // rounded and widened
  kToF16,
  kE4M3ToBf16,  // the low 8 bits of x's, widened
  kE4M3ToF16,
};

// out[i] = function(x[i], y[i])
struct ProbeMapParams {
  const float* x;
  const float* y;
  float* out;
  int count;
};
int LaunchProbeMap(const Stream& stream, ProbeFunction function,
                   const ProbeMapParams& params);

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_TESTS_KERNELS_CUDA_PROBE_PROBE_H_
