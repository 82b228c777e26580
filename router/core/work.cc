// SPDX-License-Identifier: Apache-2.0
#include "router/core/work.h"

namespace tandem::router {

void AddWork(const v1::Work& part, v1::Work* sum) {
  sum->set_steps(sum->steps() + part.steps());
  sum->set_positions_computed(sum->positions_computed() +
                              part.positions_computed());
  sum->set_kv_rows(sum->kv_rows() + part.kv_rows());
  sum->set_positions_attended(sum->positions_attended() +
                              part.positions_attended());
  sum->set_query_key_pairs(sum->query_key_pairs() + part.query_key_pairs());
  sum->set_weight_bytes_read(sum->weight_bytes_read() +
                             part.weight_bytes_read());
  sum->set_kv_bytes_read(sum->kv_bytes_read() + part.kv_bytes_read());
  sum->set_kv_bytes_written(sum->kv_bytes_written() + part.kv_bytes_written());
  sum->set_matrix_flops(sum->matrix_flops() + part.matrix_flops());
  sum->set_attention_flops(sum->attention_flops() + part.attention_flops());
}

}  // namespace tandem::router
