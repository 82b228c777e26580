// SPDX-License-Identifier: Apache-2.0
// The model of a tensor core step against a second, slow statement of it, and
// the properties that the numerics contract rests on.

#include "kernels/cuda/device/tensor_core.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

namespace tandem::kernels::cuda {
namespace {

// What numbers of a step look like: how far their exponents spread, how small
// they are, how many are zero.
struct Numbers {
  int spread;
  int scale;
  int zeros_in_ten;
};

struct Operands {
  std::vector<float> values;
  TensorVector vector;
};

Operands Draw(std::mt19937& random, const Numbers& numbers, bool half) {
  std::normal_distribution<float> normal;
  Operands operands;
  for (int i = 0; i < 16; ++i) {
    const int power =
        static_cast<int>(random() % static_cast<unsigned>(numbers.spread)) -
        numbers.spread / 2 + numbers.scale;
    float value = std::ldexp(normal(random), power);
    if (static_cast<int>(random() % 10) < numbers.zeros_in_ten) value = 0;
    if (half) {
      // Down to a multiple of f16's unit, by way of f32's own rounding.
      const int unit = value == 0 ? -24 : std::max(std::ilogb(value), -14) - 10;
      value = std::ldexp(std::trunc(std::ldexp(value, -unit)), unit);
      const float magnitude = std::fabs(value);
      const int biased =
          magnitude < std::ldexp(1.0f, -14) ? 0 : std::ilogb(value) + 15;
      const int fraction = static_cast<int>(
          std::ldexp(magnitude, 10 - (std::max(biased, 1) - 15)));
      operands.vector.SetF16(
          i, static_cast<uint16_t>((std::signbit(value) ? 0x8000 : 0) |
                                   (biased << 10) | (fraction & 0x3ff)));
    } else {
      const uint32_t bits = std::bit_cast<uint32_t>(value) & 0xffff0000u;
      value = std::bit_cast<float>(bits);
      operands.vector.SetBf16(i, static_cast<uint16_t>(bits >> 16));
    }
    operands.values.push_back(value);
  }
  return operands;
}

// In long double, which holds every product and every aligned part exactly.
// Denormals have the exponent of their type's smallest normal number.
float SlowStep(const std::vector<float>& a, const std::vector<float>& b,
               int begin, int end, int bits, float c, bool half) {
  const auto exponent = [half](float x) {
    return std::max(std::ilogb(x), half ? -14 : -126);
  };
  bool any = c != 0;
  int largest = c != 0 ? std::max(std::ilogb(c), -126) : -10000;
  for (int i = begin; i < end; ++i) {
    const size_t at = static_cast<size_t>(i);
    if (a[at] == 0 || b[at] == 0) continue;
    any = true;
    largest = std::max(largest, exponent(a[at]) + exponent(b[at]));
  }
  if (!any) return 0;
  long double sum = std::trunc(std::ldexp((long double)(c), bits - largest));
  for (int i = begin; i < end; ++i) {
    const size_t at = static_cast<size_t>(i);
    sum += std::trunc(std::ldexp((long double)(a[at]) * b[at], bits - largest));
  }
  sum = std::ldexp(sum, largest - bits);
  if (sum == 0) return 0;
  const int unit = std::max(std::ilogb(sum), -126) - 23;
  return static_cast<float>(
      std::ldexp(std::trunc(std::ldexp(sum, -unit)), unit));
}

TEST(TensorCore, StepsEqualTheSlowStatementOfThem) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  const Numbers bf16[] = {{1, 0, 0},    {4, 0, 1},   {30, 0, 3},
                          {60, -20, 1}, {8, -60, 2}, {3, 0, 9}};
  const Numbers f16[] = {{1, 0, 0}, {8, 0, 1}, {20, -8, 2}, {4, -20, 2}};
  for (int round = 0; round < 40000; ++round) {
    const bool half = round % 2 == 1;
    const Numbers& numbers = half ? f16[random() % std::size(f16)]
                                  : bf16[random() % std::size(bf16)];
    const Operands a = Draw(random, numbers, half);
    const Operands b = Draw(random, numbers, half);
    const float c =
        round % 5 == 0
            ? 0
            : std::ldexp(normal(random),
                         2 * numbers.scale + int(random() % 20) - 10);
    const float hopper =
        TensorCoreStep(Generation::kHopper, a.vector, b.vector, c, half);
    const float ampere =
        TensorCoreStep(Generation::kAmpere, a.vector, b.vector, c, half);
    const float low = SlowStep(a.values, b.values, 0, 8, 24, c, half);
    ASSERT_EQ(std::bit_cast<uint32_t>(hopper),
              std::bit_cast<uint32_t>(
                  SlowStep(a.values, b.values, 0, 16, 25, c, half)));
    ASSERT_EQ(std::bit_cast<uint32_t>(ampere),
              std::bit_cast<uint32_t>(
                  SlowStep(a.values, b.values, 8, 16, 24, low, half)));
  }
}

float ChainOf(Generation generation, const std::vector<Operands>& a,
              const std::vector<Operands>& b, const std::vector<int>& order) {
  float chain = 0;
  for (const int i : order) {
    const size_t at = static_cast<size_t>(i);
    chain =
        TensorCoreStep(generation, a[at].vector, b[at].vector, chain, false);
  }
  return chain;
}

TEST(TensorCore, OrderOfStepsShowsAndOrderInsideAStepDoesNot) {
  std::mt19937 random(2);
  int steps_showed = 0;
  int halves_showed = 0;
  int generations_showed = 0;
  for (int round = 0; round < 200; ++round) {
    std::vector<Operands> a, b;
    std::vector<int> order, swapped;
    for (int i = 0; i < 64; ++i) {
      a.push_back(Draw(random, {2, 0, 0}, false));
      b.push_back(Draw(random, {2, 0, 0}, false));
      order.push_back(i);
      swapped.push_back(i ^ 1);
    }
    const float chain = ChainOf(Generation::kHopper, a, b, order);
    steps_showed += ChainOf(Generation::kHopper, a, b, swapped) != chain;
    generations_showed += ChainOf(Generation::kAmpere, a, b, order) != chain;
    halves_showed += ChainOf(Generation::kHopper, a, b,
                             {order.begin(), order.begin() + 32}) +
                         ChainOf(Generation::kHopper, a, b,
                                 {order.begin() + 32, order.end()}) !=
                     chain;
    // The same pairs, turned around within each step.
    for (Operands* operands : {a.data(), b.data()}) {
      for (int i = 0; i < 64; ++i) {
        std::reverse(std::begin(operands[i].vector.significand),
                     std::end(operands[i].vector.significand));
        std::reverse(std::begin(operands[i].vector.exponent),
                     std::end(operands[i].vector.exponent));
      }
    }
    ASSERT_EQ(ChainOf(Generation::kHopper, a, b, order), chain);
  }
  EXPECT_GT(steps_showed, 100);
  EXPECT_GT(halves_showed, 100);
  EXPECT_GT(generations_showed, 100);
}

TEST(TensorCore, StepsOfZerosLeaveAChainAsItIs) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  TensorVector zeros;
  for (int i = 0; i < 16; ++i) zeros.SetBf16(i, i % 2 == 0 ? 0 : 0x8000);
  for (int round = 0; round < 1000; ++round) {
    const Operands a = Draw(random, {60, 0, 0}, false);
    const float c = std::ldexp(normal(random), int(random() % 200) - 100);
    for (const Generation generation :
         {Generation::kAmpere, Generation::kHopper}) {
      ASSERT_EQ(TensorCoreStep(generation, a.vector, zeros, c, false), c);
    }
  }
}

