// SPDX-License-Identifier: Apache-2.0
// Steps of more rows than a grid has places in y or z (65535), of every kernel
// that takes rows one at a time beside their elements.

#include <bit>
#include <cmath>
#include <vector>

#include "tests/kernels/cuda/checks.h"

namespace tandem::kernels::cuda {
namespace {

inline constexpr int kManyRows = 70'000;

// Element i of a row, told from those of the rows about it.
float ValueOf(int row, int i) {
  return static_cast<float>(row % 1021) + 0.25f * static_cast<float>(i);
}

// [kManyRows, width]
std::vector<float> ValuesOf(int width, float factor = 1.0f) {
  std::vector<float> values;
  for (int row = 0; row < kManyRows; ++row) {
    for (int i = 0; i < width; ++i) values.push_back(factor * ValueOf(row, i));
  }
  return values;
}

std::vector<int32_t> Backwards() {
  std::vector<int32_t> rows(kManyRows);
  for (int i = 0; i < kManyRows; ++i) rows[At(i)] = kManyRows - 1 - i;
  return rows;
}

Stream OneStream() { return StreamOf(Generation::kHopper); }

TEST(CudaManyRows, AreEmbedded) {
  const std::vector<float> table = {0, 1, 2, 3};  // of four tokens
  const PackedWeights packed = PackWeights(
      {reinterpret_cast<const std::byte*>(table.data()), DType::kF32, 4, 1},
      WeightType::kF32);
  std::vector<int32_t> ids;
  std::vector<float> expected;
  for (int row = 0; row < kManyRows; ++row) {
    ids.push_back(row % 4);
    expected.push_back(static_cast<float>(row % 4));
  }
  std::vector<float> out(kManyRows, -1.0f);
  ASSERT_EQ(LaunchEmbed(OneStream(), DType::kF32, WeightType::kF32,
                        {.weights = packed.bytes.data(),
                         .scales = nullptr,
                         .token_ids = ids.data(),
                         .fed = nullptr,
                         .drawn = nullptr,
                         .out = out.data(),
                         .num_rows = kManyRows,
                         .cols = 1}),
            0)
      << emulator::LastFault();
  EXPECT_EQ(out, expected);
}

TEST(CudaManyRows, AreGathered) {
  const auto x = ValuesOf(2);
  const auto ids = Backwards();
  std::vector<float> out(x.size(), -1.0f);
  ASSERT_EQ(LaunchGatherRows(OneStream(), DType::kF32,
                             {ids.data(), x.data(), out.data(), kManyRows, 2}),
            0)
      << emulator::LastFault();
  std::vector<float> expected;
  for (const int32_t id : ids) {
    expected.push_back(ValueOf(id, 0));
    expected.push_back(ValueOf(id, 1));
  }
  EXPECT_EQ(out, expected);
}

TEST(CudaManyRows, AreScaled) {
  auto logits = ValuesOf(2);
  ASSERT_EQ(
      LaunchScaleLogits(OneStream(), {logits.data(), kManyRows, 2, 0.5f, 0}), 0)
      << emulator::LastFault();
  EXPECT_EQ(logits, ValuesOf(2, 0.5f));
}

TEST(CudaManyRows, GoThroughTheirExperts) {
  const auto x = ValuesOf(1);
  const auto places = Backwards();
  std::vector<float> copies(kManyRows, -1.0f);
  ASSERT_EQ(LaunchSpreadRows(
                OneStream(), DType::kF32,
                {x.data(), places.data(), copies.data(), kManyRows, 1, 1}),
            0)
      << emulator::LastFault();
  for (int row = 0; row < kManyRows; ++row) {
    ASSERT_EQ(copies[At(places[At(row)])], ValueOf(row, 0)) << row;
  }
  const std::vector<float> shares(kManyRows, 0.5f);
  std::vector<float> sums(kManyRows, -1.0f);
  ASSERT_EQ(LaunchSumExperts(OneStream(), DType::kF32,
                             {copies.data(), places.data(), shares.data(),
                              sums.data(), kManyRows, 1, 1, nullptr, 1}),
            0)
      << emulator::LastFault();
  EXPECT_EQ(sums, ValuesOf(1, 0.5f));
}

// Rank 1: the row's one input times 3 and times 2, added to the output.
TEST(CudaManyRows, TakeAnAdapter) {
  const float image[] = {std::bit_cast<float>(1), 1.0f, 3.0f, 2.0f};
  const auto x = ValuesOf(1);
  const std::vector<int32_t> slots(kManyRows, 0);
  std::vector<float> scratch(kManyRows);
  auto out = ValuesOf(1);
  ASSERT_EQ(
      LaunchLora(
          OneStream(), DType::kF32,
          {.x = x.data(),
           .slots = slots.data(),
           .factors = {.a = image + 2,
                       .b = image + 3,
                       .rank = reinterpret_cast<const int32_t*>(image),
                       .scale = image + 1,
                       .slot_stride = 4,
                       .max_rank = 1,
                       .cols = 1,
                       .rows = 1},
           .sum = {.out = out.data(), .stride = 1, .scratch = scratch.data()},
           .num_rows = kManyRows}),
      0)
      << emulator::LastFault();
  EXPECT_EQ(out, ValuesOf(1, 7.0f));
}

// Activations are of one function; that every row has had it is what matters.
TEST(CudaManyRows, AreActivated) {
  const int packed = PackedRows(2, RowOrder::kGated);
  std::vector<float> x(kManyRows, 2.0f);
  std::vector<float> halves(At(int64_t{kManyRows} * packed), 2.0f);
  std::vector<float> gated(kManyRows, -1.0f);
  ASSERT_EQ(LaunchActivate(OneStream(), DType::kF32,
                           {x.data(), kManyRows, 1, Activation::kSilu}),
            0)
      << emulator::LastFault();
  ASSERT_EQ(LaunchGateHalves(
                OneStream(), DType::kF32,
                {halves.data(), gated.data(), kManyRows, 1, Activation::kSilu}),
            0)
      << emulator::LastFault();
  EXPECT_NEAR(x[0], 2 / (1 + std::exp(-2.0)), 1e-6);
  EXPECT_EQ(x, std::vector<float>(kManyRows, x[0]));
  EXPECT_EQ(gated, std::vector<float>(kManyRows, 2 * x[0]));
}

// An f32 product takes eight tokens at a time.
TEST(CudaManyRows, AreMultiplied) {
  constexpr int kTokens = 8 * 66'000;
  const float weight = 3.0f;
  const PackedWeights packed = PackWeights(
      {reinterpret_cast<const std::byte*>(&weight), DType::kF32, 1, 1},
      WeightType::kF32);
  std::vector<float> x;
  std::vector<float> expected;
  for (int token = 0; token < kTokens; ++token) {
    x.push_back(ValueOf(token, 0));
    expected.push_back(3 * x.back());
  }
  std::vector<float> out(kTokens, -1.0f);
  MatMulParams p{};
  p.weights = packed.bytes.data();
  p.x = x.data();
  p.out = out.data();
  p.x_stride = p.out_stride = p.cols = p.outputs = 1;
  p.rows = PackedRows(1, RowOrder::kPlain);
  p.tokens = kTokens;
  ASSERT_EQ(LaunchMatMul(OneStream(), DType::kF32, WeightType::kF32, p), 0)
      << emulator::LastFault();
  EXPECT_EQ(out, expected);
}

}  // namespace
}  // namespace tandem::kernels::cuda
