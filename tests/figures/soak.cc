// SPDX-License-Identifier: Apache-2.0
// Row "soak": hours of load with a fault every 20 seconds. One worker of each
// role and the router are left alone: their memory is watched.
// TANDEM_SOAK_HOURS says how long (default 8).

#include <signal.h>

#include <cstdlib>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tests/figures/figures.h"

namespace tandem::figures {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr int kVictims = 2;  // of each role, of three

seconds HowLong() {
  double hours = 8;
  const char* const text = std::getenv("TANDEM_SOAK_HOURS");
  if (text != nullptr && !absl::SimpleAtod(text, &hours)) std::abort();
  return seconds(static_cast<int64_t>(hours * 3600));
}

class SoakRow : public Row {
 protected:
  enum class Fault { kKill, kReplace, kStop, kLongStop, kCancels, kCount };

  void Do(Fault fault);
  void CancelSome();

  std::string trouble_;
};

void SoakRow::CancelSome() {
  std::vector<std::thread> clients;
  for (int i = 0; i < 16; ++i) {
    const Expectation& expected =
        expectations_[random_.Below(expectations_.size())];
    const auto after = milliseconds(1 + random_.Below(400));
    clients.emplace_back([this, &expected, after] {
      v1::GenerateRequest request = expected.request;
      request.mutable_stopping()->set_max_tokens(300);
      grpc::ClientContext context;
      context.set_deadline(std::chrono::system_clock::now() + after);
      cluster_->Generate(request, &context);
    });
  }
  for (std::thread& client : clients) client.join();
}

void SoakRow::Do(Fault fault) {
  const std::string victim =
      absl::StrCat(random_.Below(2) == 0 ? "prefill-" : "decode-",
                   1 + random_.Below(kVictims));
  switch (fault) {
    case Fault::kKill:
      cluster_->Kill(victim);
      break;
    case Fault::kReplace:
      cluster_->Signal(victim, SIGTERM);
      if (!cluster_->WaitForExit(victim, seconds(60))) {
        trouble_ = victim + " does not leave";
      }
      break;
    case Fault::kStop:
    case Fault::kLongStop:
      cluster_->Signal(victim, SIGSTOP);
      std::this_thread::sleep_for(seconds(fault == Fault::kStop ? 1 : 7));
      cluster_->Signal(victim, SIGCONT);
      return;
    case Fault::kCancels:
    case Fault::kCount:
      CancelSome();
      return;
  }
  if (!cluster_->Restart(victim).ok()) trouble_ = victim + " does not start";
}

TEST_F(SoakRow, Holds) {
  const int streams = Sized(64, 16);
  const seconds all = Full() ? HowLong() : seconds(60);
  const seconds period(Sized(20, 6)), pause(Sized(600, 30));
  Begin(
      {.prefill = 1 + kVictims,
       .decode = 1 + kVictims,
       .worker_arguments = {"--max-num-batched-tokens", "64", "--num-kv-blocks",
                            "1024", "--shutdown-timeout", "10s"}},
      Requests(64, seed_, 5, 120, 48));
  if (HasFatalFailure()) return;
  MemoryWatch memory(*cluster_, {"router", "prefill-0", "decode-0"});
  const TimePoint begun = Clock::now();
  TimePoint next = begun;
  int64_t requests = 0, failed = 0, wrong = 0, hung = 0, faults = 0;
  std::string left, first;
  while (Clock::now() < begun + all && left.empty() && trouble_.empty()) {
    Load load(cluster_.get(), &expectations_, streams);
    const TimePoint checked = std::min(Clock::now() + pause, begun + all);
    while (Clock::now() < checked && trouble_.empty()) {
      next += period;
      std::this_thread::sleep_until(next);
      Do(static_cast<Fault>(
          random_.Below(static_cast<uint64_t>(Fault::kCount))));
      ++faults;
      const absl::Status ready =
          cluster_->WaitUntilReady(1 + kVictims, 1 + kVictims, seconds(60));
      if (!ready.ok()) trouble_ = ready.ToString();
      if (!load.WaitForEveryStream(seconds(60))) {
        trouble_ = absl::StrCat("a stream stands: ", Oldest());
      }
      next = std::max(next, Clock::now() - period);
    }
    load.Finish();
    requests += load.completed();
    failed += load.fault_count() - load.wrong_count();
    wrong += load.wrong_count();
    hung += load.hung();
    if (first.empty()) first = load.faults();
    left = cluster_->WhatIsLeft("Story");
  }
  memory.Stop();
  EXPECT_EQ(first, "");
  Tell(absl::StrFormat("%.2f h, %d streams, a fault every %d s: 0 failed, "
                       "wrong, hung or left",
                       static_cast<double>(all.count()) / 3600, streams,
                       period.count()),
       absl::StrFormat("%d faults, %d requests, %d failed, %d wrong, %d hung; "
                       "left: %s%s%s",
                       faults, requests, failed, wrong, hung,
                       left.empty() ? "nothing" : left,
                       trouble_.empty() ? "" : "; ", trouble_),
       failed + wrong + hung == 0 && left.empty() && trouble_.empty());
  const auto [name, slope] = memory.Steepest(all / 2);
  Tell("memory grows by at most 1 MiB/h in the second half",
       absl::StrFormat("%.2f MiB/h, %s", slope, name), true, slope <= 1);
}

}  // namespace
}  // namespace tandem::figures
