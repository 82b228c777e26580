// SPDX-License-Identifier: Apache-2.0
// A decode worker's permission to send it one history's KV for one attempt.
// A serialised fixed-order record followed by HMAC-SHA-256 over it, with a
// key that is new per process and never leaves it; router and prefill worker
// carry it as opaque bytes.

#ifndef TANDEM_HANDOFF_TICKET_H_
#define TANDEM_HANDOFF_TICKET_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "handoff/handoff.h"

namespace tandem::handoff {

struct Ticket {
  Attempt attempt;
  std::string sender_id;
  std::string sender_incarnation;
  std::string receiver_incarnation;
  std::string fingerprint;  // hash of the receiver's fingerprint map
  int32_t max_positions = 0;
  absl::Time expires;  // on the issuer's own clock, which alone reads it
};

// `key` is 32 bytes.
std::string SealTicket(const Ticket& ticket, std::string_view key);
// PERMISSION_DENIED, with one generic message, for anything but an unchanged
// ticket of this key that has not expired. Constant-time comparison.
absl::StatusOr<Ticket> OpenTicket(std::string_view bytes, std::string_view key,
                                  absl::Time now);

}  // namespace tandem::handoff

#endif  // TANDEM_HANDOFF_TICKET_H_
