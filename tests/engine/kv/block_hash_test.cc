// SPDX-License-Identifier: Apache-2.0
// Block hashes are a format: workers of one version find each other's blocks
// by them, so their bytes are pinned here. The expected values were made with
// Python's hashlib, e.g. the child of sixteen zero bytes over ids 1 and 2:
//   hashlib.sha256(bytes(16) + struct.pack("<2i", 1, 2)).hexdigest()[:32]
// and the root of a salt s, block size b and formats f, over:
//   b"tandem kv root 1" + pack("<IQ", b, len(s)) + s + pack("<Q", len(f)) + f

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "engine/kv/kv_pool.h"

namespace tandem::engine {
namespace {

std::string Hex(const BlockHash& hash) {
  std::string hex;
  for (const uint8_t byte : hash.bytes) {
    hex += "0123456789abcdef"[byte >> 4];
    hex += "0123456789abcdef"[byte & 15];
  }
  return hex;
}

TEST(BlockHashTest, ChildIsSha256OfParentAndIds) {
  EXPECT_EQ(Hex(ChildHash(BlockHash(), {1, 2})),
            "c3f5aadf8ecfcdf7e6caaeac2626219a");
  EXPECT_EQ(Hex(ChildHash(BlockHash(), {-1, 2147483647})),
            "45f978c97639f46a64160f8f1ac570be");
}

TEST(BlockHashTest, RootIsSha256OfItsParts) {
  EXPECT_EQ(Hex(RootHash("", 16, "")), "79d53b057daecf498ef2b04ed3890a11");
  EXPECT_EQ(Hex(RootHash("tenant", 8, "f32>bf16")),
            "4ebf4b7506e92a62cc4599b8cb10107e");
}

TEST(BlockHashTest, ShortIsTheFirstEightBytesLittleEndian) {
  BlockHash hash;
  for (uint8_t i = 0; i < 16; ++i) hash.bytes[i] = i + 1;
  EXPECT_EQ(hash.Short(), 0x0807060504030201u);
}

TEST(BlockHashTest, RootsDifferByEveryPart) {
  const std::vector<BlockHash> roots = {
      RootHash("", 16, ""),   RootHash("a", 16, ""),  RootHash("", 16, "a"),
      RootHash("", 8, ""),    RootHash("ab", 16, ""), RootHash("a", 16, "b"),
      RootHash("", 16, "ab"),
  };
  for (size_t i = 0; i < roots.size(); ++i) {
    for (size_t j = 0; j < i; ++j) EXPECT_NE(roots[i], roots[j]) << i << j;
  }
}

TEST(BlockHashTest, OnlyFullBlocksHaveHashesAndEachNamesItsWholePast) {
  const BlockHash root = RootHash("", 4, "");
  const std::vector<int32_t> tokens = {1, 2, 3, 4, 5, 6, 7, 8, 9};
  struct Case {
    size_t length;
    size_t hashes;
  };
  for (const Case& c :
       std::vector<Case>{{0, 0}, {3, 0}, {4, 1}, {7, 1}, {8, 2}, {9, 2}}) {
    EXPECT_EQ(
        HashBlocks(root, absl::MakeConstSpan(tokens).first(c.length), 4).size(),
        c.hashes)
        << c.length;
  }
  const std::vector<BlockHash> hashes = HashBlocks(root, tokens, 4);
  EXPECT_EQ(hashes[0], ChildHash(root, {1, 2, 3, 4}));
  EXPECT_EQ(hashes[1], ChildHash(hashes[0], {5, 6, 7, 8}));
  // Same second block behind another first one: another hash.
  EXPECT_NE(HashBlocks(root, {1, 2, 3, 0, 5, 6, 7, 8}, 4)[1], hashes[1]);
}

}  // namespace
}  // namespace tandem::engine
