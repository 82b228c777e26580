// SPDX-License-Identifier: Apache-2.0
// A file is a head, "# ROLE pid=1 monotonic=2.000000000 wall=3.000000000
// signal=6", and a line for each record, oldest first:
// "2.000000000 ROLE placed request=... prefill=... decode=... cached=48".
// A line's time is CLOCK_MONOTONIC, the same for all processes of a machine.
#include "common/flight_recorder.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>  // NOLINT(modernize-deprecated-headers): rename, of POSIX
#include <time.h>   // NOLINT(modernize-deprecated-headers): clock_gettime
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <system_error>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace tandem::flight {
namespace {

constexpr uint64_t kOnStderr = 64;

// What `m`, `n` and `word` are called; null: not written.
struct Words {
  Event event;
  const char* name;
  const char* m = nullptr;
  const char* n = nullptr;
  const char* word = nullptr;
};
constexpr Words kWords[] = {
    {Event::kAdmitted, "admitted", "tokens"},
    {Event::kPlaced, "placed", "cached"},
    {Event::kOpened, "opened", "attempt"},
    {Event::kFirstToken, "first_token", "attempt"},
    {Event::kStarted, "started", "attempt"},
    {Event::kAttemptLost, "attempt_lost", "code", nullptr, "stage"},
    {Event::kPreempted, "preempted", "attempt"},
    {Event::kEnded, "ended", "code", "tokens"},
    {Event::kRefused, "refused", "code"},
    {Event::kSuspect, "suspect"},
    {Event::kRegistered, "registered"},
    {Event::kRejected, "rejected"},
    {Event::kWorkerLost, "worker_lost", nullptr, nullptr, "cause"},
    {Event::kWorkerAvoided, "worker_avoided", "ms"},
    {Event::kPairAvoided, "pair_avoided", "ms"},
    {Event::kCall, "call", "tokens"},
    {Event::kTicket, "ticket", "attempt"},
    {Event::kOffer, "offer", "attempt", "positions"},
    {Event::kGranted, "granted", "attempt", "positions"},
    {Event::kRevoked, "revoked", "attempt"},
    {Event::kComputed, "computed", "attempt"},
    {Event::kCommitted, "committed", "attempt"},
    {Event::kDead, "dead", "attempt", "code"},
    {Event::kCallEnded, "call_ended", "code"},
    {Event::kStep, "step", "sequences", "rows"},
    {Event::kStepDone, "step_done", "us"},
};
static_assert([] {
  for (size_t i = 0; i < std::size(kWords); ++i) {
    if (kWords[i].event != static_cast<Event>(i)) return false;
  }
  return kWords[std::size(kWords) - 1].event == Event::kStepDone;
}());

// Where things are in a record, in words of 8 bytes.
enum Place : size_t { kTime, kEvent, kRequest, kCounts, kWord };
constexpr size_t kPrefill = kWord + kWordBytes / 8;
constexpr size_t kDecode = kPrefill + kNameBytes / 8;
constexpr size_t kWordsOfEntry = kDecode + kNameBytes / 8;
static_assert(kWordsOfEntry == 16);

// Atomic, so that a dump beside the writer is no race: release and acquire, so
// that who reads a word of a newer record also sees that `next` went past.
std::array<std::array<std::atomic<uint64_t>, kWordsOfEntry>, kRingSize> ring;
std::atomic<uint64_t> next = 0;
std::atomic<bool> taken = false;  // by a thread

char role_name[16] = {};
// As signal handlers need them; the first is empty where there are none.
struct Paths {
  char file[512];
  char temporary[512];
} crash_paths, request_paths;

constexpr int kCrashes[] = {SIGABRT, SIGSEGV, SIGBUS, SIGILL, SIGFPE};
struct sigaction before[std::size(kCrashes)];

uint64_t Clock(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 +
         static_cast<uint64_t>(now.tv_nsec);
}

// Text to a descriptor, by nothing that a signal handler must not call.
class Writer {
 public:
  explicit Writer(int fd) : fd_(fd) {}
  // At most `most` bytes, and what is no visible character as '?'.
  Writer& Text(const char* text, size_t most = 64) {
    for (; *text != '\0' && most > 0; ++text, --most) {
      Put(*text >= ' ' && *text <= '~' ? *text : '?');
    }
    return *this;
  }
  Writer& Number(uint64_t value) { return Digits(value, 1); }
  Writer& Seconds(uint64_t ns) {
    Digits(ns / 1'000'000'000, 1);
    Put('.');
    return Digits(ns % 1'000'000'000, 9);
  }
  Writer& Hex(uint64_t value) {
    for (int shift = 60; shift >= 0; shift -= 4) {
      Put("0123456789abcdef"[value >> shift & 15]);
    }
    return *this;
  }
  void EndLine() { Put('\n'); }
  // False: something could not be written.
  bool Flush() {
    for (size_t done = 0; done < size_;) {
      const ssize_t wrote = write(fd_, text_ + done, size_ - done);
      if (wrote < 0 && errno != EINTR) good_ = false;
      if (!good_) break;
      if (wrote > 0) done += static_cast<size_t>(wrote);
    }
    size_ = 0;
    return good_;
  }

 private:
  void Put(char c) {
    if (size_ == sizeof text_) Flush();
    text_[size_++] = c;
  }
  Writer& Digits(uint64_t value, int least) {
    char reversed[20];
    int count = 0;
    do {
      reversed[count++] = static_cast<char>('0' + value % 10);
      value /= 10;
    } while (value > 0 || count < least);
    while (count > 0) Put(reversed[--count]);
    return *this;
  }

  const int fd_;
  bool good_ = true;
  size_t size_ = 0;
  char text_[4096];
};

void WriteNamed(const char* name, const uint64_t* words, size_t bytes,
                Writer* to) {
  if (words[0] == 0) return;
  char text[kNameBytes + 1] = {};
  std::memcpy(text, words, bytes);
  to->Text(" ").Text(name).Text("=").Text(text, bytes);
}

// gRPC's, in their order.
constexpr const char* kCodes[] = {"OK",
                                  "CANCELLED",
                                  "UNKNOWN",
                                  "INVALID_ARGUMENT",
                                  "DEADLINE_EXCEEDED",
                                  "NOT_FOUND",
                                  "ALREADY_EXISTS",
                                  "PERMISSION_DENIED",
                                  "RESOURCE_EXHAUSTED",
                                  "FAILED_PRECONDITION",
                                  "ABORTED",
                                  "OUT_OF_RANGE",
                                  "UNIMPLEMENTED",
                                  "INTERNAL",
                                  "UNAVAILABLE",
                                  "DATA_LOSS",
                                  "UNAUTHENTICATED"};

void WriteCount(const char* name, uint64_t count, Writer* to) {
  if (name == nullptr) return;
  to->Text(" ").Text(name).Text("=");
  if (std::strcmp(name, "code") == 0 && count < std::size(kCodes)) {
    to->Text(kCodes[count]);
  } else {
    to->Number(count);
  }
}

void WriteRecord(const std::array<uint64_t, kWordsOfEntry>& words, Writer* to) {
  if (words[kEvent] >= std::size(kWords)) return;
  const Words& called = kWords[words[kEvent]];
  to->Seconds(words[kTime]).Text(" ").Text(role_name);
  to->Text(" ").Text(called.name);
  if (words[kRequest] != 0) to->Text(" request=").Hex(words[kRequest]);
  WriteNamed("prefill", &words[kPrefill], kNameBytes, to);
  WriteNamed("decode", &words[kDecode], kNameBytes, to);
  if (called.word != nullptr) {
    WriteNamed(called.word, &words[kWord], kWordBytes, to);
  }
  const uint64_t m = words[kCounts] >> 32;
  const uint64_t n = words[kCounts] & 0xffffffff;
  WriteCount(called.m, m, to);
  WriteCount(called.n, n, to);
  to->EndLine();
}

// The last `most` records, after a head. False: not all could be written.
bool Write(int fd, int signal, uint64_t most) {
  Writer to(fd);
  to.Text("# ").Text(role_name).Text(" pid=").Number(
      static_cast<uint64_t>(getpid()));
  to.Text(" monotonic=").Seconds(Clock(CLOCK_MONOTONIC));
  to.Text(" wall=").Seconds(Clock(CLOCK_REALTIME));
  to.Text(" signal=").Number(static_cast<uint64_t>(signal)).EndLine();
  const uint64_t end = next.load(std::memory_order_acquire);
  // Not the oldest of a full ring: the writer may be in its place.
  const uint64_t count = std::min({end, most, uint64_t{kRingSize - 1}});
  for (uint64_t i = end - count; i < end; ++i) {
    std::array<uint64_t, kWordsOfEntry> words;
    for (size_t k = 0; k < words.size(); ++k) {
      words[k] = ring[i % kRingSize][k].load(std::memory_order_acquire);
    }
    if (next.load(std::memory_order_acquire) >= i + kRingSize) continue;
    WriteRecord(words, &to);
  }
  return to.Flush();
}

void WriteTo(const Paths& paths, int signal) {
  const int fd = paths.file[0] == '\0'
                     ? -1
                     : open(paths.temporary,
                            O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (fd < 0) {
    Write(STDERR_FILENO, signal, kOnStderr);
    return;
  }
  const bool whole = Write(fd, signal, kRingSize);
  close(fd);
  if (whole) rename(paths.temporary, paths.file);
}

void OnCrash(int signal, siginfo_t* info, void* /*context*/) {
  // A second thread waits for the first to end them all.
  static std::atomic<bool> crashing = false;
  while (crashing.exchange(true)) pause();
  alarm(5);  // a disk that hangs must not keep what is dead
  WriteTo(crash_paths, signal);
  alarm(0);
  // As if this had not been here: what faulted does so again once this returns,
  // and what somebody sent, abort() included, is sent again.
  for (size_t i = 0; i < std::size(kCrashes); ++i) {
    if (kCrashes[i] == signal) sigaction(signal, &before[i], nullptr);
  }
  if (info->si_code <= 0) raise(signal);
}

void OnRequest(int signal) {
  const int saved = errno;
  static std::atomic<bool> writing = false;
  if (!writing.exchange(true)) {
    WriteTo(request_paths, signal);
    writing = false;
  }
  errno = saved;
}

absl::Status SetPaths(const std::string& path, Paths* paths) {
  const std::string temporary = absl::StrCat(path, ".tmp");
  if (temporary.size() >= sizeof paths->temporary) {
    return absl::InvalidArgumentError(
        absl::StrCat("flight records: the path is too long: ", path));
  }
  path.copy(paths->file, path.size());
  temporary.copy(paths->temporary, temporary.size());
  return absl::OkStatus();
}

// Their names are in the order of their age.
void Prune(const std::string& directory, const std::string& prefix) {
  std::vector<std::filesystem::path> files;
  std::error_code error;
  std::filesystem::directory_iterator entry(directory, error);
  for (; !error && entry != std::filesystem::directory_iterator();
       entry.increment(error)) {
    if (absl::StartsWith(entry->path().filename().string(), prefix)) {
      files.push_back(entry->path());
    }
  }
  std::sort(files.begin(), files.end());
  for (size_t i = 0; i + kFilesKept < files.size(); ++i) {
    std::filesystem::remove(files[i], error);
  }
}

}  // namespace

absl::Status Install(const std::string& role, const std::string& directory) {
  role.copy(role_name, sizeof role_name - 1);
  if (!directory.empty()) {
    if (access(directory.c_str(), W_OK | X_OK) != 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("flight records cannot be written to ", directory, ": ",
                       std::strerror(errno)));
    }
    const std::string prefix = absl::StrCat("tandem-", role, "-");
    Prune(directory, prefix);
    const std::string path = absl::StrCat(
        directory, "/", prefix,
        absl::FormatTime("%Y%m%dT%H%M%SZ", absl::Now(), absl::UTCTimeZone()),
        "-", getpid());
    absl::Status status =
        SetPaths(absl::StrCat(path, "-crash.flight"), &crash_paths);
    status.Update(
        SetPaths(absl::StrCat(path, "-request.flight"), &request_paths));
    if (!status.ok()) return status;
  }
  struct sigaction crash {};
  crash.sa_sigaction = OnCrash;
  crash.sa_flags = SA_SIGINFO;
  // A fault while one is handled ends the process at once.
  for (const int signal : kCrashes) sigaddset(&crash.sa_mask, signal);
  for (size_t i = 0; i < std::size(kCrashes); ++i) {
    sigaction(kCrashes[i], &crash, &before[i]);
  }
  struct sigaction request {};
  request.sa_handler = OnRequest;
  request.sa_flags = SA_RESTART;
  sigaction(SIGUSR1, &request, nullptr);
  return absl::OkStatus();
}

void Attach() {
  if (!taken.exchange(true)) attached = true;
}

void RecordAttached(Event event, const What& what) {
  const uint64_t mine = next.load(std::memory_order_relaxed);
  std::array<uint64_t, kWordsOfEntry> words = {};
  words[kTime] = Clock(CLOCK_MONOTONIC);
  words[kEvent] = static_cast<uint64_t>(event);
  for (size_t i = 0; i < 8 && i < what.request.size(); ++i) {
    words[kRequest] |= uint64_t{static_cast<uint8_t>(what.request[i])}
                       << (56 - 8 * i);
  }
  words[kCounts] =
      static_cast<uint64_t>(what.m) << 32 | static_cast<uint32_t>(what.n);
  char* const bytes = reinterpret_cast<char*>(words.data());
  what.word.copy(bytes + 8 * kWord, kWordBytes);
  what.prefill.copy(bytes + 8 * kPrefill, kNameBytes);
  what.decode.copy(bytes + 8 * kDecode, kNameBytes);
  for (size_t k = 0; k < words.size(); ++k) {
    ring[mine % kRingSize][k].store(words[k], std::memory_order_release);
  }
  next.store(mine + 1, std::memory_order_release);
}

}  // namespace tandem::flight
