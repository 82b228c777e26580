// SPDX-License-Identifier: Apache-2.0

#include "engine/model/layer_parts.h"

#include <algorithm>
#include <utility>

namespace tandem::engine {
namespace {

// Each part has a block table of its own in every step.
constexpr int kMostParts = 16;

int CeilDiv(int value, int by) { return (value + by - 1) / by; }

// Whether a layer has other heads than the cache's shape says, and how many
// such lie where one of the rest does.
bool HasOtherHeads(const ModelSpec& spec, int layer) {
  return spec.mixed_heads() && spec.is_windowed(layer) != spec.full_take_less();
}
int OthersInOne(const ModelSpec& spec) {
  const int windowed = spec.kv_heads * spec.head_dim;
  const int full = spec.full_kv_heads * spec.full_head_dim;
  return std::max(windowed, full) / std::min(windowed, full);
}

// Layers without KV are where that is which they look at.
void AddShared(const ModelSpec& spec, LayerParts* parts) {
  for (int layer = spec.kv_layers(); layer < spec.layers; ++layer) {
    const auto source = static_cast<size_t>(spec.kv_source(layer));
    parts->places.push_back(LayerParts::Place(parts->places[source]));
  }
}

// `size` of the cache's layers for a part: full parts come first.
LayerParts Divide(const ModelSpec& spec, int full, int size) {
  const int others = spec.mixed_heads() ? size * OthersInOne(spec) : size;
  const int full_size = spec.full_take_less() ? others : size;
  const int windowed_size = spec.full_take_less() ? size : others;
  LayerParts divided;
  divided.layers_per_part = size;
  divided.parts.full = CeilDiv(full, full_size);
  divided.parts.windowed = CeilDiv(spec.kv_layers() - full, windowed_size);
  int next_full = 0;
  int next_windowed = 0;
  for (int layer = 0; layer < spec.kv_layers(); ++layer) {
    const bool windowed = spec.is_windowed(layer);
    const int own = windowed ? windowed_size : full_size;
    const int at = windowed ? next_windowed++ : next_full++;
    divided.places.push_back({at / own + (windowed ? divided.parts.full : 0),
                              at % own, HasOtherHeads(spec, layer)});
  }
  AddShared(spec, &divided);
  return divided;
}

}  // namespace

std::vector<LayerParts::Run> LayerParts::Runs(int begin, int end) const {
  std::vector<Run> runs;
  for (int layer = begin; layer < end; ++layer) {
    const Place& place = places[static_cast<size_t>(layer)];
    if (!runs.empty() && !place.other && !runs.back().first.other &&
        runs.back().first.part == place.part &&
        runs.back().first.layer + (layer - runs.back().begin) == place.layer) {
      runs.back().end = layer + 1;
    } else {
      runs.push_back({layer, layer + 1, place});
    }
  }
  return runs;
}

void SetHeads(const ModelSpec& spec, kernels::KvShape* shape) {
  shape->kv_heads = spec.kv_heads;
  shape->head_dim = spec.head_dim;
  if (!spec.mixed_heads()) return;
  shape->other_kv_heads = spec.full_kv_heads;
  shape->other_head_dim = spec.full_head_dim;
  shape->other_layers = OthersInOne(spec);
  if (spec.full_take_less()) return;
  std::swap(shape->kv_heads, shape->other_kv_heads);
  std::swap(shape->head_dim, shape->other_head_dim);
}

LayerParts OnePart(const ModelSpec& spec) {
  LayerParts one;
  int others = 0;
  for (int layer = 0; layer < spec.kv_layers(); ++layer) {
    const bool other = HasOtherHeads(spec, layer);
    one.places.push_back({0, other ? others++ : one.layers_per_part++, other});
  }
  if (others > 0) {  // behind those that the cache's shape is of
    const int in_one = OthersInOne(spec);
    for (LayerParts::Place& place : one.places) {
      if (place.other) place.layer += one.layers_per_part * in_one;
    }
    one.layers_per_part += CeilDiv(others, in_one);
  }
  AddShared(spec, &one);
  return one;
}

// The fewest layers that nobody uses; of equal ones the fewest parts.
LayerParts PartsOf(const ModelSpec& spec) {
  int full = 0;
  const int layers = spec.kv_layers();
  for (int layer = 0; layer < layers; ++layer) {
    full += !spec.is_windowed(layer);
  }
  if (full == 0 || full == layers) return OnePart(spec);
  LayerParts best = OnePart(spec);
  for (int size = std::min(full, layers - full); size > 0; --size) {
    LayerParts divided = Divide(spec, full, size);
    if (divided.parts.count() > kMostParts) break;
    if (best.parts.windowed == 0 || divided.room() < best.room()) {
      best = std::move(divided);
    }
  }
  return best;
}

KvWindow WindowOf(const ModelSpec& spec) {
  const int common = spec.common_window();
  if (common > 0) return common;
  const KvParts parts = PartsOf(spec).parts;
  return parts.windowed > 0 ? KvWindow(spec.window, parts) : KvWindow();
}

std::vector<bool> WindowedLayers(const ModelSpec& spec) {
  if (!WindowOf(spec).frees_parts()) return {};
  return {spec.windowed.begin(), spec.windowed.begin() + spec.kv_layers()};
}

}  // namespace tandem::engine
