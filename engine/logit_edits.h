// SPDX-License-Identifier: Apache-2.0
// What one sequence's rules (engine/logit_rules.h) and its owed tokens make of
// its next token's logits: a list of edits of single ids, kept up to date
// token by token, so that a step costs nothing by the vocabulary or by the
// length of the history.

#ifndef TANDEM_ENGINE_LOGIT_EDITS_H_
#define TANDEM_ENGINE_LOGIT_EDITS_H_

#include <cstdint>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/types/span.h"
#include "engine/logit_rules.h"
#include "kernels/types.h"

namespace tandem::engine {

class LogitEdits {
 public:
  // `rules` outlives this. `owed_ids` are those that Next bans until all owed
  // tokens are there. `history` is what has been, `prompt_tokens` of it prompt.
  LogitEdits(const LogitRules* rules, absl::Span<const int32_t> owed_ids,
             absl::Span<const int32_t> history, int prompt_tokens);

  // A token of the output.
  void Append(int32_t token);
  // As Append, until TakeBackGuesses.
  void Guess(int32_t token);
  void TakeBackGuesses();

  // Of the token that follows `history`, which ends with what was appended.
  // Valid until the next call of either. Where rules do not need history, the
  // token before may still be unknown.
  absl::Span<const kernels::LogitEdit> Next(absl::Span<const int32_t> history,
                                            bool tokens_owed);
  // Only ids with an edit may be drawn; then Next's ascend.
  bool only_edited() const { return !rules_->allowed_ids.empty(); }

 private:
  enum class From { kPrompt, kOutput };
  struct Undo {
    size_t at;
    float bias;
  };
  // The edit that a guess changed, as it was.
  struct Before {
    int at;
    bool made;  // it was not there
    kernels::LogitEdit edit;
    int32_t count;
  };

  // Adds the bias to the id's edit, which it makes if there is none; not where
  // the id is not allowed.
  void AddPermanent(int32_t id, float bias);
  // Where the id's edit is, or -1.
  int Find(int32_t id) const;
  void Count(int32_t token, From from);
  void Ban(int32_t id);
  void TakeBackBans();

  const LogitRules* rules_;
  bool sealed_ = false;  // no more ids
  std::vector<int32_t> owed_ids_;
  // Those that stay, then ids that are banned for the next token alone.
  std::vector<kernels::LogitEdit> edits_;
  std::vector<int32_t> output_counts_;        // of each edit that stays
  absl::flat_hash_map<int32_t, int> places_;  // of those
  std::vector<Undo> bans_;
  std::vector<Before> guesses_;
};

}  // namespace tandem::engine

#endif  // TANDEM_ENGINE_LOGIT_EDITS_H_
