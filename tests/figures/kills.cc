// SPDX-License-Identifier: Apache-2.0
// Row "kills": processes that die or stand still under load, with a spare of
// each role.

#include <signal.h>

#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tests/figures/figures.h"

namespace tandem::figures {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr int kWorkers = 3;  // of each role

class KillsRow : public Row {
 protected:
  int Streams() const { return Sized(64, 16); }

  // Whoever was hit is back, and every stream has ended a request since: one
  // that meets two crashes without a token in between would be suspect.
  bool Recovered(const Load& load) {
    const absl::Status ready =
        cluster_->WaitUntilReady(kWorkers, kWorkers, seconds(60));
    EXPECT_TRUE(ready.ok()) << ready;
    return ready.ok() && load.WaitForEveryStream(seconds(60)) &&
           load.fault_count() == 0;
  }

  void KillWorkers();
  void StopWorkers(int count, seconds stopped);
  void KillRouters();
  // What decode workers heard of attempts that had ended. (Of a decode worker
  // that wakes nothing is heard: its calls are over.)
  double Late();
  // Seconds until no worker has anything, from `since`; negative: never.
  double CleanSince(TimePoint since);
};

void KillsRow::KillWorkers() {
  const int kills = Sized(20, 2);
  Load load(cluster_.get(), &expectations_, Streams());
  bool going = true;
  for (int i = 0; i < kills && going; ++i) {
    for (const char* role : {"prefill", "decode"}) {
      const std::string victim = Draw(role, kWorkers);
      Pause(milliseconds(400));
      cluster_->Kill(victim);
      ASSERT_TRUE(cluster_->Restart(victim).ok());
      going = going && Recovered(load);
    }
  }
  load.Finish();
  const std::vector<double> gaps = Gaps(load.served());
  Tell(absl::StrFormat("%d SIGKILLs of each worker role, %d streams: 0 failed, "
                       "wrong or hung, gaps at most 2 s",
                       kills, Streams()),
       absl::StrFormat("%s; %d retries; gaps %.2f s, p99 %.2f s", Counts(load),
                       load.retries(), Largest(gaps), Percentile(gaps, 0.99)),
       going && Clean(load), Largest(gaps) <= 2);
  EXPECT_EQ(load.faults(), "");
}

double KillsRow::Late() {
  double late = 0;
  for (int i = 0; i < kWorkers; ++i) {
    late += cluster_->Metrics(
        absl::StrCat("decode-", i))["tandem_handoff_late_messages_total"];
  }
  return late;
}

void KillsRow::StopWorkers(int count, seconds stopped) {
  const double late = Late();
  Load load(cluster_.get(), &expectations_, Streams());
  bool going = true;
  for (int i = 0; i < count && going; ++i) {
    const std::string victim =
        Draw(i % 2 == 0 ? "prefill" : "decode", kWorkers);
    Pause(milliseconds(400));
    cluster_->Signal(victim, SIGSTOP);
    std::this_thread::sleep_for(stopped);
    cluster_->Signal(victim, SIGCONT);
    going = Recovered(load);
  }
  load.Finish();
  std::this_thread::sleep_for(milliseconds(1500));  // for the last metrics
  const std::vector<double> gaps = Gaps(load.served());
  const bool brief = stopped == seconds(1);
  Tell(absl::StrFormat(
           "%d SIGSTOPs of %d s, %d streams: 0 failed, wrong or hung, %s",
           count, stopped.count(), Streams(),
           brief ? "no failover" : "failover, gaps at most 7 s"),
       absl::StrFormat("%s; %d retries; gaps %.2f s; %.0f late "
                       "messages dropped",
                       Counts(load), load.retries(), Largest(gaps),
                       Late() - late),
       going && Clean(load) && (brief || load.retries() > 0),
       brief ? load.retries() == 0 : Largest(gaps) <= 7);
  EXPECT_EQ(load.faults(), "");
}

double KillsRow::CleanSince(TimePoint since) {
  static const std::set<std::string> kZero = {"tandem_num_requests_running",
                                              "tandem_num_requests_waiting",
                                              "tandem_handoff_tickets",
                                              "state=\"reserved\"",
                                              "state=\"live\"",
                                              "state=\"granted\"",
                                              "state=\"in_flight\"",
                                              "state=\"quarantined\""};
  while (Clock::now() < since + seconds(20)) {
    bool clean = true;
    for (const char* role : {"prefill", "decode"}) {
      for (int i = 0; i < kWorkers && clean; ++i) {
        const auto metrics = cluster_->Metrics(absl::StrCat(role, "-", i));
        clean = !metrics.empty();
        for (const auto& [name, value] : metrics) {
          for (const std::string& zero : kZero) {
            if (value != 0 && name.find(zero) != std::string::npos) {
              clean = false;
            }
          }
        }
      }
    }
    if (clean) return Served::Seconds(Clock::now() - since);
    std::this_thread::sleep_for(milliseconds(20));
  }
  return -1;
}

void KillsRow::KillRouters() {
  const int kills = Sized(4, 1);
  Load load(cluster_.get(), &expectations_, Streams(), Load::Again::kAll);
  std::vector<double> told, clean;
  bool going = true;
  for (int i = 0; i < kills && going; ++i) {
    std::this_thread::sleep_for(milliseconds(800));
    Pause(milliseconds(400));
    const TimePoint killed = Clock::now();
    cluster_->Kill("router");
    clean.push_back(CleanSince(killed));
    ASSERT_TRUE(cluster_->Restart("router").ok());
    going = clean.back() >= 0 && Recovered(load);
    for (const Served& one : load.served()) {
      if (one.sent < killed && one.ended > killed &&
          one.code == absl::StatusCode::kUnavailable) {
        told.push_back(Served::Seconds(one.ended - killed));
      }
    }
  }
  load.Finish();
  Tell(
      absl::StrFormat("%d SIGKILLs of the router, %d streams: clients are "
                      "told UNAVAILABLE within 1 s, workers clean within 3 s",
                      kills, Streams()),
      absl::StrFormat("%s; %d calls told within %.2f s, clean within %.2f s",
                      Counts(load), told.size(), Largest(told), Largest(clean)),
      going && Clean(load) && !told.empty(),
      Largest(told) <= 1 && Largest(clean) <= 3);
  EXPECT_EQ(load.faults(), "");
}

TEST_F(KillsRow, Holds) {
  Begin({.prefill = kWorkers,
         .decode = kWorkers,
         .worker_arguments = {"--max-num-batched-tokens", "64",
                              "--handoff-slab-bytes", "16KiB",
                              "--shutdown-timeout", "5s"}},
        Requests(48, seed_, 5, 65, 40));
  if (HasFatalFailure()) return;
  KillWorkers();
  StopWorkers(Sized(10, 2), seconds(1));
  StopWorkers(Sized(6, 2), seconds(10));
  KillRouters();
  TellWhatIsLeft();
}

}  // namespace
}  // namespace tandem::figures
