// SPDX-License-Identifier: Apache-2.0
// How long prompts and outputs are: all alike, uniform around a mean, or
// lognormal, which is what production traces look like.

#ifndef TANDEM_CLI_BENCH_LENGTHS_H_
#define TANDEM_CLI_BENCH_LENGTHS_H_

#include "common/random.h"

namespace tandem::bench {

// Of a prompt and of an output, at most.
inline constexpr int kMaxTokens = 1 << 24;

struct LengthDistribution {
  enum class Kind { kUniform, kLogNormal };
  Kind kind = Kind::kUniform;
  int mean_tokens = 128;  // at least 1
  // Uniform: from mean (1 - ratio) rounded down to mean (1 + ratio) rounded
  // up, ends included, as vLLM has it. 0 is a fixed length.
  double range_ratio = 0;
  // Lognormal: the standard deviation of the length's logarithm.
  double sigma = 0.5;
};

// At least 1, at most kMaxTokens.
int DrawLength(const LengthDistribution& lengths, Random* random);

}  // namespace tandem::bench

#endif  // TANDEM_CLI_BENCH_LENGTHS_H_
