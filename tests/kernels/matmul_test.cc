// SPDX-License-Identifier: Apache-2.0
// Products equal one chain of fused multiply-adds per output, bit for bit,
// whatever path, batch, thread count or instruction set computes them: in
// order, of rounded inputs in pairs, the odd one first, or in groups.

#include "kernels/cpu/float_env.h"
#include "tests/kernels/fixture.h"

namespace tandem::kernels {
namespace {

// Around every edge: panels of 32, pairs of inputs, blocks of 288, 576 and
// 1152, eight of the smallest ones.
const MatrixShape kShapes[] = {{1, 1},      {7, 3},    {31, 17},  {32, 64},
                               {33, 65},    {96, 576}, {65, 577}, {100, 769},
                               {260, 1024}, {40, 2305}};
const int kBatches[] = {1,  2,  3,  5,  6,  7,  8,   12,
                        13, 16, 24, 32, 63, 95, 143, 144};
constexpr int kMostRows = 144;

// The weights, and what their inputs are read as.
struct Types {
  DType weights;
  CpuInputs inputs;

  // Inputs are rounded beside bf16 weights, and fp8's, which lie as such.
  CpuInputs summed() const {
    return weights == DType::kF32 ? CpuInputs::kF32 : inputs;
  }
};

// What is multiplied, and what finished chains of row n are multiplied by.
struct Kept {
  std::vector<float> weights;
  std::vector<float> scales;
};

Kept KeptAs(Types types, const MatrixShape& shape,
            const std::vector<float>& w) {
  const DType type = types.weights;
  Kept kept{w, std::vector<float>(static_cast<size_t>(shape.n), 1.0f)};
  for (float& weight : kept.weights) weight = Rounded(weight, type);
  if (type != DType::kFp8) return kept;
  for (int n = 0; n < shape.n; ++n) {
    const std::ptrdiff_t at = std::ptrdiff_t{n} * shape.k;
    const Quantised row =
        QuantisedOf(w.data() + at, static_cast<size_t>(shape.k), type);
    std::copy(row.codes.begin(), row.codes.end(), kept.weights.begin() + at);
    kept.scales[static_cast<size_t>(n)] = row.scale;
  }
  return kept;
}

std::vector<float> Reference(int m, const MatrixShape& shape,
                             std::vector<float> x, const Kept& w,
                             const std::vector<float>& bias, CpuInputs inputs) {
  const cpu::ScopedFlushDenormals flush;
  std::vector<float> out(static_cast<size_t>(m * shape.n));
  if (inputs != CpuInputs::kF32) {
    for (float& input : x) input = RoundToBf16(input);
  }
  for (int r = 0; r < m; ++r) {
    for (int n = 0; n < shape.n; ++n) {
      float chain = 0.0f;
      const auto add = [&](int k, float& to) {
        if (k >= shape.k) return;
        to = std::fma(x[static_cast<size_t>(r * shape.k + k)],
                      w.weights[static_cast<size_t>(n * shape.k + k)], to);
      };
      if (inputs == CpuInputs::kBf16Amx) {
        for (int group = 0; group < shape.k; group += 32) {
          float even = 0.0f;
          float odd = 0.0f;
          for (int k = group; k < group + 32; k += 2) {
            add(k, even);
            add(k + 1, odd);
          }
          chain = chain + (even + odd);
        }
      } else {
        const bool pairs = inputs == CpuInputs::kBf16;
        for (int k = 0; k < shape.k; k += 2) {
          add(pairs ? k + 1 : k, chain);
          add(pairs ? k : k + 1, chain);
        }
      }
      chain = chain * w.scales[static_cast<size_t>(n)];
      if (!bias.empty()) chain = chain + bias[static_cast<size_t>(n)];
      out[static_cast<size_t>(r * shape.n + n)] = chain;
    }
  }
  return out;
}

class MatMulTest : public ::testing::TestWithParam<Types> {};

TEST_P(MatMulTest, EqualsTheInOrderChainBitForBit) {
  const Types types = GetParam();
  int configs = 0;
  for (const Config& config : AllConfigs()) {
    auto backend = MakeBackend(config.isa, config.threads, types.inputs);
    if (backend == nullptr) continue;
    ++configs;
    Device device(std::move(backend));
    for (const MatrixShape& shape : kShapes) {
      const auto w = RandomFloats(static_cast<size_t>(shape.n * shape.k), 1);
      Matrix& packed = device.Pack(w, shape.n, shape.k, types.weights);
      const auto bias = RandomFloats(static_cast<size_t>(shape.n), 2);
      const auto x = RandomFloats(static_cast<size_t>(kMostRows * shape.k), 3);
      const auto expected = Reference(
          kMostRows, shape, x, KeptAs(types, shape, w), bias, types.summed());
      const float* const device_x = device.Upload(x);
      const float* const device_bias = device.Upload(bias);
      float* const out =
          device.New<float>(static_cast<size_t>(kMostRows * shape.n));
      for (const int m : kBatches) {
        device->MatMul(device.queue(), m, device_x, packed, device_bias, out);
        const auto count = static_cast<size_t>(m * shape.n);
        EXPECT_TRUE(
            SameBits(device.Download(out, count),
                     {expected.begin(),
                      expected.begin() + static_cast<std::ptrdiff_t>(count)}))
            << config.isa << " threads " << config.threads << " n " << shape.n
            << " k " << shape.k << " m " << m;
      }
    }
  }
  EXPECT_GE(configs, 3);
}

TEST_P(MatMulTest, MoreRowsThanAreCopiedAtOnceGiveTheSameBits) {
  Device device(MakeBackend("auto", 1, GetParam().inputs));
  const MatrixShape shape{33, 65};
  const int rows = 1030;
  const auto w = RandomFloats(static_cast<size_t>(shape.n * shape.k), 1);
  const auto x = RandomFloats(static_cast<size_t>(rows * shape.k), 3);
  Matrix& packed = device.Pack(w, shape.n, shape.k, GetParam().weights);
  const auto count = static_cast<size_t>(rows * shape.n);
  float* const out = device.New<float>(count);
  device->MatMul(device.queue(), rows, device.Upload(x), packed, nullptr, out);
  EXPECT_TRUE(SameBits(device.Download(out, count),
                       Reference(rows, shape, x, KeptAs(GetParam(), shape, w),
                                 {}, GetParam().summed())));
}

TEST_P(MatMulTest, EachHeadHasAMatrixOfItsOwn) {
  const Types types = GetParam();
  if (IsQuantised(types.weights)) return;
  const int heads = 3;
  const int most = 60;
  for (const auto& [outputs, cols] :
       {std::pair(24, 40), {128, 192}, {64, 576}, {288, 96}}) {
    const auto count = static_cast<size_t>(outputs * cols);
    const auto x =
        RandomFloats(static_cast<size_t>(most * heads * cols), outputs);
    std::vector<std::vector<float>> own;
    std::vector<float> all;
    for (int head = 0; head < heads; ++head) {
      own.push_back(RandomFloats(count, cols + head));
      all.insert(all.end(), own.back().begin(), own.back().end());
      all.resize(static_cast<size_t>((head + 1) * HeadRows(outputs) * cols),
                 NAN);
    }
    for (const int threads : {1, 3}) {
      Device device(MakeBackend("auto", threads, types.inputs));
      const Matrix& w =
          device.Pack(all, heads * HeadRows(outputs), cols, types.weights);
      for (const int rows : {1, 7, most}) {
        const auto size = static_cast<size_t>(rows * heads * outputs);
        float* const out = device.New<float>(size);
        device->MatMulHeads(device.queue(), rows, heads, outputs,
                            device.Upload(x), w, out);
        const auto got = device.Download(out, size);
        for (int head = 0; head < heads; ++head) {
          std::vector<float> taken;
          for (int row = 0; row < rows; ++row) {
            const auto from = x.begin() + (row * heads + head) * cols;
            taken.insert(taken.end(), from, from + cols);
          }
          float* const apart =
              device.New<float>(static_cast<size_t>(rows * outputs));
          device->MatMul(device.queue(), rows, device.Upload(taken),
                         device.Pack(own[static_cast<size_t>(head)], outputs,
                                     cols, types.weights),
                         nullptr, apart);
          const auto expected =
              device.Download(apart, static_cast<size_t>(rows * outputs));
          for (int row = 0; row < rows; ++row) {
            for (int i = 0; i < outputs; ++i) {
              ASSERT_EQ(
                  got[static_cast<size_t>((row * heads + head) * outputs + i)],
                  expected[static_cast<size_t>(row * outputs + i)])
                  << head << " of " << rows << " rows, " << row << ", " << i;
            }
          }
        }
      }
    }
  }
}

TEST_P(MatMulTest, PaddingIsNotMultipliedIn) {
  // 0 * infinity would be NaN.
  Device device(MakeBackend("auto", 1, GetParam().inputs));
  // Nor what a product before left where weights are filled up.
  const int cols = 31;
  Matrix& infinite = device.Pack(std::vector<float>(3 * cols, INFINITY), 3,
                                 cols, GetParam().weights);
  const float* const ones =
      device.Upload(std::vector<float>(static_cast<size_t>(2 * cols), 1.0f));
  device->MatMul(device.queue(), 2, ones, infinite, nullptr,
                 device.New<float>(6));
  const MatrixShape shape{3, 5};
  std::vector<float> w(15, 1.0f);
  std::vector<float> x = {INFINITY, 1, 1, 1, 1, INFINITY, 1, 1, 1, 1};
  Matrix& packed = device.Pack(w, shape.n, shape.k, GetParam().weights);
  float* const out = device.New<float>(6);
  for (const int rows : {1, 2}) {
    device->MatMul(device.queue(), rows, device.Upload(x), packed, nullptr,
                   out);
    for (const float value :
         device.Download(out, static_cast<size_t>(3 * rows))) {
      EXPECT_EQ(value, INFINITY);
    }
  }
}

TEST_P(MatMulTest, IsWithinTheErrorBoundOfFloat64) {
  // k roundings of a chain whose partial sums are at most sum |x||w|:
  // error <= k * 2^-24 * sum |x||w|. Rounding inputs adds 2^-8 of it.
  Device device(MakeBackend("auto", 1, GetParam().inputs));
  const MatrixShape shape{70, 900};
  const auto w = RandomFloats(static_cast<size_t>(shape.n * shape.k), 5);
  const auto x = RandomFloats(static_cast<size_t>(4 * shape.k), 6);
  Matrix& packed = device.Pack(w, shape.n, shape.k, GetParam().weights);
  float* const out = device.New<float>(static_cast<size_t>(4 * shape.n));
  device->MatMul(device.queue(), 4, device.Upload(x), packed, nullptr, out);
  const auto got = device.Download(out, static_cast<size_t>(4 * shape.n));
  const Kept kept = KeptAs(GetParam(), shape, w);
  for (int r = 0; r < 4; ++r) {
    for (int n = 0; n < shape.n; ++n) {
      double sum = 0;
      double magnitude = 0;
      for (int k = 0; k < shape.k; ++k) {
        const double product =
            double{x[static_cast<size_t>(r * shape.k + k)]} *
            kept.weights[static_cast<size_t>(n * shape.k + k)] *
            kept.scales[static_cast<size_t>(n)];
        sum += product;
        magnitude += std::abs(product);
      }
      const double rounding =
          GetParam().summed() == CpuInputs::kF32 ? 0 : std::ldexp(1.0, -8);
      EXPECT_NEAR(got[static_cast<size_t>(r * shape.n + n)], sum,
                  (shape.k * std::ldexp(1.0, -24) + rounding) * magnitude);
    }
  }
}

std::vector<Types> AllTypes() {
  std::vector<Types> all;
  for (const DType weights : {DType::kF32, DType::kBF16, DType::kFp8}) {
    for (const CpuInputs inputs : kAllInputs) all.push_back({weights, inputs});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Types, MatMulTest, ::testing::ValuesIn(AllTypes()),
                         [](const auto& param) {
                           return std::string(Name(param.param.weights)) +
                                  "_of_" + Name(param.param.inputs);
                         });

std::vector<std::pair<Config, CpuInputs>> RoundingConfigs() {
  std::vector<std::pair<Config, CpuInputs>> all;
  for (const Config& config : AllConfigs()) {
    for (const CpuInputs inputs : {CpuInputs::kBf16, CpuInputs::kBf16Amx}) {
      all.emplace_back(config, inputs);
    }
  }
  return all;
}

// Ties, what rounds to infinity, denormals (which are zeros), NaN: one input at
// a time, beside a product that shows whether zeros were added.
TEST(RoundedInputsTest, EveryKindOfNumberIsRoundedAsBf16) {
  const std::vector<uint32_t> bits = {
      0x3f808000, 0x3f818000, 0x3f808001, 0x3f817fff, 0xbf808000, 0x7f7fffff,
      0xff7fffff, 0x7f7f7fff, 0x00000001, 0x807fffff, 0x00800000, 0x00ff8000,
      0x7f800000, 0xff800000, 0x7fc00000, 0x7fffffff, 0x7f800001, 0x00000000};
  for (const auto& [config, inputs] : RoundingConfigs()) {
    auto backend = MakeBackend(config.isa, config.threads, inputs);
    if (backend == nullptr) continue;
    Device device(std::move(backend));
    const Matrix& one = device.Pack({1.0f}, 1, 1, DType::kBF16);
    for (const int rows : {1, static_cast<int>(bits.size()), 150}) {
      std::vector<float> x;
      for (int i = 0; i < rows; ++i) {
        x.push_back(
            std::bit_cast<float>(bits[static_cast<size_t>(i) % bits.size()]));
      }
      float* const out = device.New<float>(static_cast<size_t>(rows));
      device->MatMul(device.queue(), rows, device.Upload(x), one, nullptr, out);
      const auto got = device.Download(out, static_cast<size_t>(rows));
      for (size_t i = 0; i < got.size(); ++i) {
        if (std::isnan(x[i])) {
          EXPECT_TRUE(std::isnan(got[i])) << config.isa << " " << i;
        } else {
          const float rounded = RoundToBf16(x[i]);
          // Groups take denormals as zeros before they are rounded.
          const float told = inputs == CpuInputs::kBf16 ? rounded : x[i];
          EXPECT_EQ(got[i],
                    std::fpclassify(told) == FP_SUBNORMAL ? 0.0f : rounded)
              << config.isa << " " << i;
        }
      }
    }
  }
}

TEST(PackMatrixTest, WidensHalfPrecisionExactly) {
  // Every finite f16 is an f32, denormals included.
  std::vector<uint16_t> halves;
  for (uint32_t i = 0; i < 0x7c00; ++i) {
    halves.push_back(static_cast<uint16_t>(i));
  }
  auto backend = MakeBackend();
  const HostTensor source{reinterpret_cast<const std::byte*>(halves.data()),
                          DType::kF16, static_cast<int64_t>(halves.size()), 1};
  auto matrix = backend->PackMatrix(source, DType::kF32);
  ASSERT_TRUE(matrix.ok());
  Device device(std::move(backend));
  float* const out = device.New<float>(halves.size());
  device->MatMul(device.queue(), 1, device.Upload(std::vector<float>{1.0f}),
                 **matrix, nullptr, out);
  const auto got = device.Download(out, halves.size());
  for (size_t i = 0; i < halves.size(); ++i) {
    const int exponent = static_cast<int>(i >> 10);
    const double mantissa = static_cast<double>(i & 0x3ff);
    const double expected = exponent == 0
                                ? std::ldexp(mantissa, -24)
                                : std::ldexp(1024 + mantissa, exponent - 25);
    ASSERT_EQ(got[i], expected) << i;
  }
}

TEST(PackMatrixTest, RefusesWhatItCannotKeep) {
  auto backend = MakeBackend();
  const float value = 1;
  const auto* const data = reinterpret_cast<const std::byte*>(&value);
  EXPECT_EQ(backend->PackMatrix({data, DType::kF32, 1, 1}, DType::kF16)
                .status()
                .code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(backend->PackMatrix({data, DType::kF32, 0, 1}, DType::kF32)
                .status()
                .code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(backend->PackMatrix({nullptr, DType::kF32, 1, 1}, DType::kF32)
                .status()
                .code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace tandem::kernels
