// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/sample.cuh"

namespace tandem::kernels::cuda {
namespace {

template <int kThreads>
int Run(const Stream& stream, const SampleKernelParams& p) {
  using Kernel = SampleKernel<kThreads>;
  return Launch(stream, {p.count, 1, 1}, kThreads, Kernel::kSharedBytes,
                Kernel{p});
}

}  // namespace

// Shared memory holds it all; a byte, so that there is something to point to.
size_t SampleScratchBytes(int, int) { return 1; }

int LaunchSample(const Stream& stream, const SampleKernelParams& p) {
  if (p.count == 0) return 0;
  return p.vocab <= kFewIds ? Run<kFewSampleThreads>(stream, p)
                            : Run<kSampleThreads>(stream, p);
}

}  // namespace tandem::kernels::cuda
