// SPDX-License-Identifier: Apache-2.0
// Products with int8 and int4 weights on the emulated device have the bits of
// the CPU backend, which tests/kernels/codes_test.cc holds to the formula:
// for f32 activations as they are, for others rounded to their type. Whatever
// the tiles, the batch and the schedule.

#include "tests/kernels/cuda/code_checks.h"

namespace tandem::kernels::cuda {
namespace {

// Rows and columns that end inside a step, a block, a tile.
const CodeProblem kProblems[] = {
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
  for (const CodeProblem& problem : kProblems) {
    const CodeData data(problem, 130);
    for (const int tokens : {1, 3, 8, 17, 33, 130}) {
      EXPECT_TRUE(SameBits(data.Multiply(tokens, LaunchMatMulCodes),
                           data.Expected(tokens)))
          << NameOf(problem) << ", " << tokens << " tokens";
    }
  }
}

TEST(CudaCodes, LandingAndScheduleDoNotShow) {
  for (const DType type : {DType::kInt8, DType::kInt4}) {
    const CodeData data({DType::kBF16, type, 72, 640}, 70);
    for (const emulator::Settings& settings : kSettings) {
      const ScopedSettings scoped(settings);
      for (const int tokens : {2, 20, 70}) {
        ASSERT_TRUE(SameBits(data.Multiply(tokens, LaunchMatMulCodes),
                             data.Expected(tokens)))
            << Name(type) << ", " << tokens;
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
