// SPDX-License-Identifier: Apache-2.0
// Products with int8 and int4 weights on the emulated device have the bits of
// the CPU backend, which tests/kernels/codes_test.cc holds to the formula:
// for f32 activations as they are, for others rounded to their type. Whatever
// the tiles, the batch and the schedule.

#include "tests/kernels/cuda/code_checks.h"

namespace tandem::kernels::cuda {
namespace {

// Rows and columns that end inside a step, a block, a tile.
const CodeProblem kCodeProblems[] = {
    {DType::kF32, DType::kInt8, 100, 200, true},
    {DType::kF32, DType::kInt4, 17, 33},
    {DType::kF32, DType::kInt4, 2 * 37, 72, true, true},
    {DType::kBF16, DType::kInt8, 64, 64},
    {DType::kBF16, DType::kInt8, 136, 300, true},
    {DType::kBF16, DType::kInt4, 136, 300, true},
    {DType::kBF16, DType::kInt4, 30, 1, false},
    {DType::kF16, DType::kInt8, 2 * 44, 136, true, true},
    {DType::kF16, DType::kInt4, 2 * 44, 136, false, true},
};

TEST(CudaCodes, ProductsHaveTheBitsOfTheCpuBackendWhateverTheBatch) {
  for (const CodeProblem& problem : kCodeProblems) {
    const CodeData data(problem, 130);
    for (const int tokens : {1, 3, 8, 17, 33, 130}) {
      EXPECT_TRUE(SameBits(data.Multiply(tokens, LaunchMatMulCodes),
                           data.Expected(tokens)))
          << NameOf(problem) << ", " << tokens << " tokens";
    }
  }
}

const CodeProblem kGiven[] = {
    {DType::kF32, DType::kInt8, 70, 200, true, false, 0},
    {DType::kBF16, DType::kInt8, 64, 416, false, false, 64},
    {DType::kF32, DType::kInt4, 2 * 37, 72, true, true, 32},
    {DType::kF16, DType::kInt4, 100, 300, false, false, 128},
    {DType::kF32, DType::kInt4, 33, 100, false, false, 0, true},
    {DType::kBF16, DType::kInt4, 2 * 44, 288, true, true, 128, true},
    {DType::kF16, DType::kInt4, 136, 64, true, false, 32, true},
    {DType::kF32, DType::kInt4, 2 * 37, 72, true, true, 32, false, true},
    {DType::kBF16, DType::kInt4, 100, 300, false, false, 32, false, true},
};

void ExpectKept(const PackedWeights& packed, WeightType type, RowOrder order,
                const GivenCodes& given) {
  const int rows = static_cast<int>(given.view.rows);
  const int cols = static_cast<int>(given.view.cols);
  for (int row = 0; row < PackedRows(rows, order); ++row) {
    const int from = SourceRow(row, rows, order);
    for (int col = 0; from >= 0 && col < cols; ++col) {
      ASSERT_EQ(UnpackWeight(packed, row, col, cols, type),
                given.Value(from, col))
          << "row " << row << ", col " << col;
    }
  }
}

TEST(CudaCodes, WhatWasQuantisedBeforeIsKept) {
  for (const CodeProblem& problem : kGiven) {
    SCOPED_TRACE(NameOf(problem));
    const CodeData data(problem, 130);
    ExpectKept(data.weights, data.type(),
               problem.gated ? RowOrder::kGated : RowOrder::kPlain,
               *data.given);
    for (const int tokens : {1, 17, 130}) {
      EXPECT_TRUE(SameBits(data.Multiply(tokens, LaunchMatMulCodes),
                           data.Expected(tokens)))
          << tokens << " tokens";
    }
  }
}

TEST(CudaCodes, Fp8CodesAreKept) {
  const GivenCodes given(
      {DType::kBF16, DType::kFp8, 2 * 9, 70, false, true, 0});
  ExpectKept(PackWeights(given.view, RowOrder::kGated), WeightType::kE4M3,
             RowOrder::kGated, given);
}

TEST(CudaCodes, LandingAndScheduleDoNotShow) {
  for (const CodeProblem& problem :
       {CodeProblem{DType::kBF16, DType::kInt8, 72, 640},
        CodeProblem{DType::kBF16, DType::kInt4, 72, 640},
        CodeProblem{DType::kBF16, DType::kInt4, 72, 640, false, false, 64,
                    true}}) {
    const CodeData data(problem, 70);
    for (const emulator::Settings& settings : kSettings) {
      const ScopedSettings scoped(settings);
      for (const int tokens : {2, 20, 70}) {
        ASSERT_TRUE(SameBits(data.Multiply(tokens, LaunchMatMulCodes),
                             data.Expected(tokens)))
            << NameOf(problem) << ", " << tokens;
      }
    }
  }
}

TEST(CudaCodes, EmbeddingsHaveTheBitsOfTheCpuBackend) {
  const int rows = 70;
  const int cols = 100;
  const std::vector<int32_t> ids = {0, 17, 69};
  const auto w = RandomFloats(At(int64_t{rows} * cols), 4, 0.02f);
  for (const DType type : {DType::kInt8, DType::kInt4}) {
    Device cpu(MakeBackend());
    Rows step;
    step.num_rows = 3;
    step.token_ids = cpu.Upload(ids);
    float* const out = cpu.New<float>(At(3 * cols));
    cpu->Embed(cpu.queue(), step, cpu.Pack(w, rows, cols, type), 0.5f, nullptr,
               out);
    const PackedWeights packed = PackWeights(
        {reinterpret_cast<const std::byte*>(w.data()), DType::kF32, rows, cols},
        CodeWeight(type));
    std::vector<float> got(At(3 * cols));
    EmbedParams p{};
    p.weights = packed.bytes.data();
    p.scales = packed.scales.data();
    p.token_ids = ids.data();
    p.out = got.data();
    p.num_rows = 3;
    p.cols = cols;
    p.scale = 0.5f;
    ASSERT_EQ(LaunchEmbed(StreamOf(Generation::kHopper), DType::kF32,
                          CodeWeight(type), p),
              0)
        << emulator::LastFault();
    EXPECT_TRUE(SameBits(got, cpu.Download(out, got.size()))) << Name(type);
    EXPECT_EQ(UnpackWeight(packed, 17, 5, cols, CodeWeight(type)) * 0.5f,
              got[At(cols + 5)]);
  }
}

TEST(CudaCodes, EmbeddingsOfE2m1AreItsNumbers) {
  const int cols = 96;
  const GivenCodes given(
      {DType::kF32, DType::kInt4, 3, cols, false, false, 32, false, true});
  const PackedWeights packed = PackWeights(given.view);
  const std::vector<int32_t> ids = {2, 0};
  std::vector<float> got(At(2 * cols));
  EmbedParams p{};
  p.weights = packed.bytes.data();
  p.scales = packed.scales.data();
  p.token_ids = ids.data();
  p.out = got.data();
  p.num_rows = 2;
  p.cols = cols;
  ASSERT_EQ(LaunchEmbed(StreamOf(Generation::kHopper), DType::kF32,
                        WeightType::kE2m1, p),
            0)
      << emulator::LastFault();
  for (int row = 0; row < 2; ++row) {
    for (int col = 0; col < cols; ++col) {
      ASSERT_EQ(got[At(row * cols + col)], given.Value(ids[At(row)], col))
          << row << ", " << col;
    }
  }
}

TEST(CudaCodes, WhatIsNotFiniteShows) {
  for (const DType type : {DType::kInt8, DType::kInt4}) {
    CodeData data({DType::kBF16, type, 3, 70}, 2);
    data.w[70 + 40] = HUGE_VALF;     // of row 1
    data.x[70 + 3] = std::nanf("");  // of token 1
    data.Pack();
    const auto got = data.Multiply(2, LaunchMatMulCodes);
    for (const size_t i : {0, 2}) EXPECT_TRUE(std::isfinite(got[i])) << i;
    for (const size_t i : {1, 3, 4, 5}) EXPECT_TRUE(std::isnan(got[i])) << i;
  }
}

}  // namespace
}  // namespace tandem::kernels::cuda
