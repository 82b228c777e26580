// SPDX-License-Identifier: Apache-2.0
#include "common/available_cpus.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>

namespace tandem {
namespace {

class AvailableCpusTest : public testing::Test {
 protected:
  AvailableCpusTest()
      : root_(std::filesystem::path(testing::TempDir()) / "available_cpus") {
    std::filesystem::remove_all(root_);
    cpu_set_t set;
    CPU_ZERO(&set);
    EXPECT_EQ(sched_getaffinity(0, sizeof(set), &set), 0);
    allowed_ = CPU_COUNT(&set);
  }
  ~AvailableCpusTest() override { std::filesystem::remove_all(root_); }

  void Write(const std::string& name, const std::string& text) {
    std::filesystem::create_directories((root_ / name).parent_path());
    std::ofstream(root_ / name) << text;
  }
  // What `cpus` are where this machine may have fewer.
  int AtMost(int cpus) const { return std::min(cpus, allowed_); }

  const std::filesystem::path root_;
  int allowed_ = 0;
};

TEST_F(AvailableCpusTest, AreThoseOfTheSmallestQuota) {
  EXPECT_EQ(AvailableCpus(root_), allowed_) << "no /proc";
  Write("proc/self/cgroup", "0::/a/b\n");
  EXPECT_EQ(AvailableCpus(root_), allowed_) << "nobody limits anything";
  Write("sys/fs/cgroup/a/b/cpu.max", "max 100000\n");
  EXPECT_EQ(AvailableCpus(root_), allowed_);
  Write("sys/fs/cgroup/a/cpu.max", "250000 100000\n");
  EXPECT_EQ(AvailableCpus(root_), AtMost(2)) << "whole ones";
  Write("sys/fs/cgroup/a/cpu.max", "190000 100000\n");
  EXPECT_EQ(AvailableCpus(root_), 1) << "of a group further up";
  Write("sys/fs/cgroup/a/cpu.max", "max 100000\n");
  Write("sys/fs/cgroup/a/b/cpu.max", "50000 50000\n");
  EXPECT_EQ(AvailableCpus(root_), 1);
  Write("sys/fs/cgroup/a/b/cpu.max", "20000 100000\n");
  EXPECT_EQ(AvailableCpus(root_), 1) << "at least one";
  // In a container the group is the root, and its files are there.
  Write("proc/self/cgroup", "0::/\n");
  EXPECT_EQ(AvailableCpus(root_), allowed_);
  Write("sys/fs/cgroup/cpu.max", "100000 100000\n");
  EXPECT_EQ(AvailableCpus(root_), 1);
}

TEST_F(AvailableCpusTest, OfVersionOneToo) {
  Write("proc/self/cgroup", "7:memory:/m\n4:cpu,cpuacct:/docker/x\n0::/\n");
  EXPECT_EQ(AvailableCpus(root_), allowed_);
  Write("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n");
  Write("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(AvailableCpus(root_), allowed_);
  // The host's path, and the container's files.
  Write("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "100000\n");
  EXPECT_EQ(AvailableCpus(root_), 1);
}

TEST_F(AvailableCpusTest, WhatIsNoQuotaIsNone) {
  Write("proc/self/cgroup", "0::/\n");
  for (const char* text :
       {"", "max", "words", "100000", "0 100000", "100000 0", "-5 100000"}) {
    Write("sys/fs/cgroup/cpu.max", text);
    EXPECT_EQ(AvailableCpus(root_), allowed_) << text;
  }
}

}  // namespace
}  // namespace tandem
