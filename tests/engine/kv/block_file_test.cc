// SPDX-License-Identifier: Apache-2.0
// Blocks in a real file: what comes back is what was written, or an error.

#include "engine/kv/block_file.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "common/thread_loop.h"
#include "tests/engine/temp_dir.h"

namespace tandem::engine {
namespace {

constexpr int kBytes = 4096;

BlockHash NumberedHash(uint8_t n) {
  BlockHash hash;
  hash.bytes[3] = n;
  return hash;
}

std::vector<std::byte> DataOf(uint8_t n) {
  std::vector<std::byte> data(kBytes);
  for (size_t i = 0; i < data.size(); ++i) {
    data[i] = static_cast<std::byte>(i * 7 + n);
  }
  return data;
}

class BlockFileTest : public testing::Test {
 protected:
  BlockFileTest() {
    auto file =
        TemporaryBlockFile::Create(directory_.path(), 4, kBytes, &loop_);
    EXPECT_TRUE(file.ok()) << file.status();
    file_ = *std::move(file);
  }
  absl::Status Write(int slot, const BlockHash& hash,
                     const std::vector<std::byte>& data) {
    std::promise<absl::Status> done;
    file_->Write(slot, hash, data,
                 [&](absl::Status s) { done.set_value(std::move(s)); });
    return done.get_future().get();
  }
  absl::Status Read(int slot, const BlockHash& hash,
                    std::vector<std::byte>* data) {
    data->assign(kBytes, std::byte{});
    std::promise<absl::Status> done;
    file_->Read(slot, hash, absl::MakeSpan(*data),
                [&](absl::Status s) { done.set_value(std::move(s)); });
    return done.get_future().get();
  }

  TempDir directory_;
  ThreadLoop loop_{"test"};
  std::unique_ptr<TemporaryBlockFile> file_;
};

TEST_F(BlockFileTest, GivesBackWhatWasWritten) {
  std::vector<std::byte> data;
  for (const uint8_t slot : {3, 0, 1}) {
    ASSERT_TRUE(Write(slot, NumberedHash(slot), DataOf(slot)).ok());
  }
  ASSERT_TRUE(Write(0, NumberedHash(9), DataOf(9)).ok());  // again
  for (const uint8_t slot : {3, 1}) {
    ASSERT_TRUE(Read(slot, NumberedHash(slot), &data).ok());
    EXPECT_EQ(data, DataOf(slot));
  }
  ASSERT_TRUE(Read(0, NumberedHash(9), &data).ok());
  EXPECT_EQ(data, DataOf(9));
}

TEST_F(BlockFileTest, AnotherBlocksSlotIsAnError) {
  std::vector<std::byte> data;
  ASSERT_TRUE(Write(0, NumberedHash(1), DataOf(1)).ok());
  EXPECT_TRUE(absl::IsDataLoss(Read(0, NumberedHash(2), &data)));
}

TEST_F(BlockFileTest, AChangedByteIsAnError) {
  std::vector<std::byte> data;
  ASSERT_TRUE(Write(1, NumberedHash(1), DataOf(1)).ok());
  const char wrong = 'x';
  ASSERT_EQ(pwrite(file_->descriptor(), &wrong, 1, kBytes + 100), 1);
  EXPECT_TRUE(absl::IsDataLoss(Read(1, NumberedHash(1), &data)));
}

TEST_F(BlockFileTest, ATruncatedBlockIsAnError) {
  std::vector<std::byte> data;
  ASSERT_TRUE(Write(1, NumberedHash(1), DataOf(1)).ok());
  ASSERT_EQ(ftruncate(file_->descriptor(), 2 * kBytes - 1), 0);
  EXPECT_TRUE(absl::IsDataLoss(Read(1, NumberedHash(1), &data)));
}

TEST_F(BlockFileTest, IsPrivateAndLeavesNothing) {
  struct stat file;
  ASSERT_EQ(fstat(file_->descriptor(), &file), 0);
  EXPECT_EQ(file.st_nlink, 0u);  // no name
  EXPECT_EQ(file.st_mode & 0777, 0600u);
  EXPECT_TRUE(std::filesystem::is_empty(directory_.path()));
}

// A limit of the file's size stands for the disk's.
TEST_F(BlockFileTest, AFullDiskIsAnErrorOfTheWrite) {
  signal(SIGXFSZ, SIG_IGN);
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit small{kBytes + 10, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  EXPECT_TRUE(Write(0, NumberedHash(1), DataOf(1)).ok());
  EXPECT_FALSE(Write(1, NumberedHash(2), DataOf(2)).ok());
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  std::vector<std::byte> data;
  EXPECT_TRUE(Read(0, NumberedHash(1), &data).ok());
  EXPECT_EQ(data, DataOf(1));
}

TEST_F(BlockFileTest, NeedsItsDirectory) {
  const auto file = TemporaryBlockFile::Create(directory_.path() + "/none", 1,
                                               kBytes, &loop_);
  EXPECT_TRUE(absl::IsNotFound(file.status())) << file.status();
}

}  // namespace
}  // namespace tandem::engine
