// SPDX-License-Identifier: Apache-2.0
// Many requests at once, each compared token by token with its undisturbed
// run.

#ifndef TANDEM_TESTS_INTEGRATION_LOAD_H_
#define TANDEM_TESTS_INTEGRATION_LOAD_H_

#include <grpcpp/client_context.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "tests/integration/cluster.h"

namespace tandem::integration {

struct Expectation {
  v1::GenerateRequest request;
  std::vector<int32_t> token_ids;
  std::string text;
};

// Runs each request by itself and notes what it gives.
std::vector<Expectation> RunAlone(
    Cluster* cluster, const std::vector<v1::GenerateRequest>& requests);

// What is wrong with an outcome, or "".
std::string Compare(const Expectation& expected, const Outcome& outcome);

// Keeps `streams` requests in flight, round and round over `expectations`,
// until told to stop; compares every one.
class Load {
 public:
  // `patient` clients take UNAVAILABLE for "again", as of a router that dies.
  Load(Cluster* cluster, const std::vector<Expectation>* expectations,
       int streams, bool patient = false);
  ~Load() { Finish(); }

  // Lets what runs end, starts no more, joins. False if a stream did not end
  // within `timeout`: a hang, which is cancelled.
  bool Finish(std::chrono::seconds timeout = std::chrono::seconds(60));

  int64_t completed() const;
  // Until every stream has completed a request more than at the call, or a
  // fault is seen. False if that did not come in time.
  bool WaitForEveryStream(
      std::chrono::seconds timeout = std::chrono::hours(1)) const;
  // The first few differences and failures, in words.
  std::string faults();
  int64_t fault_count() const { return fault_count_; }
  int64_t retries() const { return retries_; }
  // What patient clients were told.
  int64_t unavailable() const { return unavailable_; }

 private:
  void Run(int stream);

  Cluster* const cluster_;
  const std::vector<Expectation>* const expectations_;
  const bool patient_;
  std::atomic<bool> stop_ = false;
  std::atomic<int> running_;
  std::atomic<int> next_ = 0;
  std::vector<std::atomic<int64_t>> completed_;  // by stream
  std::atomic<int64_t> fault_count_ = 0;
  std::atomic<int64_t> retries_ = 0;
  std::atomic<int64_t> unavailable_ = 0;
  std::mutex mutex_;  // of the three below
  std::string faults_;
  std::vector<grpc::ClientContext*> calls_;  // by stream; null: none
  bool cancelled_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace tandem::integration

#endif  // TANDEM_TESTS_INTEGRATION_LOAD_H_
