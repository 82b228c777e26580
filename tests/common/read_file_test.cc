// SPDX-License-Identifier: Apache-2.0
#include "common/read_file.h"

#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;

TEST(ReadFileTest, HasAllOfAFileAndSaysWhyItHasNot) {
  const std::string path = ::testing::TempDir() + "read_file_test";
  const std::string text = std::string(200'000, 'x') + '\0' + "end";
  std::ofstream(path) << text;
  EXPECT_EQ(*ReadFile(path), text);
  EXPECT_EQ(*ReadFile(path, text.size()), text);
  const auto large = ReadFile(path, text.size() - 1);
  EXPECT_THAT(std::string(large.status().message()),
              HasSubstr("it has over 200003 bytes"));
  std::filesystem::remove(path);
  const auto missing = ReadFile(path);
  EXPECT_TRUE(absl::IsNotFound(missing.status()));
  EXPECT_THAT(std::string(missing.status().message()),
              HasSubstr("cannot read " + path + ": No such file"));
  // It opens, and does not read.
  const auto directory = ReadFile(::testing::TempDir());
  EXPECT_THAT(std::string(directory.status().message()),
              HasSubstr("Is a directory"));
}

TEST(ReadFileTest, TakesAPipe) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  ASSERT_EQ(write(ends[1], "piped", 5), 5);
  close(ends[1]);
  EXPECT_EQ(*ReadFile("/proc/self/fd/" + std::to_string(ends[0])), "piped");
  close(ends[0]);
}

}  // namespace
}  // namespace tandem
