// SPDX-License-Identifier: Apache-2.0
#include "worker/grammars.h"

#include "common/error.h"

namespace tandem::worker {

absl::Status GrammarOverdue() {
  return MakeError(absl::StatusCode::kResourceExhausted, "QUEUE_FULL",
                   "too many grammars are waiting to be compiled here");
}

absl::Status CheckStructured(const v1::SamplingParams& sampling, int max_tokens,
                             bool offered) {
  if (!sampling.has_structured()) return absl::OkStatus();
  if (!offered) {
    return absl::InvalidArgumentError(
        "sampling.structured is set, and this worker offers no structured "
        "outputs: its model directory has no tokenizer that it can read");
  }
  if (sampling.has_beam()) {
    return absl::InvalidArgumentError(
        "sampling.structured and sampling.beam exclude each other");
  }
  if (max_tokens == 0) {
    return absl::InvalidArgumentError(
        "sampling.structured is set, and stopping.max_tokens is 0");
  }
  if (sampling.structured().options().constraint_case() ==
      v1::StructuredOptions::CONSTRAINT_NOT_SET) {
    return absl::InvalidArgumentError(
        "sampling.structured.options has no constraint");
  }
  return absl::OkStatus();
}

}  // namespace tandem::worker
