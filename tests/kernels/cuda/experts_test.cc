// SPDX-License-Identifier: Apache-2.0
// Layers of many experts, on the emulated device: which rows each works on,
// and that its products are those of one matrix, bit for bit.

#include "kernels/quantise.h"
#include "tests/kernels/cuda/expert_checks.h"

namespace tandem::kernels::cuda {
namespace {

TEST(CudaExperts, RowsArePlacedByTheirExpertsWhateverTheSchedule) {
  for (const emulator::Settings& settings : kSettings) {
    const ScopedSettings scoped(settings);
    EXPECT_TRUE(CheckExpertPlan(LaunchExpertPlan));
  }
}

TEST(CudaExperts, RowsAreCopiedToTheirPlaces) {
  EXPECT_TRUE(CheckSpreadRows(LaunchSpreadRows));
}

TEST(CudaExperts, SumsAreRoundedInTheirOrder) {
  EXPECT_TRUE(CheckSumExperts(LaunchSumExperts));
}

struct Format {
  DType activation;
  WeightType weight;
};

// Experts of unlike numbers of rows, the second without any.
struct Experts {
  static constexpr int kCopies = 176;
  static constexpr int kRanges[3][2] = {{0, 13}, {16, 16}, {16, 16 + 147}};

  Format format;
  RowOrder order;
  int rows;  // of each matrix
  int cols;
  std::vector<PackedWeights> weights;
  std::vector<ExpertMatrix> matrices;
  std::vector<std::byte> x;
  std::vector<float> bias;  // [3, rows]

  Experts(const Format& f, bool gated)
      : format(f),
        order(gated ? RowOrder::kGated : RowOrder::kPlain),
        rows(gated ? 2 * 45 : 70),
        cols(104),
        x(Encode(f.activation,
                 RandomOf(f.activation, int64_t{kCopies} * cols, 11))),
        bias(RandomFloats(At(3 * rows), 17, 5.0f)) {
    for (uint64_t e = 0; e < 3; ++e) {
      const auto w = RandomFloats(At(int64_t{rows} * cols), 12 + e, 0.1f);
      weights.push_back(
          PackWeights({reinterpret_cast<const std::byte*>(w.data()),
                       DType::kF32, rows, cols},
                      f.weight, order));
    }
    for (const PackedWeights& w : weights) {
      matrices.push_back({w.bytes.data(), w.scales.data(), nullptr});
    }
  }

  int outputs() const { return order == RowOrder::kGated ? rows / 2 : rows; }

  // Of rows [begin, end) of x; `codes` is where quantised ones are kept.
  MatMulParams Product(int begin, int end, std::vector<std::byte>& codes,
                       Guarded& out) const {
    const size_t size = SizeOf(format.activation);
    const std::byte* const first = x.data() + At(begin * cols) * size;
    MatMulParams p = {};
    p.x = first;
    p.out = out.data() + At(begin * outputs()) * size;
    p.x_stride = cols;
    p.out_stride = outputs();
    p.rows = PackedRows(rows, order);
    p.cols = cols;
    p.tokens = end - begin;
    p.outputs = outputs();
    p.bias = bias.data();
    p.activation = Activation::kClampedSwiGlu;
    if (order == RowOrder::kGated) p.output = MatMulOutput::kGated;
    if (!HasIntegerProducts(format.weight)) return p;
    codes.resize(At(CodeRowsBytes(end - begin, cols)));
    EXPECT_EQ(
        LaunchQuantiseRows(StreamOf(Generation::kHopper), format.activation,
                           {first, codes.data(), cols, end - begin, cols,
                            format.weight == WeightType::kW8A8}),
        0);
    p.x = codes.data();
    return p;
  }

  // Each expert's product by itself; elsewhere what was there.
  std::vector<float> Apart() const {
    Guarded out(format.activation, int64_t{kCopies} * outputs());
    for (size_t e = 0; e < 3; ++e) {
      std::vector<std::byte> codes;
      MatMulParams p = Product(kRanges[e][0], kRanges[e][1], codes, out);
      p.weights = matrices[e].weights;
      p.scales = matrices[e].scales;
      p.bias += At(rows) * e;
      const auto launch =
          HasIntegerProducts(format.weight) ? LaunchMatMulCodes : LaunchMatMul;
      EXPECT_EQ(launch(StreamOf(Generation::kHopper), format.activation,
                       format.weight, p),
                0)
          << emulator::LastFault();
    }
    return out.Values();
  }

  std::vector<float> Together(int tile_rows) const {
    Guarded out(format.activation, int64_t{kCopies} * outputs());
    std::vector<std::byte> codes;
    std::vector<ExpertTile> tiles;
    for (int e = 0; e < 3; ++e) {
      for (int at = kRanges[e][0]; at < kRanges[e][1]; at += tile_rows) {
        tiles.push_back({e, at, kRanges[e][1]});
      }
    }
    const std::vector<int32_t> number = {static_cast<int32_t>(tiles.size())};
    tiles.push_back({99, 0, 1 << 30});  // is none
    const ExpertProductParams p{.product = Product(0, kCopies, codes, out),
                                .matrices = matrices.data(),
                                .tiles = tiles.data(),
                                .num_tiles = number.data(),
                                .most_tiles = number[0] + 1};
    EXPECT_EQ(
        LaunchExpertProduct(StreamOf(Generation::kHopper), format.activation,
                            format.weight, tile_rows, p),
        0)
        << emulator::LastFault();
    EXPECT_TRUE(out.Kept());
    return out.Values();
  }
};

TEST(CudaExperts, ProductsHaveTheBitsOfEachMatrixAlone) {
  constexpr Format kFormats[] = {
      {DType::kF32, WeightType::kF32},   {DType::kF32, WeightType::kBF16},
      {DType::kF32, WeightType::kE4M3},  {DType::kF32, WeightType::kInt4},
      {DType::kBF16, WeightType::kBF16}, {DType::kBF16, WeightType::kE4M3},
      {DType::kBF16, WeightType::kInt8}, {DType::kF16, WeightType::kF16},
      {DType::kF16, WeightType::kE4M3},  {DType::kF16, WeightType::kInt4},
      {DType::kF32, WeightType::kW8A8},  {DType::kBF16, WeightType::kW8A8},
      {DType::kF16, WeightType::kW8A8}};
  for (const Format& format : kFormats) {
    for (const bool gated : {false, true}) {
      const Experts experts(format, gated);
      const auto expected = experts.Apart();
      for (const int tile_rows : {8, 32, 128}) {
        if (format.activation == DType::kF32 && tile_rows != 8) continue;
        EXPECT_TRUE(SameBits(experts.Together(tile_rows), expected))
            << Name(format.activation) << " by "
            << static_cast<int>(format.weight) << ", tiles of " << tile_rows
            << (gated ? ", gated" : "");
      }
    }
  }
}

TEST(CudaExperts, TilesFitWhatAnExpertHas) {
  EXPECT_EQ(ExpertTileRows(DType::kF32, 4096, 8, 2), 8);
  EXPECT_EQ(ExpertTileRows(DType::kBF16, 8, 4, 4), 8);
  EXPECT_EQ(ExpertTileRows(DType::kBF16, 64, 128, 8), 8);
  EXPECT_EQ(ExpertTileRows(DType::kBF16, 512, 128, 8), 32);
  EXPECT_EQ(ExpertTileRows(DType::kBF16, 2048, 128, 8), 128);
}

}  // namespace
}  // namespace tandem::kernels::cuda
