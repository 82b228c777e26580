// SPDX-License-Identifier: Apache-2.0
// Each signal test runs in a forked child: a process has one SignalWatcher and
// ends by its signals.
#include "common/lifecycle.h"

#include <netinet/in.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/memory_limit.h"
#include "common/self_connect.h"
#include "common/thread_loop.h"
#include "gtest/gtest.h"

namespace tandem {
namespace {

// The exit status of a child that runs `body`; -signal if one ended it.
int InChild(const std::function<int()>& body) {
  const pid_t pid = fork();
  if (pid == 0) _exit(body());
  int status = 0;
  waitpid(pid, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

int DrainAfter(int number) {
  SignalWatcher signals;
  ThreadLoop loop("test");
  std::atomic<bool> drained = false;
  signals.OnDrain(&loop, [&] { drained = true; });
  kill(getpid(), number);
  for (int i = 0; i < 2000 && !drained; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return drained ? signals.ExitCode(kExitOk) : 99;
}

TEST(SignalWatcherTest, TheFirstSignalDrainsAndNamesTheExitCode) {
  EXPECT_EQ(InChild([] { return DrainAfter(SIGTERM); }), 143);
  EXPECT_EQ(InChild([] { return DrainAfter(SIGINT); }), 130);
}

TEST(SignalWatcherTest, FailuresAndQuietEndsKeepTheirCodes) {
  EXPECT_EQ(InChild([] {
              SignalWatcher signals;
              return signals.ExitCode(kExitOk);
            }),
            0);
  EXPECT_EQ(InChild([] {
              SignalWatcher signals;
              ThreadLoop loop("test");
              signals.OnDrain(&loop, [] {});
              kill(getpid(), SIGTERM);
              while (signals.signal() == 0) usleep(1000);
              return signals.ExitCode(kExitFailed);
            }),
            1);
}

TEST(LifecycleTest, AServerMayHaveAsManyDescriptorsAsTheSystemAllows) {
  EXPECT_EQ(InChild([] {
              rlimit files{};
              getrlimit(RLIMIT_NOFILE, &files);
              files.rlim_cur = 64;
              setrlimit(RLIMIT_NOFILE, &files);
              RaiseDescriptorLimit();
              getrlimit(RLIMIT_NOFILE, &files);
              return files.rlim_cur == files.rlim_max ? 0 : 1;
            }),
            0);
}

TEST(SignalWatcherTest, WritesThatFailEndNothing) {
  EXPECT_EQ(InChild([] {
              SignalWatcher signals;
              kill(getpid(), SIGPIPE);
              kill(getpid(), SIGXFSZ);
              return signals.ExitCode(kExitOk);
            }),
            0);
}

// Takes connections, up to its backlog, but nobody answers them.
struct Listener {
  Listener() {
    sockaddr_in any{};
    any.sin_family = AF_INET;
    any.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof any;
    bind(fd, reinterpret_cast<sockaddr*>(&any), size);
    listen(fd, 16);
    getsockname(fd, reinterpret_cast<sockaddr*>(&any), &size);
    address = "0.0.0.0:" + std::to_string(ntohs(any.sin_port));
  }
  ~Listener() { close(fd); }

  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  std::string address;
};

TEST(SelfConnectTest, OnlyWhoTakesAConnectionAnswers) {
  std::string gone;
  {
    Listener deaf;
    gone = deaf.address;
    EXPECT_FALSE(Answers(deaf.address, absl::Milliseconds(50)));
  }
  EXPECT_FALSE(Answers(gone, absl::Seconds(5)));
  Listener listener;
  std::thread hangs_up([&] { close(accept(listener.fd, nullptr, nullptr)); });
  EXPECT_TRUE(Answers(listener.address, absl::Seconds(60)));
  hangs_up.join();
  // Whoever lacks a descriptor to ask with cannot tell.
  EXPECT_EQ(InChild([] {
              const rlimit none{.rlim_cur = 0, .rlim_max = 0};
              setrlimit(RLIMIT_NOFILE, &none);
              return Answers("127.0.0.1:1", absl::Seconds(1)) ? 0 : 1;
            }),
            0);
}

TEST(SelfConnectTest, WhoAnsweredAndDoesNotAnyMoreIsToldOnce) {
  Listener listener, never;
  std::thread soon_deaf([&] {
    for (int i = 0; i < 5; ++i) close(accept(listener.fd, nullptr, nullptr));
  });
  std::atomic<int> told = 0;
  const SelfConnectOptions options{.interval = absl::Milliseconds(1),
                                   .timeout = absl::Milliseconds(50),
                                   .failures = 3};
  SelfConnect watch({never.address, listener.address}, options,
                    [&](const std::string& address) {
                      EXPECT_EQ(address, listener.address);
                      ++told;
                    });
  for (int i = 0; i < 6000 && told == 0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  shutdown(listener.fd, SHUT_RDWR);  // in case it still waits for one
  soon_deaf.join();
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_EQ(told, 1);
}

class MemoryLimitTest : public testing::Test {
 protected:
  MemoryLimitTest() { std::filesystem::remove_all(root_); }
  ~MemoryLimitTest() override { std::filesystem::remove_all(root_); }
  void Write(const std::string& name, const std::string& text) const {
    std::filesystem::create_directories((root_ / name).parent_path());
    std::ofstream(root_ / name) << text;
  }

  const std::filesystem::path root_ =
      std::filesystem::path(testing::TempDir()) /
      absl::StrCat("memory-", getpid());
};

TEST_F(MemoryLimitTest, CachedPagesOfFilesAreNotUsed) {
  Write("proc/meminfo",
        "MemTotal: 9000 kB\nMemFree: 1 kB\nMemAvailable: 8000 kB\n");
  EXPECT_EQ(AvailableMemory(root_), 8000 << 10);  // no group
  Write("proc/self/cgroup", "0::/\n");
  const std::string group = "sys/fs/cgroup/memory.";
  Write(group + "max", "max\n");
  Write(group + "current", "5000000\n");
  EXPECT_EQ(AvailableMemory(root_), 8000 << 10);
  Write(group + "max", "6000000\n");
  EXPECT_EQ(AvailableMemory(root_), 1000000);
  Write(group + "stat",
        "anon 1900000\nfile 3000000\nshmem 100000\ninactive_file 2000000\n"
        "active_file 900000\n");
  EXPECT_EQ(AvailableMemory(root_), 3900000);
  Write(group + "max", "100000000\n");
  EXPECT_EQ(AvailableMemory(root_), 8000 << 10);
  EXPECT_GT(AvailableMemory(), 1 << 20);
}

TEST_F(MemoryLimitTest, OthersInAGroupFurtherUpTakeTheirPart) {
  Write("proc/meminfo", "MemAvailable: 8000 kB\n");
  Write("proc/self/cgroup", "0::/pod/worker\n");
  Write("sys/fs/cgroup/pod/worker/memory.max", "6000000\n");
  Write("sys/fs/cgroup/pod/worker/memory.current", "1000000\n");
  EXPECT_EQ(AvailableMemory(root_), 5000000);
  Write("sys/fs/cgroup/pod/memory.max", "7000000\n");
  Write("sys/fs/cgroup/pod/memory.current", "4000000\n");
  EXPECT_EQ(AvailableMemory(root_), 3000000);
  // Nothing left is not the same as nothing known.
  Write("sys/fs/cgroup/pod/memory.current", "7100000\n");
  EXPECT_EQ(AvailableMemory(root_), 1);
  // Version 1, whose files count subgroups apart.
  Write("proc/self/cgroup", "4:cpu:/x\n7:memory:/pod\n");
  const std::string group = "sys/fs/cgroup/memory/pod/memory.";
  Write(group + "limit_in_bytes", "4000000\n");
  Write(group + "usage_in_bytes", "3500000\n");
  Write(group + "stat",
        "active_file 1\ninactive_file 2\ntotal_active_file 500000\n"
        "total_inactive_file 1000000\n");
  EXPECT_EQ(AvailableMemory(root_), 2000000);
}

TEST_F(MemoryLimitTest, IsThatOfTheNarrowestGroup) {
  EXPECT_EQ(ControlGroupMemoryLimit(root_), 0);  // no /proc
  Write("proc/self/cgroup", "0::/a/b\n");
  EXPECT_EQ(ControlGroupMemoryLimit(root_), 0);  // nobody limits anything
  Write("sys/fs/cgroup/a/b/memory.max", "max\n");
  Write("sys/fs/cgroup/a/memory.max", "3000000\n");
  EXPECT_EQ(ControlGroupMemoryLimit(root_), 3000000);
  Write("sys/fs/cgroup/a/b/memory.max", "2000000\n");
  EXPECT_EQ(ControlGroupMemoryLimit(root_), 2000000);
  // In a container the group is the root, and its files are there.
  Write("proc/self/cgroup", "0::/\n");
  Write("sys/fs/cgroup/memory.max", "5000000\n");
  EXPECT_EQ(ControlGroupMemoryLimit(root_), 5000000);
  Write("proc/self/cgroup", "4:cpu:/x\n7:memory:/pod\n");
  Write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_EQ(ControlGroupMemoryLimit(root_), 0);
  Write("sys/fs/cgroup/memory/pod/memory.limit_in_bytes", "4000000\n");
  EXPECT_EQ(ControlGroupMemoryLimit(root_), 4000000);
}

TEST_F(MemoryLimitTest, WhatIsTakenIsSeen) {
  const int64_t before = OwnMemory();
  std::vector<char> taken(64 << 20, 'x');
  EXPECT_GE(OwnMemory(), before + (60 << 20)) << taken[1 << 20];
}

TEST(SignalWatcherTest, TheSecondSignalEndsAtOnce) {
  EXPECT_EQ(InChild([] {
              SignalWatcher signals;
              ThreadLoop loop("test");
              signals.OnDrain(&loop, [] {});
              kill(getpid(), SIGTERM);
              while (signals.signal() == 0) usleep(1000);
              kill(getpid(), SIGINT);
              sleep(20);
              return 99;
            }),
            130);
}

TEST(SignalWatcherTest, ASignalBeforeOnDrainEndsAtOnce) {
  EXPECT_EQ(InChild([] {
              SignalWatcher signals;
              kill(getpid(), SIGTERM);
              sleep(20);
              return 99;
            }),
            143);
}

TEST(SignalWatcherTest, ChildrenGetTheirSignalsBack) {
  EXPECT_EQ(InChild([] {
              SignalWatcher signals;
              const pid_t pid = fork();
              if (pid == 0) {
                ResetSignalsInChild();
                execlp("sleep", "sleep", "20", nullptr);
                _exit(98);
              }
              usleep(100'000);
              kill(pid, SIGTERM);
              int status = 0;
              waitpid(pid, &status, 0);
              return WIFSIGNALED(status) ? WTERMSIG(status) : 99;
            }),
            SIGTERM);
}

TEST(LifecycleTest, AChildDiesWithItsParent) {
  int pipe_fds[2];
  ASSERT_EQ(pipe(pipe_fds), 0);
  const pid_t parent = fork();
  if (parent == 0) {
    const pid_t self = getpid();
    if (fork() == 0) {
      DieWithParent(self);
      sleep(20);  // holds the pipe's write end until it dies
      _exit(0);
    }
    usleep(100'000);
    _exit(0);
  }
  close(pipe_fds[1]);
  waitpid(parent, nullptr, 0);
  const auto start = std::chrono::steady_clock::now();
  char byte;
  EXPECT_EQ(read(pipe_fds[0], &byte, 1), 0);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(15));
  close(pipe_fds[0]);
}

TEST(LifecycleTest, FailureIsOneLineWithTheRootCause) {
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(ReportFailure("tandem-decode",
                          absl::NotFoundError("config.json:\nno such file")),
            1);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(),
            "tandem-decode: error: config.json:\\nno such file\n");
}

TEST(WatchdogTest, SickOnlyWithoutBeatsOrWithWorkAndNoProgress) {
  const absl::Time start = absl::UnixEpoch();
  const auto at = [&](int seconds) { return start + absl::Seconds(seconds); };
  Watchdog watchdog(absl::Seconds(10), start);
  EXPECT_TRUE(watchdog.Check(at(10)).ok());
  EXPECT_EQ(watchdog.Check(at(11)).message(),
            "the loop has not run for 11.0 s");
  watchdog.Beat(at(100));
  EXPECT_TRUE(watchdog.Check(at(100)).ok());  // idle is fine for ever
  watchdog.Beat(at(101), 7, /*has_work=*/true);
  for (int t = 102; t <= 112; ++t) {
    EXPECT_TRUE(watchdog.Check(at(t)).ok()) << t;
    watchdog.Beat(at(t), 8, /*has_work=*/true);
  }
  EXPECT_EQ(watchdog.Check(at(113)).message(),
            "work is waiting, but nothing has advanced for 11.0 s");
  watchdog.Beat(at(113), 9, /*has_work=*/true);
  EXPECT_TRUE(watchdog.Check(at(113)).ok());
  watchdog.Beat(at(114), 9, /*has_work=*/false);
  watchdog.Beat(at(119), 9, /*has_work=*/true);
  EXPECT_TRUE(watchdog.Check(at(124)).ok()) << "work came after 114";
  // A process that was stopped has its time again.
  watchdog.Beat(at(200), 9, /*has_work=*/true);
  EXPECT_TRUE(watchdog.Check(at(201)).ok());
}

}  // namespace
}  // namespace tandem
