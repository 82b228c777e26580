// SPDX-License-Identifier: Apache-2.0
// Norm, activation, embedding, row gather and exp: float64 bounds, and equal
// bits for every batch, thread count and instruction set.

#include "kernels/cpu/kernel_table.h"
#include "tests/kernels/fixture.h"
#include "tests/kernels/route_reference.h"

namespace tandem::kernels {
namespace {

const int kDims[] = {1, 8, 15, 16, 17, 100, 576, 1024, 1537};

TEST(ElementwiseTest, ExpIsWithinTwoUlpAndTheSameOnBothInstructionSets) {
  std::vector<float> x;
  for (float v = -95.0f; v < 90.0f; v += 0.00731f) x.push_back(v);
  x.insert(x.end(), {0.0f, -0.0f, -INFINITY, -1e30f, -87.4f});
  const auto exp_of = [&](const char* isa, std::vector<float>* out) {
    const auto table = cpu::MakeKernelTable(isa);
    if (!table.ok()) return false;
    out->resize(x.size());
    table->exp(static_cast<int>(x.size()), x.data(), out->data());
    return true;
  };
  std::vector<float> got;
  ASSERT_TRUE(exp_of("auto", &got));
  for (size_t i = 0; i < x.size(); ++i) {
    const double expected = x[i] < -87.33f ? 0.0 : std::exp(double{x[i]});
    if (x[i] > 88.0f) continue;  // saturates by contract
    EXPECT_NEAR(got[i], expected, 2.4e-7 * expected) << x[i];
  }
  EXPECT_EQ(got[x.size() - 5], 1.0f);
  EXPECT_EQ(got[x.size() - 4], 1.0f);
  EXPECT_EQ(got[x.size() - 3], 0.0f);
  std::vector<float> avx2;
  ASSERT_TRUE(exp_of("avx2", &avx2));
  EXPECT_TRUE(SameBits(avx2, got));
}

TEST(ElementwiseTest, RmsNormAddsTheResidualAndIsWithinTheErrorBound) {
  // A sum of dim squares in 16 chains: relative error below dim / 16 + 8
  // roundings; 1e-5 covers every dim here.
  for (const int dim : kDims) {
    const auto x = RandomFloats(static_cast<size_t>(3 * dim), 21);
    const auto delta = RandomFloats(static_cast<size_t>(3 * dim), 22);
    const auto weight = RandomFloats(static_cast<size_t>(dim), 23);
    Device device(MakeBackend());
    float* const device_x = device.Upload(x);
    float* const out = device.New<float>(static_cast<size_t>(3 * dim));
    device->RmsNorm(device.queue(), 3, dim, 1e-5f, device_x,
                    device.Upload(delta), device.Upload(weight), out);
    const auto sum = device.Download(device_x, static_cast<size_t>(3 * dim));
    const auto got = device.Download(out, static_cast<size_t>(3 * dim));
    for (int r = 0; r < 3; ++r) {
      double squares = 0;
      for (int i = 0; i < dim; ++i) {
        const auto at = static_cast<size_t>(r * dim + i);
        EXPECT_EQ(sum[at], x[at] + delta[at]);
        squares += double{sum[at]} * sum[at];
      }
      const double scale = 1 / std::sqrt(squares / dim + 1e-5);
      for (int i = 0; i < dim; ++i) {
        const auto at = static_cast<size_t>(r * dim + i);
        const double expected =
            sum[at] * scale * weight[static_cast<size_t>(i)];
        EXPECT_NEAR(got[at], expected, 1e-5 * std::abs(expected) + 1e-30);
      }
    }
  }
}

TEST(ElementwiseTest, RmsNormWithoutWeightsIsTheSum) {
  for (const int dim : kDims) {
    const auto x = RandomFloats(static_cast<size_t>(dim), 21);
    const auto delta = RandomFloats(static_cast<size_t>(dim), 22);
    auto sum = x;
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += delta[i];
    Device device(MakeBackend());
    float* const device_x = device.Upload(x);
    float* const out = device.New<float>(sum.size());
    device->RmsNorm(device.queue(), 1, dim, 1e-5f, device_x,
                    device.Upload(delta), nullptr, out);
    EXPECT_TRUE(SameBits(device.Download(out, sum.size()), sum));
    EXPECT_TRUE(SameBits(device.Download(device_x, sum.size()), sum));
  }
}

// The middle 24 of rows of 40 are normed as rows of their own are.
TEST(ElementwiseTest, NormInPlaceLeavesWhatLiesBesideIt) {
  constexpr int kRows = 5, kDim = 24, kStride = 40, kBefore = 8;
  const auto x = RandomFloats(kRows * kStride, 24);
  const auto weight = RandomFloats(kDim, 25);
  Device device(MakeBackend());
  float* const in_place = device.Upload(x);
  device->NormInPlace(device.queue(), kRows, kDim, kStride, 1e-5f,
                      device.Upload(weight), in_place + kBefore);
  const auto got = device.Download(in_place, x.size());
  auto expected = x;
  for (int row = 0; row < kRows; ++row) {
    const auto begin = x.begin() + row * kStride + kBefore;
    float* const out = device.New<float>(kDim);
    device->RmsNorm(device.queue(), 1, kDim, 1e-5f,
                    device.Upload(std::vector<float>(begin, begin + kDim)),
                    nullptr, device.Upload(weight), out);
    const auto normed = device.Download(out, kDim);
    std::copy(normed.begin(), normed.end(),
              expected.begin() + row * kStride + kBefore);
  }
  EXPECT_TRUE(SameBits(got, expected));
}

// Behind their rotation; keys are not.
TEST(ElementwiseTest, QueriesAreScaledByTheirPosition) {
  constexpr int kHeads = 2, kDim = 16, kWidth = (kHeads + 2) * kDim;
  const std::vector<int32_t> positions = {3, 0};
  const std::vector<float> scales = {1.0f, 7.0f, 7.0f, 1.25f};
  const auto qkv = RandomFloats(2 * kWidth, 26);
  const auto cos = RandomFloats(4 * kDim / 2, 27);
  const auto sin = RandomFloats(4 * kDim / 2, 28);
  const auto run = [&](bool scaled, std::vector<float>* keys) {
    Device device(MakeBackend());
    auto cache = *device->NewKvCache({1, 1, kDim, 16, 2, DType::kF32});
    Rows rows;
    rows.num_rows = 2;
    rows.positions = device.Upload(positions);
    rows.slots = device.Upload(std::vector<int32_t>{16, 17});
    float* const x = device.Upload(qkv);
    device->RopeAppend(device.queue(), rows, kHeads,
                       {device.Upload(cos), device.Upload(sin), kDim / 2,
                        scaled ? device.Upload(scales) : nullptr},
                       {}, x, nullptr, *cache, 0);
    const auto got = device.Download(x, qkv.size());
    for (const int row : {0, 1}) {
      const auto begin = got.begin() + row * kWidth + kHeads * kDim;
      keys->insert(keys->end(), begin, begin + kDim);
    }
    return got;
  };
  std::vector<float> keys, plain_keys;
  const auto got = run(true, &keys);
  const auto plain = run(false, &plain_keys);
  EXPECT_TRUE(SameBits(keys, plain_keys));
  for (int row = 0; row < 2; ++row) {
    for (int i = row * kWidth; i < row * kWidth + kHeads * kDim; ++i) {
      EXPECT_EQ(got[i], plain[i] * scales[positions[row]]);
    }
  }
}

// As beside keys and values, where nothing is appended.
TEST(ElementwiseTest, QueriesTurnByThemselves) {
  constexpr int kHeads = 3, kDim = 24, kRows = 2, kPairs = 5;
  constexpr int kQuery = kHeads * kDim, kWidth = kQuery + 2 * kDim;
  const auto qkv = RandomFloats(kRows * kWidth, 31);
  std::vector<float> queries;
  for (int row = 0; row < kRows; ++row) {
    const auto begin = qkv.begin() + row * kWidth;
    queries.insert(queries.end(), begin, begin + kQuery);
  }
  for (const bool rotated : {false, true}) {
    Device device(MakeBackend());
    auto cache = *device->NewKvCache({1, 1, kDim, 16, 2, DType::kF32});
    Rows rows;
    rows.num_rows = kRows;
    rows.positions = device.Upload(std::vector<int32_t>{3, 1});
    rows.slots = device.Upload(std::vector<int32_t>{16, 17});
    const RopeTable rope{device.Upload(RandomFloats(4 * kPairs, 32)),
                         device.Upload(RandomFloats(4 * kPairs, 33)), kPairs,
                         device.Upload(RandomFloats(4, 34))};
    const float* const weight = device.Upload(RandomFloats(kDim, 35));
    const HeadNorms norms{
        .query = weight, .key = weight, .eps = 1e-5f, .rotated = rotated};
    float* const whole = device.Upload(qkv);
    device->RopeAppend(device.queue(), rows, kHeads, rope, norms, whole,
                       nullptr, *cache, 0);
    float* const alone = device.Upload(queries);
    rows.slots = nullptr;
    device->RopeQueries(device.queue(), rows, kHeads, kDim, rope,
                        {.query = weight, .eps = 1e-5f, .rotated = rotated},
                        alone);
    const auto both = device.Download(whole, qkv.size());
    std::vector<float> expected;
    for (int row = 0; row < kRows; ++row) {
      const auto begin = both.begin() + row * kWidth;
      expected.insert(expected.end(), begin, begin + kQuery);
    }
    EXPECT_TRUE(SameBits(device.Download(alone, queries.size()), expected));
    EXPECT_FALSE(SameBits(expected, queries));
  }
}

constexpr int kTurnedDim = 24;

// RopeAppend of a head each of Q, K and V: what it makes of Q and K in place.
std::vector<float> Turned(Device& device, const std::vector<float>& qkv,
                          const RopeTable& rope, const HeadNorms& norms) {
  auto cache = *device->NewKvCache({1, 1, kTurnedDim, 16, 1, DType::kF32});
  Rows rows;
  rows.num_rows = 1;
  rows.positions = device.Upload(std::vector<int32_t>{1});
  rows.slots = device.Upload(std::vector<int32_t>{5});
  float* const out = device.Upload(qkv);
  device->RopeAppend(device.queue(), rows, 1, rope, norms, out, nullptr, *cache,
                     0);
  return device.Download(out, qkv.size());
}

TEST(ElementwiseTest, TheFirstPairsOfAHeadTurnAndTheRestStays) {
  constexpr int kHalf = kTurnedDim / 2;
  constexpr int kPairs = 5;
  const auto x = RandomFloats(3 * kTurnedDim, 21);
  const auto angles = RandomFloats(2 * kPairs, 22);  // of two positions
  std::vector<float> cos, sin;
  for (const float angle : angles) {
    cos.push_back(std::cos(angle));
    sin.push_back(std::sin(angle));
  }
  Device device(MakeBackend());
  const auto got =
      Turned(device, x, {device.Upload(cos), device.Upload(sin), kPairs}, {});
  for (int i = 0; i < 2 * kTurnedDim; ++i) {
    const int pair = i % kHalf;
    const int first = i / kTurnedDim * kTurnedDim + pair;
    const auto at = [&](int j) { return x[static_cast<size_t>(j)]; };
    const float a = at(first);
    const float b = at(first + kHalf);
    const float c = pair < kPairs ? cos[static_cast<size_t>(kPairs + pair)] : 1;
    const float s = pair < kPairs ? sin[static_cast<size_t>(kPairs + pair)] : 0;
    EXPECT_FLOAT_EQ(got[static_cast<size_t>(i)],
                    i % kTurnedDim < kHalf ? a * c - b * s : b * c + a * s)
        << i;
  }
}

// Norms of heads as they have turned are those of turned heads.
TEST(ElementwiseTest, HeadsAreNormedOnceTheyHaveTurned) {
  constexpr int kDim = kTurnedDim;
  const auto x = RandomFloats(3 * kDim, 21);  // a head each
  const auto cos = RandomFloats(kDim, 22);    // of two positions
  const auto sin = RandomFloats(kDim, 23);
  const auto query_norm = RandomFloats(kDim, 24);
  const auto key_norm = RandomFloats(kDim, 25);
  Device device(MakeBackend());
  const auto run = [&](const std::vector<float>& qkv, const RopeTable& rope,
                       const HeadNorms& norms) {
    return Turned(device, qkv, rope, norms);
  };
  const RopeTable rope = {device.Upload(cos), device.Upload(sin), kDim / 2};
  const HeadNorms norms = {device.Upload(query_norm), device.Upload(key_norm),
                           1e-5f};
  HeadNorms rotated = norms;
  rotated.rotated = true;
  const auto got = run(x, rope, rotated);
  EXPECT_TRUE(SameBits(got, run(run(x, rope, {}), {}, norms)));
  EXPECT_FALSE(SameBits(got, run(x, rope, norms)));
}

TEST(ElementwiseTest, RmsNormWithoutResidualLeavesItsInput) {
  const auto x = RandomFloats(100, 24);
  Device device(MakeBackend());
  float* const device_x = device.Upload(x);
  float* const out = device.New<float>(100);
  device->RmsNorm(device.queue(), 1, 100, 1e-5f, device_x, nullptr,
                  device.Upload(std::vector<float>(100, 1.0f)), out);
  EXPECT_TRUE(SameBits(device.Download(device_x, 100), x));
}

// What the gates open, of `both` [2 * dim], gates first: of products with 1.
std::vector<float> Gated(Activation activation,
                         const std::vector<float>& both) {
  Device device(MakeBackend());
  const int dim = static_cast<int>(both.size()) / 2;
  float* const out = device.New<float>(both.size() / 2);
  device->GatedMatMul(device.queue(), 1,
                      device.Upload(std::vector<float>(1, 1.0f)),
                      device.PackGated(both, 2 * dim, 1, DType::kF32), nullptr,
                      activation, out);
  return device.Download(out, both.size() / 2);
}
std::vector<float> Silu(const std::vector<float>& both) {
  return Gated(Activation::kSilu, both);
}

TEST(ElementwiseTest, SiluIsWithinTheErrorBoundOfFloat64) {
  for (const int dim : kDims) {
    const auto x = RandomFloats(static_cast<size_t>(2 * dim), 25, 8.0f);
    const auto got = Silu(x);
    for (int i = 0; i < dim; ++i) {
      const double gate = x[static_cast<size_t>(i)];
      const double up = x[static_cast<size_t>(dim + i)];
      const double expected = gate / (1 + std::exp(-gate)) * up;
      EXPECT_NEAR(got[static_cast<size_t>(i)], expected,
                  5e-7 * std::abs(expected) + 1e-30);
    }
  }
}

TEST(ElementwiseTest, ClampedSwiGluIsWithinTheErrorBoundOfFloat64) {
  for (const int dim : kDims) {
    const auto x = RandomFloats(static_cast<size_t>(2 * dim), 28, 20.0f);
    const auto got = Gated(Activation::kClampedSwiGlu, x);
    for (int i = 0; i < dim; ++i) {
      const double gate = std::min<double>(x[static_cast<size_t>(i)], 7);
      const double up =
          std::clamp<double>(x[static_cast<size_t>(dim + i)], -7, 7);
      const double expected = gate / (1 + std::exp(-1.702 * gate)) * (up + 1);
      // The exponent's own rounding grows with it.
      EXPECT_NEAR(got[static_cast<size_t>(i)], expected,
                  (5e-7 + 1.2e-7 * std::abs(gate)) * std::abs(expected) + 1e-6);
    }
  }
}

TEST(ElementwiseTest, ClampedSwiGluHidesNoNan) {
  const float nan = std::nanf("");
  const auto got =
      Gated(Activation::kClampedSwiGlu, {nan, 1.0f, 2.0f, 1.0f, nan, -1.0f});
  EXPECT_TRUE(std::isnan(got[0]));
  EXPECT_TRUE(std::isnan(got[1]));
  EXPECT_EQ(got[2], 0.0f);
}

TEST(ElementwiseTest, SiluIsFiniteForExtremeGates) {
  const auto got =
      Silu({-1000.0f, -90.0f, 90.0f, 1000.0f, 1.0f, 1.0f, 1.0f, 1.0f});
  EXPECT_NEAR(got[0], 0.0f, 1e-30f);
  EXPECT_NEAR(got[1], 0.0f, 1e-30f);
  EXPECT_EQ(got[2], 90.0f);
  EXPECT_EQ(got[3], 1000.0f);
}

TEST(ElementwiseTest, BitsDoNotDependOnBatchThreadsOrIsa) {
  for (const int dim : kDims) {
    const auto x = RandomFloats(static_cast<size_t>(64 * dim), 26);
    const auto weight = RandomFloats(static_cast<size_t>(dim), 27);
    std::vector<float> norm, silu;
    for (const Config& config : AllConfigs()) {
      auto backend = MakeBackend(config.isa, config.threads);
      if (backend == nullptr) continue;
      Device device(std::move(backend));
      float* const device_x = device.Upload(x);
      float* const device_weight = device.Upload(weight);
      const float* const device_bias = device.Upload(x);
      const Matrix& w = device.PackGated(x, 2 * dim, 4, DType::kF32);
      float* const out = device.New<float>(static_cast<size_t>(64 * dim));
      for (const int rows : {1, 3, 8, 32}) {
        const auto count = static_cast<size_t>(rows * dim);
        const auto prefix = [&](const std::vector<float>& whole) {
          return std::vector<float>(
              whole.begin(),
              whole.begin() +
                  static_cast<std::ptrdiff_t>(std::min(count, whole.size())));
        };
        device->RmsNorm(device.queue(), 32, dim, 1e-6f, device_x, nullptr,
                        device_weight, out);
        if (norm.empty())
          norm = device.Download(out, 32 * static_cast<size_t>(dim));
        device->RmsNorm(device.queue(), rows, dim, 1e-6f, device_x, nullptr,
                        device_weight, out);
        EXPECT_TRUE(SameBits(device.Download(out, count), prefix(norm)));
        const auto gated = [&](int gated_rows) {
          device->GatedMatMul(device.queue(), gated_rows, device_x, w,
                              device_bias, Activation::kSilu, out);
          return device.Download(out, static_cast<size_t>(gated_rows * dim));
        };
        if (silu.empty()) silu = gated(32);
        EXPECT_TRUE(SameBits(gated(rows), prefix(silu)));
      }
    }
  }
}

TEST(ElementwiseTest, LayerNormIsWithinTheErrorBoundOfFloat64) {
  for (const int dim : {8, 51, 64, 300}) {
    const auto n = static_cast<size_t>(dim);
    const auto x = RandomFloats(3 * n, 31, 4.0f);
    const auto delta = RandomFloats(3 * n, 32);
    const auto weight = RandomFloats(n, 33);
    const auto bias = RandomFloats(n, 34);
    Device device(MakeBackend("auto", 2));
    float* const out = device.New<float>(3 * n);
    device->LayerNorm(device.queue(), 3, dim, 1e-5f, device.Upload(x),
                      device.Upload(delta), device.Upload(weight),
                      device.Upload(bias), out);
    const auto got = device.Download(out, 3 * n);
    for (size_t r = 0; r < 3; ++r) {
      double mean = 0, variance = 0;
      const auto at = [&](size_t i) {
        return double{x[r * n + i]} + delta[r * n + i];
      };
      for (size_t i = 0; i < n; ++i) mean += at(i) / dim;
      for (size_t i = 0; i < n; ++i) {
        variance += (at(i) - mean) * (at(i) - mean) / dim;
      }
      for (size_t i = 0; i < n; ++i) {
        const double normed = (at(i) - mean) / std::sqrt(variance + 1e-5);
        ASSERT_NEAR(got[r * n + i], normed * weight[i] + bias[i], 1e-5) << i;
      }
    }
  }
}

// Heads 1 to 3 of rows of 5, each by weights of its own.
TEST(ElementwiseTest, CentresEachHeadAndLeavesWhatLiesBesideThem) {
  constexpr size_t kRows = 3, kHeads = 3, kDim = 40, kStride = 5 * kDim;
  const auto x = RandomFloats(kRows * kStride, 41, 4.0f);
  const auto weight = RandomFloats(kHeads * kDim, 42);
  Device device(MakeBackend("auto", 2));
  float* const in_place = device.Upload(x);
  device->CentreHeads(device.queue(), kRows, kHeads, kDim, kStride, 1e-5f,
                      device.Upload(weight), in_place + kDim);
  const auto got = device.Download(in_place, x.size());
  for (size_t at = 0; at < x.size(); at += kDim) {
    const size_t head = at / kDim % 5 - 1;
    double mean = 0, variance = 0;
    for (size_t i = 0; i < kDim; ++i) mean += x[at + i] / double{kDim};
    for (size_t i = 0; i < kDim; ++i) {
      variance += (x[at + i] - mean) * (x[at + i] - mean) / kDim;
    }
    for (size_t i = 0; i < kDim; ++i) {
      const double normed = (x[at + i] - mean) / std::sqrt(variance + 1e-5);
      const double expected =
          head < kHeads ? normed * weight[head * kDim + i] : double{x[at + i]};
      ASSERT_NEAR(got[at + i], expected, head < kHeads ? 1e-5 : 0) << at + i;
    }
  }
}

TEST(ElementwiseTest, GeluAndCapsAreWithinTheErrorBoundOfFloat64) {
  const int dim = 77;
  const auto x = RandomFloats(2 * dim, 35, 9.0f);
  Device device(MakeBackend());
  float* const gelu = device.Upload(x);
  float* const capped = device.Upload(x);
  device->Activate(device.queue(), 2, dim, Activation::kGeluTanh, gelu);
  device->ScaleLogits(device.queue(), 2, dim, 1.5f, 7, capped);
  const auto got_gelu = device.Download(gelu, x.size());
  const auto got_capped = device.Download(capped, x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    const double v = x[i];
    const double inner =
        std::sqrt(2 / std::numbers::pi) * (v + 0.044715 * v * v * v);
    EXPECT_NEAR(got_gelu[i], 0.5 * v * (1 + std::tanh(inner)), 3e-6) << v;
    EXPECT_NEAR(got_capped[i], 7 * std::tanh(v * 1.5 / 7), 3e-6) << v;
  }
}

// What is added to max(x, 0) is |x| Phi(-|x|), off by 5e-7 of it (p, Exp and
// roundings) and by what rounding x * x does to the exponent, x * x / 2 * 6e-8;
// the sum is rounded once. Behind the cut it is nothing.
TEST(ElementwiseTest, ExactGeluIsThatOfFloat64Erf) {
  std::vector<float> x = {0.0f,   -0.0f, 1e-30f, -1e-30f, 12.8f,
                          -12.8f, 13.5f, -13.5f, 3e38f,   -3e38f};
  for (int i = -28000; i <= 28000; ++i) x.push_back(0.0005f * i);
  const int dim = static_cast<int>(x.size());
  Device device(MakeBackend());
  float* const gelu = device.Upload(x);
  float* const squares = device.Upload(x);
  device->Activate(device.queue(), 1, dim, Activation::kGelu, gelu);
  device->Activate(device.queue(), 1, dim, Activation::kRelu2, squares);
  const auto got = device.Download(gelu, x.size());
  const auto got_squares = device.Download(squares, x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    const double v = x[i];
    const double tail =
        std::abs(v) * 0.5 * std::erfc(std::abs(v) / std::numbers::sqrt2);
    const double expected = std::max(v, 0.0) - tail;
    const double bound =
        tail * (5e-7 + v * v * 6e-8) + std::abs(expected) * 0x1p-24 + 2e-36;
    ASSERT_NEAR(got[i], expected, bound) << v;
    const float positive = std::max(x[i], 0.0f);
    ASSERT_EQ(got_squares[i], positive * positive) << v;
  }
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const Activation what : {Activation::kGelu, Activation::kRelu2}) {
    float* const row = device.Upload(std::vector<float>{nan, 1.0f});
    device->Activate(device.queue(), 1, 2, what, row);
    EXPECT_TRUE(std::isnan(device.Download(row, 2)[0]));
  }
}

TEST(ElementwiseTest, EmbedReadsRowsOfAPackedTable) {
  for (const DType type : {DType::kF32, DType::kBF16}) {
    const int vocab = 77, dim = 51;
    const auto table = RandomFloats(static_cast<size_t>(vocab * dim), 28);
    Device device(MakeBackend("auto", 2));
    const std::vector<int32_t> ids = {0, 76, 31, 32, 76, 63, 64};
    // The second and the last are fed with what was drawn.
    std::vector<SampleResult> drawn(2);
    drawn[0].token_id = ids[6];
    drawn[1].token_id = ids[1];
    Rows rows;
    rows.num_rows = static_cast<int>(ids.size());
    rows.token_ids = device.Upload<int32_t>({0, -1, 31, 32, 76, 63, 900});
    rows.fed = device.Upload<int32_t>({-1, 1, -1, -1, -1, -1, 0});
    rows.drawn = device.Upload(drawn);
    float* const out = device.New<float>(ids.size() * dim);
    device->Embed(device.queue(), rows, device.Pack(table, vocab, dim, type), 1,
                  nullptr, out);
    const auto got = device.Download(out, ids.size() * dim);
    const std::vector<int32_t> at = {3, 0, 0, 1, 2, 3, 3};
    const auto learned = RandomFloats(4 * dim, 29);
    rows.positions = device.Upload(at);
    device->Embed(device.queue(), rows, device.Pack(table, vocab, dim, type),
                  1.5f, device.Upload(learned), out);
    const auto moved = device.Download(out, ids.size() * dim);
    for (size_t r = 0; r < ids.size(); ++r) {
      for (size_t i = 0; i < dim; ++i) {
        const float value =
            Rounded(table[static_cast<size_t>(ids[r]) * dim + i], type);
        EXPECT_EQ(got[r * dim + i], value);
        const size_t position = static_cast<size_t>(at[r]);
        EXPECT_EQ(moved[r * dim + i],
                  value * 1.5f + learned[position * dim + i]);
      }
    }
  }
}

TEST(ElementwiseTest, RouteTakesTheMostProbableAndOfEqualOnesTheFirst) {
  const std::vector<float> logits = {1, 3, 3, 2, 3};
  for (const char* const isa : {"auto", "avx2"}) {
    const auto table = cpu::MakeKernelTable(isa);
    ASSERT_TRUE(table.ok());
    for (const int chosen : {2, 4}) {
      const RouteOptions options{.experts = 5, .chosen = chosen};
      float got[5];
      table->route(options, logits.data(), got);
      const auto expected = RouteReference(options, {}, logits.data());
      for (size_t i = 0; i < 5; ++i) {
        const bool taken = chosen == 2 ? i == 1 || i == 2 : i > 0;
        EXPECT_EQ(got[i] != 0, taken) << i << " of " << chosen;
        EXPECT_NEAR(got[i], expected[i], 1e-6) << i << " of " << chosen;
      }
    }
  }
}

TEST(ElementwiseTest, RouteChoosesInEachFamilysWay) {
  const auto logits = RandomFloats(13 * 40, 31, 2.0f);
  const auto bias = RandomFloats(12, 32, 0.5f);
  const auto scales = RandomFloats(12, 33);
  const std::vector<float> none;
  Device device(MakeBackend());
  for (RouteOptions options : RouteCases()) {
    for (const auto& [biased, scaled] :
         {std::pair(false, false), {true, false}, {false, true}}) {
      const auto columns = static_cast<size_t>(options.logits());
      const auto weights = static_cast<size_t>(options.weights());
      options.choice_bias = biased ? device.Upload(bias) : nullptr;
      options.expert_scales = scaled ? device.Upload(scales) : nullptr;
      float* const out = device.New<float>(40 * weights);
      device->Route(device.queue(), 40, options, device.Upload(logits), out);
      const auto got = device.Download(out, 40 * weights);
      for (size_t row = 0; row < 40; ++row) {
        const auto expected =
            RouteReference(options, biased ? bias : none,
                           &logits[row * columns], scaled ? scales : none);
        for (size_t i = 0; i < weights; ++i) {
          EXPECT_NEAR(got[row * weights + i], expected[i],
                      2e-6 * std::max(1.0, std::abs(expected[i])))
              << options.chosen << " chosen, row " << row << ", " << i;
        }
      }
    }
  }
}

TEST(ElementwiseTest, RouteBearsSigmoidsThatAreZero) {
  const std::vector<float> logits(4, -1000.0f);
  const auto table = cpu::MakeKernelTable("auto");
  ASSERT_TRUE(table.ok());
  float got[4];
  table->route({.experts = 4, .chosen = 2, .normalise = true, .sigmoid = true},
               logits.data(), got);
  for (const float weight : got) EXPECT_NEAR(weight, 0, 1e-6);
}

TEST(ElementwiseTest, GatherRowsTakesRowsInTheOrderAsked) {
  Device device(MakeBackend());
  const auto x = RandomFloats(5 * 33, 29);
  const std::vector<int32_t> ids = {4, 0, 4};
  float* const out = device.New<float>(3 * 33);
  device->GatherRows(device.queue(), 3, 33, device.Upload(ids),
                     device.Upload(x), out);
  const auto got = device.Download(out, 3 * 33);
  for (size_t r = 0; r < 3; ++r) {
    for (size_t i = 0; i < 33; ++i) {
      EXPECT_EQ(got[r * 33 + i], x[static_cast<size_t>(ids[r]) * 33 + i]);
    }
  }
}

}  // namespace
}  // namespace tandem::kernels
