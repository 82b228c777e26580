// SPDX-License-Identifier: Apache-2.0
// Real processes that crash, or are asked, and what their recorder leaves.

#include "common/flight_recorder.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/check.h"

namespace tandem::flight {
namespace {

class FlightRecorderTest : public testing::Test {
 protected:
  FlightRecorderTest() {
    std::string pattern = absl::StrCat(testing::TempDir(), "/flight.XXXXXX");
    directory_ = made_ = mkdtemp(pattern.data());
  }
  ~FlightRecorderTest() override {
    std::error_code none;
    std::filesystem::remove_all(made_, none);
  }

  // Runs `does` in a child that records; returns how the child ended.
  int Fly(const std::function<void()>& does) {
    const pid_t child = fork();
    if (child == 0) {
      // As in a program without a sanitizer, which has handlers of its own.
      for (const int own : {SIGSEGV, SIGBUS}) signal(own, SIG_DFL);
      if (!Install("decode", directory_).ok()) _exit(1);
      Attach();
      does();
      _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    return status;
  }

  std::set<std::string> Files() {
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(directory_)) {
      names.insert(entry.path().filename());
    }
    return names;
  }

  // The lines of the only file, whose name ends so, which is removed.
  std::vector<std::string> Take(const std::string& ending) {
    const std::set<std::string> names = Files();
    EXPECT_EQ(names.size(), 1U);
    if (names.size() != 1 || !absl::EndsWith(*names.begin(), ending)) return {};
    const std::string path = absl::StrCat(directory_, "/", *names.begin());
    struct stat facts {};
    EXPECT_EQ(stat(path.c_str(), &facts), 0);
    EXPECT_EQ(facts.st_mode & 0777, 0600U);
    std::ifstream file(path);
    std::ostringstream text;
    text << file.rdbuf();
    std::filesystem::remove(path);
    std::vector<std::string> lines = absl::StrSplit(text.str(), '\n');
    EXPECT_EQ(lines.back(), "");
    lines.pop_back();
    return lines;
  }

