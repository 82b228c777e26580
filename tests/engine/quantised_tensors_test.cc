// SPDX-License-Identifier: Apache-2.0
// Tensors of a quantised product that do not fit are refused by name; those
// that fit give codes. tools/oracle/compare_quantised.py holds every format
// against an independent statement of it.

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "engine/quantisation.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/engine/temp_dir.h"

namespace tandem::engine {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using Method = Quantisation::Method;

struct Tensor {
  std::string dtype;
  std::vector<int64_t> shape;
  std::string bytes;
};
using Tensors = std::map<std::string, Tensor>;

std::string Words(const std::vector<uint32_t>& words) {
  return {reinterpret_cast<const char*>(words.data()), words.size() * 4};
}
std::string Zeros(size_t bytes) { return std::string(bytes, '\0'); }

void Write(const TempDir& dir, const Tensors& tensors) {
  nlohmann::json header;
  std::string data;
  for (const auto& [name, tensor] : tensors) {
    header["p." + name] = {
        {"dtype", tensor.dtype},
        {"shape", tensor.shape},
        {"data_offsets", {data.size(), data.size() + tensor.bytes.size()}}};
    data += tensor.bytes;
  }
  std::string text = header.dump();
  text.append((8 - text.size() % 8) % 8, ' ');
  const uint64_t length = text.size();
  dir.Write(
      "model.safetensors",
      std::string(reinterpret_cast<const char*>(&length), 8) + text + data);
}

// 8 outputs of 64 inputs in groups of 32, 4 bits.
constexpr int kRows = 8;
constexpr int kCols = 64;

Tensors Gptq() {
  std::vector<uint32_t> order(kCols);
  for (uint32_t i = 0; i < kCols; ++i) order[i] = i / 32;
  return {{"qweight", {"I32", {8, 8}, Zeros(256)}},
          {"qzeros", {"I32", {2, 1}, Words({0x77777777, 0x77777777})}},
          {"scales", {"F16", {2, 8}, Zeros(32)}},
          {"g_idx", {"I32", {64}, Words(order)}}};
}
Tensors Packed() {
  const int64_t shape[2] = {kRows, kCols};
  return {{"weight_packed", {"I32", {8, 8}, Zeros(256)}},
          {"weight_scale", {"BF16", {8, 2}, Zeros(32)}},
          {"weight_shape",
           {"I64", {2}, {reinterpret_cast<const char*>(shape), 16}}}};
}
Tensors Plain() {
  return {{"weight", {"I8", {8, 64}, Zeros(512)}},
          {"weight_scale", {"F32", {8, 1}, Zeros(32)}}};
}

absl::StatusOr<CodeRows> Read(const Tensors& tensors, Quantisation config) {
  TempDir dir;
  Write(dir, tensors);
  const auto checkpoint = Checkpoint::Open(dir.path());
  if (!checkpoint.ok()) return checkpoint.status();
  EXPECT_TRUE(HasCodes(*checkpoint, "p"));
  return ReadCodes(*checkpoint, config, "p", kRows, kCols);
}

const Quantisation kGptq = {Method::kGptq, 4, 32, true};
const Quantisation kPacked = {Method::kPacked, 4, 32};
const Quantisation kPlain = {Method::kPlain};

TEST(QuantisedTensors, GiveCodesScalesAndZeros) {
  Tensors tensors = Gptq();
  auto codes = Read(tensors, kGptq);
  ASSERT_TRUE(codes.ok()) << codes.status();
  EXPECT_EQ(codes->dtype, kernels::DType::kInt4);
  EXPECT_TRUE(codes->zeros.empty()) << "all are 8";
  EXPECT_THAT(codes->names,
              ElementsAre("p.qweight", "p.qzeros", "p.scales", "p.g_idx"));
  tensors["qzeros"].bytes = Words({0x76543210, 0xffffffff});
  codes = Read(tensors, kGptq);
  ASSERT_TRUE(codes.ok()) << codes.status();
  EXPECT_THAT(codes->zeros, ElementsAre(1, 16, 2, 16, 3, 16, 4, 16, 5, 16, 6,
                                        16, 7, 16, 8, 16));
  EXPECT_TRUE(Read(Packed(), kPacked).ok());
  EXPECT_TRUE(Read(Plain(), kPlain).ok());
}

TEST(QuantisedTensors, InputsMayBeOfAnyGroup) {
  Tensors tensors = Gptq();
  std::vector<uint32_t> groups(kCols);
  for (uint32_t i = 0; i < kCols; ++i) groups[i] = i % 2;
  tensors["g_idx"].bytes = Words(groups);
  // Codes 9, which is 1 beside zeros of 8; scales of 1 and of 2, in f16.
  tensors["qweight"].bytes = Words(std::vector<uint32_t>(64, 0x99999999));
  std::string scales;
  for (const char high : {'\x3c', '\x40'}) {
    for (int i = 0; i < kRows; ++i) scales += {'\0', high};
  }
  tensors["scales"].bytes = scales;
  const auto codes = Read(tensors, kGptq);
  ASSERT_TRUE(codes.ok()) << codes.status();
  EXPECT_FALSE(SameForm(*codes, *codes));
  const std::vector<float> values = Dequantise(*codes);
  for (size_t i = 0; i < values.size(); ++i) {
    ASSERT_EQ(values[i], i % 2 == 0 ? 1.0f : 2.0f) << i;
  }
  // compressed-tensors has -1 where there is no order.
  Tensors packed = Packed();
  packed["weight_g_idx"] = {"I32", {64}, Words(std::vector<uint32_t>(64, ~0u))};
  const auto plain = Read(packed, kPacked);
  ASSERT_TRUE(plain.ok()) << plain.status();
  EXPECT_TRUE(SameForm(*plain, *plain));
}

TEST(QuantisedTensors, RowsOfOneFormStack) {
  auto codes = Read(Packed(), kPacked);
  Tensors more = Packed();
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
  const std::vector<float> values = Dequantise(*codes);
  EXPECT_EQ(values.size(), codes->codes.size());
}

TEST(QuantisedTensors, ThatDoNotFitAreRefusedByName) {
  const auto with = [](Tensors tensors, const std::string& name,
                       const Tensor& tensor) {
    tensors[name] = tensor;
    return tensors;
  };
  const auto without = [](Tensors tensors, const std::string& name) {
    tensors.erase(name);
    return tensors;
  };
  const struct {
    const char* what;
    Tensors tensors;
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
      {"unsigned bytes", with(Plain(), "weight", {"U8", {8, 64}, Zeros(512)}),
       kPlain, "'p.weight': is U8"},
  };
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
