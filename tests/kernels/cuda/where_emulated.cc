// SPDX-License-Identifier: Apache-2.0
#include "tests/kernels/cuda/where.h"

namespace tandem::kernels::cuda {

int DeviceGeneration() { return 0; }

}  // namespace tandem::kernels::cuda
