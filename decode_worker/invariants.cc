// SPDX-License-Identifier: Apache-2.0
// What must hold between any two tasks of the loop. For tests.

#include "absl/strings/str_cat.h"
#include "decode_worker/call.h"
#include "decode_worker/core.h"

namespace tandem::decode_worker {

absl::Status DecodeCore::CheckInvariants() const {
  const auto wrong = [](const Call& call, const char* what) {
    return absl::InternalError(absl::StrCat("call ", call.id, " ", what));
  };
  int remote = 0, cells = 0;
  for (const auto& [id, call] : calls_) {
    const bool running = call->phase == Phase::kRunning;
    if (running != engine_.contains(id)) {
      return wrong(*call, "and the engine disagree on whether it runs");
    }
    const auto attempt = attempts_.find(call->attempt);
    const bool live = attempt != attempts_.end() && attempt->second == id;
    if (live != (call->phase == Phase::kRemote)) {
      return wrong(*call, "has a live attempt in another phase, or none");
    }
    remote += live ? 1 : 0;
    const Landing& landing = call->landing;
    if (landing.granted != landing.reserved.has_value() ||
        (landing.granted && !live)) {
      return wrong(*call, "holds a grant without an attempt or blocks");
    }
    if (landing.granted) {
      for (const int32_t block : landing.reserved->ids()) {
        cells += pool_->cells().held(block);
      }
    }
    if (call->phase == Phase::kNew) continue;
    const auto by_request = by_request_.find(call->request_key);
    if (by_request == by_request_.end() || by_request->second != id) {
      return wrong(*call, "shares its sequence with another call");
    }
  }
  if (remote != static_cast<int>(attempts_.size()) ||
      remote != receiver_.tickets()) {
    return absl::InternalError(absl::StrCat(
        remote, " calls wait for handoffs, with ", attempts_.size(),
        " attempts and ", receiver_.tickets(), " tickets"));
  }
  // Queued scatters may hold more.
  const int reserved = cells / pool_->cells().parts().count();
  if (reserved > pool_->counts().reserved) {
    return absl::InternalError(absl::StrCat(
        "grants hold ", reserved, " blocks, of ", pool_->counts().reserved));
  }
  absl::Status status = engine_.CheckInvariants();
  if (status.ok()) status = receiver_.CheckInvariants();
  return status;
}

}  // namespace tandem::decode_worker
