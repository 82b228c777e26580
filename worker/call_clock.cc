// SPDX-License-Identifier: Apache-2.0
#include "worker/call_clock.h"

#include "absl/strings/str_cat.h"
#include "common/error.h"
#include "worker/grammars.h"

namespace tandem::worker {

void TimedCall::Pause(size_t unsent, absl::Time now) {
  paused = true;
  paused_since = now;
  paused_unsent = unsent;
}

void TimedCall::LookAtReader(size_t unsent, absl::Time now) {
  if (unsent < paused_unsent) paused_since = now;
  paused_unsent = unsent;
}

void TimedCall::OnBeat(bool not_reading, absl::Time now) {
  if (not_reading) paused_since = now;
}

absl::Status Overdue(const TimedCall& call, bool opened, absl::Time now,
                     bool judge, absl::Duration lease,
                     absl::Duration stall_limit) {
  const bool idle = !opened && call.compiling == 0;
  if (now >= call.times.deadline && (judge || !idle)) {
    return absl::DeadlineExceededError(idle ? "the call was not opened"
                                            : "the request's deadline passed");
  }
  if (judge && now - call.times.heard > lease) {
    return absl::UnavailableError(absl::StrCat(
        "nothing heard from the router for ", absl::FormatDuration(lease)));
  }
  if (judge && call.compiling != 0 &&
      now - call.compiling_since > kGrammarLimit) {
    return GrammarOverdue();
  }
  if (call.paused && now - call.paused_since > stall_limit) {
    return MakeError(absl::StatusCode::kResourceExhausted, "SLOW_READER",
                     absl::StrCat("the reader took nothing for ",
                                  absl::FormatDuration(stall_limit)));
  }
  return absl::OkStatus();
}

bool OwesBeat(const TimedCall& call, bool opened, absl::Time now) {
  return now - call.times.said >= kBeat && (opened || call.compiling != 0);
}

}  // namespace tandem::worker
