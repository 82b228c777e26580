// SPDX-License-Identifier: Apache-2.0
// What the backend does beside computing, over the device in host memory:
// which devices it refuses, and what becomes of one that breaks.

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <future>
#include <memory>
#include <string>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cuda/testing/host_device.h"

namespace tandem::kernels::cuda {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::NewEmulatedBackend;

// As the step loop does: it has put a step and a callback on the queue, and
// calls nothing before that has run.
TEST(CudaBackendDeathTest, AFaultEndsTheProcessThoughNobodyCallsTheDevice) {
  EXPECT_EXIT(
      {
        std::atomic<bool> broken{false};
        const auto backend = NewEmulatedBackend({}, {.broken = &broken});
        const auto queue = (*backend)->NewQueue("compute");
        std::promise<void> submitted;
        queue->Callback([&] {
          submitted.get_future().wait();
          broken = true;
        });
        queue->Callback([] { std::_Exit(1); });  // never runs
        submitted.set_value();
        std::this_thread::sleep_for(std::chrono::seconds(30));
        std::_Exit(2);
      },
      ::testing::ExitedWithCode(70),
      "^fatal: GPU: work on the device: error 700");
}

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
