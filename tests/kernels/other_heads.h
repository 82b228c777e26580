// SPDX-License-Identifier: Apache-2.0
// A cache whose layers have two kinds of heads, beside two plain ones.

#ifndef TANDEM_TESTS_KERNELS_OTHER_HEADS_H_
#define TANDEM_TESTS_KERNELS_OTHER_HEADS_H_

#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/backend.h"

namespace tandem::kernels::testing {

class OtherHeads {
 public:
  explicit OtherHeads(Backend& backend)
      : backend_(backend), queue_(backend.NewQueue("compute")) {}

  // Each kind reads what it wrote, whatever the other wrote to other blocks,
  // and copies of blocks take either.
  void Check(const KvShape& shape) {
    auto cache = backend_.NewKvCache(shape);
    ASSERT_TRUE(cache.ok()) << cache.status();
    KvShape plain = shape;
    plain.other_layers = plain.other_kv_heads = plain.other_head_dim = 0;
    const Bytes whole = Fill(**cache, plain, 1, 1);
    const Bytes other = Fill((*cache)->other(), shape.Other(), 0, 2);
    EXPECT_EQ(Read(**cache, 1), whole);
    EXPECT_EQ(Read((*cache)->other(), 0), other);
    backend_.KvCopyBlock(*queue_, **cache, 0, 2);
    EXPECT_EQ(Read((*cache)->other(), 2), other);
    backend_.KvCopyBlock(*queue_, **cache, 1, 0);
    EXPECT_EQ(Read(**cache, 0), whole);
    EXPECT_EQ(Read((*cache)->other(), 2), other);
  }

 private:
  using Bytes = std::vector<uint8_t>;

  static KvRange Block(const KvShape& shape, const int32_t* block) {
    return {.block_table = block,
            .position_end = shape.block_size,
            .layer_end = shape.num_layers,
            .head_end = shape.kv_heads};
  }

  Bytes Read(KvCache& cache, int32_t block) {
    const KvShape& shape = cache.shape();
    const KvRange range = Block(shape, &block);
    const auto staging = *backend_.AllocateHost(
        static_cast<size_t>(range.bytes(shape.dtype, shape.head_dim)));
    KvDigest digest;
    backend_.KvGather(*queue_, cache, range, shape.dtype, 7, staging->data(),
                      &digest);
    queue_->Synchronize();
    const auto* const begin = reinterpret_cast<const uint8_t*>(staging->data());
    return {begin, begin + staging->size()};
  }

  // Writes what a plain cache of `shape` then reads, too.
  Bytes Fill(KvCache& cache, const KvShape& shape, int32_t block,
             unsigned seed) {
    const auto plain = *backend_.NewKvCache(shape);
    const KvRange range = Block(shape, &block);
    const auto staging = *backend_.AllocateHost(
        static_cast<size_t>(range.bytes(shape.dtype, shape.head_dim)));
    std::mt19937 random(seed);
    for (size_t i = 0; i < staging->size(); ++i) {
      staging->data()[i] = static_cast<std::byte>(random() & 0x3f);
    }
    for (KvCache* const to : {&cache, plain.get()}) {
      backend_.KvScatter(*queue_, *to, range, shape.dtype, staging->data());
    }
    Bytes bytes = Read(*plain, block);
    EXPECT_EQ(Read(cache, block), bytes);
    return bytes;
  }

  Backend& backend_;
  const std::unique_ptr<Queue> queue_;
};

// Those that take more heads, or wider ones, of which two or one lie in a
// place.
inline std::vector<KvShape> MixedShapes(DType type) {
  const auto shape = [type](int heads, int dim, int others, int other_dim,
                            int in_one) {
    return KvShape{.num_layers = 3,
                   .kv_heads = heads,
                   .head_dim = dim,
                   .block_size = 16,
                   .num_blocks = 3,
                   .dtype = type,
                   .other_kv_heads = others,
                   .other_head_dim = other_dim,
                   .other_layers = in_one};
  };
  return {shape(4, 16, 1, 32, 2), shape(1, 512, 1, 256, 2),
          shape(3, 40, 2, 40, 1)};
}

}  // namespace tandem::kernels::testing

#endif  // TANDEM_TESTS_KERNELS_OTHER_HEADS_H_
