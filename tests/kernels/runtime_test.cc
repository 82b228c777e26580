// SPDX-License-Identifier: Apache-2.0
// Queues, the thread team, options, and the late backend's hiding of memory.

#include <immintrin.h>
#include <sched.h>

#include <atomic>
#include <ctime>
#include <numeric>
#include <thread>

#include "common/available_cpus.h"
#include "kernels/cpu/cpu_queue.h"
#include "kernels/cpu/float_env.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/testing/late_backend.h"
#include "tests/kernels/fixture.h"

namespace tandem::kernels {
namespace {

using std::chrono::microseconds;

TEST(OptionsTest, AreCheckedAndNamed) {
  const auto code = [](auto change) {
    CpuOptions options;
    change(options);
    return NewCpuBackend(options).status().code();
  };
  const auto invalid = absl::StatusCode::kInvalidArgument;
  EXPECT_EQ(code([](CpuOptions& o) { o.threads = -1; }), invalid);
  EXPECT_EQ(code([](CpuOptions& o) { o.threads = 257; }), invalid);
  EXPECT_EQ(code([](CpuOptions& o) { o.spin_microseconds = -1; }), invalid);
  EXPECT_EQ(code([](CpuOptions& o) { o.instruction_set = "sse2"; }), invalid);
  EXPECT_EQ(MakeBackend("avx2", 3)->description(), "cpu (avx2, 3 threads)");
  EXPECT_EQ(MakeBackend("avx2", 1)->description(), "cpu (avx2, 1 thread)");
  EXPECT_EQ(MakeBackend()->numerics(), "cpu-3");
}

TEST(ThreadPoolTest, EveryTaskRunsOnceOnEveryRound) {
  for (const int threads : {1, 2, 3, 8}) {
    for (const int spin : {0, 20}) {
      cpu::ThreadPool pool(threads, microseconds(spin));
      for (int round = 0; round < 300; ++round) {
        std::vector<int> runs(37, 0);
        std::vector<int> members(static_cast<size_t>(threads), 0);
        cpu::ThreadPool::Team team(&pool);
        team.ForEach(37, [&](int task, int member) {
          ++runs[static_cast<size_t>(task)];
          ASSERT_LT(member, threads);
        });
        team.Run([&](int member) { ++members[static_cast<size_t>(member)]; });
        for (const int count : runs) ASSERT_EQ(count, 1);
        for (const int count : members) ASSERT_EQ(count, 1);
      }
    }
  }
}

// CPU time of `rounds` forks of a team whose threads all share one CPU.
double SecondsOnOneCpu(cpu::ThreadPool& pool, int rounds) {
  cpu_set_t before;
  sched_getaffinity(0, sizeof(before), &before);
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(static_cast<size_t>(sched_getcpu()), &one);
  cpu::ThreadPool::Team team(&pool);
  team.Run([&](int) { sched_setaffinity(0, sizeof(one), &one); });
  const std::clock_t begin = std::clock();
  for (int i = 0; i < rounds; ++i) team.Run([](int) {});
  const std::clock_t end = std::clock();
  sched_setaffinity(0, sizeof(before), &before);
  return static_cast<double>(end - begin) / CLOCKS_PER_SEC;
}

TEST(ThreadPoolTest, ThreadsThatShareACpuDoNotWaitAwake) {
  if (AvailableCpus() < 2) GTEST_SKIP() << "a team of two never spins here";
  constexpr int kRounds = 300;
  cpu::ThreadPool sleeps(2, microseconds(0));
  cpu::ThreadPool spins(2, microseconds(2000));
  const double least = SecondsOnOneCpu(sleeps, kRounds);
  // Whoever spins has the CPU for 2 ms a round.
  EXPECT_LT(SecondsOnOneCpu(spins, kRounds), 5 * least + 0.1);
}

TEST(ThreadPoolTest, CallersUnderContentionTakeTurns) {
  cpu::ThreadPool pool(3, microseconds(5));
  int64_t inside = 0;  // guarded by the team: a data race if it is not one
  int64_t total = 0;
  std::vector<std::thread> callers;
  for (int c = 0; c < 4; ++c) {
    callers.emplace_back([&] {
      for (int i = 0; i < 500; ++i) {
        cpu::ThreadPool::Team team(&pool);
        ASSERT_EQ(inside++, 0);
        std::vector<int> shares(16, 0);
        team.ForEach(16, [&](int task, int) {
          shares[static_cast<size_t>(task)] = task;
        });
        total += std::accumulate(shares.begin(), shares.end(), 0);
        --inside;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(total, int64_t{4} * 500 * 120);
}

TEST(ThreadPoolTest, MembersFlushDenormals) {
  cpu::ThreadPool pool(4, microseconds(0));
  std::vector<unsigned> modes(4, 0);
  cpu::ThreadPool::Team team(&pool);
  team.Run([&](int member) {
    if (member > 0) modes[static_cast<size_t>(member)] = _mm_getcsr();
  });
  for (size_t i = 1; i < modes.size(); ++i) {
    EXPECT_EQ(modes[i] & 0x8040u, 0x8040u) << i;
  }
}

TEST(QueueTest, DenormalsCountAsZeroInResultsAndOperands) {
  Device device(MakeBackend());
  const float denormal = 1e-40f;
  Matrix& w = device.Pack({denormal, 1.0f}, 2, 1, DType::kF32);
  float* const out = device.New<float>(2);
  device->MatMul(device.queue(), 1, device.Upload(std::vector<float>{1e30f}), w,
                 nullptr, out);
  EXPECT_EQ(device.Download(out, 2)[0], 0.0f);
  device->MatMul(device.queue(), 1, device.Upload(std::vector<float>{denormal}),
                 w, nullptr, out);
  EXPECT_EQ(device.Download(out, 2)[1], 0.0f);
}

TEST(QueueTest, RunsInOrderPastTheEndOfTheRing) {
  std::vector<size_t> ran;
  cpu::CpuQueue queue("order", microseconds(10));
  const size_t count = 5 * cpu::CpuQueue::kSlots + 3;
  for (size_t i = 0; i < count; ++i) {
    queue.Callback([&ran, i] { ran.push_back(i); });
  }
  queue.Synchronize();
  ASSERT_EQ(ran.size(), count);
  for (size_t i = 0; i < count; ++i) ASSERT_EQ(ran[i], i);
}

TEST(QueueTest, DestructionRunsWhatWasPut) {
  std::atomic<int> ran{0};
  {
    cpu::CpuQueue queue("end", microseconds(0));
    for (int i = 0; i < 100; ++i) queue.Callback([&ran] { ++ran; });
  }
  EXPECT_EQ(ran.load(), 100);
}

TEST(QueueTest, WaitForOrdersTwoQueuesBothWays) {
  // Each step of one queue may start only after the other's: the trace
  // alternates although nobody synchronises from outside.
  std::vector<int> trace;
  cpu::CpuQueue a("a", microseconds(10));
  cpu::CpuQueue b("b", microseconds(0));
  for (int i = 0; i < 400; ++i) {
    a.Callback([&trace, i] { trace.push_back(2 * i); });
    b.WaitFor(a);
    b.Callback([&trace, i] { trace.push_back(2 * i + 1); });
    a.WaitFor(b);
  }
  a.Synchronize();
  b.Synchronize();
  for (size_t i = 0; i < trace.size(); ++i) {
    ASSERT_EQ(trace[i], static_cast<int>(i));
  }
  EXPECT_EQ(trace.size(), 800u);
}

TEST(QueueTest, WakesAllThatSleepForDifferentClosures) {
  // Whoever sleeps for a later closure must not be forgotten when the sleeper
  // for an earlier one is woken, whenever it began to sleep.
  cpu::CpuQueue source("source", microseconds(0));
  cpu::CpuQueue early("early", microseconds(0));
  cpu::CpuQueue late("late", microseconds(0));
  std::atomic<int> first{0};
  std::atomic<int> second{0};
  for (int i = 1; i <= 2000; ++i) {
    source.Callback([&first] { ++first; });
    early.WaitFor(source);
    early.Callback([&first, i] { EXPECT_GE(first.load(), i); });
    source.Callback([i] {
      for (int turn = 0; turn < i % 64 * 8; ++turn) _mm_pause();
    });
    source.Callback([&second] { ++second; });
    late.WaitFor(source);
    late.Callback([&second, i] { EXPECT_GE(second.load(), i); });
    if (i % 3 == 0) source.Synchronize();
    if (i % 5 == 0) late.Synchronize();
    if (i % 7 == 0) early.Synchronize();
  }
  early.Synchronize();
  late.Synchronize();
  EXPECT_EQ(first.load(), 2000);
  EXPECT_EQ(second.load(), 2000);
}

TEST(QueueTest, TwoQueuesOfOneBackendShareTheTeam) {
  Device device(MakeBackend("auto", 2));
  auto other = device->NewQueue("other");
  const auto w = RandomFloats(300 * 300, 61);
  Matrix& packed = device.Pack(w, 300, 300, DType::kF32);
  const float* const x = device.Upload(RandomFloats(300 * 100, 62));
  float* const first = device.New<float>(300 * 100);
  float* const second = device.New<float>(300 * 100);
  for (int i = 0; i < 20; ++i) {
    device->MatMul(device.queue(), 100, x, packed, nullptr, first);
    device->MatMul(*other, 100, x, packed, nullptr, second);
  }
  other->Synchronize();
  EXPECT_TRUE(SameBits(device.Download(first, 300 * 100),
                       device.Download(second, 300 * 100)));
}

class LateBackendDeathTest : public ::testing::Test {
 protected:
  void SetUp() override { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
  static std::unique_ptr<Backend> New() {
    testing::LateOptions options;
    options.cpu.threads = 1;
    return *testing::NewLateBackend(options);
  }
};

TEST_F(LateBackendDeathTest, AHostThatReadsABufferDies) {
  auto backend = New();
  auto buffer = *backend->Allocate(100);
  auto queue = backend->NewQueue("q");
  const std::vector<char> bytes(100, 'x');
  backend->CopyToDevice(*queue, buffer->data(), bytes.data(), bytes.size());
  queue->Synchronize();
  std::vector<char> back(100);
  backend->CopyToHost(*queue, back.data(), buffer->data(), back.size());
  queue->Synchronize();
  EXPECT_EQ(back, bytes) << "the device itself can read it";
  EXPECT_DEATH(
      {
        volatile char peek = static_cast<char>(buffer->data()[0]);
        std::fprintf(stderr, "read %d\n", peek);
      },
      "");
}

TEST_F(LateBackendDeathTest, AHostThatWritesABufferDies) {
  auto backend = New();
  auto buffer = *backend->Allocate(100);
  EXPECT_DEATH(buffer->data()[0] = std::byte{1}, "");
}

TEST(LateBackendTest, OperationsFinishLateAndInOrder) {
  testing::LateOptions options;
  options.cpu.threads = 1;
  auto backend = *testing::NewLateBackend(options);
  auto buffer = *backend->Allocate(4);
  auto queue = backend->NewQueue("q");
  // A callback that waits for the host proves that the copies behind it have
  // not run when their calls returned.
  std::atomic<bool> go{false};
  queue->Callback([&go] {
    while (!go.load()) std::this_thread::yield();
  });
  int value = 7, back = 0;
  backend->CopyToDevice(*queue, buffer->data(), &value, 4);
  backend->CopyToHost(*queue, &back, buffer->data(), 4);
  value = 8;
  EXPECT_EQ(back, 0);
  go.store(true);
  queue->Synchronize();
  EXPECT_EQ(back, 8);
}

TEST(LateBackendTest, FreedMemoryComesBackZeroed) {
  testing::LateOptions options;
  options.cpu.threads = 1;
  options.arena_bytes = size_t{1} << 20;
  auto backend = *testing::NewLateBackend(options);
  auto queue = backend->NewQueue("q");
  for (int i = 0; i < 10; ++i) {
    auto big = backend->Allocate(900 * 1024);
    ASSERT_TRUE(big.ok()) << "round " << i;
    EXPECT_EQ(backend->Allocate(900 * 1024).status().code(),
              absl::StatusCode::kResourceExhausted);
    int back = 1, value = 5;
    backend->CopyToHost(*queue, &back, (*big)->data(), 4);
    backend->CopyToDevice(*queue, (*big)->data(), &value, 4);
    queue->Synchronize();
    EXPECT_EQ(back, 0);
  }
}

}  // namespace
}  // namespace tandem::kernels
