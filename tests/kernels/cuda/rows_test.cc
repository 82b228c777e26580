// SPDX-License-Identifier: Apache-2.0
// Kernels that take rows one at a time, on the emulated device: embedding,
// norm, rotary embedding with append, gated activation, the choice of rows.

#include "tests/kernels/cuda/checks.h"

namespace tandem::kernels::cuda {
namespace {

TEST(CudaRows, NormIsTheContractsWhateverTheSchedule) {
  for (const emulator::Settings& settings : kSettings) {
    const ScopedSettings scoped(settings);
    EXPECT_TRUE(CheckRmsNorm(LaunchRmsNorm));
  }
}

TEST(CudaRows, RopeRotatesAndAppendsWhateverTheSchedule) {
  for (const emulator::Settings& settings : kSettings) {
    const ScopedSettings scoped(settings);
    EXPECT_TRUE(CheckRopeAppend(LaunchRopeAppend));
  }
}

TEST(CudaRows, SiluMulHasTheBitsOfTheCpuBackend) {
  EXPECT_TRUE(CheckSiluMul(LaunchSiluMul));
}

TEST(CudaRows, ExpHasTheBitsOfTheCpuBackend) {
  std::vector<float> x;
  for (float v = -95.0f; v < 90.0f; v += 0.00731f) x.push_back(v);
  x.insert(x.end(), {0.0f, -0.0f, -INFINITY, -1e30f, -87.4f});
  const int dim = static_cast<int>(x.size());
  // Through silu, the operation that shows it.
  std::vector<float> gate_up = x;
  gate_up.resize(x.size() * 2, 1.0f);
  Device cpu(MakeBackend());
  float* const out = cpu.New<float>(x.size());
  cpu->SiluMul(cpu.queue(), 1, dim, cpu.Upload(gate_up), out);
  std::vector<float> got(x.size());
  ASSERT_EQ(LaunchSiluMul(StreamOf(Generation::kHopper), DType::kF32,
                          {gate_up.data(), got.data(), 1, dim}),
            0);
  EXPECT_TRUE(SameBits(got, cpu.Download(out, x.size())));
}

TEST(CudaRows, EmbedTakesRowsOfEveryPackedType) {
  const int rows = 130;
  const std::vector<int32_t> ids = {0, 129, 64, 63, 64};
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
        ASSERT_EQ(
            LaunchEmbed(StreamOf(Generation::kHopper), type, weight,
                        {packed.bytes.data(), packed.scales.data(), ids.data(),
                         out.data(), static_cast<int>(ids.size()), cols}),
            0)
            << emulator::LastFault();
        std::vector<float> expected;
        for (const int32_t id : ids) {
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
  const std::vector<int32_t> ids = {4, 0, 2, 2};
  for (const DType type : kTypes) {
    for (const int dim : kSizes) {
      const auto x = RandomOf(type, 5 * dim, 81);
      const auto bytes = Encode(type, x);
      Guarded out(type, int64_t{4} * dim);
      ASSERT_EQ(
          LaunchGatherRows(StreamOf(Generation::kHopper), type,
                           {ids.data(), bytes.data(), out.data(), 4, dim}),
          0);
      std::vector<float> expected;
      for (const int32_t id : ids) {
        expected.insert(expected.end(), x.begin() + id * dim,
                        x.begin() + (id + 1) * dim);
      }
      EXPECT_TRUE(SameBits(out.Values(), expected)) << Name(type) << dim;
      EXPECT_TRUE(out.Kept());
    }
  }
}

TEST(CudaRows, NoRowsAreNoLaunch) {
  const Stream stream = StreamOf(Generation::kHopper);
  EXPECT_EQ(LaunchEmbed(stream, DType::kF32, WeightType::kF32, {}), 0);
  EXPECT_EQ(LaunchRmsNorm(stream, DType::kBF16, {}), 0);
  EXPECT_EQ(LaunchRopeAppend(stream, DType::kF16, {}), 0);
  EXPECT_EQ(LaunchSiluMul(stream, DType::kF32, {}), 0);
  EXPECT_EQ(LaunchGatherRows(stream, DType::kF32, {}), 0);
  EXPECT_EQ(LaunchSample(stream, {}), 0);
  EXPECT_EQ(LaunchKvGather(stream, KvSliceParams{}), 0);
  EXPECT_EQ(LaunchKvScatter(stream, KvSliceParams{}), 0);
}

}  // namespace
}  // namespace tandem::kernels::cuda
