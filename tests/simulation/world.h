// SPDX-License-Identifier: Apache-2.0
// A whole cluster in one thread, on virtual time, from one seed: routers,
// prefill and decode workers (the objects that the binaries link) and clients,
// over a network that fails. The device is FakeExecutor, whose KV is a hash of
// history, so every wrong, stale or foreign block shows as a wrong token.
//
// Three phases. Safety: trouble of any kind, in which nothing wrong may be
// said. Liveness: the trouble has ended, and everything must end within a
// bound; what is asked now must not fail. Quiet: everything is as at the start.

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
#include "router/core/core.h"
#include "router/validate/validate.h"
#include "tests/simulation/network.h"
#include "tests/simulation/parts.h"

namespace tandem::simulation {

// What may go wrong in one run.
struct Profile {
  std::string name = {};
  int share = 1;  // of the seeds
  int routers = 1;
  int prefill = 2;
  int decode = 2;
  int requests = 24;
  absl::Duration trouble_for = absl::Seconds(5);
  int worker_crashes = 0;  // at random moments, restarted a little later
  int router_crashes = 0;
  int freezes = 0;     // of any process, half a second to eight
  int partitions = 0;  // of any two hosts; every third one way
  int slow_links = 0;  // between any two hosts
  int drains = 0;      // workers that leave and come back, each in its turn
  int twins = 0;       // second workers under an id that is taken
  int failpoints = 0;  // hits, of a quarter of all that each process has
  double break_probability = 0;  // of any stream, per message
  double messy = 0;       // loss, repetition, reordering on handoff links
  int window = 0;         // of the model's layers
  int full_layers = 0;    // of them, which have none
  bool drawn = false;     // all these are the most: each seed draws its own
  bool may_fail = false;  // some requests may end with an error
  // Sessions of routers are recorded, and must replay; not where failpoints
  // hit, which no record tells of.
  bool record = false;
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

  engine::FakeModel model() const { return Model(window, full_layers); }
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
  int64_t replayed = 0;     // inputs of recorded sessions
  absl::Duration liveness;  // from the trouble's end until everything ended
  std::map<std::string, int> hits;      // of failpoints, with the action
  std::map<std::string, int> failures;  // by reason or status
};

// Runs one seed.
Report Simulate(uint64_t seed, const Profile& profile);

}  // namespace tandem::simulation

#endif  // TANDEM_TESTS_SIMULATION_WORLD_H_
