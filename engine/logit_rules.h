// SPDX-License-Identifier: Apache-2.0
// What changes a sequence's logits before a token is drawn from them, token by
// token: penalties, biases, ids that are allowed or banned, bad words.

#ifndef TANDEM_ENGINE_LOGIT_RULES_H_
#define TANDEM_ENGINE_LOGIT_RULES_H_

#include <algorithm>
#include <cstdint>
#include <vector>

namespace tandem::engine {

struct TokenBias {
  int32_t token_id = 0;
  float bias = 0;  // added to the logit; -inf bans
};

// Effective values of one sequence; see generation.proto.
struct LogitRules {
  // Of ids in prompt or output: positive logits are divided by it, others
  // multiplied (Keskar et al., "CTRL", 2019).
  float repetition_penalty = 1;
  // Of ids in the output: subtracted once, and once for each occurrence.
  float presence_penalty = 0;
  float frequency_penalty = 0;
  std::vector<TokenBias> logit_bias = {};
  std::vector<int32_t> allowed_ids = {};  // empty: all
  std::vector<int32_t> banned_ids = {};
  // The last id of each is banned while the history ends with those before it.
  std::vector<std::vector<int32_t>> bad_words = {};

  bool penalises() const {
    return repetition_penalty != 1 || presence_penalty != 0 ||
           frequency_penalty != 0;
  }
  // Whether the next token's rules depend on tokens before it, so that no step
  // can be prepared before the one that draws them is done.
  bool needs_history() const {
    return penalises() ||
           std::any_of(bad_words.begin(), bad_words.end(),
                       [](const auto& word) { return word.size() > 1; });
  }
};

}  // namespace tandem::engine

#endif  // TANDEM_ENGINE_LOGIT_RULES_H_
