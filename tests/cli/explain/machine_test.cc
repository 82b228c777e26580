// SPDX-License-Identifier: Apache-2.0
#include "cli/explain/machine.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "common/cpu_limits.h"

namespace tandem::explain {
namespace {

TEST(CpuLimitsTest, LoopsCountTheirOperations) {
  // 48 instructions, each of 8 or 16 lanes that multiply and add.
  EXPECT_EQ(RunFma(false, 3), 3 * 48 * 8 * 2);
  if (CpuHasWideFma()) {
    EXPECT_EQ(RunFma(true, 3), 3 * 48 * 16 * 2);
  }
  EXPECT_EQ(RunIntegerDots(IntegerDots::kMultiplyAdd, 3), 3 * 48 * 32 * 2);
  if (CpuHas(IntegerDots::kVnni)) {
    EXPECT_EQ(RunIntegerDots(IntegerDots::kVnni, 3), 3 * 48 * 32 * 2);
  }
  if (CpuHas(IntegerDots::kWideVnni)) {
    EXPECT_EQ(RunIntegerDots(IntegerDots::kWideVnni, 3), 3 * 48 * 64 * 2);
  }
  EXPECT_TRUE(CpuHas(FastestIntegerDots()));
}

TEST(MachineTest, LimitsAreThoseOfAComputer) {
  std::vector<std::string> heard;
  const auto machine =
      MeasureMachine({.threads = 1,
                      .read_bytes = 9 << 20,
                      .integer_dots = true,
                      .budget = absl::Milliseconds(20)},
                     [&](std::string_view what) { heard.emplace_back(what); });
  ASSERT_TRUE(machine.ok()) << machine.status();
  EXPECT_EQ(machine->threads, 1);
  EXPECT_EQ(machine->read_bytes, 8 << 20) << "whole samples";
  // A core at 0.1 to 8 GHz, 2 to 64 operations a cycle; memory of any kind.
  EXPECT_GT(machine->flops_per_second, 0.2e9);
  EXPECT_LT(machine->flops_per_second, 600e9);
  EXPECT_GE(machine->matrix_flops_per_second, machine->flops_per_second / 2);
  EXPECT_GT(machine->bytes_per_second, 0.05e9);
  EXPECT_LT(machine->bytes_per_second, 2000e9);
  EXPECT_EQ(heard.size(), 3);
}

}  // namespace
}  // namespace tandem::explain
