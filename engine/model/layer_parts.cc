// SPDX-License-Identifier: Apache-2.0

#include "engine/model/layer_parts.h"

#include <algorithm>

namespace tandem::engine {
namespace {

// Each part has a block table of its own in every step.
constexpr int kMostParts = 16;

int CeilDiv(int value, int by) { return (value + by - 1) / by; }

// `layers_per_part` of a part: full parts come first.
LayerParts Divide(const ModelSpec& spec, int full, int layers_per_part) {
  LayerParts divided;
  divided.layers_per_part = layers_per_part;
  divided.parts.full = CeilDiv(full, layers_per_part);
  divided.parts.windowed = CeilDiv(spec.layers - full, layers_per_part);
  int next_full = 0;
  int next_windowed = divided.parts.full * layers_per_part;
  for (int layer = 0; layer < spec.layers; ++layer) {
    const int at = spec.is_windowed(layer) ? next_windowed++ : next_full++;
    divided.places.push_back({at / layers_per_part, at % layers_per_part});
  }
  return divided;
}

}  // namespace

std::vector<LayerParts::Run> LayerParts::Runs(int begin, int end) const {
  std::vector<Run> runs;
  for (int layer = begin; layer < end; ++layer) {
    const Place& place = places[static_cast<size_t>(layer)];
    if (!runs.empty() && runs.back().first.part == place.part &&
        runs.back().first.layer + (layer - runs.back().begin) == place.layer) {
      runs.back().end = layer + 1;
    } else {
      runs.push_back({layer, layer + 1, place});
    }
  }
  return runs;
}

LayerParts OnePart(const ModelSpec& spec) {
  LayerParts one{.layers_per_part = spec.layers};
  for (int layer = 0; layer < spec.layers; ++layer) {
    one.places.push_back({0, layer});
  }
  return one;
}

// The fewest layers that nobody uses; of equal ones the fewest parts.
LayerParts PartsOf(const ModelSpec& spec) {
  int full = 0;
  for (int layer = 0; layer < spec.layers; ++layer) {
    full += !spec.is_windowed(layer);
  }
  if (full == 0 || full == spec.layers) return OnePart(spec);
  LayerParts best = OnePart(spec);
  for (int size = std::min(full, spec.layers - full); size > 0; --size) {
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

}  // namespace tandem::engine
