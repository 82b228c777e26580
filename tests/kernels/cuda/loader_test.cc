// SPDX-License-Identifier: Apache-2.0
// Which device a worker gets, and what it says where it cannot have a GPU.

#include "kernels/cuda/loader.h"

#include <cstdlib>
#include <fstream>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tandem::kernels::cuda {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::string NotALibrary() {
  const std::string path = ::testing::TempDir() + "/not_a_library.so";
  std::ofstream(path) << "no ELF";
  return path;
}

struct Refusal {
  const char* what;
  std::string library;
  absl::StatusCode code;
  const char* says;
};

std::vector<Refusal> Refusals() {
  return {
      {"missing", "/nowhere/libtandem_cuda.so", absl::StatusCode::kNotFound,
       "no CUDA backend (/nowhere/libtandem_cuda.so)"},
      {"no library at all", NotALibrary(),
       absl::StatusCode::kFailedPrecondition, "cannot be loaded"},
      {"another library", NO_FACTORY, absl::StatusCode::kFailedPrecondition,
       "does not define tandem_cuda_plugin"},
      {"another build", OTHER_BUILD, absl::StatusCode::kFailedPrecondition,
       "'0.0.9 another build'"},
  };
}

DeviceOptions Options(const std::string& device, const std::string& library) {
  DeviceOptions options;
  options.device = device;
  options.library = library;
  options.cpu.threads = 1;
  return options;
}

TEST(Loader, KernelsAreLoadedAtOnceUnlessTheEnvironmentSaysOtherwise) {
  unsetenv("CUDA_MODULE_LOADING");
  EXPECT_FALSE(OpenCuda({"/nowhere"}, 0, {}).ok());
  EXPECT_STREQ(getenv("CUDA_MODULE_LOADING"), "EAGER");
  setenv("CUDA_MODULE_LOADING", "LAZY", 1);
  EXPECT_FALSE(OpenCuda({"/nowhere"}, 0, {}).ok());
  EXPECT_STREQ(getenv("CUDA_MODULE_LOADING"), "LAZY");
}

TEST(Loader, AskedForGpuIsRefusedWithTheReason) {
  for (const Refusal& refusal : Refusals()) {
    SCOPED_TRACE(refusal.what);
    const auto opened = OpenDevice(Options("cuda:0", refusal.library));
    ASSERT_FALSE(opened.ok());
    EXPECT_EQ(opened.status().code(), refusal.code);
    EXPECT_THAT(std::string(opened.status().message()),
                AllOf(HasSubstr("--device cuda:0: "), HasSubstr(refusal.says)));
  }
}

TEST(Loader, AutoTakesTheCpuAndKeepsTheReason) {
  for (const Refusal& refusal : Refusals()) {
    SCOPED_TRACE(refusal.what);
    const auto opened = OpenDevice(Options("auto", refusal.library));
    ASSERT_TRUE(opened.ok()) << opened.status();
    EXPECT_FALSE(opened->is_cuda());
    EXPECT_THAT(opened->backend->description(), HasSubstr("cpu"));
    EXPECT_THAT(opened->reason, AllOf(HasSubstr("--device auto: no GPU: "),
                                      HasSubstr(refusal.says)));
  }
}

TEST(Loader, CpuAsksForNoLibrary) {
  const auto opened = OpenDevice(Options("cpu", OTHER_BUILD));
  ASSERT_TRUE(opened.ok()) << opened.status();
  EXPECT_FALSE(opened->is_cuda());
  EXPECT_EQ(opened->reason, "--device cpu");
}

TEST(Loader, OtherDevicesAreRefused) {
  for (const char* device : {"", "gpu", "cuda:", "cuda:-1", "cuda:0x",
                             "cuda:+1", "cuda: 1", "cuda:1000", "cuda0"}) {
    SCOPED_TRACE(device);
    const auto opened = OpenDevice(Options(device, OTHER_BUILD));
    ASSERT_FALSE(opened.ok());
    EXPECT_EQ(opened.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(opened.status().message()),
                HasSubstr("expected auto, cpu or cuda:N"));
  }
}

#ifdef REAL_LIBRARY
// The real library, as far as it goes without a driver. Where there is one,
// it opens instead, and the GPU's own tests have more to say.
TEST(Loader, TheRealLibraryNamesTheMissingDriver) {
  const auto opened = OpenDevice(Options("cuda:0", REAL_LIBRARY));
  if (opened.ok()) {
    EXPECT_TRUE(opened->is_cuda());
    GTEST_SKIP() << "there is a GPU: " << opened->backend->description();
  }
  EXPECT_EQ(opened.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(
      std::string(opened.status().message()),
      AllOf(HasSubstr("--device cuda:0: "), HasSubstr("NVIDIA driver")));
  const auto chosen = OpenDevice(Options("auto", REAL_LIBRARY));
  ASSERT_TRUE(chosen.ok()) << chosen.status();
  EXPECT_FALSE(chosen->is_cuda());
  EXPECT_THAT(chosen->reason, HasSubstr("NVIDIA driver"));
}
#endif

}  // namespace
}  // namespace tandem::kernels::cuda
