// SPDX-License-Identifier: Apache-2.0
// Products of each head with a matrix of its own, on the emulated device: the
// bits of one product for each head, and near float64.

#include "kernels/backend.h"
#include "tests/kernels/cuda/checks.h"

namespace tandem::kernels::cuda {
namespace {

struct HeadsCase {
  int outputs;
  int cols;
  int most_rows;
};
// Outputs that fill no block of weights, and more than one.
constexpr HeadsCase kHeadsCases[] = {
    {24, 192, 200}, {128, 96, 200}, {288, 576, 33}, {576, 96, 33}};
constexpr int kHeads = 3;

struct Formats {
  DType activation;
  WeightType weight;
};
constexpr Formats kFormats[] = {{DType::kF32, WeightType::kF32},
                                {DType::kF32, WeightType::kBF16},
                                {DType::kF32, WeightType::kF16},
                                {DType::kBF16, WeightType::kBF16},
                                {DType::kF16, WeightType::kF16}};

PackedWeights Packed(const std::vector<float>& w, int cols, WeightType type) {
  return PackWeights({reinterpret_cast<const std::byte*>(w.data()), DType::kF32,
                      static_cast<int64_t>(w.size()) / cols, cols},
                     type);
}

// Of `part` columns from `begin` on, all rows of `width`.
std::vector<float> Columns(const std::vector<float>& all, int width, int begin,
                           int part) {
  std::vector<float> columns;
  for (size_t row = 0; row < all.size(); row += At(width)) {
    const auto from = all.begin() + static_cast<int64_t>(row) + begin;
    columns.insert(columns.end(), from, from + part);
  }
  return columns;
}

TEST(CudaMatMulHeads, EachHeadHasTheBitsOfAProductOfItsOwn) {
  const Stream stream = StreamOf(Generation::kHopper);
  for (const HeadsCase& c : kHeadsCases) {
    const int head_rows = HeadRows(c.outputs);
    // What lies behind a head's outputs is no head's.
    auto w = RandomFloats(At(int64_t{kHeads} * head_rows * c.cols), 5, 0.1f);
    for (int row = 0; row < kHeads * head_rows; ++row) {
      if (row % head_rows < c.outputs) continue;
      std::fill_n(w.begin() + int64_t{row} * c.cols, c.cols, std::nanf(""));
    }
    for (const Formats& f : kFormats) {
      const PackedWeights packed = Packed(w, c.cols, f.weight);
      const auto x =
          RandomOf(f.activation, int64_t{c.most_rows} * kHeads * c.cols, 6);
      std::vector<std::vector<float>> alone;
      for (int head = 0; head < kHeads; ++head) {
        const auto begin = w.begin() + int64_t{head} * head_rows * c.cols;
        const PackedWeights own = Packed(
            {begin, begin + int64_t{c.outputs} * c.cols}, c.cols, f.weight);
        const auto own_x = Columns(x, kHeads * c.cols, head * c.cols, c.cols);
        const auto bytes = Encode(f.activation, own_x);
        Guarded out(f.activation, int64_t{c.most_rows} * c.outputs);
        MatMulParams params{};
        params.weights = own.bytes.data();
        params.x = bytes.data();
        params.out = out.data();
        params.x_stride = params.cols = c.cols;
        params.out_stride = params.rows = params.outputs = c.outputs;
        params.tokens = c.most_rows;
        ASSERT_EQ(LaunchMatMul(stream, f.activation, f.weight, params), 0);
        alone.push_back(out.Values());
        for (int i = 0; i < 5 * c.outputs; ++i) {
          const int row = i / c.outputs;
          double sum = 0;
          for (int k = 0; k < c.cols; ++k) {
            sum += double{own_x[At(row * c.cols + k)]} *
                   UnpackWeight(own, i % c.outputs, k, c.cols, f.weight);
          }
          ASSERT_NEAR(alone.back()[At(i)], sum,
                      UnitOf(f.activation) * (std::fabs(sum) + 1) + 1e-4);
        }
      }
      for (const int rows : {1, 7, 16, 30, 33, 200}) {
        if (rows > c.most_rows) continue;
        const auto bytes = Encode(f.activation, x);
        Guarded out(f.activation, int64_t{rows} * kHeads * c.outputs);
        ASSERT_EQ(LaunchMatMulHeads(stream, f.activation, f.weight,
                                    {.weights = packed.bytes.data(),
                                     .x = bytes.data(),
                                     .out = out.data(),
                                     .heads = kHeads,
                                     .outputs = c.outputs,
                                     .cols = c.cols,
                                     .tokens = rows}),
                  0)
            << emulator::LastFault();
        EXPECT_TRUE(out.Kept());
        for (int head = 0; head < kHeads; ++head) {
          const auto got = Columns(out.Values(), kHeads * c.outputs,
                                   head * c.outputs, c.outputs);
          ASSERT_TRUE(SameBits(
              got, {alone[At(head)].begin(),
                    alone[At(head)].begin() + int64_t{rows} * c.outputs}))
              << Name(f.activation) << " weights " << static_cast<int>(f.weight)
              << " " << c.outputs << " x " << c.cols << ", " << rows
              << " rows, head " << head;
        }
      }
    }
  }
}

TEST(CudaMatMulHeads, LandingAndScheduleDoNotShow) {
  const auto w = RandomFloats(At(2 * 64 * 136), 5, 0.1f);
  const PackedWeights packed = Packed(w, 136, WeightType::kBF16);
  const auto x = Encode(DType::kBF16, RandomFloats(At(20 * 2 * 136), 6));
  std::vector<float> expected;
  for (const emulator::Settings& settings : kSettings) {
    const ScopedSettings scoped(settings);
    Guarded out(DType::kBF16, 20 * 2 * 40);
    ASSERT_EQ(LaunchMatMulHeads(StreamOf(Generation::kHopper), DType::kBF16,
                                WeightType::kBF16,
                                {.weights = packed.bytes.data(),
                                 .x = x.data(),
                                 .out = out.data(),
                                 .heads = 2,
                                 .outputs = 40,
                                 .cols = 136,
                                 .tokens = 20}),
              0);
    if (expected.empty()) expected = out.Values();
    EXPECT_TRUE(SameBits(out.Values(), expected));
  }
}

// Those have scales, which heads' products do not apply.
TEST(CudaMatMulHeads, QuantisedMatricesAreRefused) {
  for (const DType activation : kTypes) {
    for (const WeightType weight :
         {WeightType::kE4M3, WeightType::kInt4, WeightType::kW8A8}) {
      MatMulHeadsParams params{};
      params.heads = params.outputs = params.cols = params.tokens = 8;
      EXPECT_EQ(LaunchMatMulHeads(StreamOf(Generation::kHopper), activation,
                                  weight, params),
                kInvalidLaunch);
    }
  }
}

}  // namespace
}  // namespace tandem::kernels::cuda