  std::string directory_;  // of the records; empty: stderr
  std::string made_;
};

void RecordOne() {
  Record(Event::kPlaced, {.request = "\x12\x34\x56\x78\x9a\xbc\xde\xf0more",
                          .prefill = "prefill-0",
                          .decode = "decode-1",
                          .m = 48});
}

constexpr char kPlacedLine[] =
    " decode placed request=123456789abcdef0 prefill=prefill-0 "
    "decode=decode-1 cached=48";

TEST_F(FlightRecorderTest, ACrashLeavesTheLastDecisions) {
  struct Case {
    const char* name;
    int signal;
    std::function<void()> crash;
  };
  for (const Case& c : {
           Case{"check", SIGABRT, [] { TANDEM_CHECK(false, "seeded"); }},
           Case{"on another thread", SIGABRT,
                [] { std::thread([] { abort(); }).join(); }},
           Case{"on two threads", SIGABRT,
                [] {
                  std::thread other([] { abort(); });
                  raise(SIGABRT);
                  other.join();
                }},
           Case{"sent", SIGSEGV, [] { kill(getpid(), SIGSEGV); }},
           Case{"a fault", SIGSEGV,
                [] {
                  *static_cast<volatile char*>(mmap(nullptr, 1, PROT_NONE,
                                                    MAP_PRIVATE | MAP_ANONYMOUS,
                                                    -1, 0)) = 1;
                }},
           Case{"bus", SIGBUS, [] { raise(SIGBUS); }},
       }) {
    SCOPED_TRACE(c.name);
    const int status = Fly([&] {
      RecordOne();
      Record(Event::kStep, {.m = 3, .n = 17});
      c.crash();
    });
    // It ends as it would have.
    ASSERT_TRUE(WIFSIGNALED(status));
    EXPECT_EQ(WTERMSIG(status), c.signal);
    const std::vector<std::string> lines = Take("-crash.flight");
    ASSERT_EQ(lines.size(), 3U);
    EXPECT_TRUE(absl::StartsWith(lines[0], "# decode pid=")) << lines[0];
    EXPECT_TRUE(absl::EndsWith(lines[0], absl::StrCat(" signal=", c.signal)))
        << lines[0];
    EXPECT_TRUE(absl::EndsWith(lines[1], kPlacedLine)) << lines[1];
    EXPECT_TRUE(absl::EndsWith(lines[2], " decode step sequences=3 rows=17"))
        << lines[2];
  }
}

TEST_F(FlightRecorderTest, ASignalAsksAndTheProcessGoesOn) {
  EXPECT_EQ(Fly([] {
              for (int i = 0; i < 3; ++i) {
                RecordOne();
                raise(SIGUSR1);  // the newest is what stays
              }
              RecordOne();  // after the last
            }),
            0);
  EXPECT_EQ(Take("-request.flight").size(), 4U);
}

TEST_F(FlightRecorderTest, TheRingKeepsTheNewestInTheirOrder) {
  EXPECT_EQ(Fly([] {
              for (size_t i = 0; i < 3 * kRingSize + 5; ++i) {
                Record(Event::kTicket, {.m = static_cast<int64_t>(i)});
              }
              raise(SIGUSR1);
            }),
            0);
  const std::vector<std::string> lines = Take("-request.flight");
  ASSERT_EQ(lines.size(), kRingSize);  // the head, and all but one
  for (size_t i = 1; i < lines.size(); ++i) {
    ASSERT_TRUE(absl::EndsWith(
        lines[i], absl::StrCat(" ticket attempt=", 2 * kRingSize + 5 + i)))
        << lines[i];
  }
}

TEST_F(FlightRecorderTest, WhatIsTooLongOrStrangeStaysWithinItsLine) {
  EXPECT_EQ(Fly([] {
              Record(Event::kWorkerLost, {.prefill = std::string(60, 'p'),
                                          .decode = "a\nb\x1b\xff"
                                                    "c",
                                          .word = std::string(60, 'w')});
              Record(Event::kDead,
                     {.request = "\x01", .m = 0xffffffff, .n = 1 << 30});
              raise(SIGUSR1);
            }),
            0);
  const std::vector<std::string> lines = Take("-request.flight");
  ASSERT_EQ(lines.size(), 3U);
  EXPECT_TRUE(absl::EndsWith(
      lines[1],
      absl::StrCat(" worker_lost prefill=", std::string(kNameBytes, 'p'),
                   " decode=a?b??c", " cause=", std::string(kWordBytes, 'w'))))
      << lines[1];
  EXPECT_TRUE(absl::EndsWith(
      lines[2],
      " dead request=0100000000000000 attempt=4294967295 code=1073741824"))
      << lines[2];
}

TEST_F(FlightRecorderTest, OneThreadRecords) {
  EXPECT_EQ(Fly([] {
              std::thread(RecordOne).join();
              std::thread([] {
                Attach();
                RecordOne();
              }).join();
              raise(SIGUSR1);
            }),
            0);
  EXPECT_EQ(Take("-request.flight").size(), 1U);
}

// A dump to stderr stands still halfway, on a pipe that is full, while the
// writer goes once around: what it has not read yet is not there any more.
TEST_F(FlightRecorderTest, ADumpBesideTheWriterLeavesOutWhatIsOverwritten) {
  constexpr int kDumped = 64;
  directory_.clear();
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  ASSERT_EQ(fcntl(ends[1], F_SETPIPE_SZ, 4096), 4096);
  const auto record = [](int number) {
    Record(Event::kOffer, {.prefill = std::string(kNameBytes, 'p'),
                           .decode = std::string(kNameBytes, 'd'),
                           .n = number});
  };
  EXPECT_EQ(Fly([&] {
              dup2(ends[1], STDERR_FILENO);
              for (int i = 0; i <= kDumped; ++i) record(i);
              std::thread other([] {
                raise(SIGUSR1);
                (void)!write(STDERR_FILENO, "", 1);
              });
              for (int held = 0; held < 4096;) ioctl(ends[0], FIONREAD, &held);
              for (int i = 1; i < int{kRingSize}; ++i) record(kDumped + i);
              std::string text;
              while (text.empty() || text.back() != '\0') {
                char some[4096];
                const ssize_t got = read(ends[0], some, sizeof some);
                if (got > 0) text.append(some, static_cast<size_t>(got));
              }
              other.join();
              const std::vector<std::string> lines = absl::StrSplit(text, '\n');
              int next = 1;
              for (const std::string& line : lines) {
                if (absl::EndsWith(line, absl::StrCat("positions=", next))) {
                  ++next;
                }
              }
              const int strangers = static_cast<int>(lines.size()) - 1 - next;
              _exit(strangers != 0 ? 2 : next < 20 || next > 60 ? 3 : 0);
            }),
            0);
  close(ends[0]);
  close(ends[1]);
}

TEST_F(FlightRecorderTest, OldFilesGoAndOthersStay) {
  std::set<std::string> expected = {"note", "tandem-prefill-1.flight"};
  for (const std::string& name : expected) {
    std::ofstream(directory_ + "/" + name) << "x";
  }
  for (int day = 10; day < 31; ++day) {
    const std::string name =
        absl::StrCat("tandem-decode-202501", day, "T000000Z-1-crash.flight");
    std::ofstream(directory_ + "/" + name) << "x";
    if (day >= 31 - kFilesKept) expected.insert(name);
  }
  EXPECT_EQ(Fly([] {}), 0);
  EXPECT_EQ(Files(), expected);
}

TEST_F(FlightRecorderTest, ADirectoryThatCannotBeWrittenIsRefused) {
  const absl::Status status = Install("decode", directory_ + "/none");
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(absl::StrContains(
      absl::string_view(status.message().data(), status.message().size()),
      directory_ + "/none: No such file"))
      << status;
}

}  // namespace
}  // namespace tandem::flight
