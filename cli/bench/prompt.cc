// SPDX-License-Identifier: Apache-2.0
#include "cli/bench/prompt.h"

#include <algorithm>
#include <utility>

#include "common/check.h"
#include "common/random.h"

namespace tandem::bench {
namespace {

// One step of SplitMix64: a bijection that scatters neighbours.
uint64_t Scatter(uint64_t value) { return SeededRandom(value).Next(); }

}  // namespace

Vocabulary::Vocabulary(uint32_t size, std::vector<uint32_t> left_out)
    : left_out_(std::move(left_out)) {
  std::sort(left_out_.begin(), left_out_.end());
  left_out_.erase(std::unique(left_out_.begin(), left_out_.end()),
                  left_out_.end());
  left_out_.erase(std::lower_bound(left_out_.begin(), left_out_.end(), size),
                  left_out_.end());
  TANDEM_CHECK(left_out_.size() < size, "no id is left to draw");
  choices_ = size - static_cast<uint32_t>(left_out_.size());
}

uint32_t Vocabulary::Pick(uint64_t bits) const {
  // The high half scaled: no remainder, and a bias below 2^-32 * size.
  auto id = static_cast<uint32_t>(((bits >> 32) * choices_) >> 32);
  for (const uint32_t skipped : left_out_) {
    if (id < skipped) break;
    ++id;
  }
  return id;
}

int PromptTokens(const std::vector<PromptRun>& runs) {
  int tokens = 0;
  for (const PromptRun& run : runs) tokens += run.tokens;
  return tokens;
}

void TruncatePrompt(std::vector<PromptRun>* runs, int tokens) {
  size_t kept = 0;
  while (kept < runs->size() && tokens > 0) {
    PromptRun& run = (*runs)[kept++];
    run.tokens = std::min(run.tokens, tokens);
    tokens -= run.tokens;
  }
  runs->resize(kept);
}

std::vector<uint32_t> PromptIds(const std::vector<PromptRun>& runs,
                                uint64_t seed, const Vocabulary& vocabulary) {
  std::vector<uint32_t> ids;
  ids.reserve(PromptTokens(runs));
  for (const PromptRun& run : runs) {
    SeededRandom stream(Scatter(seed) ^ Scatter(~run.stream));
    for (int i = 0; i < run.tokens; ++i) {
      ids.push_back(vocabulary.Pick(stream.Next()));
    }
  }
  return ids;
}

}  // namespace tandem::bench
