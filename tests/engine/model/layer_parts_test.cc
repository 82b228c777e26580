// SPDX-License-Identifier: Apache-2.0

#include "engine/model/layer_parts.h"

#include <set>
#include <utility>

#include "gtest/gtest.h"

namespace tandem::engine {
namespace {

// Every pattern-th layer sees all.
ModelSpec Alternating(int layers, int pattern) {
  ModelSpec spec;
  spec.layers = layers;
  spec.window = 1024;
  for (int i = 0; i < layers; ++i) {
    spec.windowed.push_back((i + 1) % pattern != 0);
  }
  return spec;
}

TEST(LayerParts, DivideLayersWithLittleToSpare) {
  const struct {
    const char* what;
    int layers;
    int pattern;
    KvParts parts;
    int room;
  } cases[] = {
      {"Gemma 2 2B: every other layer", 26, 2, {1, 1}, 26},
      {"Gemma 3 1B", 26, 6, {2, 11}, 26},
      {"Gemma 3 4B", 34, 6, {1, 6}, 35},
      {"Gemma 3 12B", 48, 6, {1, 5}, 48},
      {"Gemma 3 27B", 62, 6, {3, 13}, 64},
      {"one of each", 2, 2, {1, 1}, 2},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.what);
    const ModelSpec spec = Alternating(c.layers, c.pattern);
    const LayerParts layers = PartsOf(spec);
    EXPECT_EQ(layers.parts, c.parts)
        << layers.parts.full << " " << layers.parts.windowed;
    EXPECT_EQ(layers.room(), c.room);
    // Each layer has a place of its own, among its kind.
    std::set<std::pair<int, int>> taken;
    for (int i = 0; i < c.layers; ++i) {
      const LayerParts::Place place = layers.places[static_cast<size_t>(i)];
      EXPECT_TRUE(taken.emplace(place.part, place.layer).second);
      EXPECT_LT(place.layer, layers.layers_per_part);
      EXPECT_EQ(place.part >= c.parts.full, spec.is_windowed(i)) << i;
    }
    // Runs make up any range, in order.
    int next = 1;
    for (const LayerParts::Run& run : layers.Runs(1, c.layers)) {
      EXPECT_EQ(run.begin, next);
      for (int i = run.begin; i < run.end; ++i) {
        const LayerParts::Place place = layers.places[static_cast<size_t>(i)];
        EXPECT_EQ(place.part, run.first.part);
        EXPECT_EQ(place.layer, run.first.layer + (i - run.begin));
      }
      next = run.end;
    }
    EXPECT_EQ(next, c.layers);
    const KvWindow window = WindowOf(spec);
    EXPECT_TRUE(window.frees_parts());
    EXPECT_EQ(window.positions, 1024);
  }
}

// `full` heads of layers that see all, twice as wide as those of the rest.
ModelSpec WithOtherHeads(int layers, int windowed_heads, int full_heads) {
  ModelSpec spec = Alternating(layers, 6);
  spec.kv_heads = windowed_heads;
  spec.head_dim = 256;
  spec.full_kv_heads = full_heads;
  spec.full_head_dim = 512;
  return spec;
}

// No two layers' places overlap, counted in the smaller kind's.
void ExpectPlacesApart(const ModelSpec& spec, const LayerParts& layers,
                       int in_one) {
  std::set<std::pair<int, int>> taken;
  for (const LayerParts::Place& place : layers.places) {
    const int size = place.other ? 1 : in_one;
    for (int i = 0; i < size; ++i) {
      EXPECT_TRUE(taken.emplace(place.part, place.layer * size + i).second);
      EXPECT_LT(place.layer * size + i, layers.layers_per_part * in_one);
    }
  }
  EXPECT_EQ(static_cast<int>(layers.places.size()), spec.layers);
}

TEST(LayerParts, SeveralLayersWithSmallerHeadsLieInOnePlace) {
  const struct {
    const char* what;
    ModelSpec spec;
    KvParts parts;
    int room;
    bool full_are_smaller;
  } cases[] = {
      {"Gemma 4 31B", WithOtherHeads(60, 16, 4), {1, 10}, 55, true},
      {"Gemma 4 26B A4B", WithOtherHeads(30, 8, 2), {1, 5}, 30, true},
      {"Gemma 4 E4B's heads", WithOtherHeads(24, 2, 2), {2, 5}, 14, false},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.what);
    const LayerParts layers = PartsOf(c.spec);
    EXPECT_EQ(layers.parts, c.parts)
        << layers.parts.full << " " << layers.parts.windowed;
    EXPECT_EQ(layers.room(), c.room);
    ExpectPlacesApart(c.spec, layers, 2);
    const LayerParts one = OnePart(c.spec);
    ExpectPlacesApart(c.spec, one, 2);
    for (int i = 0; i < c.spec.layers; ++i) {
      const bool other = c.spec.is_windowed(i) != c.full_are_smaller;
      EXPECT_EQ(layers.places[static_cast<size_t>(i)].other, other);
      EXPECT_EQ(one.places[static_cast<size_t>(i)].other, other);
    }
    // Such a layer is a run of its own.
    for (const LayerParts::Run& run : one.Runs(0, c.spec.layers)) {
      EXPECT_TRUE(!run.first.other || run.end == run.begin + 1);
    }
    kernels::KvShape shape;
    SetHeads(c.spec, &shape);
    EXPECT_EQ(shape.head_dim, c.full_are_smaller ? 256 : 512);
    EXPECT_EQ(shape.other_layers, 2);
  }
}

