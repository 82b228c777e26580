// SPDX-License-Identifier: Apache-2.0
#include "engine/work.h"

#include <algorithm>
#include <cmath>

namespace tandem::engine {
namespace {

int64_t SumFrom(int64_t terms, int64_t first) {  // first + (first + 1) + ...
  return terms * first + terms * (terms - 1) / 2;
}

}  // namespace

int64_t QueryKeyPairs(int64_t first, int64_t rows, int64_t window) {
  if (window == 0) return SumFrom(rows, first + 1);
  // Queries before position window - 1 see less than a window.
  const int64_t growing = std::clamp<int64_t>(window - 1 - first, 0, rows);
  return SumFrom(growing, first + 1) + (rows - growing) * window;
}

void WorkShape::AddAttention(int64_t first, int64_t rows, const Layers& layers,
                             Work* work) const {
  const int64_t of = layers.window;
  const int64_t count = layers.count;
  const int64_t pairs = count * heads * QueryKeyPairs(first, rows, of);
  const int64_t begin = of == 0 ? 0 : std::max<int64_t>(0, first + 1 - of);
  work->query_key_pairs += pairs;
  // q k and p v: a multiplication and an addition per element each.
  work->attention_flops += 4 * pairs * layers.head_dim;
  work->kv_bytes_read += count * layers.kv_heads * 2 * layers.kv_vector_bytes *
                         (first + rows - begin);
}

Work WorkShape::EntryWork(int64_t first, int64_t rows, int64_t draws) const {
  Work work;
  work.steps = 1;
  work.positions_computed = rows;
  const int64_t drawn_first = first + rows - draws;
  for (const Layers& kind : {full, windowed}) {
    const int64_t kv_rows = rows * (kind.count - kind.shared) * kind.kv_heads;
    work.kv_rows += kv_rows;
    work.kv_bytes_written += kv_rows * 2 * kind.kv_vector_bytes;
    work.positions_attended += int64_t{heads} * kind.count *
                               QueryKeyPairs(drawn_first, draws, kind.window);
  }
  // Behind the last K and V nothing is left to do for nobody.
  Layers seen = full;
  Layers near = windowed;
  if (draws == 0) {
    seen.count -= seen.shared;
    near.count -= near.shared;
    --(last_windowed ? near : seen).count;
  }
  if (seen.count > 0) AddAttention(first, rows, seen, &work);
  if (near.count > 0) AddAttention(first, rows, near, &work);
  work.matrix_flops = 2 * rows * (qkv + after_attention) +
                      (draws > 0 ? 2 * rows * tail : 0) +
                      2 * draws * (last_after_attention + head);
  return work;
}

int64_t WorkShape::StepWeightBytes(int64_t rows, int64_t drawn) const {
  // Of an even draw of k of n experts for each row: those drawn at least once.
  const auto experts_read = [this](int64_t tokens) -> int64_t {
    if (experts == 0) return 0;
    const double missed = 1 - static_cast<double>(experts_per_token) / experts;
    return std::llround(static_cast<double>(expert_bytes) * experts *
                        (1 - std::pow(missed, static_cast<double>(tokens))));
  };
  int64_t bytes =
      qkv_bytes + after_attention_bytes + expert_layers * experts_read(rows);
  if (drawn > 0) {
    bytes += tail_bytes + tail_expert_layers * experts_read(rows) +
             last_after_attention_bytes + head_bytes +
             (last_has_experts ? experts_read(drawn) : 0);
  }
  return bytes;
}

}  // namespace tandem::engine
