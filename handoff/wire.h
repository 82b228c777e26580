// SPDX-License-Identifier: Apache-2.0
// Between messages and what the state machines hold.

#ifndef TANDEM_HANDOFF_WIRE_H_
#define TANDEM_HANDOFF_WIRE_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "handoff/handoff.h"

namespace tandem::handoff {

Attempt FromKey(const v1::AttemptKey& key);
void ToKey(const Attempt& attempt, v1::AttemptKey* key);

// Codes off the wire that mean success or nothing become UNKNOWN.
absl::Status FailureFrom(int32_t code, const std::string& message);
std::string Message(const absl::Status& status);

// One of kWireFormats.
std::optional<kernels::DType> ParseDType(std::string_view name);

// For tickets: SHA-256 over the sorted map.
std::string HashFingerprint(
    const std::map<std::string, std::string>& fingerprint);

// Whether a sender's hello fits a receiver: fingerprints field by field. The
// numerics field and the KV format may differ if both ends allow it.
struct Compatibility {
  absl::Status status;
  bool mixed = false;  // they do differ there
};
Compatibility Compare(const v1::LinkHello& hello,
                      const std::map<std::string, std::string>& fingerprint,
                      std::string_view kv_dtype, bool mixed_numerics);

struct ProtocolRange {
  uint32_t min = kProtocolMin;
  uint32_t max = kProtocolMax;
};
// What this program says that it speaks: that, but for a program with
// failpoints that TANDEM_PROTOCOL ("1..2") has pass for one of another version.
ProtocolRange OurProtocol();

// The version both ends speak: the highest that both know.
absl::StatusOr<uint32_t> NegotiateProtocol(uint32_t peer_min,
                                           uint32_t peer_max);

}  // namespace tandem::handoff

#endif  // TANDEM_HANDOFF_WIRE_H_
