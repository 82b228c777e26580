// SPDX-License-Identifier: Apache-2.0
// Which part of a block (block_cells.h) a layer's KV is in. Cells are of one
// size, so that what one part let go is room for any other: as many layers for
// each, with some that nobody uses where they do not divide.

#ifndef TANDEM_ENGINE_MODEL_LAYER_PARTS_H_
#define TANDEM_ENGINE_MODEL_LAYER_PARTS_H_

#include <vector>

#include "engine/checkpoint/model_config.h"
#include "engine/kv/block_cells.h"
#include "kernels/backend.h"

namespace tandem::engine {

struct LayerParts {
  // A layer's KV is what the cache, or the cache of layers with other heads,
  // calls `layer`, in the cells of `part`.
  struct Place {
    int part = 0;
    int layer = 0;
    bool other = false;
  };
  // Consecutive layers of the model that are so in one part as well; one, of
  // layers with other heads.
  struct Run {
    int begin = 0;
    int end = 0;
    Place first;
  };

  KvParts parts = {};
  int layers_per_part = 0;         // of the cache
  std::vector<Place> places = {};  // [layers of the model]

  // Layers that a whole block has room for.
  int room() const { return layers_per_part * parts.count(); }
  // What [begin, end) is made of, in order. REQUIRES: they have KV.
  std::vector<Run> Runs(int begin, int end) const;
};

// What a cache is told of the layers' heads: shape's are those of layers that
// take more, and the rest fit into their place.
void SetHeads(const ModelSpec& spec, kernels::KvShape* shape);

// One part for all layers.
LayerParts OnePart(const ModelSpec& spec);
// Parts of their own for layers with a window, if others have none; else one.
LayerParts PartsOf(const ModelSpec& spec);

// What a sequence of the model lets go of its blocks, in those parts.
KvWindow WindowOf(const ModelSpec& spec);
// [layers with KV] whose parts are let go; empty: a block is one part.
std::vector<bool> WindowedLayers(const ModelSpec& spec);

}  // namespace tandem::engine

#endif  // TANDEM_ENGINE_MODEL_LAYER_PARTS_H_
