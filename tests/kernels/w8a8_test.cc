// SPDX-License-Identifier: Apache-2.0
// Products with W8A8 weights equal the formula of kernels/quantise.h, worked
// out here in doubles and exact integers, bit for bit, whatever path, batch,
// thread count or instruction set computes them.

#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "kernels/cpu/float_env.h"
#include "tests/kernels/code_products.h"
#include "tests/kernels/fixture.h"

namespace tandem::kernels {
namespace {

// Rows of a matrix, each with its scale.
std::vector<Quantised> WholeRows(const MatrixShape& shape,
                                 const std::vector<float>& w) {
  std::vector<Quantised> rows;
  for (int n = 0; n < shape.n; ++n) {
    rows.push_back(QuantisedOf(w.data() + ElementAt(n, shape.k, 0),
                               static_cast<size_t>(shape.k), DType::kInt8));
  }
  return rows;
}

std::vector<float> WholeReference(int m, const MatrixShape& shape,
                                  const std::vector<float>& x,
                                  const std::vector<Quantised>& w,
                                  const std::vector<float>& bias) {
  const cpu::ScopedFlushDenormals flush;
  const std::vector<Quantised> tokens = WholeRows({m, shape.k}, x);
  std::vector<float> out;
  for (const Quantised& token : tokens) {
    for (size_t n = 0; n < w.size(); ++n) {
      int64_t dot = 0;
      for (size_t k = 0; k < token.codes.size(); ++k) {
        dot += static_cast<int64_t>(w[n].codes[k]) *
               static_cast<int64_t>(token.codes[k]);
      }
      const float sum = static_cast<float>(dot) * token.scale * w[n].scale;
      out.push_back(bias.empty() ? sum : sum + bias[n]);
    }
  }
  return out;
}

TEST(W8A8Test, EqualsTheFormulaBitForBit) {
  int configs = 0;
  for (const Config& config : kCodeConfigs) {
    auto backend = MakeBackend(config.isa, config.threads);
    if (backend == nullptr) continue;
    ++configs;
    Device device(std::move(backend));
    for (const MatrixShape& shape : kCodeShapes) {
      auto w = RandomFloats(ElementAt(shape.n, shape.k, 0), 1);
      // Rows of other magnitudes, and of none.
      for (size_t i = 0; i < w.size(); ++i) {
        const auto row = static_cast<int>(i / static_cast<size_t>(shape.k));
        w[i] *= row % 7 == 5 ? 0 : std::ldexp(1.0f, row % 5 * 9 - 20);
      }
      auto x = RandomFloats(ElementAt(kMostCodeRows, shape.k, 0), 3);
      for (size_t i = 0; i < x.size(); ++i) {
        const auto row = static_cast<int>(i / static_cast<size_t>(shape.k));
        x[i] *= row % 9 == 4 ? 0 : std::ldexp(1.0f, row % 3 * 10 - 10);
      }
      const auto bias = RandomFloats(static_cast<size_t>(shape.n), 2);
      ExpectProducts(
          device, device.Pack(w, shape.n, shape.k, DType::kW8A8), x, bias,
          WholeReference(kMostCodeRows, shape, x, WholeRows(shape, w), bias),
          std::string(config.isa) + ", threads " +
              std::to_string(config.threads));
    }
  }
  EXPECT_GE(configs, 2);
}

// Beyond 2^24, where an f32 no longer holds each integer, and of either sign.
TEST(W8A8Test, LargeSumsAreRoundedOnce) {
  const MatrixShape shape{36, 3001};
  std::mt19937 random(5);
  std::vector<float> w(ElementAt(shape.n, shape.k, 0));
  for (size_t i = 0; i < w.size(); ++i) {
    w[i] = random() % 8 == 0 ? 126.0f : 127.0f;
    if (i / static_cast<size_t>(shape.k) % 2 == 1) w[i] = -w[i];
  }
  std::vector<float> x(ElementAt(kMostCodeRows, shape.k, 0));
  for (float& value : x) value = random() % 5 == 0 ? 125.0f : 127.0f;
  const std::vector<Quantised> rows = WholeRows(shape, w);
  EXPECT_EQ(rows[0].scale, 1);
  const auto expected = WholeReference(kMostCodeRows, shape, x, rows, {});
  EXPECT_GT(expected[0], 0x1p25f);
  for (const Config& config : kCodeConfigs) {
    auto backend = MakeBackend(config.isa, config.threads);
    if (backend == nullptr) continue;
    Device device(std::move(backend));
    ExpectProducts(device, device.Pack(w, shape.n, shape.k, DType::kW8A8), x,
                   {}, expected, std::string(config.isa));
  }
}

TEST(W8A8Test, KeepsWhatWasQuantisedBefore) {
  const MatrixShape shape{129, 832};
  std::mt19937 random(7);
  std::vector<uint8_t> codes;
  for (int i = 0; i < shape.n * shape.k; ++i) {
    codes.push_back(static_cast<uint8_t>(i % 50 == 0 ? 0x80 : random()));
  }
  std::vector<float> scales;
  std::vector<Quantised> rows;
  for (int n = 0; n < shape.n; ++n) {
    scales.push_back(static_cast<float>(1 + random() % 1000) * 1.1e-6f);
    Quantised row{{}, scales.back()};
    for (int k = 0; k < shape.k; ++k) {
      row.codes.push_back(static_cast<int8_t>(codes[ElementAt(n, shape.k, k)]));
    }
    rows.push_back(row);
  }
  const auto x = RandomFloats(ElementAt(kMostCodeRows, shape.k, 0), 8);
  const auto products = WholeReference(kMostCodeRows, shape, x, rows, {});
  for (const Config& config : kCodeConfigs) {
    auto backend = MakeBackend(config.isa, config.threads);
    if (backend == nullptr) continue;
    auto matrix =
        backend->PackCodes({DType::kW8A8, shape.n, shape.k, codes.data(),
                            shape.k, scales.data(), nullptr});
    ASSERT_TRUE(matrix.ok()) << matrix.status();
    Device device(std::move(backend));
    ExpectProducts(device, **matrix, x, {}, products, config.isa);
  }
}

TEST(W8A8Test, EmbeddingsAreCodeTimesScale) {
  const MatrixShape shape{40, 100};
  const auto w = RandomFloats(ElementAt(shape.n, shape.k, 0), 4, 0.02f);
  const std::vector<Quantised> rows_of = WholeRows(shape, w);
  for (const char* isa : {"avx2", "auto"}) {
    Device device(MakeBackend(isa));
    Rows rows;
    rows.num_rows = 3;
    rows.token_ids = device.Upload(std::vector<int32_t>{0, 17, 39});
    float* const out = device.New<float>(ElementAt(3, shape.k, 0));
    device->Embed(device.queue(), rows,
                  device.Pack(w, shape.n, shape.k, DType::kW8A8), 1, nullptr,
                  out);
    std::vector<float> expected;
    for (const size_t id : {0, 17, 39}) {
      for (const float code : rows_of[id].codes) {
        expected.push_back(code * rows_of[id].scale);
      }
    }
    EXPECT_TRUE(SameBits(device.Download(out, expected.size()), expected));
  }
}

TEST(W8A8Test, RefusesWhatDoesNotFit) {
  auto backend = MakeBackend();
  const uint8_t codes[96] = {};
  const float scales[96] = {};
  const auto code = [&](int group, const uint8_t* zeros) {
    return backend
        ->PackCodes({DType::kW8A8, 1, 96, codes, group, scales, zeros})
        .status()
        .code();
  };
  EXPECT_EQ(code(96, nullptr), absl::StatusCode::kOk);
  EXPECT_EQ(code(32, nullptr), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(96, codes), absl::StatusCode::kInvalidArgument);
  // Sums of so many inputs fit 32 bits, those of one more may not.
  const std::vector<float> row(size_t{kMaxW8A8Inputs} + 1, -1.0f);
  const auto pack = [&](int64_t cols) {
    return backend
        ->PackMatrix({reinterpret_cast<const std::byte*>(row.data()),
                      DType::kF32, 1, cols},
                     DType::kW8A8)
        .status();
  };
  EXPECT_TRUE(pack(kMaxW8A8Inputs).ok());
  const absl::Status refused = pack(kMaxW8A8Inputs + 1);
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.message()),
              ::testing::HasSubstr("131073 inputs of w8a8"));
}

TEST(W8A8Test, TheLargestSumFits) {
  const std::vector<uint8_t> codes(kMaxW8A8Inputs, 0x80);
  const std::vector<float> x(kMaxW8A8Inputs, -127.0f);
  const float scale = 1;
  for (const Config& config : kCodeConfigs) {
    auto backend = MakeBackend(config.isa, config.threads);
    if (backend == nullptr) continue;
    auto matrix =
        backend->PackCodes({DType::kW8A8, 1, kMaxW8A8Inputs, codes.data(),
                            kMaxW8A8Inputs, &scale, nullptr});
    ASSERT_TRUE(matrix.ok()) << matrix.status();
    Device device(std::move(backend));
    float* const out = device.New<float>(1);
    device->MatMul(device.queue(), 1, device.Upload(x), **matrix, nullptr, out);
    EXPECT_EQ(device.Download(out, 1)[0],
              static_cast<float>(int64_t{128} * 127 * kMaxW8A8Inputs))
        << config.isa;
  }
}

}  // namespace
}  // namespace tandem::kernels
