// SPDX-License-Identifier: Apache-2.0
// MXFP4 of stacked experts, and NVFP4: the numbers that codes and scales stand
// for, and files that do not fit. Tensors are named on refusal.

#include <cstdint>
#include <limits>
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

// Quantisers leave any power beside 32 zeros, mostly the least or the greatest.
TEST(Mxfp4, PowersOfGroupsOfZerosDoNotCount) {
  for (const char power : {'\0', '\xfe'}) {
    Mxfp4Stack stack = Drawn(1);
    stack.scales.bytes[2 * kOutputs + 2] = power;  // of the second matrix
    // Of either sign.
    stack.blocks.bytes.replace((2 * kOutputs + 2) * 16, 16, 16, '\x80');
    const auto codes = ReadOne(Tensors(stack));
    ASSERT_TRUE(codes.ok()) << codes.status();
    EXPECT_TRUE(ScalesAreNear(*codes));
    EXPECT_EQ(codes->scales[2], 0);
    EXPECT_EQ(codes->scales[3], 0x1p-3f);
    std::vector<float> numbers;
    Dequantise(*codes, numbers);
    for (size_t i = 0; i < 32; ++i) EXPECT_EQ(numbers[kInputs + i], 0);
  }
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
  EXPECT_THAT(
      message(Tensors(stack), 72),
      HasSubstr("tensor \"p_blocks\" has 72 inputs, no multiple of 32"));
}

// 2 outputs of 32 inputs: each code twice in a row, low halves first.
std::string Pairs() {
  std::string pairs;
  for (int row = 0; row < 2; ++row) {
    for (const int code :
         {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}) {
      pairs += static_cast<char>((15 - code) << 4 | code);
    }
  }
  return pairs;
}

float NumberAt(int i) {
  const float kNumbers[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  const int pair = i % 32 / 2;
  const int code = i % 2 == 0 ? pair : 15 - pair;
  return kNumbers[code % 8] * (code < 8 ? 1.0f : -1.0f);
}

FileTensors Nvfp4(bool packed) {
  // In e4m3 1, 1.125, 2^-9 and -448.
  const std::string scales = {'\x38', '\x39', '\x01', '\xfe'};
  FileTensors tensors = {{"p.weight_scale", {"F8_E4M3", {2, 2}, scales}},
                         {"p.input_scale", {"F32", {}, BytesOf<float>({3})}}};
  tensors[packed ? "p.weight_packed" : "p.weight"] = {"U8", {2, 16}, Pairs()};
  tensors[packed ? "p.weight_global_scale" : "p.weight_scale_2"] = {
      "F32", {}, BytesOf<float>({packed ? 8 : 0.125f})};
  return tensors;
}

absl::StatusOr<CodeRows> ReadProduct(
    const FileTensors& tensors, int64_t cols = 32,
    Quantisation::Method method = Quantisation::Method::kNvfp4) {
  TempDir dir;
  dir.Write("model.safetensors", SafetensorsFile(tensors));
  const auto checkpoint = Checkpoint::Open(dir.path());
  if (!checkpoint.ok()) return checkpoint.status();
  EXPECT_TRUE(HasCodes(*checkpoint, "p"));
  return ReadCodes(*checkpoint, {.method = method}, "p", 2, cols);
}

TEST(Nvfp4, CodesStandForTheirNumbersInEitherForm) {
  const float kScales[] = {1, 1.125, 0x1p-9, -448};
  for (const bool packed : {false, true}) {
    const auto codes = ReadProduct(Nvfp4(packed));
    ASSERT_TRUE(codes.ok()) << codes.status();
    EXPECT_EQ(codes->names.size(), 4u);
    EXPECT_FALSE(SameForm(*codes, *codes)) << "backends have groups of 32";
    std::vector<float> numbers;
    Dequantise(*codes, numbers);
    ASSERT_EQ(numbers.size(), 64u);
    for (int i = 0; i < 64; ++i) {
      EXPECT_EQ(numbers[static_cast<size_t>(i)],
                NumberAt(i) * kScales[i / 16] / 8)
          << i;
    }
  }
}

TEST(Mxfp4, ProductsOfCompressedTensorsHaveTheirOwnTensors) {
  FileTensors tensors = {
      {"p.weight_packed", {"U8", {2, 16}, Pairs()}},
      {"p.weight_scale", {"U8", {2, 1}, std::string("\x7f\x7c")}}};
  const auto read = [&](int64_t cols = 32) {
    return ReadProduct(tensors, cols, Quantisation::Method::kPackedMxfp4);
  };
  const auto codes = read();
  ASSERT_TRUE(codes.ok()) << codes.status();
  EXPECT_EQ(codes->names.size(), 2u);
  EXPECT_TRUE(SameForm(*codes, *codes));
  EXPECT_TRUE(ScalesAreNear(*codes));
  std::vector<float> numbers;
  Dequantise(*codes, numbers);
  ASSERT_EQ(numbers.size(), 64u);
  for (int i = 0; i < 64; ++i) {
    EXPECT_EQ(numbers[static_cast<size_t>(i)],
              NumberAt(i) * (i < 32 ? 1 : 0.125f))
        << i;
  }
  EXPECT_THAT(std::string(read(48).status().message()),
              HasSubstr("p.weight_packed\" has 48 inputs, no multiple of 32"));
  tensors["p.weight_scale"].bytes[1] = '\xff';
  EXPECT_THAT(std::string(read().status().message()),
              HasSubstr("p.weight_scale\" has a scale that is NaN"));
  tensors.erase("p.weight_packed");
  EXPECT_THAT(std::string(read().status().message()),
              HasSubstr("p.weight_packed\" is missing"));
}

TEST(Nvfp4, TensorsThatDoNotFitAreRefusedByName) {
  const auto message = [](const FileTensors& tensors, int64_t cols = 32) {
    return std::string(ReadProduct(tensors, cols).status().message());
  };
  for (const bool packed : {false, true}) {
    const std::string codes = packed ? "p.weight_packed" : "p.weight";
    const std::string all =
        packed ? "p.weight_global_scale" : "p.weight_scale_2";
    FileTensors tensors = Nvfp4(packed);
    EXPECT_THAT(message(tensors, 24),
                HasSubstr(codes + "\" has 24 inputs, no multiple of 16"));
    EXPECT_THAT(message(tensors, 48),
                HasSubstr(codes + "\" is U8 [2, 16], but config.json asks for "
                                  "U8 [2, 24]"));
    tensors.erase(all);
    EXPECT_THAT(message(tensors), HasSubstr(all + "\" is missing"));
    for (const float scale :
         {0.0f, -1.0f, std::numeric_limits<float>::infinity(), 1e-45f}) {
      tensors[all] = {"F32", {1}, BytesOf<float>({scale})};
      EXPECT_THAT(message(tensors), HasSubstr(all + "\" is ")) << scale;
    }
    tensors = Nvfp4(packed);
    tensors["p.weight_scale"].bytes[3] = '\xff';
    EXPECT_THAT(message(tensors),
                HasSubstr("p.weight_scale\" has a scale that is NaN"));
    tensors["p.weight_scale"] = {"F8_E4M3", {2, 4}, std::string(8, '\0')};
    EXPECT_THAT(message(tensors),
                HasSubstr("p.weight_scale\" is F8_E4M3 [2, 4], but "));
    tensors["p.weight_scale"] = {"BF16", {2, 2}, std::string(8, '\0')};
    EXPECT_THAT(message(tensors), HasSubstr("p.weight_scale\" is BF16"));
  }
}

}  // namespace
}  // namespace tandem::engine
