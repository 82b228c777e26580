// SPDX-License-Identifier: Apache-2.0
// Places of this file, which is compiled as the programs with failpoints are.
#define TANDEM_FAILPOINTS
#include "common/failpoint.h"

#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tandem::failpoint {
namespace {

using testing::AllOf;
using testing::Field;

Hit Work() { return TANDEM_FAILPOINT("work", "crash fail drop stall"); }
Hit Copy() { return TANDEM_FAILPOINT("copy", "duplicate corrupt truncate"); }
// Nobody calls it, but it is compiled.
[[gnu::used]] Hit Never() { return TANDEM_FAILPOINT("never", "delay"); }

TEST(FailpointTest, PlacesAreListedPassedOrNot) {
  std::string names;
  for (const State& state : States()) names += state.name + " ";
  EXPECT_EQ(names, "copy never work ");
}

TEST(FailpointTest, NothingHappensUnlessArmed) {
  EXPECT_EQ(Work(), kNone);
  ASSERT_TRUE(Arm("").ok());
  EXPECT_EQ(Copy(), kNone);
}

TEST(FailpointTest, HitsAreThoseAskedFor) {
  const struct {
    const char* armed;
    const char* hits;  // '.': none
  } cases[] = {
      {"fail", "f......"},       {"drop", "d......"},     {"fail@3", "..f...."},
      {"fail*3", "fff...."},     {"fail@2*2", ".ff...."}, {"off", "......."},
      {"stall(1)*2", "......."},
  };
  for (const auto& c : cases) {
    ASSERT_TRUE(Arm(std::string("work=") + c.armed).ok()) << c.armed;
    std::string hits;
    for (int i = 0; i < 7; ++i) hits += ".fd"[Work()];
    EXPECT_EQ(hits, c.hits) << c.armed;
  }
}

TEST(FailpointTest, AHandlerJudgesInPlaceOfWhatIsArmed) {
  struct Judge final : Handler {
    Hit OnPass(const Site& site) override {
      passed += site.name;
      return kDrop;
    }
    std::string passed;
  } judge;
  ASSERT_TRUE(Arm("work=fail").ok());
  SetHandler(&judge);
  EXPECT_EQ(Work(), kDrop);
  EXPECT_EQ(Copy(), kDrop);
  SetHandler(nullptr);
  EXPECT_EQ(Work(), kFail);
  EXPECT_EQ(judge.passed, "workcopy");
}

TEST(FailpointTest, EachActionIsTold) {
  ASSERT_TRUE(Arm("copy=duplicate;work=drop").ok());
  EXPECT_EQ(Copy(), kDuplicate);
  EXPECT_EQ(Work(), kDrop);
  ASSERT_TRUE(Arm("copy=corrupt").ok());
  EXPECT_EQ(Copy(), kCorrupt);
  ASSERT_TRUE(Arm("copy=truncate").ok());
  EXPECT_EQ(Copy(), kTruncate);
}

TEST(FailpointTest, PassagesAndHitsAreCounted) {
  const auto now = [] {
    for (const State& state : States()) {
      if (state.name == "work") return state;
    }
    return State();
  };
  const State before = now();
  ASSERT_TRUE(Arm("work=fail*2").ok());
  for (int i = 0; i < 5; ++i) Work();
  EXPECT_THAT(now(), AllOf(Field(&State::passed, before.passed + 5),
                           Field(&State::hits, before.hits + 2),
                           Field(&State::actions, "crash fail drop stall")));
}

TEST(FailpointTest, AStallTakesItsTime) {
  ASSERT_TRUE(Arm("work=stall(20)").ok());
  const auto begun = std::chrono::steady_clock::now();
  EXPECT_EQ(Work(), kNone);
  EXPECT_GE(std::chrono::steady_clock::now() - begun,
            std::chrono::milliseconds(20));
}

TEST(FailpointTest, ACrashIsAKillAfterItsLine) {
  EXPECT_EXIT(
      {
        (void)Arm("work=crash");
        Work();
      },
      testing::KilledBySignal(SIGKILL), "^failpoint work crash\n$");
}

TEST(FailpointTest, WrongWordsArmNothing) {
  for (const char* wrong :
       {"work", "wok=fail", "work=", "work=explode", "copy=fail", "work=fail*",
        "work=fail*0", "work=fail@0", "work=fail@x", "work=fail(3)",
        "work=stall(0)", "work=stall(x)", "work=stall(3", "=fail",
        "work=fail;copy=fail"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(Arm(wrong))) << wrong;
    EXPECT_EQ(Work(), kNone) << wrong;
  }
}

TEST(FailpointTest, CorruptChangesOneBit) {
  char bytes[5] = {1, 2, 3, 4, 5};
  Corrupt(bytes, sizeof bytes);
  EXPECT_EQ(std::string(bytes, 5), "\1\2\2\4\5");
  Corrupt(bytes, 0);
  EXPECT_EQ(std::string(bytes, 5), "\1\2\2\4\5");
}

}  // namespace
}  // namespace tandem::failpoint
