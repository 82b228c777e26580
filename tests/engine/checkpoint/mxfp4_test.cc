// SPDX-License-Identifier: Apache-2.0
// MXFP4 of stacked experts: the numbers that codes and scales stand for, and
// files that do not fit. Tensors are named on refusal.

#include <cstdint>
#include <string>
#include <vector>

#include "engine/checkpoint/quantisation.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/checkpoint/safetensors_file.h"
#include "tests/engine/mxfp4_maker.h"
#include "tests/engine/temp_dir.h"

namespace tandem::engine {
namespace {

using testing::HasSubstr;

constexpr int64_t kExperts = 3, kOutputs = 4, kInputs = 64;

absl::StatusOr<CodeRows> ReadOne(const FileTensors& tensors, int64_t index = 1,
                                 int64_t cols = kInputs) {
  TempDir dir;
  dir.Write("model.safetensors", SafetensorsFile(tensors));
  const auto checkpoint = Checkpoint::Open(dir.path());
  if (!checkpoint.ok()) return checkpoint.status();
  return ReadMxfp4(*checkpoint, "p", kExperts, index, kOutputs, cols);
}

FileTensors Tensors(const Mxfp4Stack& stack) {
  return {{"p_blocks", stack.blocks}, {"p_scales", stack.scales}};
}

Mxfp4Stack Drawn(int powers = 5) {
  std::mt19937 random(7);
  return DrawMxfp4(kExperts, kOutputs, kInputs, powers, random);
}

TEST(Mxfp4, CodesStandForTheNumbersOfTheStandard) {
  const Mxfp4Stack stack = Drawn();
  for (int64_t expert = 0; expert < kExperts; ++expert) {
    const auto codes = ReadOne(Tensors(stack), expert);
    ASSERT_TRUE(codes.ok()) << codes.status();
    EXPECT_EQ(codes->dtype, kernels::DType::kInt4);
    EXPECT_EQ(codes->group, 32);
    EXPECT_TRUE(ScalesAreNear(*codes));
    CodeRows others = *codes;
    EXPECT_TRUE(SameForm(*codes, others));
    others.e2m1 = false;
    EXPECT_FALSE(SameForm(*codes, others));
    std::vector<float> numbers;
    Dequantise(*codes, numbers);
    for (int64_t row = 0; row < kOutputs; ++row) {
      for (int64_t col = 0; col < kInputs; ++col) {
        EXPECT_EQ(numbers[static_cast<size_t>(row * kInputs + col)],
                  stack.numbers[static_cast<size_t>(
                      (expert * kInputs + col) * kOutputs + row)]);
      }
    }
  }
}

TEST(Mxfp4, AllPowersButNanAreRead) {
  Mxfp4Stack stack = Drawn(1);
  stack.scales.bytes[8] = '\0';  // of the second matrix
  stack.scales.bytes[9] = '\xfe';
  const auto codes = ReadOne(Tensors(stack));
  ASSERT_TRUE(codes.ok()) << codes.status();
  EXPECT_EQ(codes->scales[0], 0x1p-128f);
  EXPECT_EQ(codes->scales[1], 0x1p126f);
  EXPECT_EQ(codes->scales[2], 0x1p-3f);
}

TEST(Mxfp4, ScalesThatF16CannotHoldBesideEachOtherAreFar) {
  Mxfp4Stack stack = Drawn(1);
  const auto far = [&](int lower) {
    stack.scales.bytes[2 * kOutputs + 2] = static_cast<char>(125 - lower);
    return !ScalesAreNear(*ReadOne(Tensors(stack)));
  };
  EXPECT_FALSE(far(0));
  EXPECT_FALSE(far(24));
  EXPECT_TRUE(far(25));
}

TEST(Mxfp4, TensorsThatDoNotFitAreRefusedByName) {
  const auto message = [](const FileTensors& tensors, int64_t cols = kInputs) {
    return std::string(ReadOne(tensors, 1, cols).status().message());
  };
  const Mxfp4Stack stack = Drawn();
  FileTensors tensors = Tensors(stack);
  tensors.erase("p_scales");
  EXPECT_THAT(message(tensors), HasSubstr("tensor \"p_scales\" is missing"));
  tensors = Tensors(stack);
  tensors["p_scales"].bytes[9] = '\xff';  // of the second matrix
  EXPECT_THAT(message(tensors),
              HasSubstr("tensor \"p_scales\" has a scale that is NaN"));
  tensors = Tensors(stack);
  tensors["p_blocks"].shape = {3, 4, 1, 32};
  EXPECT_THAT(message(tensors),
              HasSubstr("tensor \"p_blocks\" is U8 [3, 4, 1, 32], but "
                        "config.json asks for U8 [3, 4, 2, 16]"));
  tensors = Tensors(stack);
  tensors["p_blocks"].dtype = "I8";
  EXPECT_THAT(message(tensors), HasSubstr("tensor \"p_blocks\" is I8"));
  EXPECT_THAT(message(Tensors(stack), 72),
              HasSubstr("72 inputs are no multiple of 32"));
}

}  // namespace
}  // namespace tandem::engine
