// SPDX-License-Identifier: Apache-2.0
// Products with int8 and int4 weights equal the formula of kernels/quantise.h,
// worked out here in doubles and exact integers, bit for bit, whatever path,
// batch, thread count or instruction set computes them.

#include <numeric>

#include "kernels/cpu/float_env.h"
#include "tests/kernels/code_products.h"
#include "tests/kernels/fixture.h"

namespace tandem::kernels {
namespace {

// The nearest f16 of a float below 2, ties to even.
float NearestF16(float value) {
  const double magnitude = std::fabs(double{value});
  int exponent = 0;
  std::frexp(magnitude, &exponent);
  const double step = std::ldexp(1.0, std::max(exponent - 11, -24));
  return std::copysign(
      static_cast<float>(std::nearbyint(magnitude / step) * step), value);
}

// What a matrix stands for: codes, and scales without and with the rows'.
struct Codes {
  std::vector<int> codes;     // [n, k], without zeros
  std::vector<float> scales;  // [n, groups]
  std::vector<float> rows;    // [n]
};

int Groups(int k) { return (k + 31) / 32; }

Codes CodesOf(DType type, const MatrixShape& shape,
              const std::vector<float>& w) {
  const float limit = type == DType::kInt8 ? 127.0f : 8.0f;
  Codes result{std::vector<int>(w.size()), {}, {}};
  for (int n = 0; n < shape.n; ++n) {
    float most = 0;
    for (int k = 0; k < shape.k; ++k) {
      most = std::max(most, std::fabs(w[ElementAt(n, shape.k, k)]));
    }
    const float row =
        most == 0 ? 1.0f : std::ldexp(1.0f, std::ilogb(most / limit));
    result.rows.push_back(row);
    for (int begin = 0; begin < shape.k; begin += 32) {
      const int end = std::min(begin + 32, shape.k);
      float extreme = 0;
      for (int k = begin; k < end; ++k) {
        const float value = w[ElementAt(n, shape.k, k)];
        if (std::fabs(value) > std::fabs(extreme)) extreme = value;
      }
      const float scale =
          NearestF16((type == DType::kInt8 ? std::fabs(extreme) / 127.0f
                                           : extreme / -8.0f) /
                     row);
      result.scales.push_back(scale);
      if (scale == 0) continue;
      for (int k = begin; k < end; ++k) {
        const float scaled = w[ElementAt(n, shape.k, k)] / row * (1.0f / scale);
        const double code = std::nearbyint(double{scaled});
        result.codes[ElementAt(n, shape.k, k)] = static_cast<int>(
            std::clamp(code, type == DType::kInt8 ? -127.0 : -8.0,
                       type == DType::kInt8 ? 127.0 : 7.0));
      }
    }
  }
  return result;
}

std::vector<float> Reference(int m, const MatrixShape& shape,
                             const std::vector<float>& x, const Codes& w,
                             const std::vector<float>& bias) {
  const cpu::ScopedFlushDenormals flush;
  const int groups = Groups(shape.k);
  std::vector<float> out;
  for (int r = 0; r < m; ++r) {
    std::vector<Quantised> pieces;
    for (int begin = 0; begin < shape.k; begin += 32) {
      pieces.push_back(QuantisedOf(
          x.data() + ElementAt(r, shape.k, begin),
          static_cast<size_t>(std::min(32, shape.k - begin)), DType::kInt8));
    }
    for (int n = 0; n < shape.n; ++n) {
      float chain = 0;
      for (int g = 0; g < groups; ++g) {
        const Quantised& piece = pieces[static_cast<size_t>(g)];
        int64_t dot = 0;
        for (size_t i = 0; i < piece.codes.size(); ++i) {
          dot += int64_t{w.codes[ElementAt(n, shape.k, g * 32) + i]} *
                 static_cast<int64_t>(piece.codes[i]);
        }
        const float both = w.scales[ElementAt(n, groups, g)] * piece.scale;
        chain = std::fma(static_cast<float>(dot), both, chain);
      }
      chain = chain * w.rows[static_cast<size_t>(n)];
      out.push_back(bias.empty() ? chain
                                 : chain + bias[static_cast<size_t>(n)]);
    }
  }
  return out;
}

class CodesTest : public ::testing::TestWithParam<DType> {};

TEST_P(CodesTest, EqualTheFormulaBitForBit) {
  const DType type = GetParam();
  int configs = 0;
  for (const Config& config : kCodeConfigs) {
    auto backend = MakeBackend(config.isa, config.threads);
    if (backend == nullptr) continue;
    ++configs;
    Device device(std::move(backend));
    for (const MatrixShape& shape : kCodeShapes) {
      auto w = RandomFloats(ElementAt(shape.n, shape.k, 0), 1);
      // Rows and groups of other magnitudes, and of none.
      for (size_t i = 0; i < w.size(); ++i) {
        const auto k = static_cast<size_t>(shape.k);
        w[i] *= std::ldexp(1.0f, static_cast<int>(i / k % 5) * 9 - 20);
        if (i % k / 32 % 3 == 1) w[i] *= 1e-5f;
        if (i % k / 32 % 7 == 5) w[i] = 0;
      }
      auto x = RandomFloats(ElementAt(kMostCodeRows, shape.k, 0), 3);
      for (size_t i = 0; i < x.size() / 4; ++i) x[i] = i % 3 == 0 ? 2 : -2;
      const auto bias = RandomFloats(static_cast<size_t>(shape.n), 2);
      ExpectProducts(
          device, device.Pack(w, shape.n, shape.k, type), x, bias,
          Reference(kMostCodeRows, shape, x, CodesOf(type, shape, w), bias),
          std::string(config.isa) + ", threads " +
              std::to_string(config.threads));
    }
  }
  EXPECT_GE(configs, 2);
}

// Sums of a group are as large as they can be, with either sign, and both paths
// hold them: of one row, and of several.
TEST_P(CodesTest, LargestSumsOfAGroupFit) {
  const MatrixShape shape{36, 128};
  std::vector<float> w(ElementAt(shape.n, shape.k, 0),
                       7.0f);  // of int4 the code 15
  for (size_t i = 0; i < w.size(); ++i) {
    if (GetParam() == DType::kInt4 && i % 32 == 9) w[i] = -8;
    if (i / 128 % 2 == 1) w[i] = -w[i];
  }
  std::vector<float> x(ElementAt(kMostCodeRows, shape.k, 0), 2.0f);
  for (size_t i = 0; i < x.size(); ++i) {
    if (i / 128 % 3 == 1) x[i] = -2;
  }
  const std::vector<float> expected =
      Reference(kMostCodeRows, shape, x, CodesOf(GetParam(), shape, w), {});
  for (const Config& config : kCodeConfigs) {
    auto backend = MakeBackend(config.isa, config.threads);
    if (backend == nullptr) continue;
    Device device(std::move(backend));
    ExpectProducts(device, device.Pack(w, shape.n, shape.k, GetParam()), x, {},
                   expected, std::string(config.isa));
  }
}

TEST_P(CodesTest, EmbeddingsAreCodeTimesScales) {
  const MatrixShape shape{40, 100};
  const auto w = RandomFloats(ElementAt(shape.n, shape.k, 0), 4, 0.02f);
  const Codes codes = CodesOf(GetParam(), shape, w);
  Device device(MakeBackend());
  const std::vector<int32_t> ids = {0, 17, 39};
  Rows rows;
  rows.num_rows = 3;
  rows.token_ids = device.Upload(ids);
  float* const out = device.New<float>(ElementAt(3, shape.k, 0));
  device->Embed(device.queue(), rows,
                device.Pack(w, shape.n, shape.k, GetParam()), 1, nullptr, out);
  std::vector<float> expected;
  for (const int32_t id : ids) {
    for (int k = 0; k < shape.k; ++k) {
      expected.push_back(
          static_cast<float>(codes.codes[ElementAt(id, shape.k, k)]) *
          codes.scales[ElementAt(id, Groups(shape.k), k / 32)] *
          codes.rows[static_cast<size_t>(id)]);
    }
  }
  EXPECT_TRUE(SameBits(device.Download(out, expected.size()), expected));
}

class CodesThatShowTest : public ::testing::TestWithParam<DType> {};

TEST_P(CodesThatShowTest, WhatIsNotFinite) {
  const MatrixShape shape{3, 70};
  auto w = RandomFloats(ElementAt(shape.n, shape.k, 0), 5);
  w[ElementAt(1, shape.k, 40)] = INFINITY;
  auto x = RandomFloats(ElementAt(2, shape.k, 0), 6);
  x[ElementAt(1, shape.k, 3)] = NAN;
  Device device(MakeBackend());
  float* const out = device.New<float>(6);
  device->MatMul(device.queue(), 2, device.Upload(x),
                 device.Pack(w, shape.n, shape.k, GetParam()), nullptr, out);
  const auto got = device.Download(out, 6);
  for (const size_t i : {0, 2}) EXPECT_TRUE(std::isfinite(got[i])) << i;
  for (const size_t i : {1, 3, 4, 5}) EXPECT_TRUE(std::isnan(got[i])) << i;
}

std::string NameOfType(const ::testing::TestParamInfo<DType>& info) {
  return std::string(Name(info.param));
}
INSTANTIATE_TEST_SUITE_P(Types, CodesTest,
                         ::testing::Values(DType::kInt8, DType::kInt4),
                         NameOfType);
INSTANTIATE_TEST_SUITE_P(Types, CodesThatShowTest,
                         ::testing::Values(DType::kInt8, DType::kInt4,
                                           DType::kW8A8),
                         NameOfType);

struct Given {
  const char* what;
  DType type;
  int group;  // 0: one for each row
  bool zeros;
  bool e2m1 = false;
  bool order = false;
};

// Twice the number of an e2m1: a sign, two bits of exponent, one of mantissa.
int TwiceE2m1(int code) {
  const int exponent = code >> 1 & 3;
  const int magnitude =
      exponent == 0 ? code & 1 : (2 + (code & 1)) << (exponent - 1);
  return code < 8 ? magnitude : -magnitude;
}

TEST(PackCodesTest, KeepsWhatWasQuantisedBefore) {
  const Given cases[] = {
      {"int8 by row", DType::kInt8, 0, false},
      {"int8 in groups of 128", DType::kInt8, 128, false},
      {"int4 in groups of 32", DType::kInt4, 32, false},
      {"int4 in groups of 128", DType::kInt4, 128, false},
      {"int4 with zeros", DType::kInt4, 128, true},
      {"int4 by row with zeros", DType::kInt4, 0, true},
      {"e2m1", DType::kInt4, 32, false, true},
      {"e2m1 by row", DType::kInt4, 0, false, true},
      {"int8 in an order", DType::kInt8, 32, false, false, true},
      {"int4 in an order", DType::kInt4, 128, true, false, true}};
  const MatrixShape shape{129, 416};
  std::mt19937 random(7);
  for (const Given& c : cases) {
    const int group = c.group == 0 ? shape.k : c.group;
    const int groups = (shape.k + group - 1) / group;
    std::vector<uint8_t> codes;
    std::vector<uint8_t> zeros;
    std::vector<float> scales;
    for (int i = 0; i < shape.n * shape.k; ++i) {
      codes.push_back(static_cast<uint8_t>(
          c.type == DType::kInt8 ? random() : random() % 16));
    }
    for (int i = 0; i < shape.n * groups; ++i) {
      // bf16's bits: exact as f16 beside a power of two.
      scales.push_back(
          RoundToBf16(static_cast<float>(1 + random() % 1000) * 1e-6f));
      zeros.push_back(static_cast<uint8_t>(random() % 17));
    }
    Codes expected;
    expected.rows.assign(static_cast<size_t>(shape.n), 1.0f);
    for (int n = 0; n < shape.n; ++n) {
      for (int k = 0; k < shape.k; ++k) {
        const size_t at = ElementAt(n, shape.k, k);
        const int zero = c.zeros ? zeros[ElementAt(n, groups, k / group)]
                         : c.type == DType::kInt4 ? 8
                                                  : 0;
        expected.codes.push_back(c.e2m1 ? TwiceE2m1(codes[at])
                                 : c.type == DType::kInt8
                                     ? static_cast<int8_t>(codes[at])
                                     : int{codes[at]} - zero);
      }
      for (int g = 0; g < Groups(shape.k); ++g) {
        expected.scales.push_back(
            groups == 1 ? 1.0f : scales[ElementAt(n, groups, g * 32 / group)]);
      }
      if (groups == 1) {
        expected.rows[static_cast<size_t>(n)] = scales[static_cast<size_t>(n)];
      }
    }
    const auto x = RandomFloats(ElementAt(kMostCodeRows, shape.k, 0), 8);
    std::vector<int32_t> order(static_cast<size_t>(shape.k));
    std::iota(order.begin(), order.end(), 0);
    if (c.order) std::shuffle(order.begin(), order.end(), random);
    std::vector<float> moved;
    for (int row = 0; row < kMostCodeRows; ++row) {
      for (const int32_t input : order) {
        moved.push_back(x[ElementAt(row, shape.k, input)]);
      }
    }
    const auto products = Reference(kMostCodeRows, shape, moved, expected, {});
    for (const char* isa :
         {"avx2", "avxvnni", "avx512", "avx512vnni", "amx", "auto"}) {
      auto backend = MakeBackend(isa, 2);
      if (backend == nullptr) continue;
      auto matrix =
          backend->PackCodes({c.type, shape.n, shape.k, codes.data(), group,
                              scales.data(), c.zeros ? zeros.data() : nullptr,
                              c.e2m1, c.order ? order.data() : nullptr});
      ASSERT_TRUE(matrix.ok()) << matrix.status();
      Device device(std::move(backend));
      ExpectProducts(device, **matrix, x, {}, products,
                     std::string(c.what) + ", " + isa);
    }
  }
}

TEST(PackCodesTest, KeepsFp8Codes) {
  std::vector<uint8_t> codes;
  for (int i = 0; i < 0x7f; ++i) codes.push_back(static_cast<uint8_t>(i));
  const float scale = 0.3f;
  auto backend = MakeBackend();
  auto matrix = backend->PackCodes(
      {DType::kFp8, 1, 127, codes.data(), 127, &scale, nullptr});
  ASSERT_TRUE(matrix.ok()) << matrix.status();
  Device device(std::move(backend));
  float* const out = device.New<float>(127);
  Rows rows;
  rows.num_rows = 1;
  rows.token_ids = device.Upload(std::vector<int32_t>{0});
  device->Embed(device.queue(), rows, **matrix, 1, nullptr, out);
  const auto got = device.Download(out, 127);
  for (int i = 0; i < 127; ++i) {
    const double number =
        i < 8 ? std::ldexp(i, -9) : std::ldexp(8 + i % 8, i / 8 - 10);
    EXPECT_EQ(got[static_cast<size_t>(i)], static_cast<float>(number) * scale);
  }
}

TEST(PackCodesTest, RefusesGroupsThatDoNotFit) {
  auto backend = MakeBackend();
  const uint8_t codes[96] = {};
  const float scales[96] = {};
  const auto code = [&](DType type, int group) {
    return backend->PackCodes({type, 1, 96, codes, group, scales, nullptr})
        .status()
        .code();
  };
  EXPECT_EQ(code(DType::kInt8, 16), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(DType::kInt4, 48), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(DType::kFp8, 32), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(DType::kInt8, 96), absl::StatusCode::kOk);
}

TEST(PackCodesTest, RefusesOrdersThatMissAnInput) {
  auto backend = MakeBackend();
  const uint8_t codes[64] = {};
  const float scales[2] = {};
  std::vector<int32_t> order(64);
  std::iota(order.rbegin(), order.rend(), 0);
  const auto code = [&](DType type) {
    return backend
        ->PackCodes({type, 1, 64, codes, type == DType::kFp8 ? 64 : 32, scales,
                     nullptr, false, order.data()})
        .status()
        .code();
  };
  EXPECT_EQ(code(DType::kInt8), absl::StatusCode::kOk);
  EXPECT_EQ(code(DType::kInt4), absl::StatusCode::kOk);
  EXPECT_EQ(code(DType::kFp8), absl::StatusCode::kInvalidArgument);
  for (const int32_t wrong : {-1, 64, order[1]}) {
    order[0] = wrong;
    EXPECT_EQ(code(DType::kInt8), absl::StatusCode::kInvalidArgument);
  }
}

TEST(PackCodesTest, RefusesE2m1OfOtherTypesAndWithZeros) {
  auto backend = MakeBackend();
  const uint8_t codes[32] = {};
  const float scale = 1;
  const auto code = [&](DType type, const uint8_t* zeros) {
    return backend->PackCodes({type, 1, 32, codes, 32, &scale, zeros, true})
        .status()
        .code();
  };
  EXPECT_EQ(code(DType::kInt4, nullptr), absl::StatusCode::kOk);
  EXPECT_EQ(code(DType::kInt4, codes), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(DType::kInt8, nullptr), absl::StatusCode::kInvalidArgument);
}

// As embeddings are read.
TEST(PackCodesTest, NumbersOfE2m1AreThoseOfTheStandard) {
  std::vector<uint8_t> codes;
  for (int i = 0; i < 16; ++i) codes.push_back(static_cast<uint8_t>(i));
  const float scale = 0.5f;
  auto backend = MakeBackend();
  auto matrix = backend->PackCodes(
      {DType::kInt4, 1, 16, codes.data(), 16, &scale, nullptr, true});
  ASSERT_TRUE(matrix.ok()) << matrix.status();
  Device device(std::move(backend));
  float* const out = device.New<float>(16);
  Rows rows;
  rows.num_rows = 1;
  rows.token_ids = device.Upload(std::vector<int32_t>{0});
  device->Embed(device.queue(), rows, **matrix, 1, nullptr, out);
  EXPECT_EQ(device.Download(out, 16),
            (std::vector<float>{0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5,
                                -2, -3, -4, -6}));
}

}  // namespace
}  // namespace tandem::kernels
