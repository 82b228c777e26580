// SPDX-License-Identifier: Apache-2.0
#include "bench/gpu/yardstick.h"

namespace tandem::bench {

std::unique_ptr<Yardstick> NewCudaYardstick() { return nullptr; }

}  // namespace tandem::bench
