// SPDX-License-Identifier: Apache-2.0
// Tensors of a quantised product that do not fit are refused by name; those
// that fit give codes. tools/oracle/compare_quantised.py holds every format
// against an independent statement of it.

#include <cstdint>
#include <string>
#include <vector>

#include "engine/checkpoint/quantisation.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/checkpoint/safetensors_file.h"
#include "tests/engine/temp_dir.h"

namespace tandem::engine {
namespace {

using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using Method = Quantisation::Method;

std::string Words(const std::vector<uint32_t>& words) { return BytesOf(words); }

// 8 outputs of 64 inputs in groups of 32, 4 bits.
constexpr int kRows = 8;
constexpr int kCols = 64;

FileTensors Gptq() {
  std::vector<uint32_t> order(kCols);
  for (uint32_t i = 0; i < kCols; ++i) order[i] = i / 32;
  return {{"qweight", {"I32", {8, 8}, Zeros(256)}},
          {"qzeros", {"I32", {2, 1}, Words({0x77777777, 0x77777777})}},
          {"scales", {"F16", {2, 8}, Zeros(32)}},
          {"g_idx", {"I32", {64}, Words(order)}}};
}
FileTensors Packed() {
  const int64_t shape[2] = {kRows, kCols};
  return {{"weight_packed", {"I32", {8, 8}, Zeros(256)}},
          {"weight_scale", {"BF16", {8, 2}, Zeros(32)}},
          {"weight_shape",
           {"I64", {2}, {reinterpret_cast<const char*>(shape), 16}}}};
}
FileTensors Plain() {
  return {{"weight", {"I8", {8, 64}, Zeros(512)}},
          {"weight_scale", {"F32", {8, 1}, Zeros(32)}}};
}

absl::StatusOr<CodeRows> Read(const FileTensors& tensors, Quantisation config,
                              int64_t rows = kRows, int64_t cols = kCols) {
  TempDir dir;
  FileTensors named;
  for (const auto& [name, tensor] : tensors) named["p." + name] = tensor;
  dir.Write("model.safetensors", SafetensorsFile(named));
  const auto checkpoint = Checkpoint::Open(dir.path());
  if (!checkpoint.ok()) return checkpoint.status();
  EXPECT_TRUE(HasCodes(*checkpoint, "p"));
  return ReadCodes(*checkpoint, config, "p", rows, cols);
}

const Quantisation kGptq = {Method::kGptq, 4, 32, true};
const Quantisation kPacked = {Method::kPacked, 4, 32};
const Quantisation kPlain = {Method::kPlain};
const Quantisation kW8A8 = {.method = Method::kPlain, .w8a8 = true};

// Blocks of 3 outputs by 32 inputs.
const Quantisation kBlocks = {
    .method = Method::kPlain, .group = 32, .block_rows = 3, .e4m3 = true};
FileTensors Blocks() {
  return {{"weight", {"F8_E4M3", {8, 64}, Zeros(512)}},
          {"weight_scale_inv",
           {"F32", {3, 2}, BytesOf<float>({1, 2, 4, 8, 16, 32})}}};
}

TEST(QuantisedTensors, GiveCodesScalesAndZeros) {
  FileTensors tensors = Gptq();
  auto codes = Read(tensors, kGptq);
  ASSERT_TRUE(codes.ok()) << codes.status();
  EXPECT_EQ(codes->dtype, kernels::DType::kInt4);
  EXPECT_TRUE(codes->zeros.empty()) << "all are 8";
  EXPECT_THAT(codes->names,
              ElementsAre("p.qweight", "p.qzeros", "p.scales", "p.g_idx"));
  // The second is 0x08ff1050 less one in each place: zeros of 0 borrow.
  tensors["qzeros"].bytes = Words({0x76543210, 0xf7edff3f});
  codes = Read(tensors, kGptq);
  ASSERT_TRUE(codes.ok()) << codes.status();
  EXPECT_THAT(codes->zeros,
              ElementsAre(1, 0, 2, 5, 3, 0, 4, 1, 5, 15, 6, 15, 7, 8, 8, 0));
  EXPECT_TRUE(Read(Packed(), kPacked).ok());
  EXPECT_TRUE(Read(Plain(), kPlain).ok());
}

TEST(QuantisedTensors, OfW8A8AreBytesWithAScaleForEachRow) {
  FileTensors tensors = Plain();
  for (int i = 0; i < kRows * kCols; ++i) {
    tensors["weight"].bytes[static_cast<size_t>(i)] =
        static_cast<char>(i % 256 - 128);
  }
  tensors["weight_scale"].bytes =
      BytesOf<float>({1, 2, 3, 4, 0.5, 0.25, 0, 1e-3f});
  // Of activations, found before: taken, and not used.
  tensors["input_scale"] = {"F32", {1}, BytesOf<float>({3})};
  const auto codes = Read(tensors, kW8A8);
  ASSERT_TRUE(codes.ok()) << codes.status();
  EXPECT_EQ(codes->dtype, kernels::DType::kW8A8);
  EXPECT_EQ(codes->group, kCols);
  EXPECT_THAT(codes->scales, ElementsAre(1, 2, 3, 4, 0.5, 0.25, 0, 1e-3f));
  EXPECT_THAT(codes->zeros, IsEmpty());
  EXPECT_THAT(codes->names, Contains("p.input_scale"));
  EXPECT_EQ(codes->View().dtype, kernels::DType::kW8A8);
  EXPECT_TRUE(SameForm(*codes, *codes));
  std::vector<float> values;
  Dequantise(*codes, values);
  EXPECT_EQ(values[0], -128.0f);
  EXPECT_EQ(values[64], -64 * 2.0f);
  EXPECT_EQ(values[511], 127 * 1e-3f);
  // The same bytes where the config says nothing of tokens.
  const auto groups = Read(tensors, kPlain);
  ASSERT_TRUE(groups.ok()) << groups.status();
  EXPECT_EQ(groups->dtype, kernels::DType::kInt8);
  EXPECT_EQ(groups->codes, codes->codes);
  EXPECT_FALSE(SameForm(*codes, *groups)) << "rows are of one form";
  tensors["weight_scale"] = {"F32", {1}, BytesOf<float>({0.25})};
  const auto one = Read(tensors, kW8A8);
  ASSERT_TRUE(one.ok()) << one.status();
  EXPECT_EQ(one->dtype, kernels::DType::kW8A8);
  EXPECT_EQ(one->scales, std::vector<float>(kRows, 0.25));
  tensors["weight"].dtype = "F8_E4M3";  // whatever the config says
  const auto fp8 = Read(tensors, kW8A8);
  ASSERT_TRUE(fp8.ok()) << fp8.status();
  EXPECT_EQ(fp8->dtype, kernels::DType::kFp8);
}

// Sums of more products than that outgrow 32 bits.
TEST(QuantisedTensors, OfW8A8MeetGroupsWhereRowsAreVeryLong) {
  constexpr int64_t kMost = kernels::kMaxW8A8Inputs;
  for (const int64_t cols : {kMost, kMost + 32}) {
    const auto codes =
        Read({{"weight", {"I8", {1, cols}, Zeros(static_cast<size_t>(cols))}},
              {"weight_scale", {"F32", {1, 1}, Zeros(4)}}},
             kW8A8, 1, cols);
    ASSERT_TRUE(codes.ok()) << codes.status();
    EXPECT_EQ(codes->dtype,
              cols > kMost ? kernels::DType::kInt8 : kernels::DType::kW8A8);
  }
}

std::vector<uint32_t> Appended(std::vector<uint32_t> words, size_t count,
                               uint32_t word) {
  words.insert(words.end(), count, word);
  return words;
}

TEST(QuantisedTensors, InputsMayBeOfAnyGroup) {
  FileTensors tensors = Gptq();
  std::vector<uint32_t> groups(kCols);
  for (uint32_t i = 0; i < kCols; ++i) groups[i] = i % 2;
  tensors["g_idx"].bytes = Words(groups);
  // Codes 9, which is 1 beside zeros of 8; scales of 1 and of 2, in f16.
  std::string scales;
  for (const char high : {'\x3c', '\x40'}) {
    for (int i = 0; i < kRows; ++i) scales += {'\0', high};
  }
  tensors["scales"].bytes = scales;
  // Of the last input the code is 3: -5, or twice that.
  const auto expect = [&](size_t even) {
    tensors["qweight"].bytes = Words(Appended(
        std::vector<uint32_t>(56, 0x99999999), 8, uint32_t{0x39999999}));
    const auto codes = Read(tensors, kGptq);
    ASSERT_TRUE(codes.ok()) << codes.status();
    std::vector<float> values;
    Dequantise(*codes, values);
    for (size_t i = 0; i < values.size(); ++i) {
      const float scale = i % kCols < even && i % 2 == 0 ? 1.0f : 2.0f;
      ASSERT_EQ(values[i], i % kCols == 63 ? -10.0f : scale) << i;
    }
  };
  expect(64);
  const auto codes = Read(tensors, kGptq);
  ASSERT_TRUE(codes.ok()) << codes.status();
  // Kept as groups of neighbours: all even inputs, then all odd ones.
  EXPECT_TRUE(SameForm(*codes, *codes));
  EXPECT_THAT(codes->group_of, IsEmpty());
  ASSERT_EQ(codes->order.size(), 64u);
  for (int i = 0; i < kCols; ++i) {
    EXPECT_EQ(codes->order[static_cast<size_t>(i)], i % 32 * 2 + i / 32);
  }
  EXPECT_EQ(codes->View().order, codes->order.data());
  CodeRows other = *codes;
  std::swap(other.order[0], other.order[1]);
  EXPECT_FALSE(SameForm(*codes, other)) << "inputs are of one order";
  // One group has more inputs than it may have.
  groups[62] = 1;
  tensors["g_idx"].bytes = Words(groups);
  expect(62);
  const auto uneven = Read(tensors, kGptq);
  ASSERT_TRUE(uneven.ok()) << uneven.status();
  EXPECT_THAT(uneven->order, IsEmpty());
  EXPECT_FALSE(SameForm(*uneven, *uneven));
  // compressed-tensors has -1 where there is no order.
  FileTensors packed = Packed();
  packed["weight_g_idx"] = {"I32", {64}, Words(std::vector<uint32_t>(64, ~0u))};
  const auto plain = Read(packed, kPacked);
  ASSERT_TRUE(plain.ok()) << plain.status();
  EXPECT_TRUE(SameForm(*plain, *plain));
}

TEST(QuantisedTensors, BlocksAreOfRowsAndInputs) {
  FileTensors tensors = Blocks();
  tensors["weight"].bytes = std::string(512, '\x3c');  // 1.5
  tensors["weight"].bytes[8] = '\x81';                 // -2^-9
  const auto expect = [&](const char* what) {
    const auto codes = Read(tensors, kBlocks);
    ASSERT_TRUE(codes.ok()) << what << codes.status();
    EXPECT_FALSE(SameForm(*codes, *codes)) << "no kernel has such scales";
    std::vector<float> values;
    Dequantise(*codes, values);
    EXPECT_EQ(values[8], -0.001953125f) << what;
    for (size_t i = 0; i < values.size(); ++i) {
      const size_t block = i / kCols / 3 * 2 + i % kCols / 32;
      if (i == 8) continue;
      ASSERT_EQ(values[i], 1.5f * static_cast<float>(1 << block)) << what << i;
    }
  };
  expect("weight_scale_inv ");
  tensors["weight_scale"] = tensors.extract("weight_scale_inv").mapped();
  expect("weight_scale ");
  // Of int8 a backend keeps them, a scale for each row and group.
  tensors["weight"].dtype = "I8";
  const auto codes = Read(tensors, kBlocks);
  ASSERT_TRUE(codes.ok()) << codes.status();
  EXPECT_TRUE(SameForm(*codes, *codes));
  EXPECT_THAT(codes->scales,
              ElementsAre(1, 2, 1, 2, 1, 2, 4, 8, 4, 8, 4, 8, 16, 32, 16, 32));
}

TEST(QuantisedTensors, OneScaleMayBeOfAllRows) {
  FileTensors tensors = Blocks();
  Quantisation config = kBlocks;
  config.group = config.block_rows = 0;
  for (const char* name : {"weight_scale", "weight_scale_inv"}) {
    for (const std::vector<int64_t>& shape :
         {std::vector<int64_t>{}, std::vector<int64_t>{1}}) {
      tensors.erase("weight_scale_inv");
      tensors[name] = {"F32", shape, BytesOf<float>({0.25})};
      tensors["activation_scale"] = {"F32", shape, BytesOf<float>({3})};
      const auto codes = Read(tensors, config);
      ASSERT_TRUE(codes.ok()) << codes.status();
      EXPECT_TRUE(SameForm(*codes, *codes));
      EXPECT_EQ(codes->scales, std::vector<float>(kRows, 0.25));
      EXPECT_THAT(codes->names, Contains("p.activation_scale"));
    }
  }
}

TEST(QuantisedTensors, RowsArePutInOrderWithTheirScalesAndZeros) {
  CodeRows codes;
  codes.dtype = kernels::DType::kInt4;
  codes.rows = 4;
  codes.cols = 3;
  codes.group = 2;
  codes.codes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};
  codes.scales = {1, 2, 3, 4, 5, 6, 7, 8};
  codes.zeros = {0, 1, 2, 3, 4, 5, 6, 7};
  PutRowsInOrder({2, 0, 1}, codes);
  EXPECT_THAT(codes.codes, ElementsAre(6, 7, 8, 0, 1, 2, 3, 4, 5, 9, 10, 11));
  EXPECT_THAT(codes.scales, ElementsAre(5, 6, 1, 2, 3, 4, 7, 8));
  EXPECT_THAT(codes.zeros, ElementsAre(4, 5, 0, 1, 2, 3, 6, 7));
  codes.zeros.clear();
  PutRowsInOrder({1, 0}, codes);
  EXPECT_THAT(codes.scales, ElementsAre(1, 2, 5, 6, 3, 4, 7, 8));
  EXPECT_THAT(codes.zeros, IsEmpty());
}

TEST(QuantisedTensors, RowsOfOneFormStack) {
  auto codes = Read(Packed(), kPacked);
  FileTensors more = Packed();
  more["weight_zero_point"] = {"I32", {1, 2}, Words({0x99999999, 0x88888888})};
  auto zeroed = Read(more, kPacked);
  ASSERT_TRUE(codes.ok() && zeroed.ok()) << zeroed.status();
  ASSERT_TRUE(SameForm(*codes, *zeroed));
  AppendRows(*zeroed, *codes);
  EXPECT_EQ(codes->rows, 16);
  EXPECT_EQ(codes->codes.size(), size_t{16 * kCols});
  ASSERT_EQ(codes->zeros.size(), size_t{32});
  EXPECT_EQ(codes->zeros[0], 8);
  EXPECT_EQ(codes->zeros[16], 9);
  std::vector<float> values;
  Dequantise(*codes, values);
  EXPECT_EQ(values.size(), codes->codes.size());
}

TEST(QuantisedTensors, ThatDoNotFitAreRefusedByName) {
  const auto with = [](FileTensors tensors, const std::string& name,
                       const FileTensor& tensor) {
    tensors[name] = tensor;
    return tensors;
  };
  const auto without = [](FileTensors tensors, const std::string& name) {
    tensors.erase(name);
    return tensors;
  };
  const struct {
    const char* what;
    FileTensors tensors;
    Quantisation config;
    const char* message;
  } cases[] = {
      {"another shape", with(Gptq(), "qweight", {"I32", {8, 7}, Zeros(224)}),
       kGptq,
       "'p.qweight': is I32 [8, 7], but config.json asks for I32 [8, 8]"},
      {"another type", with(Gptq(), "qweight", {"F32", {8, 8}, Zeros(256)}),
       kGptq, "'p.qweight': is F32"},
      {"no zeros", without(Gptq(), "qzeros"), kGptq, "'p.qzeros': is missing"},
      {"no scales", without(Gptq(), "scales"), kGptq, "'p.scales': is missing"},
      {"scales that are integers",
       with(Gptq(), "scales", {"I32", {2, 8}, Zeros(64)}), kGptq,
       "'p.scales': dtype I32"},
      {"scales of other groups",
       with(Gptq(), "scales", {"F16", {1, 8}, Zeros(16)}), kGptq,
       "'p.scales': is F16 [1, 8]"},
      {"a group that is not there",
       with(Gptq(), "g_idx",
            {"I32", {64}, Words(std::vector<uint32_t>(64, 2))}),
       kGptq, "'p.g_idx': input 0 is of group 2 of 2"},
      {"no word on how", Gptq(), {}, "config.json does not say how"},
      {"no expert",
       Gptq(),
       {Method::kMxfp4, 4, 32},
       "'p.weight': is quantised, but no expert's, as mxfp4 is"},
      {"zeros of 8 bits",
       {{"qweight", {"I32", {16, 8}, Zeros(512)}},
        {"qzeros", {"I32", {2, 2}, Zeros(16)}},
        {"scales", {"F16", {2, 8}, Zeros(32)}}},
       {Method::kGptq, 8, 32, true},
       "8-bit codes must be symmetric"},
      {"another weight_shape",
       with(Packed(), "weight_shape", {"I64", {2}, Zeros(16)}), kPacked,
       "'p.weight_shape': is not [8, 64]"},
      {"a zero for bytes",
       with(Plain(), "weight_zero_point", {"I8", {8, 1}, Zeros(8)}), kPlain,
       "'p.weight_zero_point': 8-bit codes must be symmetric"},
      {"blocks without scales", without(Blocks(), "weight_scale_inv"), kBlocks,
       "'p.weight_scale': is missing"},
      {"blocks, and no word on how", Blocks(), {}, "does not say how"},
      {"one scale for all blocks",
       with(Blocks(), "weight_scale_inv", {"F32", {1}, Zeros(4)}), kBlocks,
       "'p.weight_scale_inv': is F32 [1], but config.json asks for F32 [3, 2]"},
      {"blocks rounded down",
       with(Blocks(), "weight_scale_inv", {"F32", {2, 2}, Zeros(16)}), kBlocks,
       "'p.weight_scale_inv': is F32 [2, 2]"},
      {"blocks the other way round",
       with(Blocks(), "weight_scale_inv", {"F32", {2, 3}, Zeros(24)}), kBlocks,
       "'p.weight_scale_inv': is F32 [2, 3]"},
      {"a scale for each row of blocks",
       with(Blocks(), "weight_scale_inv", {"F32", {8, 2}, Zeros(64)}), kBlocks,
       "'p.weight_scale_inv': is F32 [8, 2]"},
      {"blocks where none are said", Blocks(), kPlain,
       "'p.weight_scale_inv': is F32 [3, 2]"},
      {"scales that are codes",
       with(Blocks(), "weight_scale_inv", {"U8", {3, 2}, Zeros(6)}), kBlocks,
       "'p.weight_scale_inv': dtype U8"},
      {"codes of another fp8",
       with(Blocks(), "weight", {"F8_E5M2", {8, 64}, Zeros(512)}), kBlocks,
       "'p.weight': is F8_E5M2"},
      {"blocks of half the inputs",
       with(Blocks(), "weight", {"F8_E4M3", {8, 32}, Zeros(256)}), kBlocks,
       "'p.weight': is F8_E4M3 [8, 32]"},
      {"unsigned bytes", with(Plain(), "weight", {"U8", {8, 64}, Zeros(512)}),
       kPlain, "'p.weight': is U8"},
  };
  RecordProperty("files", static_cast<int>(std::size(cases)));
  for (const auto& c : cases) {
    const auto codes = Read(c.tensors, c.config);
    EXPECT_EQ(codes.status().code(), absl::StatusCode::kInvalidArgument)
        << c.what;
    EXPECT_THAT(std::string(codes.status().message()), HasSubstr(c.message))
        << c.what;
  }
}

}  // namespace
}  // namespace tandem::engine
