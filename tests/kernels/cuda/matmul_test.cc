// SPDX-License-Identifier: Apache-2.0
// Matrix products on the emulated device: bit for bit the chain that
// kernels/cuda/numerics.h states, whatever the tiles, and near float64.

#include <functional>

#include "kernels/cuda/matmul_wgmma.cuh"
#include "kernels/quantise.h"
#include "tests/kernels/cuda/fixture.h"

namespace tandem::kernels::cuda {
namespace {

struct Problem {
  DType type;
  WeightType weight;
  int rows;
  int cols;
  bool bias = false;
  bool gated = false;  // rows: gates, then as many that they open
  Activation activation = Activation::kSilu;

  RowOrder order() const { return gated ? RowOrder::kGated : RowOrder::kPlain; }
  int outputs() const { return gated ? rows / 2 : rows; }
};

std::string NameOf(const Problem& p) {
  return std::string(Name(p.type)) + " weights " +
         std::to_string(static_cast<int>(p.weight)) + " " +
         std::to_string(p.rows) + " x " + std::to_string(p.cols);
}

// Data of one problem; tokens are drawn one after the other, so that more of
// them begin with the same.
struct Data {
  Problem problem;
  PackedWeights weights;
  std::vector<float> x;
  std::vector<float> bias;

  Data(const Problem& p, int tokens) : problem(p) {
    const auto w = RandomFloats(At(int64_t{p.rows} * p.cols), 5, 0.1f);
    weights = PackWeights({reinterpret_cast<const std::byte*>(w.data()),
                           DType::kF32, p.rows, p.cols},
                          p.weight, p.order());
    x = RandomFloats(At(int64_t{tokens} * p.cols), 6);
    for (float& value : x) value = RoundedTo(p.type, value);
    if (p.bias) bias = RandomFloats(At(p.rows), 7);
  }

