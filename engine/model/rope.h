// SPDX-License-Identifier: Apache-2.0
// Rotary embedding's angles, worked out in double and rounded once to f32.

#ifndef TANDEM_ENGINE_MODEL_ROPE_H_
#define TANDEM_ENGINE_MODEL_ROPE_H_

#include <vector>

#include "engine/checkpoint/rope_config.h"

namespace tandem::engine {

// Radians per position of each pair that turns.
std::vector<double> RopeFrequencies(const RopeSpec& rope, int head_dim);

// cos or sin of position * frequency, both [positions, pairs].
struct RopeTables {
  std::vector<float> cos;
  std::vector<float> sin;
};
RopeTables MakeRopeTables(const RopeSpec& rope, int head_dim, int positions);

// What queries are multiplied by at each position; empty: nothing.
std::vector<float> QueryScales(const RopeSpec& rope, int positions);

// Kernels turn dimension i with i + head_dim / 2, all of a head. Where only
// rotary_dim of them turn, or neighbours turn together, rows of query and key
// are kept in another order, which no score depends on: which row of a
// checkpoint's `heads` heads stands at each place. Empty: as they are.
std::vector<int> RotaryOrder(const RopeSpec& rope, int head_dim, int heads);

// The same of a tensor of queries, keys and values: they may be `in_groups`, as
// TensorNames says.
std::vector<int> FusedOrder(const RopeSpec& rope, int head_dim, int heads,
                            int kv_heads, bool in_groups);

}  // namespace tandem::engine

#endif  // TANDEM_ENGINE_MODEL_ROPE_H_
