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

void WorkShape::AddAttention(int64_t first, int64_t rows, const Layers& kind,
                             int count, Work* work) const {
  if (rows == 0) return;
  const int64_t of = kind.window;
  const int64_t pairs = int64_t{count} * heads * QueryKeyPairs(first, rows, of);
  const int64_t begin = of == 0 ? 0 : std::max<int64_t>(0, first + 1 - of);
  work->query_key_pairs += pairs;
  // q k and p v: a multiplication and an addition per element each.
  work->attention_flops += 4 * pairs * kind.head_dim;
  work->kv_bytes_read += int64_t{count} * kind.kv_heads * 2 *
                         kind.kv_vector_bytes * (first + rows - begin);
}

Work WorkShape::EntryWork(int64_t first, int64_t rows, int64_t draws) const {
  Work work;
  work.steps = 1;
  work.positions_computed = rows;
  const int64_t drawn_first = first + rows - draws;
  for (const Layers* kind : {&full, &windowed}) {
    const int64_t kv_rows =
        rows * (kind->count - kind->shared) * kind->kv_heads;
    work.kv_rows += kv_rows;
    work.kv_bytes_written += kv_rows * 2 * kind->kv_vector_bytes;
    work.positions_attended += int64_t{heads} * kind->count *
                               QueryKeyPairs(drawn_first, draws, kind->window);
    // From the last K and V on.
    const int few = std::min(
        kind->count,
        kind->shared + (kind == (last_windowed ? &windowed : &full) ? 1 : 0));
    AddAttention(first, rows, *kind, kind->count - few, &work);
    AddAttention(drawn_first, draws, *kind, few, &work);
  }
  work.matrix_flops =
      2 * rows * (qkv + after_attention) + 2 * draws * (drawn + head);
  return work;
}

int64_t WorkShape::StepWeightBytes(int64_t rows, int64_t drawing) const {
  // Of an even draw of k of n experts for each row: those drawn at least once.
  const auto experts_read = [this](int64_t tokens) -> int64_t {
    if (experts == 0) return 0;
    const double missed = 1 - static_cast<double>(experts_per_token) / experts;
    return std::llround(static_cast<double>(expert_bytes) * experts *
                        (1 - std::pow(missed, static_cast<double>(tokens))));
  };
  int64_t bytes =
      qkv_bytes + after_attention_bytes + expert_layers * experts_read(rows);
  if (drawing > 0) {
    bytes +=
        drawn_bytes + drawn_expert_layers * experts_read(drawing) + head_bytes;
  }
  return bytes;
}

}  // namespace tandem::engine
