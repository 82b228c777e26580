// SPDX-License-Identifier: Apache-2.0
// Limits worked out by hand, of a toy and of the shape that figures are for.

#include "bench/gpu/arithmetic.h"
#include "gtest/gtest.h"

namespace tandem::bench {
namespace {

TEST(BenchArithmetic, AProductReadsItsOperandsAndWritesItsResult) {
  const Work work = MatMulWork(3, 10, 20, {.weight = 1, .activation = 2});
  EXPECT_EQ(work.bytes, 200 + 3 * 30 * 2);
  EXPECT_EQ(work.flops, 2 * 3 * 200);
}

TEST(BenchArithmetic, ACausalQuerySeesOneKeyMoreThanTheOneBefore) {
  const Shape shape{.heads = 4, .kv_heads = 2, .head_dim = 8};
  // Of 5 positions the last 3: 3 + 4 + 5 pairs.
  const Work work = AttentionWork(shape, 3, 5, {});
  EXPECT_EQ(work.flops, 4.0 * 12 * 32);
  EXPECT_EQ(work.bytes, 5.0 * 2 * 16 * 2 + 2 * 3 * 32 * 2);
}

TEST(BenchArithmetic, TheLimitIsTheSumOverOperatorsOfTheirLongerTime) {
  const Limits limits{.bytes_per_second = 10, .flops_per_second = 100};
  EXPECT_DOUBLE_EQ(LimitSeconds({{20, 100}, {10, 300}}, limits), 2 + 3);
}

TEST(BenchArithmetic, LlamaAtBatch1Reads15Gigabytes) {
  // Without the embedding: 15.0 GB of weights and 0.13 GB of KV.
  const double bytes = DecodeBytes(kLlama8B, 1, 1024, {});
  EXPECT_NEAR(bytes, 15.14e9, 0.02e9);
  // Activations are a thousandth of it.
  const Work step = Sum(StepWork(kLlama8B, 1, 1, 1024, {}));
  EXPECT_NEAR(step.bytes / bytes, 1, 2e-3);
  // The head stays in 16 bits: 6.98 GB of layers and 1.05 of it.
  EXPECT_NEAR(DecodeBytes(kLlama8B, 1, 0, {.weight = 1}), 8.03e9, 0.01e9);
  EXPECT_EQ(Sum(StepWork(kLlama8B, 1, 1, 1024, {})).bytes -
                Sum(StepWork(kLlama8B, 1, 1, 1024, {.weight = 1})).bytes,
            32.0 * 4096 * (6144 + 4096 + 3 * 14336));
}

TEST(BenchArithmetic, APrefillComputesTwiceItsParametersForEachToken) {
  const double parameters = 32.0 * 4096 * (6144 + 4096 + 3 * 14336);
  const Work work = Sum(StepWork(kLlama8B, 1, 2048, 2048, {}));
  const double attention = 32 * 4.0 * 4096 * (2048.0 * 2049 / 2);
  const double head = 2.0 * 128256 * 4096;
  // The last layer's products after attention are for one row.
  const double spared = 2.0 * 2047 * 4096 * (4096 + 3 * 14336);
  EXPECT_NEAR(work.flops / (2 * parameters * 2048 + attention + head - spared),
              1, 1e-12);
}

}  // namespace
}  // namespace tandem::bench
