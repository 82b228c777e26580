// SPDX-License-Identifier: Apache-2.0
// A whole cluster in one thread, on virtual time, from one seed: routers,
// prefill and decode workers (the objects that the binaries link) and clients,
// over a network that fails. The device is FakeExecutor, whose KV is a hash of
// history, so every wrong, stale or foreign block shows as a wrong token.
//
// First a phase with faults, in which nothing wrong may be said; then the
// faults stop, and everything must end, and be as at the start.

#ifndef TANDEM_TESTS_SIMULATION_WORLD_H_
#define TANDEM_TESTS_SIMULATION_WORLD_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/random.h"
#include "common/testing/virtual_loop.h"
#include "engine/executor.h"
#include "engine/testing/fake_executor.h"
#include "handoff/handoff.h"
#include "router/core.h"
#include "router/validate.h"
#include "tests/simulation/network.h"

namespace tandem::simulation {

// What may go wrong in one run.
struct Profile {
  std::string name = {};
  int routers = 1;
  int prefill = 2;
  int decode = 2;
  int requests = 24;
  absl::Duration faults_for = absl::Seconds(5);
  int worker_crashes = 0;  // at random moments, restarted a little later
  int router_crashes = 0;
  int freezes = 0;     // of any process, half a second to eight
  int partitions = 0;  // of any pair of processes; every third one way
  double break_probability = 0;  // of any stream but the clients'
  double messy = 0;       // loss, repetition, reordering on handoff links
  int window = 0;         // of the model's layers
  bool may_fail = false;  // some requests may end with an error
  // A seeded fault of the code: wraps the devices and streams of workers.
  std::function<std::unique_ptr<engine::Executor>(engine::FakeExecutor*, Loop*,
                                                  Random*)>
      wrap_decode_executor = {};
  std::function<std::unique_ptr<handoff::SenderStream>(
      std::unique_ptr<handoff::SenderStream>, Random*)>
      wrap_link = {};
  std::function<std::unique_ptr<router::DecodeStream>(
      std::unique_ptr<router::DecodeStream>)>
      wrap_decode_call = {};
  std::function<std::unique_ptr<router::PrefillStream>(
      std::unique_ptr<router::PrefillStream>)>
      wrap_prefill_call = {};
};

struct Report {
  std::string wrong;   // the first thing that must not be; empty: none
  uint64_t trace = 0;  // equal for equal seeds
  int ok = 0;
  int cancelled = 0;
  int failed = 0;
  int64_t tokens = 0;
  int64_t resumed = 0;  // prefill and decode retries
  int64_t messages = 0;
  std::map<std::string, int> failures;  // by status
};

// Runs one seed.
Report Simulate(uint64_t seed, const Profile& profile);

}  // namespace tandem::simulation

#endif  // TANDEM_TESTS_SIMULATION_WORLD_H_
