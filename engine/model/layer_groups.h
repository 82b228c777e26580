// SPDX-License-Identifier: Apache-2.0
// How many layers' KV leave together. Every group costs a message, a credit and
// a transfer of its own, so none is smaller than the link likes; and what is
// still to be sent when the last layer is computed is what nothing hides, so
// none is larger than that needs.

#ifndef TANDEM_ENGINE_MODEL_LAYER_GROUPS_H_
#define TANDEM_ENGINE_MODEL_LAYER_GROUPS_H_

#include <algorithm>
#include <cstdint>

namespace tandem::engine {

// `layer_bytes`: K and V of one layer, of the positions computed in a step.
// The fewest layers that have `group_bytes`, in groups as even as they may be;
// all `layers` where they do not make two such groups, or group_bytes is 0.
inline int LayersPerGroup(int layers, int64_t layer_bytes,
                          int64_t group_bytes) {
  if (group_bytes <= 0 || layer_bytes * layers < 2 * group_bytes) {
    return layers;
  }
  const auto fewest =
      static_cast<int>((group_bytes + layer_bytes - 1) / layer_bytes);
  const int groups = std::max(1, layers / fewest);
  return (layers + groups - 1) / groups;
}

}  // namespace tandem::engine

#endif  // TANDEM_ENGINE_MODEL_LAYER_GROUPS_H_
