// SPDX-License-Identifier: Apache-2.0
// The attention weights that tokens bring along, on the CPU and on the device
// under test, against those of `transformers` in float64
// (tools/oracle/make_attention_goldens.py).

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/engine/checkpoint_maker.h"
#include "tests/engine/rig.h"
#include "tests/engine/test_device.h"
#include "tests/sanitized.h"

namespace tandem::engine {
namespace {

using kernels::DType;
using nlohmann::json;

RigOptions AttentionRigOptions(DType type) {
  RigOptions options;
  options.load.weight_dtype = type;
  options.executor.max_rows = 128;
  options.executor.max_sequences = 8;
  options.executor.num_blocks = 64;
  options.executor.kv_dtype = type;
  return options;
}

AttentionAsk All(int layers) {
  AttentionAsk ask;
  for (int i = 0; i < layers; ++i) ask.layers.push_back(i);
  return ask;
}

json Goldens() {
  std::ifstream file(TANDEM_SOURCE_DIR "/tests/golden/engine_attention.json");
  return json::parse(file)["cases"];
}

// The largest difference from a golden; all rows sum to one.
double WorstOf(Rig& rig, const json& prompt, int chunk) {
  const auto ids = prompt["ids"].get<std::vector<int32_t>>();
  const auto length = ids.size();
  TestSequence sequence = rig.NewSequence(ids, static_cast<int>(length));
  sequence.attention = All(rig.spec().layers);
  TestSequence* const one = &sequence;
  StepOutput output;
  while (sequence.computed < static_cast<int>(length)) {
    output = rig.Advance({&one, 1}, chunk);
    EXPECT_TRUE(output.status.ok()) << output.status;
  }
  const std::vector<float>& weights = output.tokens.back().attention;
  if (weights.size() != prompt["layers"].size() * length) {
    ADD_FAILURE() << weights.size() << " weights";
    return 1;
  }
  double worst = 0;
  size_t at = 0;
  for (const json& layer : prompt["layers"]) {
    double sum = 0;
    for (const json& want : layer) {
      sum += weights[at];
      if (want == 0) {
        EXPECT_EQ(weights[at], 0) << "outside the window";
      }
      worst = std::max(worst, std::abs(weights[at++] - want.get<double>()));
    }
    EXPECT_NEAR(sum, 1, 1e-4);
  }
  return worst;
}

class AttentionOutput : public testing::TestWithParam<std::string> {};

TEST_P(AttentionOutput, IsNearTheGoldens) {
  const json prompts = Goldens()[GetParam()];
  TempDir dir;
  WriteCheckpoint(LoadCases()[GetParam()], dir);
  const auto cpu = NewCpu(2);
  Rig rig(dir.path(), cpu.get(), AttentionRigOptions(DType::kF32));
  for (const json& prompt : prompts) {
    EXPECT_LE(WorstOf(rig, prompt, 128), 2e-5);
    EXPECT_LE(WorstOf(rig, prompt, 10), 2e-5) << "in chunks";
  }
  if (kSanitized) return;
  // A probability of about 0.1, from scores of rounded queries and keys.
  for (const auto& [type, error] :
       {std::pair{DType::kF32, 2e-5}, std::pair{DType::kBF16, 2e-2}}) {
    const auto device = NewTestDevice(type);
    Rig on_device(dir.path(), device.get(), AttentionRigOptions(type));
    EXPECT_LE(WorstOf(on_device, prompts[0], 128), error);
  }
}

INSTANTIATE_TEST_SUITE_P(Families, AttentionOutput,
                         testing::Values("llama2_mha_f32", "smollm_tied_bf16",
                                         "mistral_window_f32", "qwen3_f32",
                                         "gemma2_f32", "gemma3_f32",
                                         "gemma4_f32", "gemma4_few_f32",
                                         "gpt2_f32"),
                         [](const auto& test) { return test.param; });

TEST(AttentionOutputTest, LayersAreChosenMeansAreMeansAndNeighboursStay) {
  const json prompt = Goldens()["gemma2_f32"][1];
  const auto ids = prompt["ids"].get<std::vector<int32_t>>();
  const int length = static_cast<int>(ids.size());
  TempDir dir;
  WriteCheckpoint(LoadCases()["gemma2_f32"], dir);
  const auto cpu = NewCpu(1);
  Rig rig(dir.path(), cpu.get(), AttentionRigOptions(DType::kF32));
  std::vector<TestSequence> sequences;
  for (int i = 0; i < 4; ++i) {
    sequences.push_back(rig.NewSequence(ids, length));
  }
  sequences[0].attention = All(3);
  sequences[1].attention = {.layers = {0, 2}, .mean = true};
  sequences[3].attention = {.layers = {1}};
  std::vector<TestSequence*> step;
  for (TestSequence& sequence : sequences) step.push_back(&sequence);
  StepOutput output;
  while (sequences[0].computed < length) output = rig.Advance(step, 30);
  ASSERT_TRUE(output.status.ok()) << output.status;
  const auto n = static_cast<size_t>(length);
  const std::vector<float>& all = output.tokens[0].attention;
  ASSERT_EQ(all.size(), 3 * n);
  ASSERT_EQ(output.tokens[1].attention.size(), n);
  EXPECT_TRUE(output.tokens[2].attention.empty()) << "it did not ask";
  ASSERT_EQ(output.tokens[3].attention.size(), n);
  for (size_t i = 0; i < n; ++i) {
    EXPECT_NEAR(output.tokens[1].attention[i], (all[i] + all[2 * n + i]) / 2,
                1e-7);
    EXPECT_EQ(output.tokens[3].attention[i], all[n + i]);
  }
  // Who asks draws what it would have drawn.
  EXPECT_EQ(output.logits[0], output.logits[2]);
}

TEST(AttentionOutputTest, SinksTakeTheirShareOnTheDeviceToo) {
  const json spec = LoadCases()["gpt_oss_f32"];
  TempDir dir;
  WriteCheckpoint(spec, dir);
  std::vector<std::vector<float>> weights;
  for (const auto& backend : {NewCpu(1), NewTestDevice(DType::kF32)}) {
    Rig rig(dir.path(), backend.get(), AttentionRigOptions(DType::kF32));
    TestSequence sequence = rig.NewSequence(PromptIds(spec, 9), 9);
    sequence.attention = {.layers = {1}};
    TestSequence* const one = &sequence;
    weights.push_back(rig.Advance({&one, 1}, 9).tokens.at(0).attention);
  }
  ASSERT_EQ(weights[0].size(), 9u);
  double sum = 0;
  for (size_t i = 0; i < 9; ++i) {
    EXPECT_NEAR(weights[1][i], weights[0][i], 2e-5);
    sum += weights[0][i];
  }
  EXPECT_LT(sum, 0.99);
}

// Freeing it might wait for the whole device.
TEST(AttentionOutputTest, MemoryThatWasOutgrownIsKept) {
  TempDir dir;
  WriteCheckpoint(LoadCases()["gemma2_f32"], dir);
  const auto device = NewTestDevice(DType::kF32);
  Rig rig(dir.path(), device.get(), AttentionRigOptions(DType::kF32));
  const int layers = rig.spec().layers;
  size_t used = device->memory().used_bytes;
  for (const int length : {2, 60}) {
    TestSequence sequence = rig.NewSequence(
        std::vector<int32_t>(static_cast<size_t>(length), 1), length);
    sequence.attention = All(layers);
    TestSequence* const one = &sequence;
    ASSERT_TRUE(rig.Advance({&one, 1}, length).status.ok());
    const int floats = 2 * rig.spec().heads + layers * length;
    used += std::bit_ceil(static_cast<size_t>(floats) * sizeof(float));
    EXPECT_EQ(device->memory().used_bytes, used) << length;
  }
}

TEST(AttentionOutputTest, WhatDoesNotFitIsRefused) {
  TempDir dir;
  WriteCheckpoint(LoadCases()["gemma2_f32"], dir);
  const auto cpu = NewCpu(1);
  Rig rig(dir.path(), cpu.get(), AttentionRigOptions(DType::kF32));
  for (const AttentionAsk& ask :
       {AttentionAsk{.layers = {3}}, AttentionAsk{.layers = {-1}},
        AttentionAsk{.layers = {1, 1}}, AttentionAsk{.layers = {2, 0}}}) {
    TestSequence sequence = rig.NewSequence({1, 2, 3}, 3);
    sequence.attention = ask;
    TestSequence* const one = &sequence;
    EXPECT_EQ(rig.Advance({&one, 1}, 3).status.code(),
              absl::StatusCode::kInvalidArgument);
  }
}

}  // namespace
}  // namespace tandem::engine
