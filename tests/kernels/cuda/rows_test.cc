// SPDX-License-Identifier: Apache-2.0
// Kernels that take rows one at a time, on the emulated device: embedding,
// norm, rotary embedding with append, the choice of rows.

#include "tests/kernels/cuda/checks.h"

namespace tandem::kernels::cuda {
namespace {

TEST(CudaRows, NormIsTheContractsWhateverTheSchedule) {
  for (const emulator::Settings& settings : kSettings) {
    const ScopedSettings scoped(settings);
    EXPECT_TRUE(CheckRmsNorm(LaunchRmsNorm));
  }
}

// The middle of rows that lie apart gets the bits of rows of its own.
TEST(CudaRows, NormInPlaceLeavesWhatLiesBesideIt) {
  constexpr int kRows = 3, kBefore = 8;
  for (const auto& [dim, stride] : {std::pair(24, 40), std::pair(520, 1048)}) {
    for (const DType type : kTypes) {
      const auto all = RandomOf(type, int64_t{kRows} * stride, 31);
      const auto weight = RandomFloats(At(dim), 32);
      Guarded x(type, int64_t{kRows} * stride);
      const auto bytes = Encode(type, all);
      std::memcpy(x.data(), bytes.data(), bytes.size());
      std::byte* const middle =
          static_cast<std::byte*>(x.data()) + kBefore * SizeOf(type);
      ASSERT_EQ(LaunchRmsNorm(StreamOf(Generation::kHopper), type,
                              {middle, nullptr, weight.data(), middle, kRows,
                               dim, 1e-5f, stride}),
                0);
      auto expected = all;
      for (int row = 0; row < kRows; ++row) {
        const auto begin = expected.begin() + row * stride + kBefore;
        Guarded own(type, dim);
        const auto mine = Encode(type, {begin, begin + dim});
        std::memcpy(own.data(), mine.data(), mine.size());
        ASSERT_EQ(LaunchRmsNorm(StreamOf(Generation::kHopper), type,
                                {own.data(), nullptr, weight.data(), own.data(),
                                 1, dim, 1e-5f}),
                  0);
        const auto normed = own.Values();
        std::copy(normed.begin(), normed.end(), begin);
      }
      EXPECT_TRUE(SameBits(x.Values(), expected)) << Name(type) << " " << dim;
      EXPECT_TRUE(x.Kept());
    }
  }
}

TEST(CudaRows, NormWithoutWeightsIsTheSum) {
  for (const int dim : kSizes) {
    for (const DType type : kTypes) {
      const auto x = RandomOf(type, dim, 33);
      const auto delta = RandomOf(type, dim, 34);
      auto sum = x;
      for (size_t i = 0; i < sum.size(); ++i) {
        sum[i] = RoundedTo(type, sum[i] + delta[i]);
      }
      Guarded in(type, dim), out(type, dim);
      const auto bytes = Encode(type, x);
      const auto added = Encode(type, delta);
      std::memcpy(in.data(), bytes.data(), bytes.size());
      ASSERT_EQ(LaunchRmsNorm(StreamOf(Generation::kHopper), type,
                              {in.data(), added.data(), nullptr, out.data(), 1,
                               dim, 1e-5f}),
                0);
      EXPECT_TRUE(SameBits(out.Values(), sum)) << Name(type) << " " << dim;
      EXPECT_TRUE(SameBits(in.Values(), sum)) << Name(type) << " " << dim;
      EXPECT_TRUE(in.Kept() && out.Kept());
    }
  }
}

TEST(CudaRows, RopeRotatesAndAppendsWhateverTheSchedule) {
  for (const emulator::Settings& settings : kSettings) {
    const ScopedSettings scoped(settings);
    EXPECT_TRUE(CheckRopeAppend(LaunchRopeAppend));
  }
}

TEST(CudaRows, EmbedTakesRowsOfEveryPackedType) {
  const int rows = 130;
  // Two of them are fed with what was drawn: then their ids mean nothing.
  const std::vector<int32_t> tokens = {0, 129, 64, 63, 64};
  const std::vector<int32_t> ids = {0, -1, 64, 900, 64};
  const std::vector<int32_t> fed = {-1, 2, -1, 0, -1};
  std::vector<SampleResult> drawn(3);
  drawn[2].token_id = 129;
  drawn[0].token_id = 63;
  const WeightType types[] = {WeightType::kF32, WeightType::kBF16,
                              WeightType::kF16, WeightType::kE4M3};
  for (const int cols : {1, 8, 77, 136, 1030}) {
    const auto source = RandomFloats(At(int64_t{rows} * cols), 71);
    for (const WeightType weight : types) {
      const PackedWeights packed =
          PackWeights({reinterpret_cast<const std::byte*>(source.data()),
                       DType::kF32, rows, cols},
                      weight);
      for (const DType type : kTypes) {
        Guarded out(type, static_cast<int64_t>(ids.size()) * cols);
        ASSERT_EQ(LaunchEmbed(StreamOf(Generation::kHopper), type, weight,
                              {.weights = packed.bytes.data(),
                               .scales = packed.scales.data(),
                               .token_ids = ids.data(),
                               .fed = fed.data(),
                               .drawn = drawn.data(),
                               .out = out.data(),
                               .num_rows = static_cast<int>(ids.size()),
                               .cols = cols}),
                  0)
            << emulator::LastFault();
        std::vector<float> expected;
        for (const int32_t id : tokens) {
          for (int i = 0; i < cols; ++i) {
            expected.push_back(
                RoundedTo(type, UnpackWeight(packed, id, i, cols, weight)));
          }
        }
        ASSERT_TRUE(SameBits(out.Values(), expected))
            << cols << " " << Name(type) << " " << static_cast<int>(weight);
        EXPECT_TRUE(out.Kept());
      }
    }
  }
}

TEST(CudaRows, GatherRowsCopiesTheRowsThatAreAskedFor) {
  EXPECT_TRUE(CheckGatherRows(LaunchGatherRows));
}

TEST(CudaRows, NoRowsAreNoLaunch) {
  const Stream stream = StreamOf(Generation::kHopper);
  EXPECT_EQ(LaunchEmbed(stream, DType::kF32, WeightType::kF32, {}), 0);
  EXPECT_EQ(LaunchRmsNorm(stream, DType::kBF16, {}), 0);
  EXPECT_EQ(LaunchRopeAppend(stream, DType::kF16, {}), 0);
  EXPECT_EQ(LaunchGatherRows(stream, DType::kF32, {}), 0);
  EXPECT_EQ(LaunchSample(stream, {}), 0);
  EXPECT_EQ(LaunchKvGather(stream, KvSliceParams{}), 0);
  EXPECT_EQ(LaunchKvScatter(stream, KvSliceParams{}), 0);
}

}  // namespace
}  // namespace tandem::kernels::cuda
