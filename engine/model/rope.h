// SPDX-License-Identifier: Apache-2.0
// Rotary embedding's angles, worked out in double and rounded once to f32.

#ifndef TANDEM_ENGINE_MODEL_ROPE_H_
#define TANDEM_ENGINE_MODEL_ROPE_H_

#include <vector>

#include "engine/checkpoint/rope_config.h"

namespace tandem::engine {

// Radians per position of each pair, [head_dim / 2].
std::vector<double> RopeFrequencies(const RopeSpec& rope, int head_dim);

// cos or sin of position * frequency, both [positions, head_dim / 2].
struct RopeTables {
  std::vector<float> cos;
  std::vector<float> sin;
};
RopeTables MakeRopeTables(const RopeSpec& rope, int head_dim, int positions);

}  // namespace tandem::engine

#endif  // TANDEM_ENGINE_MODEL_ROPE_H_
