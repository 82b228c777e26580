// SPDX-License-Identifier: Apache-2.0
// Products with int8 and int4 weights on the emulated device have the bits of
// the CPU backend, which tests/kernels/codes_test.cc holds to the formula, and
// those with W8A8 weights the formula's: for f32 activations as they are, for
// others rounded to their type. Whatever the tiles, the batch and the schedule.

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

// The same, and codes as they come, -128 among them.
const CodeProblem kWhole[] = {
    {DType::kF32, DType::kW8A8, 100, 200, true},
    {DType::kF32, DType::kW8A8, 2 * 37, 72, true, true},
    {DType::kF32, DType::kW8A8, 17, 33, false, false, 0},
    {DType::kBF16, DType::kW8A8, 136, 300, true, false, 0},
    {DType::kBF16, DType::kW8A8, 2 * 44, 136, true, true},
    {DType::kBF16, DType::kW8A8, 30, 1},
    {DType::kF16, DType::kW8A8, 64, 64},
    {DType::kF16, DType::kW8A8, 2 * 44, 288, false, true, 0},
};

TEST(CudaCodes, ProductsOfWholeRowsHaveTheirFormulasBitsWhateverTheBatch) {
  for (const CodeProblem& problem : kWhole) {
    CodeData data(problem, 140);
    // A token of zeros, and others of tiny and of large numbers.
    constexpr float kFactors[] = {1, 0, 0x1p-12f, 0x1p9f};
    for (size_t i = 0; i < At(4 * problem.cols); ++i) {
      data.x[i] =
          RoundedTo(problem.type, data.x[i] * kFactors[i / At(problem.cols)]);
    }
    if (problem.type == DType::kF32) {
      EXPECT_TRUE(SameBits(data.CpuChains(140), data.WholeChains(140)))
          << NameOf(problem);
    }
    for (const int tokens : {1, 8, 9, 33, 70, 140}) {
      EXPECT_TRUE(SameBits(data.Multiply(tokens, LaunchMatMulCodes),
                           data.Expected(tokens)))
          << NameOf(problem) << ", " << tokens << " tokens";
    }
  }
}

// What an f32 does not hold is rounded once, to the nearest.
TEST(CudaCodes, SumsOfWholeRowsAreExactHoweverLarge) {
  for (const int cols : {4096, kMaxW8A8Inputs}) {
    CodeData data({DType::kF32, DType::kW8A8, 5, cols, false, false, 0}, 2);
    std::vector<uint8_t>& codes = data.given->codes;
    for (size_t i = 0; i < codes.size(); ++i) {
      const size_t row = i / At(cols);
      // Rows of the greatest codes of either sign, and of either in turns.
      codes[i] = row == 0                   ? 0x80
                 : row == 1                 ? 0x7f
                 : row == 2 && i % 2 == 0   ? 0x80
                 : row == 3 && i % 100 < 97 ? 0x7d
                                            : codes[i];
    }
    for (size_t i = 0; i < data.x.size(); ++i) {
      data.x[i] = i < At(cols) ? (i % 53 == 1 ? 0.3f : 0.7f)
                               : (i % 2 == 0 ? -1.0f : 1.0f);
    }
    data.weights = PackWeights(data.given->view);
    EXPECT_TRUE(SameBits(data.Multiply(2, LaunchMatMulCodes), data.Expected(2)))
        << cols;
    // That is: some sums are no f32.
    const Quantised token = WholeRows(data.x, 1, cols)[0];
    int64_t sum = 0;
    for (size_t i = 0; i < At(cols); ++i) {
      sum += int64_t{static_cast<int8_t>(codes[At(cols) + i])} *
             static_cast<int64_t>(token.codes[i]);
    }
    EXPECT_GT(sum, int64_t{1} << 24);
    EXPECT_NE(static_cast<int64_t>(static_cast<float>(sum)), sum);
  }
}

// What a warp and the largest block read at once, less and more; what ends
// inside a chunk, a group, a block; tokens that fill a tile and do not.
TEST(CudaCodes, WholeRowsAreQuantisedByThemselves) {
  for (const DType type : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const int cols : {1, 33, 100, 520, 4096, 8192, 8200, 20001}) {
      for (const int tokens : {1, 8, 9}) {
        auto x = RandomFloats(At(int64_t{tokens} * cols), 6);
        x[At(cols / 2)] = 3;
        for (float& value : x) value = RoundedTo(type, value);
        const auto encoded = Encode(type, x);
        const int tiles = (tokens + 7) / 8;
        const size_t size = At(tiles * WholeCodeRowsBytes(cols));
        ASSERT_LE(size, At(CodeRowsBytes(tokens, cols)));
        std::vector<std::byte> got(size + 64, std::byte{0xab});
        ASSERT_EQ(LaunchQuantiseRows(
                      StreamOf(Generation::kHopper), type,
                      {encoded.data(), got.data(), cols, tokens, cols, true}),
                  0)
            << emulator::LastFault();
        std::vector<std::byte> expected(size);
        const auto rows = WholeRows(x, tokens, cols);
        for (size_t t = 0; t < rows.size(); ++t) {
          std::byte* const tile =
              &expected[t / 8 * At(WholeCodeRowsBytes(cols))];
          for (size_t c = 0; c < At(cols); ++c) {
            tile[(c / 32 * 8 + t % 8) * 32 + c % 32] =
                static_cast<std::byte>(static_cast<int>(rows[t].codes[c]));
          }
          std::memcpy(tile + At(WholeCodeRowsBytes(cols)) - 32 + t % 8 * 4,
                      &rows[t].scale, 4);
        }
        expected.resize(size + 64, std::byte{0xab});
        ASSERT_TRUE(got == expected)
            << Name(type) << ", " << cols << " columns, " << tokens;
      }
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

TEST(CudaCodes, CodesOfWholeRowsAreKept) {
  const GivenCodes given(
      {DType::kBF16, DType::kW8A8, 2 * 9, 70, false, true, 0});
  ASSERT_NE(std::find(given.codes.begin(), given.codes.end(), 0x80),
            given.codes.end());
  ExpectKept(PackWeights(given.view, RowOrder::kGated), WeightType::kW8A8,
             RowOrder::kGated, given);
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
        CodeProblem{DType::kBF16, DType::kW8A8, 72, 640},
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
  for (const DType type : {DType::kInt8, DType::kInt4, DType::kW8A8}) {
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

void ExpectEmbedded(const GivenCodes& given) {
  const int cols = static_cast<int>(given.view.cols);
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
                        TypeOfCodes(given.view), p),
            0)
      << emulator::LastFault();
  for (int row = 0; row < 2; ++row) {
    for (int col = 0; col < cols; ++col) {
      ASSERT_EQ(got[At(row * cols + col)], given.Value(ids[At(row)], col))
          << row << ", " << col;
    }
  }
}

TEST(CudaCodes, EmbeddingsOfE2m1AreItsNumbers) {
  ExpectEmbedded(GivenCodes(
      {DType::kF32, DType::kInt4, 3, 96, false, false, 32, false, true}));
}

TEST(CudaCodes, EmbeddingsOfWholeRowsAreTheirNumbers) {
  ExpectEmbedded(
      GivenCodes({DType::kF32, DType::kW8A8, 3, 100, false, false, 0}));
}

TEST(CudaCodes, WhatIsNotFiniteShows) {
  for (const DType type : {DType::kInt8, DType::kInt4, DType::kW8A8}) {
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
