// SPDX-License-Identifier: Apache-2.0
// What the backend does beside computing, over the device in host memory:
// which devices it refuses.

#include <memory>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cuda/testing/host_device.h"

namespace tandem::kernels::cuda {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::NewEmulatedBackend;

TEST(CudaBackend, ADeviceWithTooLittleSharedMemoryIsRefused) {
  // Compute capability 8.6, 8.9 and 12.x.
  const auto refused = NewEmulatedBackend({}, {.shared_bytes = 99 * 1024});
  ASSERT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.status().message()),
              AllOf(HasSubstr("emulated (sm_90) has 99 KiB of shared memory"),
                    HasSubstr("expected 163 or more")));
  EXPECT_TRUE(NewEmulatedBackend({}, {.shared_bytes = 163 * 1024}).ok());
}

}  // namespace
}  // namespace tandem::kernels::cuda
