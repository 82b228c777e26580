// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/sample.cuh"

namespace tandem::kernels::cuda {

// Shared memory holds it all; a byte, so that there is something to point to.
size_t SampleScratchBytes(int, int) { return 1; }

int LaunchSample(const Stream& stream, const SampleKernelParams& p) {
  if (p.count == 0) return 0;
  return Launch(stream, {p.count, 1, 1}, SampleKernel::kThreads,
                SampleKernel::kSharedBytes, SampleKernel{p});
}

}  // namespace tandem::kernels::cuda