  MatMulParams Params(int tokens, const std::vector<std::byte>& encoded,
                      std::vector<std::byte>& out) const {
    MatMulParams params;
    params.weights = weights.bytes.data();
    params.scales = weights.scales.data();
    params.x = encoded.data();
    params.bias = bias.empty() ? nullptr : bias.data();
    params.out = out.data();
    params.x_stride = problem.cols;
    params.out_stride = problem.outputs();
    params.rows = PackedRows(problem.rows, problem.order());
    params.cols = problem.cols;
    params.tokens = tokens;
    params.outputs = problem.outputs();
    if (problem.gated) params.output = MatMulOutput::kGated;
    params.activation = problem.activation;
    return params;
  }
};

using LaunchFn = std::function<int(const MatMulParams&)>;

std::vector<float> MultiplyWith(const Data& data, int tokens, DType out_type,
                                const LaunchFn& launch) {
  const auto x = Encode(data.problem.type, data.x);
  const int64_t count = int64_t{tokens} * data.problem.outputs();
  // Outputs that nobody writes show.
  std::vector<std::byte> out(At(count) * SizeOf(out_type), std::byte{0xff});
  EXPECT_EQ(launch(data.Params(tokens, x, out)), 0) << emulator::LastFault();
  return Decode(out_type, out);
}

std::vector<float> Multiply(const Data& data, int tokens,
                            Generation generation) {
  return MultiplyWith(
      data, tokens, data.problem.type, [&](const MatMulParams& p) {
        return LaunchMatMul(StreamOf(generation), data.problem.type,
                            data.problem.weight, p);
      });
}

// Of the packed matrix.
int PackedRowOf(const Problem& p, int row) {
  if (!p.gated) return row;
  const int of_half = row % (p.rows / 2);
  return of_half / 8 * 16 + of_half % 8 + (row < p.rows / 2 ? 0 : 8);
}

// The weight that enters the chain.
float ChainWeight(const Data& data, int source_row, int col) {
  const int row = PackedRowOf(data.problem, source_row);
  const float weight = UnpackWeight(data.weights, row, col, data.problem.cols,
                                    data.problem.weight);
  return data.problem.weight == WeightType::kE4M3
             ? weight / data.weights.scales[At(row)]
             : weight;
}

// The contract, straight from its words.
std::vector<float> Reference(const Data& data, int tokens,
                             Generation generation) {
  const Problem& p = data.problem;
  std::vector<float> out(At(int64_t{tokens} * p.rows));
  std::vector<float> row_weights(At(p.cols));
  for (int row = 0; row < p.rows; ++row) {
    std::vector<TensorVector> weights;
    for (int c = 0; c < p.cols; ++c) {
      row_weights[At(c)] = ChainWeight(data, row, c);
    }
    for (int c = 0; c < p.cols; c += kChainStep) {
      weights.push_back(VectorOf(p.type, &row_weights[At(c)], p.cols - c));
    }
    for (int t = 0; t < tokens; ++t) {
      float chain = 0;
      for (int c = 0; c < p.cols; c += kChainStep) {
        chain = TensorCoreStep(
            generation, weights[At(c / kChainStep)],
            VectorOf(p.type, &data.x[At(int64_t{t} * p.cols + c)], p.cols - c),
            chain, p.type == DType::kF16);
      }
      if (p.weight == WeightType::kE4M3) {
        chain *= data.weights.scales[At(PackedRowOf(p, row))];
      }
      float result = RoundedTo(p.type, chain);
      if (p.bias) result = RoundedTo(p.type, result + data.bias[At(row)]);
      out[At(int64_t{t} * p.rows + row)] = result;
    }
  }
  if (!p.gated) return out;
  const int dim = p.rows / 2;
  std::vector<float> gated;
  for (int t = 0; t < tokens; ++t) {
    for (int i = 0; i < dim; ++i) {
      const size_t gate = At(int64_t{t} * p.rows + i);
      gated.push_back(RoundedTo(
          p.type, Gated(p.activation, out[gate], out[gate + At(dim)])));
    }
  }
  return gated;
}

// Shapes after the supported families, reduced, and odd ones: rows and columns
// that end inside a step, a block, a tile; rows of x that are not aligned.
const Problem kProblems[] = {
    {DType::kBF16, WeightType::kBF16, 64, 64},
    {DType::kBF16, WeightType::kBF16, 192, 128, true},
    {DType::kBF16, WeightType::kBF16, 64, 172},
    {DType::kBF16, WeightType::kBF16, 100, 200},
    {DType::kBF16, WeightType::kBF16, 17, 33, true},
    {DType::kBF16, WeightType::kBF16, 136, 1096},
    {DType::kF16, WeightType::kF16, 96, 192},
    {DType::kF16, WeightType::kF16, 40, 75, true},
    {DType::kBF16, WeightType::kE4M3, 136, 264},
    {DType::kBF16, WeightType::kE4M3, 30, 50, true},
    {DType::kF16, WeightType::kE4M3, 72, 136},
    {DType::kBF16, WeightType::kBF16, 256, 136, false, true},
    {DType::kBF16, WeightType::kBF16, 2 * 37, 72, true, true},
    {DType::kF16, WeightType::kE4M3, 2 * 44, 64, true, true},
    {DType::kBF16, WeightType::kBF16, 2 * 40, 64, true, true,
     Activation::kClampedSwiGlu},
};

TEST(CudaMatMul, EveryOutputIsTheOneChainWhateverTheBatch) {
  for (const Problem& problem : kProblems) {
    for (const Generation generation : Generations()) {
      const Data data(problem, 130);
      const auto reference = Reference(data, 130, generation);
      for (const int tokens : {1, 3, 8, 17, 33, 130}) {
        const auto got = Multiply(data, tokens, generation);
        ASSERT_TRUE(SameBits(
            got, {reference.begin(),
                  reference.begin() + int64_t{tokens} * problem.outputs()}))
            << NameOf(problem) << ", " << tokens << " tokens";
      }
    }
  }
}

TEST(CudaMatMul, IsNearFloat64) {
  for (const Problem& problem : kProblems) {
    if (problem.gated) continue;
    const int tokens = 5;
    const Data data(problem, tokens);
    const auto got = Multiply(data, tokens, Generation::kHopper);
    const double unit = problem.type == DType::kBF16 ? 0x1p-8 : 0x1p-11;
    for (int t = 0; t < tokens; ++t) {
      for (int row = 0; row < problem.rows; ++row) {
        double sum = 0;
        double size = 0;
        for (int c = 0; c < problem.cols; ++c) {
          const double product =
              double{data.x[At(int64_t{t} * problem.cols + c)]} *
              UnpackWeight(data.weights, row, c, problem.cols, problem.weight);
          sum += product;
          size += std::fabs(product);
        }
        if (problem.bias) sum += data.bias[At(row)];
        // Rounding twice to the type, truncation once per step.
        const double bound = 2 * unit * (std::fabs(sum) + 1) +
                             size * problem.cols / 16 * 0x1p-23;
        ASSERT_NEAR(got[At(int64_t{t} * problem.rows + row)], sum, bound)
            << NameOf(problem);
      }
    }
  }
}

TEST(CudaMatMul, LandingAndScheduleDoNotShow) {
  for (const Problem& problem :
       {Problem{DType::kBF16, WeightType::kBF16, 72, 640},
        Problem{DType::kBF16, WeightType::kE4M3, 72, 640}}) {
    const Data data(problem, 65);
    for (const int tokens : {2, 16, 30, 60, 65}) {
      for (const Generation generation : Generations()) {
        const auto expected = Multiply(data, tokens, generation);
        for (const emulator::Settings& settings : kSettings) {
          const ScopedSettings scoped(settings);
          ASSERT_TRUE(SameBits(Multiply(data, tokens, generation), expected))
              << tokens;
        }
      }
    }
  }
}

TEST(CudaMatMul, LogitsAreTheSameValuesInF32) {
  const Problem problem{DType::kBF16, WeightType::kBF16, 130, 96};
  const Data data(problem, 70);
  for (const int tokens : {1, 70}) {
    const auto wide =
        MultiplyWith(data, tokens, DType::kF32, [&](MatMulParams p) {
          p.output = MatMulOutput::kWide;
          return LaunchMatMul(StreamOf(Generation::kHopper), problem.type,
                              problem.weight, p);
        });
    EXPECT_TRUE(SameBits(wide, Multiply(data, tokens, Generation::kHopper)));
  }
}

template <typename Kernel>
LaunchFn Direct(DType type) {
  return [type](const MatMulParams& p) {
    return RunWarpgroups<Kernel>(StreamOf(Generation::kHopper), type, p);
  };
}

// With more tiles than blocks, rings that wrap, tiles that end early.
TEST(CudaMatMul, WarpgroupKernelsGiveTheSameBits) {
  struct Case {
    Problem problem;
    int tokens;
    LaunchFn launch;
  };
  const DType bf16 = DType::kBF16;
  const DType f16 = DType::kF16;
  const Case cases[] = {
      {{bf16, WeightType::kBF16, 100, 200},
       200,
       Direct<MatMulWgmmaKernel<BFloat16, BFloat16, 1, 64, 3>>(bf16)},
      {{bf16, WeightType::kBF16, 200, 328, true},
       140,
       Direct<MatMulWgmmaKernel<BFloat16, BFloat16, 1, 128, 2>>(bf16)},
      {{bf16, WeightType::kBF16, 600, 72},
       130,
       Direct<MatMulWgmmaKernel<BFloat16, BFloat16, 2, 128, 6>>(bf16)},
      {{bf16, WeightType::kBF16, 130, 520},
       260,
       Direct<MatMulWgmmaKernel<BFloat16, BFloat16, 2, 256, 4>>(bf16)},
      {{f16, WeightType::kF16, 64, 264},
       66,
       Direct<MatMulWgmmaKernel<Half, Half, 1, 128, 7>>(f16)},
      {{f16, WeightType::kE4M3, 72, 264},
       66,
       Direct<MatMulWgmmaKernel<Half, E4M3, 1, 64, 3>>(f16)},
      {{bf16, WeightType::kE4M3, 200, 136, true},
       257,
       Direct<MatMulWgmmaKernel<BFloat16, E4M3, 2, 256, 4>>(bf16)},
      {{bf16, WeightType::kBF16, 2 * 100, 136, true, true},
       150,
       Direct<MatMulWgmmaKernel<BFloat16, BFloat16, 2, 128, 3>>(bf16)},
      {{bf16, WeightType::kE4M3, 2 * 44, 72, true, true},
       70,
       Direct<MatMulWgmmaKernel<BFloat16, E4M3, 1, 64, 3>>(bf16)},
  };
  for (const Case& c : cases) {
    const Data data(c.problem, c.tokens);
    const auto expected = Reference(data, c.tokens, Generation::kHopper);
    for (const emulator::Settings& settings : kSettings) {
      const ScopedSettings scoped(settings);
      ASSERT_TRUE(SameBits(
          MultiplyWith(data, c.tokens, c.problem.type, c.launch), expected))
          << NameOf(c.problem);
    }
  }
}

TEST(CudaMatMul, F32ModelsHaveTheBitsOfTheCpuBackend) {
  struct Case {
    int rows, cols, tokens;
    DType weight;
  };
  for (const Case& c : {Case{64, 64, 1, DType::kF32},
                        {172, 64, 9, DType::kF32},
                        {65, 172, 30, DType::kF32},
                        {33, 77, 5, DType::kF32},
                        {48, 96, 10, DType::kBF16}}) {
    const auto w = RandomFloats(At(int64_t{c.rows} * c.cols), 1);
    const auto x = RandomFloats(At(int64_t{c.tokens} * c.cols), 2);
    const auto bias = RandomFloats(At(c.rows), 3);
    Device cpu(MakeBackend());
    float* const out = cpu.New<float>(At(int64_t{c.tokens} * c.rows));
    cpu->MatMul(cpu.queue(), c.tokens, cpu.Upload(x),
                cpu.Pack(w, c.rows, c.cols, c.weight), cpu.Upload(bias), out);
    const auto expected = cpu.Download(out, At(int64_t{c.tokens} * c.rows));

    Data data({DType::kF32,
               c.weight == DType::kF32 ? WeightType::kF32 : WeightType::kBF16,
               c.rows, c.cols},
              c.tokens);
    data.weights = PackWeights({reinterpret_cast<const std::byte*>(w.data()),
                                DType::kF32, c.rows, c.cols},
                               data.problem.weight);
    data.x = x;
    data.bias = bias;
    EXPECT_TRUE(
        SameBits(Multiply(data, c.tokens, Generation::kHopper), expected))
        << c.rows << " x " << c.cols;
  }
}

TEST(CudaMatMul, ClampedGatesHideNoNan) {
  const auto gated = [](float gate, float up) {
    return Gated(Activation::kClampedSwiGlu, gate, up);
  };
  EXPECT_TRUE(std::isnan(gated(std::nanf(""), 1)));
  EXPECT_TRUE(std::isnan(gated(1, std::nanf(""))));
  EXPECT_EQ(gated(2, -1), 0);
}

TEST(CudaMatMul, GatedF32ModelsHaveTheBitsOfTheCpuBackend) {
  for (const int dim : {8, 37, 200}) {
    const int cols = 40;
    const int tokens = 9;
    // The other numbers are cut here and there.
    const Activation activation =
        dim == 37 ? Activation::kClampedSwiGlu : Activation::kSilu;
    const auto w =
        RandomFloats(At(int64_t{2} * dim * cols), 1, dim == 37 ? 3.0f : 1.0f);
    const auto x = RandomFloats(At(int64_t{tokens} * cols), 2);
    const auto bias = RandomFloats(At(int64_t{2} * dim), 3);
    Device cpu(MakeBackend());
    float* const out = cpu.New<float>(At(int64_t{tokens} * dim));
    cpu->GatedMatMul(cpu.queue(), tokens, cpu.Upload(x),
                     cpu.PackGated(w, 2 * dim, cols, DType::kF32),
                     cpu.Upload(bias), activation, out);
    const auto expected = cpu.Download(out, At(int64_t{tokens} * dim));

    Data data(
        {DType::kF32, WeightType::kF32, 2 * dim, cols, true, true, activation},
        tokens);
    data.weights = PackWeights({reinterpret_cast<const std::byte*>(w.data()),
                                DType::kF32, 2 * dim, cols},
                               WeightType::kF32, RowOrder::kGated);
    data.x = x;
    data.bias = bias;
    EXPECT_TRUE(SameBits(Multiply(data, tokens, Generation::kHopper), expected))
        << dim;
  }
}

// Through the gate, the operation that shows it: products with 1.
TEST(CudaMatMul, ExpHasTheBitsOfTheCpuBackend) {
  std::vector<float> w;
  for (float v = -95.0f; v < 90.0f; v += 0.00731f) w.push_back(v);
  w.insert(w.end(), {-1e30f, -87.4f, 1000.0f, -1000.0f});
  const int dim = static_cast<int>(w.size());
  w.resize(w.size() * 2, 1.0f);
  Device cpu(MakeBackend());
  float* const out = cpu.New<float>(At(dim));
  cpu->GatedMatMul(cpu.queue(), 1, cpu.Upload(std::vector<float>(1, 1.0f)),
                   cpu.PackGated(w, 2 * dim, 1, DType::kF32), nullptr,
                   Activation::kSilu, out);
  Data data({DType::kF32, WeightType::kF32, 2 * dim, 1, false, true}, 1);
  data.weights = PackWeights(
      {reinterpret_cast<const std::byte*>(w.data()), DType::kF32, 2 * dim, 1},
      WeightType::kF32, RowOrder::kGated);
  data.x = {1.0f};
  EXPECT_TRUE(SameBits(Multiply(data, 1, Generation::kHopper),
                       cpu.Download(out, At(dim))));
}

TEST(PackedWeights, EveryE4M3GoesThereAndBack) {
  for (int bits = 0; bits < 256; ++bits) {
    if ((bits & 0x7f) == 0x7f) continue;  // not a number
    const float value = FloatFromE4M3(static_cast<uint8_t>(bits));
    EXPECT_EQ(E4M3FromFloat(value), bits) << value;
    for (const bool half : {false, true}) {
      const uint32_t pair = static_cast<uint32_t>(bits) << 8 | 0x38u;
      const uint32_t operands =
          half ? FromE4M3Pair<Half>(pair) : FromE4M3Pair<BFloat16>(pair);
      const uint16_t high = static_cast<uint16_t>(operands >> 16);
      const uint16_t low = static_cast<uint16_t>(operands);
      EXPECT_EQ(half ? ToFloat(Half{high}) : ToFloat(BFloat16{high}), value);
      EXPECT_EQ(half ? ToFloat(Half{low}) : ToFloat(BFloat16{low}), 1.0f);
    }
  }
  // Halfway goes to the even one; beyond the largest is the largest.
  EXPECT_EQ(FloatFromE4M3(E4M3FromFloat(17.0f)), 16.0f);
  EXPECT_EQ(FloatFromE4M3(E4M3FromFloat(19.0f)), 20.0f);
  EXPECT_EQ(FloatFromE4M3(E4M3FromFloat(-1000.0f)), -448.0f);
  EXPECT_EQ(FloatFromE4M3(E4M3FromFloat(0x1p-10f)), 0.0f);
  EXPECT_EQ(FloatFromE4M3(E4M3FromFloat(0x1.8p-10f)), 0x1p-9f);
}

}  // namespace
}  // namespace tandem::kernels::cuda
