// SPDX-License-Identifier: Apache-2.0
// What prompts are made of. A prompt is a list of runs; a run is the first so
// many tokens of a stream, and token i of a stream is a pure function of
// (seed, stream, i). Two prompts share a prefix exactly where their lists
// begin alike, and a plan of a hundred thousand prompts holds no token.

#ifndef TANDEM_CLI_BENCH_PROMPT_H_
#define TANDEM_CLI_BENCH_PROMPT_H_

#include <cstdint>
#include <vector>

namespace tandem::bench {

struct PromptRun {
  uint64_t stream = 0;
  int tokens = 0;

  bool operator==(const PromptRun&) const = default;
};

// Streams that cannot meet: a request's own, prefixes that requests share,
// and the blocks of a trace (their ids, which are below 2^62).
constexpr uint64_t OwnStream(uint64_t request) {
  return (uint64_t{1} << 63) | request;
}
constexpr uint64_t PrefixStream(uint64_t prefix) {
  return (uint64_t{1} << 62) | prefix;
}
inline constexpr int64_t kLargestBlockId = (int64_t{1} << 62) - 1;

// The ids that prompts are drawn from: all below `size` but `left_out`, the
// model's end tokens.
class Vocabulary {
 public:
  // REQUIRES: some id is left.
  Vocabulary(uint32_t size, std::vector<uint32_t> left_out);

  // Uniform over the ids if `bits` is uniform.
  uint32_t Pick(uint64_t bits) const;

 private:
  std::vector<uint32_t> left_out_;  // ascending, each below the size
  uint32_t choices_;
};

int PromptTokens(const std::vector<PromptRun>& runs);

// Drops tokens from the end until `tokens` are left.
void TruncatePrompt(std::vector<PromptRun>* runs, int tokens);

std::vector<uint32_t> PromptIds(const std::vector<PromptRun>& runs,
                                uint64_t seed, const Vocabulary& vocabulary);

}  // namespace tandem::bench

#endif  // TANDEM_CLI_BENCH_PROMPT_H_
