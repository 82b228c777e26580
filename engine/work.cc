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

// Of `count` layers that see `of` positions (0: all).
void WorkShape::AddAttention(int64_t first, int64_t rows, int64_t count,
                             int64_t of, Work* work) const {
  const int64_t pairs = count * heads * QueryKeyPairs(first, rows, of);
  const int64_t begin = of == 0 ? 0 : std::max<int64_t>(0, first + 1 - of);
  work->query_key_pairs += pairs;
  // q k and p v: a multiplication and an addition per element each.
  work->attention_flops += 4 * pairs * head_dim;
  work->kv_bytes_read +=
      count * kv_heads * 2 * kv_vector_bytes * (first + rows - begin);
}

Work WorkShape::EntryWork(int64_t first, int64_t rows, int64_t draws) const {
  Work work;
  work.steps = 1;
  work.positions_computed = rows;
  work.kv_rows = rows * layers * kv_heads;
  work.kv_bytes_written = work.kv_rows * 2 * kv_vector_bytes;
  // Behind the last layer's K and V nothing is left to do for nobody.
  const bool ends_early = draws == 0 && layers > 0;
  const int64_t whole = layers - (ends_early ? 1 : 0);
  const int64_t windowed =
      windowed_layers - (ends_early && last_windowed ? 1 : 0);
  AddAttention(first, rows, whole - windowed, 0, &work);
  if (windowed > 0) AddAttention(first, rows, windowed, window, &work);
  work.matrix_flops = 2 * rows * (layers * qkv + after_attention) +
                      2 * draws * (last_after_attention + head);
  const int64_t drawn_first = first + rows - draws;
  work.positions_attended = int64_t{heads} * (layers - windowed_layers) *
                            QueryKeyPairs(drawn_first, draws);
  if (windowed_layers > 0) {
    work.positions_attended += int64_t{heads} * windowed_layers *
                               QueryKeyPairs(drawn_first, draws, window);
  }
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
  int64_t bytes = layers * qkv_bytes + after_attention_bytes +
                  expert_layers * experts_read(rows);
  if (drawn > 0) {
    bytes += last_after_attention_bytes + head_bytes +
             (last_has_experts ? experts_read(drawn) : 0);
  }
  return bytes;
}

}  // namespace tandem::engine
