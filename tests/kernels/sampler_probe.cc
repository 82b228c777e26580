// SPDX-License-Identifier: Apache-2.0
// Draws tokens for tools/oracle/compare_sampler.py, which states the sampler
// anew in NumPy. Reads one case per line on standard input:
//   vocab logits_seed temperature top_k top_p min_p typical_p seed index
//   position only_edited edits, then for each edit id bias repetition penalty
// and writes "token logprob rank". Logits are SplitMix64 of (seed, i), so
// that both sides make the same ones.

#include <cstdio>
#include <vector>

#include "tests/kernels/fixture.h"

namespace {

uint64_t SplitMix64(uint64_t state) {
  uint64_t z = state + 0x9e3779b97f4a7c15;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

}  // namespace

int main() {
  using tandem::kernels::SampleParams;
  using tandem::kernels::SampleResult;
  int vocab;
  unsigned long long logits_seed, seed;
  SampleParams params;
  while (std::scanf("%d %llu %f %d %f %f %f %llu %u %d %d %d", &vocab,
                    &logits_seed, &params.temperature, &params.top_k,
                    &params.top_p, &params.min_p, &params.typical_p, &seed,
                    &params.sequence_index, &params.position,
                    &params.only_edited, &params.num_edits) == 12) {
    std::vector<tandem::kernels::LogitEdit> edits(
        static_cast<size_t>(params.num_edits));
    for (auto& edit : edits) {
      if (std::scanf("%d %f %f %f", &edit.token_id, &edit.bias,
                     &edit.repetition, &edit.penalty) != 4) {
        return 1;
      }
    }
    params.seed = seed;
    params.logprobs = 0;
    std::vector<float> logits(static_cast<size_t>(vocab));
    for (size_t i = 0; i < logits.size(); ++i) {
      const uint64_t bits = SplitMix64(logits_seed * 1000003 + i) >> 48;
      logits[i] = static_cast<float>(bits) / 4096.0f - 8.0f;
    }
    tandem::kernels::Device round(tandem::kernels::MakeBackend());
    SampleResult* const result = round.New<SampleResult>(1);
    round->Sample(round.queue(), 1, vocab, round.Upload(logits),
                  round.Upload(std::vector<SampleParams>{params}),
                  round.Upload(edits), nullptr, result);
    const SampleResult drawn = round.Download(result, 1)[0];
    std::printf("%d %.9g %d\n", drawn.token_id,
                static_cast<double>(drawn.logprob), drawn.rank);
  }
  return 0;
}
