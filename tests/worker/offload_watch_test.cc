// SPDX-License-Identifier: Apache-2.0
#include "worker/offload_watch.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tandem::worker {
namespace {

using testing::AllOf;
using testing::HasSubstr;

TEST(OffloadWatchTest, SaysOnceThatTheFileIsFullAndOnceThatItIsNot) {
  const absl::Status full = absl::ResourceExhaustedError("no space left");
  OffloadWatch watch("/var/kv");
  const auto logged = [&](const absl::Status& status) {
    testing::internal::CaptureStderr();
    watch.Update(status);
    return testing::internal::GetCapturedStderr();
  };
  EXPECT_EQ(logged(absl::OkStatus()), "");
  for (int times = 0; times < 2; ++times) {
    EXPECT_THAT(logged(full),
                AllOf(HasSubstr("cannot grow"), HasSubstr("/var/kv"),
                      HasSubstr("no space left")));
    EXPECT_EQ(logged(full), "");
    EXPECT_THAT(
        logged(absl::OkStatus()),
        AllOf(HasSubstr("takes new blocks again"), HasSubstr("/var/kv")));
    EXPECT_EQ(logged(absl::OkStatus()), "");
  }
}

}  // namespace
}  // namespace tandem::worker
