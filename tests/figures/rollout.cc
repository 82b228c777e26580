// SPDX-License-Identifier: Apache-2.0
// Row "rollout": each process asked to leave and replaced, under load. Clients
// that a leaving router refuses go to the other one, as behind any balancer.
// The workers come back with the version of the handoff protocol before, then
// with the newest, as in an upgrade and its way back.

#include <signal.h>

#include <map>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tests/figures/figures.h"

namespace tandem::figures {
namespace {

using std::chrono::seconds;

// Of one build: programs with failpoints say what they are told to.
constexpr char kOld[] = "TANDEM_PROTOCOL=1..1";
constexpr char kNew[] = "TANDEM_PROTOCOL=1..2";
constexpr char kForeign[] = "TANDEM_PROTOCOL=3..3";

class RolloutRow : public Row {
 protected:
  // Asks it to leave, and starts it again with `variable`.
  void Replace(const std::string& name, const std::string& variable) {
    const TimePoint begun = Clock::now();
    cluster_->Signal(name, SIGTERM);
    const std::optional<int> code = cluster_->WaitForExit(name, seconds(60));
    slowest_ = std::max(slowest_, Served::Seconds(Clock::now() - begun));
    if (code != 143) {
      trouble_ = absl::StrFormat("%s ended with %d", name, code.value_or(-1));
      return;
    }
    cluster_->SetEnvironment(name, variable);
    ASSERT_TRUE(cluster_->Restart(name).ok());
    const absl::Status ready = cluster_->WaitUntilReady(2, 2, seconds(60));
    if (!ready.ok()) trouble_ = ready.ToString();
    if (!load_->WaitForEveryStream(seconds(60))) {
      trouble_ = absl::StrCat("a stream stands: ", Oldest());
    }
  }
  bool GoesOn() const {
    return trouble_.empty() && load_->fault_count() == 0 && !HasFatalFailure();
  }

  // Workers by the newest version that they say they speak.
  std::map<uint32_t, int> Versions() {
    std::map<uint32_t, int> versions;
    const auto state = cluster_->State();
    if (!state.ok()) return versions;
    for (const v1::WorkerStatus& worker : state->workers()) {
      ++versions[worker.hello().protocol_max()];
    }
    return versions;
  }
  // What the router says of a pair that cannot be.
  std::string WhyAvoided() {
    const auto state = cluster_->State();
    if (!state.ok() || state->avoided_pairs().empty()) return "nothing";
    return state->avoided_pairs(0).reason();
  }

  std::unique_ptr<Load> load_;
  std::string trouble_;
  double slowest_ = 0;
};

TEST_F(RolloutRow, Holds) {
  const int streams = Sized(64, 16), rounds = Sized(4, 2);
  Begin({.prefill = 2,
         .decode = 2,
         .routers = 2,
         .router_arguments = {"--shutdown-timeout", "30s"},
         .worker_arguments = {"--max-num-batched-tokens", "64",
                              "--shutdown-timeout", "30s"},
         .faulty = true},
        Requests(48, seed_, 5, 65, 40));
  if (HasFatalFailure()) return;
  load_ = std::make_unique<Load>(cluster_.get(), &expectations_, streams,
                                 Load::Again::kRefused);
  bool mixed = true;  // half of the workers of each role, each time
  for (int round = 0; round < rounds; ++round) {
    const bool newer = round % 2 != 0;
    const char* const variable = newer ? kNew : kOld;
    for (int i = 0; i < 2 && GoesOn(); ++i) {
      // The new one of a pair is of either role.
      const char* const roles[] = {newer ? "prefill" : "decode",
                                   newer ? "decode" : "prefill"};
      for (const char* const role : roles) {
        if (GoesOn()) Replace(absl::StrFormat("%s-%d", role, i), variable);
      }
      if (i == 0)
        mixed &= Versions() == std::map<uint32_t, int>{{1, 2}, {2, 2}};
    }
    for (const char* const name : {"router", "router-1"}) {
      if (GoesOn()) Replace(name, "");
    }
  }

  std::string why;
  std::set<std::string> decoded_by;
  if (GoesOn()) Replace("decode-1", kForeign);
  if (GoesOn()) {
    why = WhyAvoided();
    for (int i = 0; i < 8; ++i) {
      const integration::Outcome outcome =
          cluster_->Generate(expectations_[0].request);
      decoded_by.insert(outcome.done.workers().decode());
    }
    Replace("decode-1", kOld);
  }
  load_->Finish();
  const std::vector<double> gaps = Gaps(load_->served());
  Tell(absl::StrFormat("2 prefill and 2 decode workers and 2 routers replaced "
                       "in turn, %d times, by the next protocol version and "
                       "back, %d streams: 0 failed, wrong or hung",
                       rounds, streams),
       absl::StrFormat("%s; %d calls went to the other router; gaps %.2f s; "
                       "a process leaves within %.1f s%s%s",
                       Counts(*load_), load_->unavailable(), Largest(gaps),
                       slowest_, trouble_.empty() ? "" : "; ", trouble_),
       Clean(*load_) && trouble_.empty() && mixed);
  EXPECT_EQ(load_->faults(), "");
  Tell(
      "a worker without a common version beside them: nothing goes to it, and "
      "the router says why",
      why,
      decoded_by == std::set<std::string>{"decode-0"} &&
          why.find("have none in common") != std::string::npos);
  TellWhatIsLeft();
}

}  // namespace
}  // namespace tandem::figures
