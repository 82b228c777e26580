// SPDX-License-Identifier: Apache-2.0
// Kernels that single model families need, on the emulated device.

#include "tests/kernels/cuda/family_checks.h"

namespace tandem::kernels::cuda {
namespace {

TEST(CudaFamilies, LayerNormIsTheContractsWhateverTheSchedule) {
  for (const emulator::Settings& settings : kSettings) {
    const ScopedSettings scoped(settings);
    EXPECT_TRUE(CheckLayerNorm(LaunchLayerNorm));
  }
}

TEST(CudaFamilies, HeadsAreCentredAsTheCpuDoesIt) {
  for (const emulator::Settings& settings : kSettings) {
    const ScopedSettings scoped(settings);
    EXPECT_TRUE(CheckCentredHeads(LaunchLayerNorm));
  }
}

TEST(CudaFamilies, HeadsAreNormedWhateverTheSchedule) {
  for (const emulator::Settings& settings : kSettings) {
    const ScopedSettings scoped(settings);
    EXPECT_TRUE(CheckHeadNorms(LaunchRopeAppend, /*rotated=*/false));
    EXPECT_TRUE(CheckHeadNorms(LaunchRopeAppend, /*rotated=*/true));
  }
}

TEST(CudaFamilies, SumsAreRoundedScaledAndRounded) {
  EXPECT_TRUE(CheckAddAndScale(LaunchAddAndScale));
}

TEST(CudaFamilies, ActivationsAreNearFloat64) {
  EXPECT_TRUE(CheckActivate(LaunchActivate));
}

TEST(CudaFamilies, LogitsAreScaledAndCapped) {
  EXPECT_TRUE(CheckScaleLogits(LaunchScaleLogits));
}

TEST(CudaFamilies, TheLikeliestExpertsAreChosen) {
  EXPECT_TRUE(CheckRoute(LaunchRoute));
}

}  // namespace
}  // namespace tandem::kernels::cuda
