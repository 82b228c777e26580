// SPDX-License-Identifier: Apache-2.0
// Microseconds to draw one token from one row on one thread of the CPU backend,
// by options of sampling: medians of 201 draws at other positions.
//
//   sample_bench [--isa auto|avx2|avx512]
//
// Logits are normally distributed with a standard deviation of 2.5: flatter
// than a trained model's, so that top-p and typical-p have much to look at.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <random>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/cpu/cpu_backend.h"

namespace {

using namespace tandem::kernels;  // NOLINT: a program of one file

struct Case {
  const char* name;
  SampleParams params;
};

const Case kCases[] = {
    {"greedy", {}},
    {"temperature", {.temperature = 1}},
    {"top-k 40", {.temperature = 1, .top_k = 40}},
    {"top-k 40, top-p 0.9", {.temperature = 1, .top_p = 0.9f, .top_k = 40}},
    {"top-p 0.95", {.temperature = 1, .top_p = 0.95f}},
    {"min-p 0.05", {.temperature = 1, .min_p = 0.05f}},
    {"typical-p 0.9", {.temperature = 1, .typical_p = 0.9f}},
    {"greedy, 5 log probabilities", {.logprobs = 5}},
    {"a mask of all", {.temperature = 1, .mask = 0}},
};

double Median(Backend& backend, std::vector<float>& logits, SampleParams params,
              const std::vector<uint32_t>& mask) {
  const auto queue = backend.NewQueue("sample");
  SampleResult result;
  std::vector<double> microseconds;
  for (int i = 0; i < 201; ++i) {
    params.position = i;
    const auto begin = std::chrono::steady_clock::now();
    backend.Sample(*queue, 1, static_cast<int>(logits.size()), logits.data(),
                   &params, nullptr, mask.data(), &result);
    queue->Synchronize();
    microseconds.push_back(std::chrono::duration<double, std::micro>(
                               std::chrono::steady_clock::now() - begin)
                               .count());
  }
  std::sort(microseconds.begin(), microseconds.end());
  return microseconds[microseconds.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  CpuOptions options;
  options.threads = 1;
  if (argc == 3 && std::string_view(argv[1]) == "--isa") {
    options.instruction_set = argv[2];
  } else if (argc != 1) {
    std::fprintf(stderr, "usage: sample_bench [--isa auto|avx2|avx512]\n");
    return 2;
  }
  auto backend = NewCpuBackend(options);
  if (!backend.ok()) {
    std::fprintf(stderr, "sample_bench: %s\n",
                 std::string(backend.status().message()).c_str());
    return 1;
  }
  std::printf("| %s | 49 152 ids | 151 936 ids |\n| --- | --- | --- |\n",
              (*backend)->description().c_str());
  for (const Case& c : kCases) {
    std::printf("| %s |", c.name);
    for (const int vocab : {49152, 151936}) {
      std::mt19937 random(1);
      std::normal_distribution<float> normal(0, 2.5f);
      std::vector<float> logits(static_cast<size_t>(vocab));
      for (float& logit : logits) logit = normal(random);
      const std::vector<uint32_t> mask(static_cast<size_t>(MaskWords(vocab)),
                                       ~0u);
      std::printf(" %.0f us |", Median(**backend, logits, c.params, mask));
      std::fflush(stdout);
    }
    std::printf("\n");
  }
  return 0;
}
