// SPDX-License-Identifier: Apache-2.0
// Rows of activations in int8 against VectorQuantiser, group by group and
// whole, bit for bit, with each instruction set.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cpu/code_matrix.h"
#include "kernels/cpu/kernel_table.h"
#include "kernels/quantise.h"

namespace tandem::kernels::cpu {
namespace {

struct Group {
  uint32_t scale;  // its bits
  int32_t minus;
  std::vector<int> codes;
  bool operator==(const Group&) const = default;
};

// `count` inputs from `begin` on, zeros behind the last one.
Group Expected(const std::vector<float>& x, int begin, int count) {
  const int end = std::min(begin + count, static_cast<int>(x.size()));
  uint32_t key = 0;
  for (int i = begin; i < end; ++i) {
    key = std::max(key, MagnitudeKey(x[static_cast<size_t>(i)]));
  }
  const VectorQuantiser quantiser(DType::kInt8, key);
  Group group{std::bit_cast<uint32_t>(quantiser.scale), 0, {}};
  for (int i = begin; i < begin + count; ++i) {
    const int code =
        i < end ? static_cast<int8_t>(quantiser(x[static_cast<size_t>(i)])) : 0;
    group.codes.push_back(code);
    group.minus -= 128 * code;
  }
  return group;
}

class QuantiseRowTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    auto table = MakeKernelTable(GetParam());
    if (!table.ok()) GTEST_SKIP() << table.status();
    quantise_row_ = table->quantise_row;
    quantise_whole_row_ = table->quantise_whole_row;
  }

  void Check(const std::vector<float>& x) {
    const int k = static_cast<int>(x.size());
    constexpr int kStride = 3;
    std::vector<RowPiece> pieces(static_cast<size_t>(RowPieces(k) * kStride));
    quantise_row_(x.data(), k, pieces.data(), kStride);
    for (int begin = 0; begin < k; begin += kCodeGroup) {
      int piece = 0;
      while (PieceBegin(k, piece + 1) * kCodeInputs <= begin) ++piece;
      const RowPiece& of = pieces[static_cast<size_t>(piece * kStride)];
      const int at = begin - PieceBegin(k, piece) * kCodeInputs;
      const int group = at / kCodeGroup;
      const Group got{std::bit_cast<uint32_t>(of.scales[group]),
                      of.minus[group],
                      {of.codes + at, of.codes + at + kCodeGroup}};
      const Group want = Expected(x, begin, kCodeGroup);
      ASSERT_EQ(got.scale, want.scale) << "k " << k << ", input " << begin;
      ASSERT_EQ(got.minus, want.minus) << "k " << k << ", input " << begin;
      ASSERT_THAT(got.codes, ::testing::ElementsAreArray(want.codes))
          << "k " << k << ", input " << begin;
    }
    CheckWhole(x);
  }

  // One scale in all pieces, and of each the sum of its own codes.
  void CheckWhole(const std::vector<float>& x) {
    const int k = static_cast<int>(x.size());
    constexpr int kStride = 2;
    std::vector<RowPiece> pieces(static_cast<size_t>(RowPieces(k) * kStride));
    quantise_whole_row_(x.data(), k, pieces.data(), kStride);
    const Group want = Expected(x, 0, CodeBlocks(k) * kCodeInputs);
    for (int piece = 0; piece < RowPieces(k); ++piece) {
      const RowPiece& of = pieces[static_cast<size_t>(piece * kStride)];
      const int begin = PieceBegin(k, piece) * kCodeInputs;
      const int end = PieceBegin(k, piece + 1) * kCodeInputs;
      ASSERT_EQ(std::bit_cast<uint32_t>(of.scales[0]), want.scale) << k;
      const std::vector<int> codes(want.codes.begin() + begin,
                                   want.codes.begin() + end);
      ASSERT_THAT(std::vector<int>(of.codes, of.codes + (end - begin)),
                  ::testing::ElementsAreArray(codes))
          << "k " << k << ", piece " << piece;
      ASSERT_EQ(of.minus[0],
                -128 * std::accumulate(codes.begin(), codes.end(), 0))
          << "k " << k << ", piece " << piece;
    }
  }

  void (*quantise_row_)(const float*, int, RowPiece*, int64_t) = nullptr;
  void (*quantise_whole_row_)(const float*, int, RowPiece*, int64_t) = nullptr;
};

TEST_P(QuantiseRowTest, EveryWidth) {
  std::mt19937 random(1);
  for (const int k : {1, 31, 32, 33, 63, 64, 65, 96, 100, 127, 128, 129, 192,
                      576, 768, 800, 1536, 1537, 2000}) {
    std::vector<float> x(static_cast<size_t>(k));
    for (float& value : x) {
      value = std::ldexp(std::normal_distribution<float>()(random),
                         static_cast<int>(random() % 20) - 10);
    }
    Check(x);
  }
}

TEST_P(QuantiseRowTest, NumbersThatAreNone) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const float not_numbers[] = {
      kInfinity,
      -kInfinity,
      std::numeric_limits<float>::quiet_NaN(),
      std::bit_cast<float>(0xffffffffu),
      std::numeric_limits<float>::max(),
      -std::numeric_limits<float>::max(),
      0x1p-100f,
      -std::nextafter(0x1p-100f, 0.0f),
      std::numeric_limits<float>::denorm_min(),
      -0.0f,
  };
  // Alone among zeros, and among others that it makes small or that make it so.
  for (const float value : not_numbers) {
    for (int at = 0; at < 5 * kCodeGroup; at += 7) {
      std::vector<float> x(5 * kCodeGroup, 0.0f);
      x[static_cast<size_t>(at)] = value;
      Check(x);
      for (size_t i = 0; i < x.size(); ++i) {
        x[i] += static_cast<float>(i % 11) - 5;
      }
      Check(x);
    }
  }
}

// Halfway between two codes goes to the even one.
TEST_P(QuantiseRowTest, Ties) {
  std::vector<float> x;
  for (int i = 0; i < 4 * kCodeGroup; ++i) {
    x.push_back(i % kCodeGroup == 0 ? 127.0f
                                    : static_cast<float>(i % 29 - 14) + 0.5f);
  }
  Check(x);
}

INSTANTIATE_TEST_SUITE_P(All, QuantiseRowTest,
                         ::testing::Values("avx2", "avx512"));

}  // namespace
}  // namespace tandem::kernels::cpu
