// SPDX-License-Identifier: Apache-2.0
// How much work steps are: counted from what their entries hold and from the
// model's shape, never timed or assumed. Workers count with it where steps are
// scheduled, and `tandem explain` predicts with it, so that both mean the same
// (DESIGN.md section 1). It follows engine/model/forward.h: all rows go through
// all layers up to the last K and V that a layer has, and behind them only
// those that a token is drawn from. Left out is what is below a thousandth:
// norms, biases, activations, the rows of the embedding, adapters.
//
// What an entry needs does not depend on what else its step holds; weights are
// read once a step, for all of its entries.

#ifndef TANDEM_ENGINE_WORK_H_
#define TANDEM_ENGINE_WORK_H_

#include <cstdint>

namespace tandem::engine {

// Of a whole model: all layers, and all KV heads or heads. Integers count a
// request; sums over a worker's life or a prediction for any length outgrow
// them, and are doubles.
template <typename Number>
struct WorkOf {
  Number steps = 0;
  Number positions_computed = 0;  // K/V rows of one layer and head
  Number kv_rows = 0;  // computed; each is a K and a V of head_dim elements
  Number positions_attended = 0;  // by rows that a token is drawn from
  Number query_key_pairs = 0;
  Number weight_bytes = 0;      // read: each matrix once a step
  Number kv_bytes_read = 0;     // each position once a step and sequence
  Number kv_bytes_written = 0;  // not in any other figure
  Number matrix_flops = 0;
  Number attention_flops = 0;

  Number bytes_read() const { return weight_bytes + kv_bytes_read; }
  Number flops() const { return matrix_flops + attention_flops; }
  // FLOPs per byte read.
  double intensity() const {
    return static_cast<double>(flops()) / static_cast<double>(bytes_read());
  }

  template <typename Other>
  WorkOf& operator+=(const WorkOf<Other>& other) {
    steps += static_cast<Number>(other.steps);
    positions_computed += static_cast<Number>(other.positions_computed);
    kv_rows += static_cast<Number>(other.kv_rows);
    positions_attended += static_cast<Number>(other.positions_attended);
    query_key_pairs += static_cast<Number>(other.query_key_pairs);
    weight_bytes += static_cast<Number>(other.weight_bytes);
    kv_bytes_read += static_cast<Number>(other.kv_bytes_read);
    kv_bytes_written += static_cast<Number>(other.kv_bytes_written);
    matrix_flops += static_cast<Number>(other.matrix_flops);
    attention_flops += static_cast<Number>(other.attention_flops);
    return *this;
  }
  bool operator==(const WorkOf&) const = default;
};
using Work = WorkOf<int64_t>;

// Causal query-key pairs of queries [first, first + rows), each of which sees
// itself and what is before it, `window` positions at most (0: all).
int64_t QueryKeyPairs(int64_t first, int64_t rows, int64_t window = 0);

// What work is counted by; engine/model/model_work.h makes it of a model. All
// zeros count steps and positions alone.
struct WorkShape {
  struct Layers {
    int count = 0;
    int window = 0;  // positions that they see; 0: all
    int kv_heads = 0;
    int head_dim = 0;
    int64_t kv_vector_bytes = 0;  // a K or a V of one head, scale included
    int shared = 0;               // of `count`, without K and V of their own
  };
  Layers full = {};
  Layers windowed = {};        // the rest
  bool last_windowed = false;  // the last one with K and V
  int heads = 0;

  // Multiplications of one row. What follows attention in a layer is its
  // output and the feed-forward layer, of the experts that a row takes.
  int64_t qkv = 0;              // of layers with K and V, and before them
  int64_t after_attention = 0;  // of those but the last
  int64_t drawn = 0;            // what is left, of rows that draw
  int64_t head = 0;             // of them too

  int64_t qkv_bytes = 0;
  int64_t after_attention_bytes = 0;  // but the experts'
  int64_t drawn_bytes = 0;
  int64_t head_bytes = 0;
  int64_t expert_bytes = 0;  // of one
  int experts = 0;           // of a layer that has any
  int experts_per_token = 0;
  int expert_layers = 0;        // that have, whose experts all rows take
  int drawn_expert_layers = 0;  // and those that draw

  // What one sequence's part of a step needs, weights apart: positions [first,
  // first + rows), of which the last `draws` draw a token each.
  Work EntryWork(int64_t first, int64_t rows, int64_t draws) const;

  // What a step of so many rows reads of weights, of which `drawing` draw.
  // Experts are taken to be chosen evenly and independently of one another, so
  // of these alone it is an expectation.
  int64_t StepWeightBytes(int64_t rows, int64_t drawing) const;

 private:
  // Of `count` layers of that kind.
  void AddAttention(int64_t first, int64_t rows, const Layers& kind, int count,
                    Work* work) const;
};

}  // namespace tandem::engine

#endif  // TANDEM_ENGINE_WORK_H_
