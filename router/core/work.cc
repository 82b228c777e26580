// SPDX-License-Identifier: Apache-2.0
#include "router/core/work.h"

#include <cstdint>
#include <limits>

namespace tandem::router {
namespace {

// Of counts, of which a worker may tell any.
int64_t Sum(int64_t a, int64_t b) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  return a > kMost - b ? kMost : a + b;
}

}  // namespace

void AddWork(const v1::Work& part, v1::Work* sum) {
  sum->set_steps(Sum(sum->steps(), part.steps()));
  sum->set_positions_computed(
      Sum(sum->positions_computed(), part.positions_computed()));
  sum->set_kv_rows(Sum(sum->kv_rows(), part.kv_rows()));
  sum->set_positions_attended(
      Sum(sum->positions_attended(), part.positions_attended()));
  sum->set_query_key_pairs(Sum(sum->query_key_pairs(), part.query_key_pairs()));
  sum->set_weight_bytes_read(
      Sum(sum->weight_bytes_read(), part.weight_bytes_read()));
  sum->set_kv_bytes_read(Sum(sum->kv_bytes_read(), part.kv_bytes_read()));
  sum->set_kv_bytes_written(
      Sum(sum->kv_bytes_written(), part.kv_bytes_written()));
  sum->set_matrix_flops(Sum(sum->matrix_flops(), part.matrix_flops()));
  sum->set_attention_flops(Sum(sum->attention_flops(), part.attention_flops()));
}

}  // namespace tandem::router
