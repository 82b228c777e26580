// SPDX-License-Identifier: Apache-2.0
// KV to and from the wire on the emulated device: the bytes and the digest
// that any other backend has for the same values.

#include "tests/kernels/cuda/checks.h"

namespace tandem::kernels::cuda {
namespace {

TEST(CudaKv, GatherHasTheBytesAndTheDigestOfTheDefinition) {
  for (const emulator::Settings& settings : kSettings) {
    const ScopedSettings scoped(settings);
    EXPECT_TRUE(CheckKvGather(LaunchKvGather));
  }
}

TEST(CudaKv, GatherWithoutADigestMovesTheSameBytes) {
  KvProblem problem(kKvCases[0]);
  std::vector<std::byte> with(At(problem.wire_bytes()));
  std::vector<std::byte> without(with.size());
  KvDigest digest;
  problem.params.staging = with.data();
  problem.params.digest = &digest;
  ASSERT_EQ(LaunchKvGather(StreamOf(Generation::kHopper), problem.params), 0);
  problem.params.staging = without.data();
  problem.params.digest = nullptr;
  ASSERT_EQ(LaunchKvGather(StreamOf(Generation::kHopper), problem.params), 0);
  EXPECT_TRUE(with == without);
}

TEST(CudaKv, ScatterWritesTheSliceAndNothingElse) {
  for (const emulator::Settings& settings : kSettings) {
    const ScopedSettings scoped(settings);
    EXPECT_TRUE(CheckKvScatter(LaunchKvScatter));
  }
}

TEST(CudaKv, RoundsToBf16AsACpuDoes) {
  // Ties, overflow, infinities and NaNs: the digest is of these bytes.
  const uint32_t from[] = {0x3f800000, 0x3f808000, 0x3f818000, 0x3f808001,
                           0x3f807fff, 0xbf808000, 0x7f800000, 0xff800000,
                           0x7fc00000, 0x7f7fffff, 0x7f800001, 0x00000000,
                           0x00000001, 0x80018000, 0xffc12345, 0x00028000};
  const uint16_t to[] = {0x3f80, 0x3f80, 0x3f82, 0x3f81, 0x3f80, 0xbf80,
                         0x7f80, 0xff80, 0x7fc0, 0x7f80, 0x7fc0, 0x0000,
                         0x0000, 0x8002, 0xffc1, 0x0002};
  KvProblem problem({DType::kF32, DType::kBF16, 1, 8, 8, 0, 1, 0, 1});
  for (int i = 0; i < 16; ++i) {
    std::memcpy(problem.cache.data() + problem.CacheAt(1, 0, i) * 4, &from[i],
                4);
  }
  std::vector<std::byte> staging(At(problem.wire_bytes()));
  problem.params.staging = staging.data();
  ASSERT_EQ(LaunchKvGather(StreamOf(Generation::kHopper), problem.params), 0);
  for (int i = 0; i < 16; ++i) {
    uint16_t got;
    std::memcpy(&got, &staging[At(i * 2)], 2);
    EXPECT_EQ(got, to[i]) << i;
  }
}

TEST(CudaKv, CopyBlockCopiesEveryLayerOfOneBlock) {
  for (const KvCase& c : kKvCases) {
    KvProblem problem(c);
    auto expected = problem.values;
    const KvView& kv = problem.params.kv;
    for (int layer = 0; layer < kKvLayers; ++layer) {
      std::copy_n(problem.values.begin() + kv.Offset(layer, 1, 0, 0, 0),
                  kv.block_stride(),
                  expected.begin() + kv.Offset(layer, 0, 0, 0, 0));
    }
    ASSERT_EQ(
        LaunchKvCopyBlock(StreamOf(Generation::kHopper), {kv, kKvLayers, 1, 0}),
        0)
        << emulator::LastFault();
    EXPECT_TRUE(SameBits(Decode(c.cache, problem.cache), expected));
  }
}

}  // namespace
}  // namespace tandem::kernels::cuda
