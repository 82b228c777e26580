// SPDX-License-Identifier: Apache-2.0
// What the rows of docs/reliability.md's table share: their size, their seed,
// how they tell what they measured, and arithmetic on it. A row is a test of
// this binary, run by scripts/figures.sh with real processes.
//
// TANDEM_FIGURES_SIZE  full (default), or ci: minutes instead of hours
// TANDEM_SEED          the row's seed; drawn if absent, printed always
// TANDEM_FIGURES       file that gets one JSON object per line of the table

#ifndef TANDEM_TESTS_FIGURES_FIGURES_H_
#define TANDEM_TESTS_FIGURES_FIGURES_H_

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <map>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "common/random.h"
#include "tests/integration/cluster.h"
#include "tests/integration/load.h"

namespace tandem::figures {

using Clock = std::chrono::steady_clock;
using integration::Cluster;
using integration::Expectation;
using integration::Load;
using integration::Served;
using integration::TimePoint;

bool Full();
template <typename T>
T Sized(T full, T ci) {
  return Full() ? full : ci;
}

// Draws what a row needs from one seed, which it prints.
class Row : public testing::Test {
 protected:
  Row();
  // One line of the table, held if both. A goal may be missed for another
  // program on the machine: only what is not right fails the test.
  void Tell(const std::string& asked, const std::string& measured, bool right,
            bool goal = true) const;
  // That nothing is left on the cluster.
  void TellWhatIsLeft();
  // Starts it, and runs every request by itself.
  void Begin(integration::ClusterOptions options,
             const std::vector<v1::GenerateRequest>& requests);
  // What the router says of the oldest requests, for one that stands.
  std::string Oldest() const;
  // A moment within `longest`, drawn.
  void Pause(std::chrono::milliseconds longest);
  std::string Draw(std::string_view role, int count);

  const std::string name_;
  const uint64_t seed_;
  SeededRandom random_;
  std::unique_ptr<Cluster> cluster_;
  std::vector<Expectation> expectations_;
};

// Text prompts of `min_words` to `max_words`, half of them greedy, some with
// penalties, some past the prefix cache.
std::vector<v1::GenerateRequest> Requests(int count, uint64_t seed,
                                          int min_words, int max_words,
                                          int max_tokens);

// "512 requests, 0 failed, 0 wrong, 0 hung", of a load that has finished.
std::string Counts(const Load& load);
inline bool Clean(const Load& load) {
  return load.fault_count() == 0 && load.hung() == 0;
}

// Of values in any order, `share` of which are at most what is returned; 0 of
// none.
double Percentile(std::vector<double> values, double share);
// Of what `of` gives for each, where it gives any.
std::vector<double> Gaps(const std::vector<Served>& served);
std::vector<double> FirstTokens(const std::vector<Served>& served);
double Largest(const std::vector<double>& values);

// Resident memory, in MiB; 0: it has ended.
double Resident(pid_t pid);

// The same of some processes, each second from construction to Stop.
class MemoryWatch {
 public:
  MemoryWatch(const Cluster& cluster, const std::vector<std::string>& names);
  ~MemoryWatch() { Stop(); }
  void Stop();
  // Of the line through what was measured after `warm_up`, in MiB per hour;
  // the process that grew most.
  std::pair<std::string, double> Steepest(std::chrono::seconds warm_up) const;

 private:
  using Samples = std::vector<std::pair<double, double>>;  // seconds, MiB

  std::map<std::string, std::pair<pid_t, Samples>> processes_;
  std::atomic<bool> stop_ = false;
  std::thread thread_;
};

}  // namespace tandem::figures

#endif  // TANDEM_TESTS_FIGURES_FIGURES_H_
