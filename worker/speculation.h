// SPDX-License-Identifier: Apache-2.0
// What --speculative-config says, as in vLLM: a JSON object.
//
//   {"method": "ngram", "num_speculative_tokens": 5,
//    "prompt_lookup_min": 3, "prompt_lookup_max": 5}
//   {"method": "draft_model", "model": DIRECTORY, "num_speculative_tokens": 5,
//    "num_kv_blocks": 1000}

#ifndef TANDEM_WORKER_SPECULATION_H_
#define TANDEM_WORKER_SPECULATION_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "common/lifecycle.h"
#include "engine/engine.h"

namespace tandem::worker {

// Of the flag, whose name it says.
absl::Status InvalidSpeculation(const auto&... parts) {
  return UsageError(absl::StrCat("--speculative-config: ", parts...));
}

// Most guesses of a sequence in a step.
inline constexpr int kMaxSpeculativeTokens = 64;

struct SpeculativeConfig {
  engine::Speculation speculation;
  std::string draft_model;                  // its directory; empty: n-grams
  std::string draft_quantization = "none";  // as --quantization
  int draft_num_blocks = 0;  // of its KV cache; 0: as many as the model's
};

// "" is no speculation. num_speculative_tokens must be there; the ends of the
// n-grams' lengths are each other's default, and both 5 without either; a model
// alone says that it is a draft model. Errors: INVALID_ARGUMENT, with what is
// wrong.
absl::StatusOr<SpeculativeConfig> ParseSpeculativeConfig(
    const std::string& text);

// Draws that a step may hold: one of each sequence and all of its guesses, but
// no more than so few that their logits' memory stays small.
int MaxDraws(const engine::Speculation& speculation, int max_num_seqs,
             int max_num_batched_tokens);

}  // namespace tandem::worker

#endif  // TANDEM_WORKER_SPECULATION_H_
