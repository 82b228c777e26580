// SPDX-License-Identifier: Apache-2.0
// Many requests at once, each compared with its undisturbed run, tokens, text
// and the bits of all that comes with them, and timed.

#ifndef TANDEM_TESTS_INTEGRATION_LOAD_H_
#define TANDEM_TESTS_INTEGRATION_LOAD_H_

#include <grpcpp/client_context.h>

#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "tests/integration/cluster.h"

namespace tandem::integration {

struct Expectation {
  v1::GenerateRequest request;
  std::vector<int32_t> token_ids;
  std::string text;
  std::map<int, v1::GeneratedSequence> sequences;
  v1::PromptLogprobs prompt_logprobs;
};

// What a request's client saw, and when.
struct Served {
  TimePoint sent, ended;
  std::optional<TimePoint> first;  // token
  // The longest it waited for the next tokens once there were some, and when
  // that ended; zero: there were none after the first.
  std::chrono::nanoseconds gap = {};
  TimePoint gap_ended;
  absl::StatusCode code = absl::StatusCode::kOk;
  int tokens = 0;

  double seconds() const { return Seconds(ended - sent); }
  double gap_seconds() const { return Seconds(gap); }
  static double Seconds(std::chrono::nanoseconds time) {
    return std::chrono::duration<double>(time).count();
  }
};
Served Summary(const Outcome& outcome);

// Runs each request by itself and notes what it gives.
std::vector<Expectation> RunAlone(
    Cluster* cluster, const std::vector<v1::GenerateRequest>& requests);

// What is wrong with an outcome, or "".
std::string Compare(const Expectation& expected, const Outcome& outcome);

// Keeps `streams` requests in flight, round and round over `expectations`,
// until told to stop; compares every one.
class Load {
 public:
  // Which calls that ended UNAVAILABLE are made again, and told apart from
  // faults.
  enum class Again {
    kNone,
    // Refused before they began, as of a router that drains: on the next one.
    // Five seconds of that are a fault.
    kRefused,
    kAll,  // lost ones too, as of a router that dies
  };
  Load(Cluster* cluster, const std::vector<Expectation>* expectations,
       int streams, Again again = Again::kNone);
  ~Load() { Finish(); }

  // Lets what runs end, starts no more, joins. False if a stream did not end
  // within `timeout`: a hang, which is cancelled.
  bool Finish(std::chrono::seconds timeout = std::chrono::seconds(60));

  int64_t completed() const;
  // Until every stream has completed a request more than at the call, or a
  // fault is seen. False if that did not come in time.
  bool WaitForEveryStream(
      std::chrono::seconds timeout = std::chrono::hours(1)) const;
  // Streams that Finish found without an end.
  int hung() const { return hung_; }
  // The first few differences and failures, in words.
  std::string faults();
  int64_t fault_count() const { return fault_count_; }
  int64_t retries() const { return retries_; }
  // Of the faults, those that ended well, with something else.
  int64_t wrong_count() const { return wrong_count_; }
  // How often a call was made again.
  int64_t unavailable() const { return unavailable_; }
  // All that have ended.
  std::vector<Served> served();

 private:
  void Run(int stream);
  // None: the load is over.
  std::optional<Outcome> Call(int stream, int router,
                              const Expectation& expected);
  // Whether the call is to be made again.
  bool MayAgain(const Outcome& outcome, TimePoint first_sent) const;

  Cluster* const cluster_;
  const std::vector<Expectation>* const expectations_;
  const Again again_;
  std::atomic<bool> stop_ = false;
  std::atomic<int> running_;
  int hung_ = 0;
  std::atomic<int> next_ = 0;
  std::vector<std::atomic<int64_t>> completed_;  // by stream
  std::atomic<int64_t> fault_count_ = 0;
  std::atomic<int64_t> wrong_count_ = 0;
  std::atomic<int64_t> retries_ = 0;
  std::atomic<int64_t> unavailable_ = 0;
  std::mutex mutex_;  // of the four below
  std::string faults_;
  std::vector<Served> served_;
  std::vector<grpc::ClientContext*> calls_;  // by stream; null: none
  bool cancelled_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace tandem::integration

#endif  // TANDEM_TESTS_INTEGRATION_LOAD_H_