TEST(TensorCore, InfinitiesAndNansGoThrough) {
  struct Case {
    uint16_t a, b;
    float c;
    float expected;  // NaN: not a number
  };
  const float infinity = HUGE_VALF;
  const Case cases[] = {
      {0x7f80, 0x3f80, 0, infinity},        {0xff80, 0x3f80, 1, -infinity},
      {0x7f80, 0x0000, 0, std::nanf("")},   {0x7f80, 0x3f80, -infinity, NAN},
      {0x3f80, 0x3f80, infinity, infinity}, {0x7fc0, 0x3f80, 0, NAN},
      {0x7f00, 0x7f00, 0, infinity},
  };
  for (const Case& c : cases) {
    for (const int at : {2, 13}) {
      TensorVector a, b;
      for (int i = 0; i < 16; ++i) {
        a.SetBf16(i, i == at ? c.a : 0);
        b.SetBf16(i, i == at ? c.b : 0x3f80);
      }
      for (const Generation generation :
           {Generation::kAmpere, Generation::kHopper}) {
        const float got = TensorCoreStep(generation, a, b, c.c, false);
        if (std::isnan(c.expected)) {
          EXPECT_TRUE(std::isnan(got)) << c.a << " * " << c.b << " + " << c.c;
        } else {
          EXPECT_EQ(got, c.expected) << c.a << " * " << c.b << " + " << c.c;
        }
      }
    }
  }
}

}  // namespace
}  // namespace tandem::kernels::cuda
