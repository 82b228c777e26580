// SPDX-License-Identifier: Apache-2.0
// What a worker hears where there is no NCCL, or not the right one.

#include "handoff/nccl/loader.h"

#include <fstream>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tandem::handoff::nccl {
namespace {

using ::testing::HasSubstr;

TEST(NcclLoader, SaysWhatIsMissing) {
  const auto library = OpenNccl({});
  ASSERT_FALSE(library.ok());
  // A build with CUDA puts it beside the programs, not beside the tests.
  EXPECT_EQ(library.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(library.status().message()),
              HasSubstr("libtandem_nccl.so"));
}

TEST(NcclLoader, RefusesWhatIsNoLibrary) {
  LibraryOptions options;
  options.library = ::testing::TempDir() + "/libtandem_nccl.so";
  std::ofstream(options.library) << "not a library";
  const auto library = OpenNccl(options);
  EXPECT_EQ(library.status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST(NcclLoader, RefusesALibraryOfAnotherBuild) {
  // Any library without the entry.
  for (const char* name : {"/lib/x86_64-linux-gnu/libm.so.6",
                           "/lib/aarch64-linux-gnu/libm.so.6"}) {
    LibraryOptions options;
    options.library = name;
    if (!std::ifstream(name).good()) continue;
    EXPECT_EQ(OpenNccl(options).status().code(),
              absl::StatusCode::kFailedPrecondition);
  }
}

// Built with CUDA: it loads, and NCCL's absence or the driver's is an error
// with a name.
TEST(NcclLoader, SaysWhatTheLibraryMisses) {
  LibraryOptions options;
  options.library = TANDEM_BINARY_DIR "/bin/libtandem_nccl.so";
  if (!std::ifstream(options.library).good()) {
    GTEST_SKIP() << "not built with TANDEM_CUDA";
  }
  options.nccl = "libno-such-nccl.so.2";
  const auto library = OpenNccl(options);
  EXPECT_EQ(library.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(library.status().message()),
              HasSubstr("libno-such-nccl.so.2"));
}

}  // namespace
}  // namespace tandem::handoff::nccl
