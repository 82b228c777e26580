// SPDX-License-Identifier: Apache-2.0

#include "engine/model/layer_groups.h"

#include "gtest/gtest.h"

namespace tandem::engine {
namespace {

constexpr int64_t kKiB = 1 << 10;
constexpr int64_t kMiB = 1 << 20;

TEST(LayerGroups, AreAsSmallAsTheLinkLikesThem) {
  const struct {
    const char* what;
    int layers;
    int64_t layer_bytes;
    int64_t group_bytes;
    int expected;
  } kCases[] = {
      // 8B shape, 4 KiB per layer and position.
      {"2048 positions: every layer is large enough", 32, 8 * kMiB, 4 * kMiB,
       1},
      {"512 positions: two layers", 32, 2 * kMiB, 4 * kMiB, 2},
      {"128 positions: eight", 32, 512 * kKiB, 4 * kMiB, 8},
      {"64 positions: two groups", 32, 256 * kKiB, 4 * kMiB, 16},
      {"63 positions: short, one group", 32, 252 * kKiB, 4 * kMiB, 32},
      {"one position", 32, 4 * kKiB, 4 * kMiB, 32},
      {"even: 3, 3, 2 of 8, not 3 thirds", 8, 3 * kMiB, 8 * kMiB, 4},
      {"five layers of just too little", 5, 2 * kMiB, 4 * kMiB, 3},
      {"no grouping", 32, 8 * kMiB, 0, 32},
      {"one layer", 1, 64 * kMiB, 4 * kMiB, 1},
      {"small model", 5, 16 * kKiB, 64 * kKiB, 5},
  };
  for (const auto& c : kCases) {
    EXPECT_EQ(LayersPerGroup(c.layers, c.layer_bytes, c.group_bytes),
              c.expected)
        << c.what;
  }
}

// Whatever the shape: a full group reaches the size, and the last is no
// larger than the others.
TEST(LayerGroups, NoFullGroupIsTooSmall) {
  for (int layers = 1; layers <= 80; ++layers) {
    for (int64_t layer = kKiB; layer < 64 * kMiB; layer = layer * 3 / 2) {
      const int group = LayersPerGroup(layers, layer, 4 * kMiB);
      ASSERT_GE(group, 1);
      ASSERT_LE(group, layers);
      if (group < layers) {
        EXPECT_GE(group * layer, 4 * kMiB) << layers << ' ' << layer;
        EXPECT_LT((group - 1) * layer, 2 * 4 * kMiB) << layers << ' ' << layer;
      }
    }
  }
}

}  // namespace
}  // namespace tandem::engine
