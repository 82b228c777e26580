// SPDX-License-Identifier: Apache-2.0
// Where the time of a worker's start goes, phase by phase.

#ifndef TANDEM_WORKER_STARTUP_CLOCK_H_
#define TANDEM_WORKER_STARTUP_CLOCK_H_

#include <string_view>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "google/protobuf/repeated_ptr_field.h"
#include "tandem/v1/registry.pb.h"

namespace tandem::worker {

// Not thread-safe.
class StartupClock {
 public:
  using Phases = google::protobuf::RepeatedPtrField<v1::StartupPhase>;

  // What was done since the end of the phase before, or since the beginning.
  void End(std::string_view name) {
    const absl::Time now = absl::Now();
    v1::StartupPhase* const phase = phases_.Add();
    phase->mutable_name()->assign(name);
    phase->set_seconds(absl::ToDoubleSeconds(now - last_));
    last_ = now;
  }
  const Phases& phases() const { return phases_; }

 private:
  absl::Time last_ = absl::Now();
  Phases phases_;
};

}  // namespace tandem::worker

#endif  // TANDEM_WORKER_STARTUP_CLOCK_H_
