// SPDX-License-Identifier: Apache-2.0
#include "engine/logit_edits.h"

#include <algorithm>
#include <limits>

namespace tandem::engine {
namespace {

using kernels::LogitEdit;

constexpr float kBanned = -std::numeric_limits<float>::infinity();

// Whether the word's last id would complete it.
bool AwaitsLast(absl::Span<const int32_t> history,
                const std::vector<int32_t>& word) {
  const size_t before = word.size() - 1;
  return history.size() >= before &&
         std::equal(word.begin(), word.end() - 1, history.end() - before);
}

}  // namespace

LogitEdits::LogitEdits(const LogitRules* rules,
                       absl::Span<const int32_t> owed_ids,
                       absl::Span<const int32_t> history, int prompt_tokens)
    : rules_(rules), owed_ids_(owed_ids.begin(), owed_ids.end()) {
  std::vector<int32_t> allowed = rules_->allowed_ids;
  std::sort(allowed.begin(), allowed.end());
  for (const int32_t id : allowed) AddPermanent(id, 0);
  sealed_ = only_edited();
  for (const TokenBias& bias : rules_->logit_bias) {
    AddPermanent(bias.token_id, bias.bias);
  }
  for (const int32_t id : rules_->banned_ids) AddPermanent(id, kBanned);
  for (const auto& word : rules_->bad_words) {
    if (word.size() == 1) AddPermanent(word[0], kBanned);
  }
  if (!rules_->penalises()) return;
  for (size_t i = 0; i < history.size(); ++i) {
    Count(history[i],
          static_cast<int>(i) < prompt_tokens ? From::kPrompt : From::kOutput);
  }
}

int LogitEdits::Find(int32_t id) const {
  const auto it = places_.find(id);
  return it == places_.end() ? -1 : it->second;
}

void LogitEdits::AddPermanent(int32_t id, float bias) {
  const int at = Find(id);
  if (at >= 0) {
    edits_[static_cast<size_t>(at)].bias += bias;
  } else if (!sealed_) {
    places_[id] = static_cast<int>(edits_.size());
    edits_.push_back({.token_id = id, .bias = bias});
    output_counts_.push_back(0);
  }
}

void LogitEdits::Count(int32_t token, From from) {
  // Prompts matter to repetition alone.
  if (from == From::kPrompt && rules_->repetition_penalty == 1) return;
  AddPermanent(token, 0);
  const int found = Find(token);
  if (found < 0) return;  // may not be drawn anyway
  const auto at = static_cast<size_t>(found);
  edits_[at].repetition = rules_->repetition_penalty;
  if (from == From::kPrompt) return;
  const int count = ++output_counts_[at];
  edits_[at].penalty = rules_->frequency_penalty * static_cast<float>(count) +
                       rules_->presence_penalty;
}

void LogitEdits::Append(int32_t token) {
  TakeBackBans();
  if (rules_->penalises()) Count(token, From::kOutput);
}

void LogitEdits::Guess(int32_t token) {
  TakeBackBans();
  if (!rules_->penalises()) return;
  const int found = Find(token);
  Before before{.at = found, .made = found < 0, .edit = {}, .count = 0};
  if (found >= 0) {
    before.edit = edits_[static_cast<size_t>(found)];
    before.count = output_counts_[static_cast<size_t>(found)];
  }
  Count(token, From::kOutput);
  before.at = Find(token);
  if (before.at >= 0) guesses_.push_back(before);
}

void LogitEdits::TakeBackGuesses() {
  TakeBackBans();
  while (!guesses_.empty()) {
    const Before& before = guesses_.back();
    const auto at = static_cast<size_t>(before.at);
    if (before.made) {  // and so it is the last
      places_.erase(edits_[at].token_id);
      edits_.pop_back();
      output_counts_.pop_back();
    } else {
      edits_[at] = before.edit;
      output_counts_[at] = before.count;
    }
    guesses_.pop_back();
  }
}

void LogitEdits::Ban(int32_t id) {
  const int found = Find(id);
  if (found >= 0) {
    LogitEdit& edit = edits_[static_cast<size_t>(found)];
    bans_.push_back({static_cast<size_t>(found), edit.bias});
    edit.bias = kBanned;
    return;
  }
  const auto begin =
      edits_.begin() + static_cast<std::ptrdiff_t>(output_counts_.size());
  if (sealed_ || std::any_of(begin, edits_.end(), [id](const LogitEdit& edit) {
        return edit.token_id == id;
      })) {
    return;
  }
  edits_.push_back({.token_id = id, .bias = kBanned});
}

void LogitEdits::TakeBackBans() {
  while (!bans_.empty()) {
    edits_[bans_.back().at].bias = bans_.back().bias;
    bans_.pop_back();
  }
  edits_.resize(output_counts_.size());
}

absl::Span<const LogitEdit> LogitEdits::Next(absl::Span<const int32_t> history,
                                             bool tokens_owed) {
  TakeBackBans();
  if (tokens_owed) {
    for (const int32_t id : owed_ids_) Ban(id);
  }
  for (const auto& word : rules_->bad_words) {
    if (word.size() > 1 && AwaitsLast(history, word)) Ban(word.back());
  }
  return edits_;
}

}  // namespace tandem::engine
