// SPDX-License-Identifier: Apache-2.0
#include "router/placement/expected_wait.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

namespace tandem::router {
namespace {

// Long beside one prompt, short beside the time that people wait.
constexpr double kHalfLifeSeconds = 5;
// First tokens before the rate is believed.
constexpr int kLeastObserved = 16;

}  // namespace

void ExpectedWait::Advance(absl::Time now) {
  const double passed = absl::ToDoubleSeconds(now - at_);
  if (passed <= 0) return;
  at_ = now;
  if (waiting_ <= 0) return;
  const double kept = std::exp2(-passed / kHalfLifeSeconds);
  served_ *= kept;
  seconds_ =
      seconds_ * kept + (1 - kept) * kHalfLifeSeconds / std::numbers::ln2;
}

void ExpectedWait::SetWaiting(int waiting, absl::Time now) {
  Advance(now);
  waiting_ = waiting;
}

void ExpectedWait::OnServed(absl::Time now) {
  Advance(now);
  if (waiting_ <= 0) return;
  observed_ = std::min(observed_ + 1, kLeastObserved);
  served_ += 1;
}

void ExpectedWait::Forget() {
  observed_ = 0;
  served_ = seconds_ = 0;
}

bool ExpectedWait::Known() const {
  return observed_ >= kLeastObserved && seconds_ > 0;
}

absl::Duration ExpectedWait::Behind(int others) const {
  if (!Known()) return absl::ZeroDuration();
  return absl::Seconds(others * seconds_ / served_);
}

int ExpectedWait::MostWithin(absl::Duration limit) const {
  constexpr int kAll = std::numeric_limits<int>::max();
  if (!Known()) return kAll;
  const double most = absl::ToDoubleSeconds(limit) * served_ / seconds_;
  return most < kAll ? static_cast<int>(most) : kAll;
}

}  // namespace tandem::router
