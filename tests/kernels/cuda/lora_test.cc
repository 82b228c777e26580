// SPDX-License-Identifier: Apache-2.0
// Kernels of adapters, on the emulated device.

#include "tests/kernels/cuda/lora_checks.h"

namespace tandem::kernels::cuda {
namespace {

TEST(CudaLora, RowsAreTheContractsWhateverTheSchedule) {
  for (const emulator::Settings& settings : kSettings) {
    const ScopedSettings scoped(settings);
    EXPECT_TRUE(CheckLora(LaunchLora));
  }
}

TEST(CudaLora, HalvesTakeWhatIsAddedToThem) {
  EXPECT_TRUE(CheckGateHalves(LaunchGateHalves));
}

TEST(CudaLora, AGatedProductHasTheSameBitsInTwoSteps) {
  EXPECT_TRUE(CheckGatedInTwo());
}

}  // namespace
}  // namespace tandem::kernels::cuda
