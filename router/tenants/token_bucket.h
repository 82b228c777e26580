// SPDX-License-Identifier: Apache-2.0
// A token bucket that holds one minute's worth and fills evenly. Exact: it
// counts in units of a token's 60e9th part, of which a limit of L per minute
// yields L in a nanosecond, so nothing is ever rounded.
//
// It may go below zero, by what turned out to cost more than was thought, and
// gives nothing out before that is made up for. Not thread-safe.

#ifndef TANDEM_ROUTER_TENANTS_TOKEN_BUCKET_H_
#define TANDEM_ROUTER_TENANTS_TOKEN_BUCKET_H_

#include <algorithm>
#include <cstdint>

#include "absl/numeric/int128.h"
#include "absl/time/time.h"

namespace tandem::router {

class TokenBucket {
 public:
  // `per_minute` of 0: no limit. Full at first.
  TokenBucket(int64_t per_minute, absl::Time now)
      : per_minute_(per_minute), level_(Capacity()), at_(now) {}

  // What was taken stays taken, as far as it leaves an empty bucket: of a limit
  // far below the old one it may be hours' worth. Debts are kept.
  void SetLimit(int64_t per_minute, absl::Time now) {
    Fill(now);
    const absl::int128 taken = Capacity() - level_;
    per_minute_ = per_minute;
    level_ = per_minute == 0 ? 0
                             : std::max(Capacity() - taken,
                                        std::min(level_, absl::int128(0)));
  }

  int64_t limit() const { return per_minute_; }
  bool Has(int64_t amount, absl::Time now) {
    Fill(now);
    return per_minute_ == 0 || level_ >= absl::int128(amount) * kUnits;
  }
  void Take(int64_t amount, absl::Time now) {
    Fill(now);
    if (per_minute_ != 0) level_ -= absl::int128(amount) * kUnits;
  }
  void Give(int64_t amount, absl::Time now) {
    Fill(now);
    level_ = std::min(level_ + absl::int128(amount) * kUnits, Capacity());
  }

  // How many may be taken; at least 0.
  int64_t Left(absl::Time now) {
    Fill(now);
    return level_ <= 0 ? 0 : static_cast<int64_t>(level_ / kUnits);
  }
  // When `amount` may be taken, rounded up to a nanosecond; infinite if it
  // never may.
  absl::Duration Until(int64_t amount, absl::Time now) {
    if (Has(amount, now)) return absl::ZeroDuration();
    if (amount > per_minute_) return absl::InfiniteDuration();
    const absl::int128 missing = absl::int128(amount) * kUnits - level_;
    return absl::Nanoseconds(
        static_cast<int64_t>((missing + per_minute_ - 1) / per_minute_));
  }
  absl::Duration UntilFull(absl::Time now) { return Until(per_minute_, now); }

 private:
  static constexpr int64_t kUnits = 60'000'000'000;  // ns of a minute

  absl::int128 Capacity() const { return absl::int128(per_minute_) * kUnits; }
  void Fill(absl::Time now) {
    if (now <= at_) return;  // threads may bring their clocks out of order
    const int64_t nanos = absl::ToInt64Nanoseconds(now - at_);
    at_ += absl::Nanoseconds(nanos);
    level_ = std::min(level_ + absl::int128(per_minute_) * nanos, Capacity());
  }

  int64_t per_minute_;
  absl::int128 level_;  // units
  absl::Time at_;
};

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_TENANTS_TOKEN_BUCKET_H_
