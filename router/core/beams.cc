// SPDX-License-Identifier: Apache-2.0
// A request for a beam search: one sequence to the workers, that begins anew
// with every attempt, and n to the client. Nothing is sent before the decode
// worker has sent all hypotheses.

#include <utility>

#include "absl/strings/str_cat.h"
#include "router/core/legs.h"
#include "router/core/request.h"

namespace tandem::router {
namespace {

// Tokens of a hypothesis in one message.
constexpr int kTokensPerDelta = 256;

}  // namespace

void Request::OnHypothesis(const v1::DecodedHypothesis& part) {
  const int index = part.index();
  const int known = static_cast<int>(hypotheses_.size());
  const bool goes_on =
      known > 0 && index == known - 1 &&
      hypotheses_.back().reason() == v1::FINISH_REASON_UNSPECIFIED;
  const bool next = index == known && index < effective_.sampling.n() &&
                    (known == 0 || hypotheses_.back().reason() !=
                                       v1::FINISH_REASON_UNSPECIFIED);
  if (next) hypotheses_.emplace_back();
  if (goes_on || next) {
    v1::DecodedHypothesis& hypothesis = hypotheses_.back();
    hypothesis.mutable_tokens()->MergeFrom(part.tokens());
    hypothesis.set_reason(part.reason());
    if (hypothesis.tokens_size() <= effective_.stopping.max_tokens()) return;
  }
  DecodeLost(absl::InternalError(
      absl::StrCat("hypothesis ", index, " came where that was not due")));
}

void Request::FinishBeams() {
  if (hypotheses_.empty() ||
      hypotheses_.back().reason() == v1::FINISH_REASON_UNSPECIFIED) {
    DecodeLost(absl::InternalError(
        "the decode worker ended a beam search without hypotheses"));
    return;
  }
  const absl::Time now = context_.loop->Now();
  BeginEnding();
  context_.counters->set_tokens(context_.counters->tokens() +
                                decode_finished_.completion_tokens());
  first_token_ = last_token_ = now;
  context_.observer->OnFirstToken(decode_finished_.completion_tokens(),
                                  now - admitted_);
  context_.host->OnFirstToken();
  for (int i = 0; i < effective_.sampling.n(); ++i) {
    const auto at = static_cast<size_t>(i);
    Output& output = i == 0 ? output_ : *other_outputs_[at - 1];
    if (i > 0 && effective_.output.echo()) output.Echo();
    v1::FinishReason reason = v1::FINISH_REASON_LENGTH;
    if (at < hypotheses_.size()) {
      reason = hypotheses_[at].reason();
      for (int t = 0; t < hypotheses_[at].tokens_size(); ++t) {
        output.Add(hypotheses_[at].tokens(t));
        if ((t + 1) % kTokensPerDelta == 0) output.Flush();
      }
    }
    reason = output.Finished(reason);
    if (i == 0) finish_reason_ = reason;
  }
  EndCalls();
}

}  // namespace tandem::router
