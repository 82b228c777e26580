// SPDX-License-Identifier: Apache-2.0
// Checkpoints whose stacked experts are in MXFP4, written from its standard
// (OCP Microscaling Formats 1.0) and from what gpt-oss's files look like.

#ifndef TANDEM_TESTS_ENGINE_MXFP4_MAKER_H_
#define TANDEM_TESTS_ENGINE_MXFP4_MAKER_H_

#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "engine/checkpoint/safetensors.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/engine/checkpoint/safetensors_file.h"
#include "tests/engine/checkpoint_maker.h"
#include "tests/engine/temp_dir.h"

namespace tandem::engine {

// A sign, two bits of exponent (bias 1) and one of mantissa.
inline double ValueOfE2m1(unsigned code) {
  const int exponent = static_cast<int>(code >> 1 & 3);
  const double mantissa = (code & 1) / 2.0;
  const double magnitude =
      exponent == 0 ? mantissa : std::ldexp(1 + mantissa, exponent - 1);
  return (code & 8) != 0 ? -magnitude : magnitude;
}

struct Mxfp4Stack {
  FileTensor blocks;
  FileTensor scales;
  std::vector<float> numbers;  // [count, cols, rows]
};

// Powers of two from 2^-2 down, of so many kinds.
inline Mxfp4Stack DrawMxfp4(size_t count, size_t rows, size_t cols, int powers,
                            std::mt19937& random) {
  const auto size = [](size_t n) { return static_cast<int64_t>(n); };
  Mxfp4Stack made;
  made.numbers.resize(count * rows * cols);
  for (size_t e = 0; e < count; ++e) {
    for (size_t row = 0; row < rows; ++row) {
      for (size_t col = 0; col < cols; col += 32) {
        const int power = -2 - static_cast<int>(random() % powers);
        made.scales.bytes.push_back(static_cast<char>(power + 127));
        for (size_t i = 0; i < 32; i += 2) {
          const unsigned low = random() % 16;
          const unsigned high = random() % 16;
          made.blocks.bytes.push_back(static_cast<char>(low | high << 4));
          const size_t at = (e * cols + col + i) * rows + row;
          made.numbers[at] =
              static_cast<float>(std::ldexp(ValueOfE2m1(low), power));
          made.numbers[at + rows] =
              static_cast<float>(std::ldexp(ValueOfE2m1(high), power));
        }
      }
    }
  }
  made.scales.dtype = made.blocks.dtype = "U8";
  made.scales.shape = {size(count), size(rows), size(cols / 32)};
  made.blocks.shape = {size(count), size(rows), size(cols / 32), 16};
  return made;
}

// A checkpoint's tensors, by name.
inline FileTensors TensorsOf(const TempDir& dir) {
  FileTensors tensors;
  const auto file = Checkpoint::Open(dir.path());
  EXPECT_TRUE(file.ok()) << file.status();
  if (!file.ok()) return tensors;
  for (const TensorInfo& tensor : file->tensors()) {
    const auto bytes = file->bytes(tensor);
    tensors[tensor.name] = {
        std::string(tensor.dtype),
        tensor.shape,
        {reinterpret_cast<const char*>(bytes.data()), bytes.size()}};
  }
  return tensors;
}

// Writes the case's checkpoint with its stacked experts in MXFP4 into `coded`,
// and into `plain` (null: nowhere) with the numbers that they stand for.
inline void WriteMxfp4(const nlohmann::json& spec, int powers,
                       const TempDir& coded, const TempDir* plain) {
  WriteCheckpoint(spec, coded);
  nlohmann::json config = spec.at("config");
  if (plain != nullptr) plain->Write("config.json", config.dump());
  config["quantization_config"] = {
      {"quant_method", "mxfp4"},
      {"modules_to_not_convert",
       {"model.layers.*.self_attn", "model.layers.*.mlp.router",
        "model.embed_tokens", "lm_head"}}};
  coded.Write("config.json", config.dump());
  FileTensors codes, numbers;
  std::mt19937 random(1);
  for (const auto& [name, tensor] : TensorsOf(coded)) {
    if (tensor.shape.size() < 3) {
      codes[name] = numbers[name] = tensor;
      continue;
    }
    const Mxfp4Stack made =
        DrawMxfp4(static_cast<size_t>(tensor.shape[0]),
                  static_cast<size_t>(tensor.shape[2]),
                  static_cast<size_t>(tensor.shape[1]), powers, random);
    codes[name + "_blocks"] = made.blocks;
    codes[name + "_scales"] = made.scales;
    numbers[name] = {tensor.dtype, tensor.shape, BytesOf(made.numbers)};
  }
  coded.Write("model.safetensors", SafetensorsFile(codes));
  if (plain != nullptr) {
    plain->Write("model.safetensors", SafetensorsFile(numbers));
  }
}

}  // namespace tandem::engine

#endif  // TANDEM_TESTS_ENGINE_MXFP4_MAKER_H_
