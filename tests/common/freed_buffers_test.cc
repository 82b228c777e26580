// SPDX-License-Identifier: Apache-2.0
#include "common/freed_buffers.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cstddef>
#include <memory>

#include "tests/sanitized.h"

namespace tandem {
namespace {

int64_t PageFaults() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_minflt;
}

// A handoff's slabs, each in a message of its own.
TEST(FreedBuffersTest, TheNextOneFindsItsPages) {
  if (kSanitized) GTEST_SKIP() << "its allocator is another one";
  KeepFreedBuffers();
  constexpr size_t kBytes = size_t{1} << 20;
  const auto fill = [] {
    std::unique_ptr<volatile char[]> buffers[8];
    for (auto& buffer : buffers) {
      buffer.reset(new volatile char[kBytes]);
      for (size_t i = 0; i < kBytes; i += 4096) buffer[i] = 1;
    }
  };
  fill();
  const int64_t before = PageFaults();
  for (int i = 0; i < 10; ++i) fill();
  EXPECT_LT(PageFaults() - before, 10 * 8 * 10) << "of 20 480 pages";
}

}  // namespace
}  // namespace tandem
