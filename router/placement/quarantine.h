// SPDX-License-Identifier: Apache-2.0
// Prompts that crashed two workers: their client's next try would crash two
// more, so they are refused for a while, or until one of the two shows that it
// was only cut off. What is kept tells nobody what they were: SHA-256 with a
// salt of this process.

#ifndef TANDEM_ROUTER_PLACEMENT_QUARANTINE_H_
#define TANDEM_ROUTER_PLACEMENT_QUARANTINE_H_

#include <cstdint>
#include <list>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "common/random.h"

namespace tandem::router {

// Of the latest 64. Not thread-safe.
class Quarantine {
 public:
  explicit Quarantine(absl::Duration length)
      : length_(length), salt_(SystemRandom().Bytes(16)) {}

  // `incarnations`: of the processes that are held to have crashed.
  void Add(const std::vector<int32_t>& prompt,
           std::vector<std::string> incarnations, absl::Time now);
  // A process that is there did not crash.
  void Acquit(const std::string& incarnation);
  // Costs nothing while nobody is in it.
  bool Holds(const std::vector<int32_t>& prompt, absl::Time now);

 private:
  struct Entry {
    std::string fingerprint;
    std::vector<std::string> incarnations;
    absl::Time until;
  };

  std::string FingerprintOf(const std::vector<int32_t>& prompt) const;

  const absl::Duration length_;
  const std::string salt_;
  std::list<Entry> entries_;  // the oldest first
};

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_PLACEMENT_QUARANTINE_H_