// Gemma 4 E2B: every fifth layer sees all, the last 20 have no KV.
TEST(LayerParts, LayersWithoutKvAreWhereThatIsWhichTheyLookAt) {
  ModelSpec spec = Alternating(35, 5);
  spec.kv_heads = spec.full_kv_heads = 1;
  spec.head_dim = 256;
  spec.full_head_dim = 512;
  spec.shared_kv_layers = 20;
  EXPECT_EQ(spec.kv_source(12), 12);
  EXPECT_EQ(spec.kv_source(34), 14);
  EXPECT_EQ(spec.kv_source(33), 13);
  for (const bool parted : {false, true}) {
    const LayerParts layers = parted ? PartsOf(spec) : OnePart(spec);
    EXPECT_EQ(layers.room(), 9);  // 3, and 12 of half their size
    ASSERT_EQ(layers.places.size(), 35u);
    for (int i = 15; i < 35; ++i) {
      const LayerParts::Place place = layers.places[static_cast<size_t>(i)];
      const LayerParts::Place source =
          layers.places[static_cast<size_t>(spec.is_windowed(i) ? 13 : 14)];
      EXPECT_EQ(place.part, source.part) << i;
      EXPECT_EQ(place.layer, source.layer) << i;
      EXPECT_EQ(place.other, source.other) << i;
    }
    // As without them.
    ModelSpec first = Alternating(15, 5);
    first.kv_heads = first.full_kv_heads = 1;
    first.head_dim = 256;
    first.full_head_dim = 512;
    const LayerParts own = parted ? PartsOf(first) : OnePart(first);
    EXPECT_EQ(own.parts, layers.parts);
    EXPECT_EQ(own.layers_per_part, layers.layers_per_part);
  }
}

TEST(LayerParts, IsOneWhereAllLayersSeeAlike) {
  ModelSpec spec = Alternating(8, 100);  // all have the window
  EXPECT_EQ(PartsOf(spec).parts, KvParts());
  EXPECT_EQ(PartsOf(spec).room(), 8);
  EXPECT_TRUE(WindowOf(spec).frees_blocks());
  spec.windowed.clear();
  spec.window = 0;
  EXPECT_EQ(PartsOf(spec).parts, KvParts());
  EXPECT_EQ(WindowOf(spec).positions, 0);
  const auto runs = PartsOf(spec).Runs(2, 7);
  ASSERT_EQ(runs.size(), 1);
  EXPECT_EQ(runs[0].first.layer, 2);
  EXPECT_EQ(runs[0].end, 7);
}

}  // namespace
}  // namespace tandem::engine
