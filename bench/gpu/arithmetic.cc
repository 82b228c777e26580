// SPDX-License-Identifier: Apache-2.0
#include "bench/gpu/arithmetic.h"

#include <algorithm>

namespace tandem::bench {

Work MatMulWork(int64_t tokens, int64_t rows, int64_t cols,
                const Widths& widths) {
  return MatMulWork(tokens, rows, cols, rows, widths);
}

Work MatMulWork(int64_t tokens, int64_t rows, int64_t cols, int64_t outputs,
                const Widths& widths) {
  const auto weights = static_cast<double>(rows) * static_cast<double>(cols);
  const auto activations =
      static_cast<double>(tokens) * static_cast<double>(outputs + cols);
  return {weights * widths.weight + activations * widths.activation,
          2 * weights * static_cast<double>(tokens)};
}

Work AttentionWork(const Shape& shape, int64_t queries, int64_t context,
                   const Widths& widths) {
  const auto n = static_cast<double>(queries);
  const auto keys = static_cast<double>(context);
  // The first query sees n - 1 keys less than the last.
  const double pairs = n * keys - n * (n - 1) / 2;
  const double width = static_cast<double>(shape.heads) * shape.head_dim;
  const double kv = 2.0 * shape.kv_heads * shape.head_dim * keys;
  return {kv * widths.kv + 2 * n * width * widths.activation,
          4 * pairs * width};
}

std::vector<Work> StepWork(const Shape& shape, int sequences, int64_t queries,
                           int64_t context, const Widths& widths) {
  const int64_t tokens = sequences * queries;
  const int query = shape.heads * shape.head_dim;
  std::vector<Work> operators;
  for (int i = 0; i < shape.layers; ++i) {
    operators.push_back(
        MatMulWork(tokens, shape.qkv_rows(), shape.hidden, widths));
    Work attention;
    for (int s = 0; s < sequences; ++s) {
      attention += AttentionWork(shape, queries, context, widths);
    }
    operators.push_back(attention);
    // After the last layer's attention only the rows drawn from go on.
    const int64_t rows = i + 1 < shape.layers ? tokens : sequences;
    operators.push_back(MatMulWork(rows, shape.hidden, query, widths));
    operators.push_back(MatMulWork(rows, 2 * shape.intermediate, shape.hidden,
                                   shape.intermediate, widths));
    operators.push_back(
        MatMulWork(rows, shape.hidden, shape.intermediate, widths));
  }
  operators.push_back(
      MatMulWork(sequences, shape.vocab, shape.hidden,
                 {.weight = widths.head, .activation = widths.activation}));
  return operators;
}

Work Sum(const std::vector<Work>& operators) {
  Work sum;
  for (const Work& work : operators) sum += work;
  return sum;
}

double LimitSeconds(const std::vector<Work>& operators, const Limits& limits) {
  double seconds = 0;
  for (const Work& work : operators) {
    seconds += std::max(work.bytes / limits.bytes_per_second,
                        work.flops / limits.flops_per_second);
  }
  return seconds;
}

double DecodeBytes(const Shape& shape, int sequences, int64_t context,
                   const Widths& widths) {
  const double layer =
      static_cast<double>(shape.hidden) *
      (shape.qkv_rows() + double{1} * shape.heads * shape.head_dim +
       3.0 * shape.intermediate);
  const double head = static_cast<double>(shape.vocab) * shape.hidden;
  const double kv = 2.0 * shape.kv_heads * shape.head_dim *
                    static_cast<double>(context) * sequences * shape.layers;
  return layer * shape.layers * widths.weight + head * widths.head +
         kv * widths.kv;
}

}  // namespace tandem::bench
