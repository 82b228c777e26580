// SPDX-License-Identifier: Apache-2.0
// Virtual time must itself be beyond doubt: order, cancelling, crashes.

#include "common/testing/virtual_loop.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace tandem {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr absl::Duration kSecond = absl::Seconds(1);

struct Log {
  std::vector<std::string> lines;
  Loop::Task Write(std::string line) {
    return [this, line] { lines.push_back(line); };
  }
};

TEST(VirtualLoopTest, RunsByTimeAndAmongEqualsInOrder) {
  VirtualLoop loop;
  Log log;
  const absl::Time start = loop.Now();
  loop.After(2 * kSecond, log.Write("late"));
  loop.After(kSecond, log.Write("timer"));
  loop.Post(log.Write("first"));
  loop.Post([&] {
    loop.Post(log.Write("posted by a task"));
    loop.After(kSecond, log.Write("timer of a task"));
  });
  loop.After(-kSecond, log.Write("long due"));
  EXPECT_EQ(loop.RunUntilIdle(), 7);
  EXPECT_THAT(log.lines, ElementsAre("first", "long due", "posted by a task",
                                     "timer", "timer of a task", "late"));
  EXPECT_EQ(loop.Now() - start, 2 * kSecond);
  EXPECT_FALSE(loop.RunNext());
}

TEST(VirtualLoopTest, RunForEndsAtItsTime) {
  VirtualLoop loop;
  Log log;
  const absl::Time start = loop.Now();
  loop.After(kSecond, log.Write("due"));
  loop.After(kSecond + absl::Nanoseconds(1), log.Write("not due"));
  loop.RunFor(kSecond);
  EXPECT_THAT(log.lines, ElementsAre("due"));
  EXPECT_EQ(loop.Now() - start, kSecond);
  EXPECT_EQ(loop.pending(), 1);
}

TEST(VirtualLoopTest, CancelledTasksAreDestroyedUnrun) {
  VirtualLoop loop;
  Log log;
  auto owned = std::make_unique<int>(1);
  int* const watched = owned.get();
  const Loop::TimerId timer = loop.After(
      kSecond, [&log, owned = std::move(owned)] { log.lines.push_back("x"); });
  EXPECT_EQ(*watched, 1);
  loop.Cancel(timer);
  loop.Cancel(timer);
  loop.Cancel(0);
  EXPECT_EQ(loop.pending(), 0);
  EXPECT_EQ(loop.RunUntilIdle(), 0);
  EXPECT_THAT(log.lines, IsEmpty());
}

TEST(VirtualLoopTest, ATimerMayRestartOrDestroyItself) {
  VirtualLoop loop;
  int ticks = 0;
  std::optional<Timer> timer(&loop);
  std::function<void()> tick = [&] {
    if (++ticks < 3) {
      timer->Start(kSecond, tick);
    } else {
      timer.reset();
    }
  };
  timer->Start(kSecond, tick);
  EXPECT_EQ(loop.RunUntilIdle(), 3);
  EXPECT_EQ(ticks, 3);
}

TEST(VirtualLoopTest, RunUntilIdleStopsAtItsLimit) {
  VirtualLoop loop;
  std::function<void()> again = [&] { loop.After(kSecond, again); };
  again();
  EXPECT_EQ(loop.RunUntilIdle(10), 10);
  EXPECT_EQ(loop.pending(), 1);
}

TEST(VirtualProcessTest, HasAClockOfItsOwnAndItsPlaceInTheOrder) {
  VirtualLoop world;
  VirtualProcess ahead(&world, 5 * kSecond);
  VirtualProcess behind(&world);
  Log log;
  EXPECT_EQ(ahead.Now() - world.Now(), 5 * kSecond);
  ahead.After(kSecond, log.Write("ahead"));
  behind.Post(log.Write("behind"));
  world.After(kSecond, log.Write("world"));
  world.RunUntilIdle();
  EXPECT_THAT(log.lines, ElementsAre("behind", "ahead", "world"));
  EXPECT_EQ(ahead.Now() - world.Now(), 5 * kSecond);
}

TEST(VirtualProcessTest, StoppedItsTasksAreGoneNowAndFromNowOn) {
  VirtualLoop world;
  VirtualProcess process(&world);
  Log log;
  process.Post([&] {
    log.lines.push_back("crash");
    process.Stop();
  });
  process.Post(log.Write("posted before"));
  process.After(kSecond, log.Write("timer"));
  world.RunUntilIdle();
  EXPECT_EQ(process.After(kSecond, log.Write("after")), 0);
  process.Post(log.Write("after"));
  world.RunUntilIdle();
  EXPECT_THAT(log.lines, ElementsAre("crash"));
  EXPECT_EQ(process.pending(), 0);
  EXPECT_EQ(world.pending(), 0);
}

TEST(VirtualProcessTest, FrozenItsTasksWaitInOrderAndCanBeCancelled) {
  VirtualLoop world;
  VirtualProcess process(&world);
  Log log;
  process.Freeze();
  process.After(2 * kSecond, log.Write("two"));
  process.After(kSecond, log.Write("one"));
  const Loop::TimerId cancelled = process.After(kSecond, log.Write("never"));
  const Loop::TimerId later = process.After(9 * kSecond, log.Write("nine"));
  world.RunFor(3 * kSecond);
  EXPECT_THAT(log.lines, IsEmpty());
  EXPECT_EQ(process.pending(), 4);
  process.Cancel(cancelled);
  process.Thaw();
  process.Cancel(later);
  world.RunUntilIdle();
  EXPECT_THAT(log.lines, ElementsAre("one", "two"));
  EXPECT_EQ(process.pending(), 0);
}

}  // namespace
}  // namespace tandem
