// SPDX-License-Identifier: Apache-2.0
// Row "rollout": each process asked to leave and replaced, under load. Clients
// that a leaving router refuses go to the other one, as behind any balancer.

#include <signal.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tests/figures/figures.h"

namespace tandem::figures {
namespace {

using std::chrono::seconds;

class RolloutRow : public Row {};

TEST_F(RolloutRow, Holds) {
  const int streams = Sized(64, 16), rounds = Sized(3, 1);
  Begin({.prefill = 2,
         .decode = 2,
         .routers = 2,
         .router_arguments = {"--shutdown-timeout", "30s"},
         .worker_arguments = {"--max-num-batched-tokens", "64",
                              "--shutdown-timeout", "30s"}},
        Requests(48, seed_, 5, 65, 40));
  if (HasFatalFailure()) return;
  Load load(cluster_.get(), &expectations_, streams, Load::Again::kRefused);
  std::string trouble;
  double slowest = 0;
  for (int round = 0; round < rounds && trouble.empty(); ++round) {
    for (const char* name : {"prefill-0", "prefill-1", "decode-0", "decode-1",
                             "router", "router-1"}) {
      const TimePoint begun = Clock::now();
      cluster_->Signal(name, SIGTERM);
      const std::optional<int> code = cluster_->WaitForExit(name, seconds(60));
      slowest = std::max(slowest, Served::Seconds(Clock::now() - begun));
      if (code != 143) {
        trouble = absl::StrFormat("%s ended with %d", name, code.value_or(-1));
      }
      ASSERT_TRUE(cluster_->Restart(name).ok());
      const absl::Status ready = cluster_->WaitUntilReady(2, 2, seconds(60));
      if (!ready.ok()) trouble = ready.ToString();
      if (!load.WaitForEveryStream(seconds(60))) {
        trouble = absl::StrCat("a stream stands: ", Oldest());
      }
      if (!trouble.empty() || load.fault_count() != 0) break;
    }
  }
  load.Finish();
  const std::vector<double> gaps = Gaps(load.served());
  Tell(absl::StrFormat("2 prefill and 2 decode workers and 2 routers replaced "
                       "in turn, %d times, %d streams: 0 failed, wrong or hung",
                       rounds, streams),
       absl::StrFormat("%s; %d calls went to the other router; gaps %.2f s; "
                       "a process leaves within %.1f s%s%s",
                       Counts(load), load.unavailable(), Largest(gaps), slowest,
                       trouble.empty() ? "" : "; ", trouble),
       Clean(load) && trouble.empty());
  EXPECT_EQ(load.faults(), "");
  TellWhatIsLeft();
}

}  // namespace
}  // namespace tandem::figures
