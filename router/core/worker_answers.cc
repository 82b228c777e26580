// SPDX-License-Identifier: Apache-2.0
#include "router/core/worker_answers.h"

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <limits>

#include "absl/strings/str_cat.h"

namespace tandem::router {
namespace {

// Longer than any request may take.
constexpr int64_t kLongestMicroseconds = int64_t{30} * 24 * 3600 * 1000 * 1000;
// More than the longest sequence has, and few enough to add up over those of a
// request; and over the hypotheses of a beam search.
constexpr int64_t kMostTokens = 1 << 25;
constexpr int64_t kMostHypothesised = 1 << 29;
constexpr int64_t kMostBytes = int64_t{1} << 60;

absl::Status Wrong(std::string_view what) {
  return absl::InternalError(
      absl::StrCat("a worker told of ", std::string(what)));
}

absl::Status WrongCount() { return Wrong("a count that no sequence comes to"); }

bool AllWithin(int64_t most, std::initializer_list<int64_t> values) {
  return std::all_of(values.begin(), values.end(), [most](int64_t value) {
    return value >= 0 && value <= most;
  });
}

bool IsId(int32_t id, int vocabulary) {
  return id >= 0 && (vocabulary == 0 || id < vocabulary);
}

absl::Status CheckToken(const v1::Token& token, int vocabulary) {
  const bool ids = IsId(token.token_id(), vocabulary) &&
                   std::all_of(token.top().begin(), token.top().end(),
                               [vocabulary](const v1::TopLogprob& top) {
                                 return IsId(top.token_id(), vocabulary);
                               });
  if (!ids) return Wrong("a token that the model has not");
  if (token.rank() < 0) return Wrong("a rank below zero");
  return absl::OkStatus();
}

template <typename Tokens>
absl::Status CheckTokens(const Tokens& tokens, int vocabulary) {
  for (const v1::Token& token : tokens) {
    const absl::Status status = CheckToken(token, vocabulary);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

// Other reasons are the router's to give.
absl::Status CheckReason(v1::FinishReason reason) {
  if (reason == v1::FINISH_REASON_UNSPECIFIED ||
      reason == v1::FINISH_REASON_STOP || reason == v1::FINISH_REASON_LENGTH) {
    return absl::OkStatus();
  }
  return Wrong(absl::StrCat("the finish reason ", static_cast<int>(reason)));
}

absl::Status CheckWork(const v1::Work& work) {
  if (AllWithin(std::numeric_limits<int64_t>::max(),
                {work.steps(), work.positions_computed(), work.kv_rows(),
                 work.positions_attended(), work.query_key_pairs(),
                 work.weight_bytes_read(), work.kv_bytes_read(),
                 work.kv_bytes_written(), work.matrix_flops(),
                 work.attention_flops()})) {
    return absl::OkStatus();
  }
  return Wrong("less work than none");
}

// Of DecodedTokens or DecodeFinished.
template <typename Told>
absl::Status CheckDrafts(const Told& told) {
  if (!AllWithin(kMostTokens,
                 {told.draft_tokens(), told.accepted_draft_tokens()})) {
    return WrongCount();
  }
  return told.accepted_draft_tokens() > told.draft_tokens()
             ? Wrong("more accepted tokens than drafted ones")
             : absl::OkStatus();
}

absl::Status CheckFinished(const v1::DecodeFinished& finished) {
  if (!AllWithin(kMostTokens,
                 {finished.cached_tokens(), finished.preemptions()}) ||
      !AllWithin(kMostHypothesised, {finished.completion_tokens()})) {
    return WrongCount();
  }
  if (!AllWithin(kLongestMicroseconds,
                 {finished.decode_us(), finished.local_prefill_us(),
                  finished.local_queue_us()})) {
    return Wrong("a time that no request takes");
  }
  absl::Status status = CheckDrafts(finished);
  status.Update(CheckReason(finished.reason()));
  status.Update(CheckWork(finished.work()));
  return status;
}

absl::Status CheckDone(const v1::PrefillDone& done) {
  if (!AllWithin(kLongestMicroseconds, {done.prefill_us(), done.handoff_us(),
                                        done.handoff_exposed_us()})) {
    return Wrong("a time that no request takes");
  }
  if (!AllWithin(kMostBytes, {done.handoff_bytes()})) return WrongCount();
  return CheckWork(done.work());
}

}  // namespace

absl::Status CheckAnswer(const v1::DecodeResponse& answer, int vocabulary) {
  absl::Status status;
  switch (answer.event_case()) {
    case v1::DecodeResponse::kOpened:
      if (AllWithin(kMostTokens, {answer.opened().cached_tokens()})) {
        return absl::OkStatus();
      }
      return WrongCount();
    case v1::DecodeResponse::kTokens:
      status = CheckTokens(answer.tokens().tokens(), vocabulary);
      status.Update(CheckWork(answer.tokens().work()));
      status.Update(CheckDrafts(answer.tokens()));
      return status;
    case v1::DecodeResponse::kHypothesis:
      status = CheckTokens(answer.hypothesis().tokens(), vocabulary);
      status.Update(CheckReason(answer.hypothesis().reason()));
      return status;
    case v1::DecodeResponse::kScores:
      return CheckTokens(answer.scores().tokens(), vocabulary);
    case v1::DecodeResponse::kFinished:
      return CheckFinished(answer.finished());
    case v1::DecodeResponse::kStarted:
    case v1::DecodeResponse::kDead:
    case v1::DecodeResponse::kBeat:
    case v1::DecodeResponse::EVENT_NOT_SET:
      return absl::OkStatus();
  }
  return absl::OkStatus();
}

absl::Status CheckAnswer(const v1::PrefillResponse& answer, int vocabulary) {
  absl::Status status;
  switch (answer.event_case()) {
    case v1::PrefillResponse::kStarted:
      if (!AllWithin(kMostTokens, {answer.started().cached_tokens()})) {
        return WrongCount();
      }
      if (!AllWithin(kLongestMicroseconds, {answer.started().queue_us()})) {
        return Wrong("a time that no request takes");
      }
      return absl::OkStatus();
    case v1::PrefillResponse::kFirstToken:
      status = CheckToken(answer.first_token().token(), vocabulary);
      status.Update(CheckReason(answer.first_token().finish_reason()));
      status.Update(CheckWork(answer.first_token().work()));
      return status;
    case v1::PrefillResponse::kScores:
      return CheckTokens(answer.scores().tokens(), vocabulary);
    case v1::PrefillResponse::kDone:
      return CheckDone(answer.done());
    case v1::PrefillResponse::kBeat:
    case v1::PrefillResponse::EVENT_NOT_SET:
      return absl::OkStatus();
  }
  return absl::OkStatus();
}

}  // namespace tandem::router
