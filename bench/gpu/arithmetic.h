// SPDX-License-Identifier: Apache-2.0
// What a step must move and compute, and so how fast it could be: the sum over
// its operators of the longer of bytes / bandwidth and operations / rate. The
// sum and not the longer of the sums, since operators follow one another.

#ifndef TANDEM_BENCH_GPU_ARITHMETIC_H_
#define TANDEM_BENCH_GPU_ARITHMETIC_H_

#include <cstdint>
#include <string>
#include <vector>

namespace tandem::bench {

// A decoder of the Llama kind, without biases.
struct Shape {
  int layers = 0;
  int hidden = 0;
  int heads = 0;
  int kv_heads = 0;
  int head_dim = 0;
  int intermediate = 0;
  int vocab = 0;

  int qkv_rows() const { return (heads + 2 * kv_heads) * head_dim; }
};

inline constexpr Shape kLlama8B{32, 4096, 32, 8, 128, 14336, 128256};

// Bytes of an element.
struct Widths {
  double weight = 2;  // of the layers' matrices
  double head = 2;
  double activation = 2;
  double kv = 2;
};

struct Work {
  double bytes = 0;
  double flops = 0;
  Work& operator+=(const Work& other) {
    bytes += other.bytes;
    flops += other.flops;
    return *this;
  }
};

struct Limits {
  double bytes_per_second = 0;  // read and written by a copy
  double flops_per_second = 0;  // of a large matrix product
};

// w [rows, cols] for `tokens` rows of activations; `outputs` of each, where
// that is less than the rows (gates).
Work MatMulWork(int64_t tokens, int64_t rows, int64_t cols,
                const Widths& widths);
Work MatMulWork(int64_t tokens, int64_t rows, int64_t cols, int64_t outputs,
                const Widths& widths);
// Of one layer; each of `queries` consecutive positions, the last of which
// sees `context` keys, its own included; KV is read once.
Work AttentionWork(const Shape& shape, int64_t queries, int64_t context,
                   const Widths& widths);

// The operators of one step over `sequences`, each with `queries` new
// positions and `context` positions in all, one token drawn for each.
std::vector<Work> StepWork(const Shape& shape, int sequences, int64_t queries,
                           int64_t context, const Widths& widths);

Work Sum(const std::vector<Work>& operators);
double LimitSeconds(const std::vector<Work>& operators, const Limits& limits);

// Weights that a decode step reads, and the KV of its sequences.
double DecodeBytes(const Shape& shape, int sequences, int64_t context,
                   const Widths& widths);

}  // namespace tandem::bench

#endif  // TANDEM_BENCH_GPU_ARITHMETIC_H_
