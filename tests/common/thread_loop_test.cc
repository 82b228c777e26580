// SPDX-License-Identifier: Apache-2.0
#include "common/thread_loop.h"

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace tandem {
namespace {

// Counts its own destruction, as a task's captured state would be destroyed.
class Witness {
 public:
  explicit Witness(std::atomic<int>* destroyed) : destroyed_(destroyed) {}
  Witness(Witness&& other) noexcept
      : destroyed_(std::exchange(other.destroyed_, nullptr)) {}
  ~Witness() {
    if (destroyed_ != nullptr) ++*destroyed_;
  }

 private:
  std::atomic<int>* destroyed_;
};

TEST(ThreadLoopTest, RunsPostsOfEachThreadInOrderAndAllOnOneThread) {
  ThreadLoop loop("test");
  constexpr int kThreads = 4;
  constexpr int kPosts = 5000;
  std::vector<int> next(kThreads, 0);
  int out_of_order = 0, off_loop = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < kPosts; ++i) {
        loop.Post([&, t, i] {
          if (next[t]++ != i) ++out_of_order;
          if (!loop.on_loop()) ++off_loop;
        });
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  ASSERT_TRUE(loop.RunSync([] {}));
  EXPECT_EQ(next, std::vector<int>(kThreads, kPosts));
  EXPECT_EQ(out_of_order, 0);
  EXPECT_EQ(off_loop, 0);
  EXPECT_FALSE(loop.on_loop());
}

TEST(ThreadLoopTest, TimersFireByTimeThenByTheOrderTheyWereSet) {
  ThreadLoop loop("test");
  std::string order;
  std::atomic<bool> done = false;
  loop.RunSync([&] {
    loop.After(absl::Milliseconds(20), [&] { order += 'c'; });
    loop.After(absl::ZeroDuration(), [&] { order += 'a'; });
    loop.After(absl::ZeroDuration(), [&] { order += 'b'; });
    loop.After(absl::Milliseconds(40), [&] {
      order += 'e';
      done = true;
    });
    loop.After(absl::Milliseconds(20), [&] { order += 'd'; });
  });
  while (!done) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  loop.Stop();
  EXPECT_EQ(order, "abcde");
}

TEST(ThreadLoopTest, ATimerNeverFiresEarly) {
  ThreadLoop loop("test");
  absl::Duration waited;
  std::atomic<bool> done = false;
  loop.RunSync([&] {
    const absl::Time start = loop.Now();
    loop.After(absl::Milliseconds(15), [&, start] {
      waited = loop.Now() - start;
      done = true;
    });
  });
  while (!done) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_GE(waited, absl::Milliseconds(15));
}

TEST(ThreadLoopTest, ACancelledTimerNeitherFiresNorKeepsItsState) {
  ThreadLoop loop("test");
  std::atomic<int> destroyed = 0;
  bool fired = false;
  int destroyed_after_cancel = -1;
  loop.RunSync([&] {
    const auto id =
        loop.After(absl::ZeroDuration(),
                   [&, witness = Witness(&destroyed)] { fired = true; });
    loop.Cancel(id);
    destroyed_after_cancel = destroyed;
    loop.Cancel(id);  // no-op
    loop.Cancel(0);
  });
  loop.RunSync([] {});
  EXPECT_EQ(destroyed_after_cancel, 1);
  EXPECT_FALSE(fired);
}

TEST(ThreadLoopTest, ManySetAndCancelledTimersLeaveTheOthersIntact) {
  ThreadLoop loop("test");
  std::vector<int> fired;
  std::atomic<bool> done = false;
  loop.RunSync([&] {
    for (int i = 0; i < 10'000; ++i) {
      const auto id = loop.After(absl::Hours(1), [] {});
      if (i % 1000 == 0) {
        loop.After(absl::Milliseconds(i / 1000),
                   [&, i] { fired.push_back(i / 1000); });
      }
      loop.Cancel(id);
    }
    loop.After(absl::Milliseconds(12), [&] { done = true; });
  });
  while (!done) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  loop.Stop();
  EXPECT_EQ(fired, (std::vector<int>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}));
}

TEST(ThreadLoopTest, ATimerThatRearmsItselfDoesNotStarvePosts) {
  std::function<void()> again;  // outlives the loop, whose timer calls it
  ThreadLoop loop("test");
  again = [&] { loop.After(absl::ZeroDuration(), [&] { again(); }); };
  loop.RunSync([&] { again(); });
  for (int i = 0; i < 100; ++i) EXPECT_TRUE(loop.RunSync([] {}));
}

TEST(ThreadLoopTest, StopDestroysWhatDidNotRunAndLaterPosts) {
  std::atomic<int> destroyed = 0;
  std::atomic<int> ran = 0;
  {
    ThreadLoop loop("test");
    loop.RunSync([&] {
      loop.After(absl::Hours(1), [&, w = Witness(&destroyed)] { ++ran; });
    });
    std::atomic<bool> running = false;
    std::thread stopper([&] {
      while (!running) std::this_thread::yield();
      loop.Stop();
    });
    loop.Post([&] {
      running = true;
      // Stop waits for this task; the ones behind it must not run.
      while (loop.running()) std::this_thread::yield();
    });
    for (int i = 0; i < 10; ++i) {
      loop.Post([&, w = Witness(&destroyed)] { ++ran; });
    }
    stopper.join();
    loop.Post([&, w = Witness(&destroyed)] { ++ran; });
    EXPECT_FALSE(loop.RunSync([&] { ++ran; }));
    loop.Stop();
  }
  EXPECT_EQ(ran, 0);
  EXPECT_EQ(destroyed, 12);
}

TEST(ThreadLoopTest, ATaskThatPostsWhileItIsDestroyedDoesNoHarm) {
  struct PostsWhenDestroyed {
    ThreadLoop* loop;
    explicit PostsWhenDestroyed(ThreadLoop* l) : loop(l) {}
    PostsWhenDestroyed(PostsWhenDestroyed&& other) noexcept
        : loop(std::exchange(other.loop, nullptr)) {}
    ~PostsWhenDestroyed() {
      if (loop != nullptr) loop->Post([] {});
    }
  };
  ThreadLoop loop("test");
  loop.RunSync(
      [&] { loop.After(absl::Hours(1), [p = PostsWhenDestroyed(&loop)] {}); });
  loop.Stop();
  EXPECT_FALSE(loop.RunSync([] {}));
}

TEST(TimerTest, MayBeDestroyedByItsOwnTask) {
  ThreadLoop loop("test");
  auto timer = std::make_unique<Timer>(&loop);
  std::atomic<bool> done = false;
  loop.RunSync([&] {
    timer->Start(absl::ZeroDuration(), [&] {
      timer.reset();
      done = true;
    });
    EXPECT_TRUE(timer->running());
  });
  while (!done) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_EQ(timer, nullptr);
}

}  // namespace
}  // namespace tandem
