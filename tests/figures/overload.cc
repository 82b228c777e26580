// SPDX-License-Identifier: Apache-2.0
// Row "overload": more than the cluster can do, clients that do not read or do
// not wait, and prompts that workers do not survive.

#include <deque>
#include <mutex>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tests/figures/figures.h"

namespace tandem::figures {
namespace {

using integration::Outcome;
using std::chrono::milliseconds;
using std::chrono::seconds;

// As many as two cores compute before each makes the others slower; one of them
// may wait. What so many streams get is called the capacity.
constexpr int kAtOnce = 2;

// What became of calls that came at a rate, whoever was still waited for.
struct Storm {
  int64_t arrived = 0, good = 0, refused = 0, failed = 0, wrong = 0, behind = 0;
  double seconds = 0;
  std::vector<double> good_times, refused_times;
  std::string failure;
};

class OverloadRow : public Row {
 protected:
  // Requests a second of so many streams, and their times.
  std::pair<double, std::vector<double>> Closed(int streams, seconds time);
  // Each refused call comes again at once, `again` times at most.
  Storm Open(double rate, seconds time, int again);
  void TellStorm(const std::string& what, const Storm& storm, double capacity,
                 double unloaded_p99);
  Outcome Serve(const v1::GenerateRequest& poison, const std::string& role,
                int* deaths);
  void Poison(const std::string& role);
};

std::vector<double> Times(const std::vector<Served>& served) {
  std::vector<double> times;
  times.reserve(served.size());
  for (const Served& one : served) times.push_back(one.seconds());
  return times;
}

std::pair<double, std::vector<double>> OverloadRow::Closed(int streams,
                                                           seconds time) {
  Load load(cluster_.get(), &expectations_, streams);
  std::this_thread::sleep_for(time);
  const auto done = static_cast<double>(load.completed());
  load.Finish();
  EXPECT_EQ(load.faults(), "");
  return {done / static_cast<double>(time.count()), Times(load.served())};
}

Storm OverloadRow::Open(double rate, seconds time, int again) {
  Storm storm;
  std::mutex mutex;
  std::atomic<int64_t> next = 0;
  const TimePoint begun = Clock::now(), end = begun + time;
  std::vector<std::thread> clients;
  // More than are ever let in, and those that are being refused.
  for (int i = 0; i < 128; ++i) {
    clients.emplace_back([&] {
      while (true) {
        const int64_t n = next++;
        const TimePoint due =
            begun +
            std::chrono::duration_cast<Clock::duration>(
                std::chrono::duration<double>(static_cast<double>(n) / rate));
        if (due >= end) return;
        std::this_thread::sleep_until(due);
        const bool late = Clock::now() > due + milliseconds(100);
        const Expectation& expected =
            expectations_[static_cast<size_t>(n) % expectations_.size()];
        for (int tries = 0; tries <= again; ++tries) {
          const Outcome outcome = cluster_->Generate(expected.request);
          const double took = Served::Seconds(outcome.ended - outcome.sent);
          std::lock_guard<std::mutex> lock(mutex);
          storm.arrived += 1;
          storm.behind += late && tries == 0;
          if (absl::IsResourceExhausted(outcome.status)) {
            ++storm.refused;
            storm.refused_times.push_back(took);
            continue;
          }
          if (!outcome.status.ok()) {
            if (++storm.failed == 1) storm.failure = outcome.status.ToString();
          } else if (!Compare(expected, outcome).empty()) {
            ++storm.wrong;
          } else {
            storm.good += outcome.ended <= end;
            storm.good_times.push_back(took);
          }
          break;
        }
      }
    });
  }
  for (std::thread& client : clients) client.join();
  storm.seconds = static_cast<double>(time.count());
  return storm;
}

void OverloadRow::TellStorm(const std::string& what, const Storm& storm,
                            double capacity, double unloaded_p99) {
  const double goodput = static_cast<double>(storm.good) / storm.seconds;
  const double refusal = Percentile(storm.refused_times, 0.99);
  const double good = Percentile(storm.good_times, 0.99);
  Tell(absl::StrCat(what,
                    ": goodput at least 80 % of capacity, refusals within 10 "
                    "ms, p99 of the admitted at most twice the unloaded"),
       absl::StrFormat(
           "%d calls, %d refused, %d failed, %d wrong, %d came late; %.0f a "
           "second, %.0f %% of what %d streams get; refusals p99 %.1f ms; "
           "admitted p99 %.0f "
           "ms, unloaded %.0f ms%s",
           storm.arrived, storm.refused, storm.failed, storm.wrong,
           storm.behind, goodput, 100 * goodput / capacity, kAtOnce,
           refusal * 1e3, good * 1e3, unloaded_p99 * 1e3,
           storm.failure.empty() ? "" : "; " + storm.failure),
       storm.failed == 0 && storm.wrong == 0 && storm.refused > 0,
       goodput >= 0.8 * capacity && refusal <= 0.010 &&
           good <= 2 * unloaded_p99);
}

TEST_F(OverloadRow, Storms) {
  Begin({.router_arguments = {"--max-requests", absl::StrCat(kAtOnce),
                              "--max-queued", "1"}},
        Requests(48, seed_, 20, 40, 32));
  if (HasFatalFailure()) return;
  const seconds calm(Sized(10, 4));
  const double unloaded = Percentile(Closed(1, calm).second, 0.99);
  const double capacity = Closed(kAtOnce, calm).first;
  const Storm storm = Open(4 * capacity, seconds(Sized(60, 8)), 0);
  TellStorm(absl::StrFormat("4 times capacity for %.0f s", storm.seconds),
            storm, capacity, unloaded);
  const Storm retries = Open(4 * capacity, seconds(Sized(20, 4)), 2);
  TellStorm(
      absl::StrFormat("the same for %.0f s, the refused come again at once, "
                      "twice",
                      retries.seconds),
      retries, capacity, unloaded);
  TellWhatIsLeft();
}

TEST_F(OverloadRow, Readers) {
  const int streams = 32;
  const std::string limit = Sized("20s", "8s");
  Begin({.prefill = 2,
         .decode = 2,
         .router_arguments = {"--stall-limit", limit},
         .decode_arguments = {"--stall-limit", limit}},
        Requests(48, seed_, 10, 40, 40));
  if (HasFatalFailure()) return;
  const seconds time(Sized(25, 12));
  const auto gaps_of = [&](Load* load) {
    std::this_thread::sleep_for(time);
    load->Finish();
    return Gaps(load->served());
  };
  std::vector<double> before, during;
  {
    Load load(cluster_.get(), &expectations_, streams);
    before = gaps_of(&load);
  }
  v1::GenerateRequest endless = integration::TextRequest("Story 0.", 900);
  endless.mutable_stopping()->set_ignore_eos(true);
  endless.mutable_output()->set_logprobs(20);  // large messages
  // Small buffers: else gRPC takes in what nobody reads.
  grpc::ChannelArguments small;
  small.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  small.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 16 << 10);
  small.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  std::deque<grpc::ClientContext> contexts;
  std::vector<std::unique_ptr<grpc::ClientReader<v1::GenerateResponse>>>
      readers;
  const double memory = Resident(cluster_->pid("router"));
  for (int i = 0; i < streams; ++i) {
    contexts.emplace_back();
    Cluster::SetDeadline(&contexts.back());
    readers.push_back(v1::InferenceService::NewStub(
                          grpc::CreateCustomChannel(
                              absl::StrCat("localhost:", cluster_->grpc_port()),
                              grpc::InsecureChannelCredentials(), small))
                          ->Generate(&contexts.back(), endless));
  }
  std::this_thread::sleep_for(seconds(2));  // until all buffers are full
  Load load(cluster_.get(), &expectations_, streams);
  during = gaps_of(&load);
  const double grown = Resident(cluster_->pid("router")) - memory;
  const TimePoint cut_off = Clock::now() + seconds(60);
  for (auto state = cluster_->State();
       state.ok() && state->requests().total() > 0 && Clock::now() < cut_off;
       state = cluster_->State()) {
    std::this_thread::sleep_for(milliseconds(50));
  }
  // Who does not read the reason either is cancelled some seconds later.
  int told = 0, cancelled = 0, fitted = 0;
  for (auto& reader : readers) {
    v1::GenerateResponse response;
    while (reader->Read(&response)) {
    }
    const grpc::Status status = reader->Finish();
    told += status.error_code() == grpc::RESOURCE_EXHAUSTED;
    cancelled += status.error_code() == grpc::CANCELLED;
    fitted += status.ok();
  }
  readers.clear();
  contexts.clear();  // and their connections
  const double p99 = Percentile(before, 0.99),
               beside = Percentile(during, 0.99);
  Tell(absl::StrFormat("%d clients that never read beside %d that do: those "
                       "are cut off, these have gaps at most twice as long, "
                       "the router grows by at most half a MiB for each",
                       streams, streams),
       absl::StrFormat("%s; %d cut off and told so, %d cancelled without, "
                       "%d fitted into buffers; gaps p99 %.3f s, without them "
                       "%.3f s; router grew by %.1f MiB",
                       Counts(load), told, cancelled, fitted, beside, p99,
                       grown),
       Clean(load) && told + cancelled + fitted == streams && fitted < streams,
       beside <= 2 * p99 && grown <= 0.5 * streams);
  EXPECT_EQ(load.faults(), "");
  TellWhatIsLeft();
}

// Every step of a worker of the role that dies takes so long: within one this
// test sees where the prompt is, and kills that worker before its next token,
// which would rightly clear the prompt of suspicion.
constexpr const char* kSlow = "engine.step=stall(200)*1000000";

// Sends `poison`, and kills each worker of `role` that computes it: by this
// test's hand, which looks where it is. The dead start anew by twos: so a
// second one is always one that was slow from the beginning.
Outcome OverloadRow::Serve(const v1::GenerateRequest& poison,
                           const std::string& role, int* deaths) {
  Outcome outcome;
  std::atomic<bool> ended = false;
  std::thread client([&] {
    outcome = cluster_->Generate(poison);
    ended = true;
  });
  const bool prefill = role == "prefill";
  std::vector<std::string> dead;
  const auto restart = [&] {
    for (const std::string& worker : dead) {
      cluster_->ArmAtStart(worker, kSlow);
      EXPECT_TRUE(cluster_->Restart(worker).ok());
    }
    dead.clear();
  };
  std::string killed;
  while (!ended) {
    std::this_thread::sleep_for(milliseconds(1));
    const auto state = cluster_->State();
    if (!state.ok()) continue;
    for (const v1::RequestStatus& request : state->in_flight()) {
      if (request.request_id() != poison.request_id() ||
          request.phase() != (prefill ? "prefilling" : "decoding")) {
        continue;
      }
      const std::string& worker =
          prefill ? request.prefill_worker_id() : request.decode_worker_id();
      // The router may not have seen yet that this one is dead.
      if (worker.empty() || worker == killed) continue;
      // It may wait there for its first step, behind suspects of few tokens.
      if (prefill) std::this_thread::sleep_for(seconds(3));
      cluster_->Kill(worker);
      ++*deaths;
      killed = worker;
      dead.push_back(worker);
      if (dead.size() == 2) restart();
    }
  }
  client.join();
  restart();
  return outcome;
}

void OverloadRow::Poison(const std::string& role) {
  Begin({.prefill = 3,
         .decode = 3,
         .worker_arguments = {"--max-num-batched-tokens", "16"},
         .faulty = true},
        Requests(16, seed_, 5, 10, 40));
  if (HasFatalFailure()) return;
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(cluster_->Arm(absl::StrCat(role, "-", i), kSlow), "");
  }
  v1::GenerateRequest poison = Requests(1, seed_ + 1, 330, 331, 200)[0];
  Load load(cluster_.get(), &expectations_, 15);
  std::this_thread::sleep_for(milliseconds(500));
  int deaths = 0, more = 0;
  poison.set_request_id("poison-1");
  const Outcome first = Serve(poison, role, &deaths);
  poison.set_request_id("poison-2");
  const Outcome second = Serve(poison, role, &more);
  const absl::Status ready = cluster_->WaitUntilReady(3, 3, seconds(60));
  EXPECT_TRUE(ready.ok()) << ready;
  load.WaitForEveryStream(seconds(60));
  load.Finish();
  Tell(absl::StrFormat("a prompt that %s workers die of, beside 15 streams: "
                       "two deaths at most, then it is refused at once",
                       role),
       absl::StrFormat(
           "%d deaths, then %s; again: %d deaths, %s within %.0f ms; beside "
           "it %s",
           deaths, absl::StatusCodeToString(first.status.code()), more,
           absl::StatusCodeToString(second.status.code()),
           1e3 * Served::Seconds(second.ended - second.sent), Counts(load)),
       Clean(load),
       deaths == 2 && absl::IsInternal(first.status) && more == 0 &&
           absl::IsInternal(second.status));
  EXPECT_EQ(load.faults(), "");
  TellWhatIsLeft();
}

TEST_F(OverloadRow, PoisonOfPrefill) { Poison("prefill"); }

TEST_F(OverloadRow, PoisonOfDecode) { Poison("decode"); }

}  // namespace
}  // namespace tandem::figures
