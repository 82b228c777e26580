// SPDX-License-Identifier: Apache-2.0
// What must hold between any two tasks of the loop. For tests.

#include "absl/strings/str_cat.h"
#include "prefill_worker/call.h"
#include "prefill_worker/core.h"

namespace tandem::prefill_worker {

absl::Status PrefillCore::CheckInvariants() const {
  int promised = 0, offered = 0, live = 0;
  int64_t queued_tokens = 0;
  for (const auto& [id, call] : calls_) {
    const bool computes =
        call->phase == Phase::kComputing || call->phase == Phase::kSending;
    if (computes != engine_.contains(id)) {
      return absl::InternalError(absl::StrCat(
          "call ", id, " and the engine disagree on whether it computes"));
    }
    promised += call->promised_blocks;
    const bool begun = computes || call->phase == Phase::kOffered;
    offered += begun && !call->only_scores() ? 1 : 0;
    live += call->phase == Phase::kNew ? 0 : 1;
    if (call->phase == Phase::kQueued) queued_tokens += call->uncached;
  }
  if (promised != promised_blocks_ || queued_tokens != queued_tokens_ ||
      live != static_cast<int>(attempts_.size()) ||
      offered != sender_.attempts()) {
    return absl::InternalError(absl::StrCat(
        "the calls come to ", promised, " promised blocks, ", queued_tokens,
        " queued tokens, ", live, " attempts, ", offered,
        " of them offered; counted are ", promised_blocks_, ", ",
        queued_tokens_, ", ", attempts_.size(), ", ", sender_.attempts()));
  }
  absl::Status status = engine_.CheckInvariants();
  if (status.ok()) status = sender_.CheckInvariants();
  return status;
}

}  // namespace tandem::prefill_worker
