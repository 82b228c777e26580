// SPDX-License-Identifier: Apache-2.0
// Plans against figures worked out by hand from the models' published shapes.

#include "cli/plan/figures.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "cli/plan/command.h"
#include "common/progress.h"
#include "tests/engine/checkpoint/safetensors_file.h"
#include "tests/engine/temp_dir.h"

namespace tandem::plan {
namespace {

using testing::HasSubstr;

constexpr int64_t kGiB = int64_t{1} << 30;

constexpr const char* kLlama8B = R"({
  "architectures": ["LlamaForCausalLM"], "model_type": "llama",
  "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
  "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
  "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
  "rope_theta": 500000.0, "hidden_act": "silu"})";
constexpr const char* kGpt2 = R"({
  "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2",
  "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024,
  "vocab_size": 50257, "activation_function": "gelu_new",
  "layer_norm_epsilon": 1e-5})";
constexpr const char* kMixtral = R"({
  "architectures": ["MixtralForCausalLM"], "model_type": "mixtral",
  "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
  "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000,
  "max_position_embeddings": 32768, "rms_norm_eps": 1e-5,
  "num_local_experts": 8, "num_experts_per_tok": 2,
  "rope_theta": 1000000.0, "hidden_act": "silu", "sliding_window": null})";

PlanInput Input(const char* config, bool gpu, int64_t memory) {
  PlanInput input;
  input.model = "model";
  absl::StatusOr<engine::ModelSpec> spec =
      engine::ParseModelSpec("config.json", config, "", "");
  EXPECT_TRUE(spec.ok()) << spec.status();
  if (spec.ok()) input.spec = *spec;
  input.checkpoint_dtype = "bfloat16";
  input.gpu = gpu;
  input.memory_bytes = memory;
  return input;
}

TEST(PlanTest, BytesOfPublishedShapes) {
  const struct {
    const char* config;
    const char* dtype;
    const char* quantization;
    const char* kv;
    double parameters;
    int64_t weights, kv_token;
  } cases[] = {
      // 8 029 995 008 parameters of matrices in 2 bytes, and rotary tables of
      // 131 072 positions x 128 x 4 bytes; K and V: 2 x 32 x 8 x 128 x 2.
      {kLlama8B, "auto", "none", "auto", 8029995008,
       2 * int64_t{8029995008} + 131072 * 512, 131072},
      // fp8 vectors have an f32 scale each: 2 x 32 x 8 x (128 + 4).
      {kLlama8B, "auto", "none", "fp8", 8029995008,
       2 * int64_t{8029995008} + 131072 * 512, 67584},
      // Layers of 6 979 321 856 in half a byte, the head and the embedding of
      // 525 336 576 each in one, and 2 bytes of scale for each 32.
      {kLlama8B, "auto", "int4", "auto", 8029995008,
       6979321856 / 2 + 6979321856 / 16 +
           2 * (int64_t{525336576} + 525336576 / 16) + 131072 * 512,
       131072},
      // Layers in one byte each with an f32 scale for each row: of qkv, output,
      // gate and up, and down.
      {kLlama8B, "auto", "w8a8", "auto", 8029995008,
       6979321856 + 4 * 32 * int64_t{6144 + 4096 + 28672 + 4096} +
           2 * (int64_t{525336576} + 525336576 / 16) + 131072 * 512,
       131072},
      // 12 layers of 7 077 888 and a tied head of 38 597 376 in 4 bytes, and
      // 1024 x 768 learned positions; K and V: 2 x 12 x 12 x 64 x 4.
      {kGpt2, "f32", "none", "auto", 123532032 + 1024 * 768,
       4 * (int64_t{123532032} + 1024 * 768), 73728},
      // All experts count.
      {kMixtral, "bf16", "none", "int8", 46702526464,
       2 * int64_t{46702526464} + 32768 * 512, 2 * 32 * 8 * (128 + 4)},
  };
  for (const auto& c : cases) {
    PlanInput input = Input(c.config, /*gpu=*/true, 1000 * kGiB);
    input.dtype = c.dtype;
    input.quantization = c.quantization;
    input.kv_cache_dtype = c.kv;
    const absl::StatusOr<Plan> plan = MakePlan(input);
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_EQ(plan->parameters, c.parameters);
    EXPECT_EQ(plan->weight_bytes, c.weights) << c.quantization;
    EXPECT_EQ(plan->kv_token_bytes, c.kv_token) << c.kv;
    EXPECT_EQ(plan->kv_block_bytes, 16 * c.kv_token);
  }
}

constexpr const char* kGptOss = R"({
  "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss",
  "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
  "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
  "vocab_size": 201088, "max_position_embeddings": 131072,
  "rms_norm_eps": 1e-5, "rope_theta": 150000, "hidden_act": "silu",
  "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0,
                   "beta_slow": 1.0, "truncate": false,
                   "original_max_position_embeddings": 4096},
  "sliding_window": 128, "num_local_experts": 32, "num_experts_per_tok": 4,
  "swiglu_limit": 7.0, "tie_word_embeddings": false,
  "quantization_config": {"quant_method": "mxfp4"}})";

// Experts of 3 x 2880 x 2880 in half a byte with 2 bytes of scale for each 32;
// the rest, of which the config does not say the type, in bf16; two rotary
// tables.
TEST(PlanTest, ExpertsInMxfp4AreCountedApart) {
  constexpr int64_t kExperts = int64_t{24} * 32 * 3 * 2880 * 2880;
  constexpr int64_t kRest =
      int64_t{24} * 2880 * (5120 + 4096 + 32) + int64_t{2} * 201088 * 2880;
  PlanInput input = Input(kGptOss, /*gpu=*/true, 80 * kGiB);
  input.checkpoint_dtype = "";
  const absl::StatusOr<Plan> plan = MakePlan(input);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->parameters, 20907786240);
  EXPECT_EQ(plan->weight_bytes, kExperts / 2 + kExperts / 16 + 2 * kRest +
                                    2 * int64_t{131072} * 64 * 4);
  EXPECT_EQ(plan->kv_token_bytes, 2 * 24 * 8 * 64 * 2);
  const std::string text = PlanText(input, *plan);
  EXPECT_THAT(text, testing::HasSubstr("experts in int4, others in bf16; the "
                                       "checkpoint's own codes; bf16 is "
                                       "assumed"));
}

// The layers' 6 979 321 856 weights as the checkpoint has them, embedding and
// head of 525 336 576 each in bf16.
TEST(PlanTest, QuantisedCheckpointsAreCountedAsTheyAreKept) {
  constexpr int64_t kLayers = 6979321856;
  constexpr int64_t kRest = 2 * int64_t{2} * 525336576 + 131072 * 512;
  // Rows of qkv, output, gate and up, down: an f32 scale each.
  constexpr int64_t kRows = 32 * (6144 + 4096 + 28672 + 4096);
  const struct {
    const char* config;
    bool gpu;
    int64_t layers;
    const char* note;
  } cases[] = {
      {R"({"quant_method": "gptq", "bits": 4, "group_size": 128})", true,
       kLayers / 2 + kLayers / 16, "layers in int4, others in bf16; the "},
      {R"({"quant_method": "awq", "bits": 4, "group_size": 128})", true,
       kLayers / 2 + kLayers / 16 + kLayers / 32, "own codes"},
      {R"({"quant_method": "awq", "bits": 4, "group_size": 128})", false,
       kLayers / 2 + kLayers / 16 + kLayers / 16, "own codes"},
      {R"({"quant_method": "gptq", "bits": 4, "group_size": 128,
           "desc_act": true})",
       true, kLayers / 2 + kLayers / 16,
       "layers in int4, others in bf16; the "},
      {R"({"quant_method": "gptq", "bits": 8, "group_size": -1,
           "desc_act": true})",
       true, kLayers + kLayers / 16, "layers in int8"},
      {R"({"quant_method": "compressed-tensors", "format": "float-quantized",
           "config_groups": {"group_0": {"weights": {
             "num_bits": 8, "type": "float", "strategy": "channel"}}}})",
       true, kLayers + 4 * kRows, "layers in fp8"},
      {R"({"quant_method": "compressed-tensors", "format": "int-quantized",
           "config_groups": {"group_0": {
             "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
             "input_activations": {"num_bits": 8, "type": "int",
                                   "strategy": "token", "dynamic": true}}}})",
       false, kLayers + 4 * kRows, "layers in w8a8, others in bf16; the chec"},
      {R"({"quant_method": "compressed-tensors", "format": "int-quantized",
           "config_groups": {"group_0": {
             "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
             "input_activations": null}}})",
       false, kLayers + kLayers / 16, "layers in int8, others in bf16; the c"},
      // As DeepSeek and Qwen publish them: expanded.
      {R"({"quant_method": "fp8", "weight_block_size": [128, 128]})", true,
       2 * kLayers, "in bf16; dequantised, for fp8 in groups"},
      {R"({"quant_method": "fp8", "weight_block_size": [128, 128]})", false,
       2 * kLayers, "in bf16; dequantised, for fp8 in groups"},
      {R"({"quant_method": "fp8", "activation_scheme": "static"})", true,
       kLayers + 4 * kRows, "layers in fp8"}};
  for (const auto& c : cases) {
    auto config = nlohmann::json::parse(kLlama8B);
    config["quantization_config"] = nlohmann::json::parse(c.config);
    const PlanInput input = Input(config.dump().c_str(), c.gpu, 1000 * kGiB);
    const absl::StatusOr<Plan> plan = MakePlan(input);
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_EQ(plan->weight_bytes, c.layers + kRest) << c.config;
    EXPECT_THAT(PlanText(input, *plan), HasSubstr(c.note)) << c.config;
  }
}

// Beside what every model needs, copies of 512 rows for two experts each, those
// of each expert from a multiple of eight on; a CPU has one expert's rows.
TEST(PlanTest, ExpertsNeedTheirOwnWorkingMemory) {
  const int64_t rows = int64_t{512} * (3 * 4096 + 6144 + 4096);
  const int64_t logits = int64_t{4} * 128 * 32000;
  const int64_t sampled = int64_t{128} * (2 * 4096);
  const struct {
    bool gpu;
    int64_t expected;
  } cases[] = {
      {true, 2 * (rows + sampled + (1024 + 7 * 8) * (2 * 4096 + 14336))},
      {false, 4 * (rows + sampled + 512 * (2 * 4096 + 3 * 14336))}};
  for (const auto& c : cases) {
    const auto plan = MakePlan(Input(kMixtral, c.gpu, 1000 * kGiB));
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_GE(plan->workspace_bytes, c.expected + logits);
    EXPECT_LT(plan->workspace_bytes, (c.expected + logits) * 101 / 100);
  }
}

// An H100 of 81 559 MiB: nine tenths, without 15.0 GiB of weights, a step's
// working memory (of which 128 rows of logits are 62.6 MiB), 768 MiB of the
// driver and the kernels, and 34 handoff buffers of 8 MiB.
TEST(PlanTest, ContextsOfLlamaOnAnH100) {
  const PlanInput input = Input(kLlama8B, true, int64_t{81559} << 20);
  const absl::StatusOr<Plan> plan = MakePlan(input);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->budget_bytes, 76968728985);
  EXPECT_EQ(plan->overhead_bytes, (int64_t{768} + 34 * 8) << 20);
  const int64_t logits = int64_t{4} * 128 * 128256;
  // x, its norm, the delta, q with k and v, attention, gate times up: bf16.
  const int64_t rows = int64_t{2} * 512 * (3 * 4096 + 6144 + 4096 + 14336);
  const int64_t sampled = int64_t{2} * 128 * (2 * 4096);
  EXPECT_GE(plan->workspace_bytes, logits + rows + sampled);
  EXPECT_LT(plan->workspace_bytes, (logits + rows + sampled) * 101 / 100);
  const int64_t left = plan->budget_bytes - plan->weight_bytes -
                       plan->workspace_bytes - plan->overhead_bytes;
  EXPECT_EQ(plan->num_blocks, left / (16 * 131072));
  EXPECT_EQ(plan->max_model_len, 131072);
  ASSERT_EQ(plan->contexts.size(), 8u);
  EXPECT_EQ(plan->contexts[0].positions, 1024);
  EXPECT_EQ(plan->contexts[0].count, plan->num_blocks / 64);
  EXPECT_EQ(plan->contexts[7].positions, 131072);
  EXPECT_EQ(plan->contexts[7].count, 3);
}

TEST(PlanTest, WorkersShareAndLimitsAreKept) {
  PlanInput input = Input(kLlama8B, true, 80 * kGiB);
  input.workers = 2;
  input.max_model_len = 4096;
  const absl::StatusOr<Plan> half = MakePlan(input);
  ASSERT_TRUE(half.ok()) << half.status();
  EXPECT_EQ(half->budget_bytes, static_cast<int64_t>(36 * 1.0 * kGiB));
  EXPECT_EQ(half->max_model_len, 4096);
  EXPECT_EQ(half->contexts.back().positions, 4096);
  // 64 sequences of 256 blocks, twice.
  EXPECT_LE(half->num_blocks, 64 * 2 * 256);

  input.workers = 1;
  input.gpu = false;
  input.memory_bytes = 200 * kGiB;
  const absl::StatusOr<Plan> host = MakePlan(input);
  ASSERT_TRUE(host.ok()) << host.status();
  EXPECT_EQ(host->num_blocks, 64 * 2 * 256);
  EXPECT_THAT(PlanText(input, *host), HasSubstr("--max-num-seqs 64"));
}

TEST(PlanTest, WhatDoesNotFitSaysWhatWould) {
  PlanInput input = Input(kLlama8B, true, 16 * kGiB);
  absl::StatusOr<Plan> plan = MakePlan(input);
  EXPECT_EQ(plan.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(plan.status().message()), HasSubstr("15.0 GiB"));

  input.memory_bytes = 24 * kGiB;
  input.max_model_len = 100000;
  plan = MakePlan(input);
  EXPECT_EQ(plan.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(plan.status().message()),
              HasSubstr("lower --max-model-len to "));
}

TEST(PlanTest, AdviceIsWhatCanStillBeDone) {
  const struct {
    const char* config;
    const char* quantization;
    int64_t memory;
    bool advised;
  } cases[] = {
      {kLlama8B, "none", 8 * kGiB, true},  {kLlama8B, "fp8", 8 * kGiB, true},
      {kLlama8B, "none", 4 * kGiB, false},  // int4 takes more
      {kLlama8B, "fp8", 4 * kGiB, false},  {kLlama8B, "int8", 8 * kGiB, false},
      {kLlama8B, "int4", 2 * kGiB, false}, {kGptOss, "none", 8 * kGiB, false}};
  for (const auto& c : cases) {
    PlanInput input = Input(c.config, true, c.memory);
    input.quantization = c.quantization;
    const absl::StatusOr<Plan> plan = MakePlan(input);
    EXPECT_EQ(plan.status().code(), absl::StatusCode::kResourceExhausted);
    const std::string message(plan.status().message());
    EXPECT_THAT(message, HasSubstr("take a larger device"));
    EXPECT_EQ(message.find("--quantization") != std::string::npos, c.advised)
        << c.quantization << ": " << message;
  }
}

TEST(PlanTest, FormatsThatWorkersRefuseAreRefused) {
  const struct {
    const char* config;
    bool gpu;
    const char* dtype;
    const char* quantization;
    const char* kv;
    const char* why;  // "": it is planned
  } cases[] = {
      {kLlama8B, false, "f16", "none", "auto", "--dtype is f16, expected"},
      {kLlama8B, false, "f16", "fp8", "auto", "--dtype is f16, expected"},
      {kLlama8B, false, "auto", "none", "f16", "--kv-cache-dtype is f16"},
      {kLlama8B, false, "bf16", "none", "f32", ""},
      {kLlama8B, true, "auto", "none", "f32", "activations' bf16"},
      {kLlama8B, true, "auto", "none", "f16", "activations' bf16"},
      {kLlama8B, true, "f16", "none", "bf16", "activations' f16"},
      {kLlama8B, true, "f16", "none", "f16", ""},
      {kLlama8B, true, "f16", "int4", "fp8", ""},
      {kLlama8B, true, "f32", "none", "bf16", ""},
      {kGptOss, true, "auto", "int8", "auto",
       "quantised already; leave out --quantization int8"},
      {kGptOss, false, "auto", "int4", "auto",
       "quantised already; leave out --quantization int4"},
      {kGptOss, true, "auto", "none", "auto", ""}};
  for (const auto& c : cases) {
    SCOPED_TRACE(absl::StrCat(c.gpu ? "gpu " : "cpu ", c.dtype, " ",
                              c.quantization, " ", c.kv));
    PlanInput input = Input(c.config, c.gpu, 1000 * kGiB);
    input.dtype = c.dtype;
    input.quantization = c.quantization;
    input.kv_cache_dtype = c.kv;
    const absl::Status status = MakePlan(input).status();
    if (*c.why == '\0') {
      EXPECT_TRUE(status.ok()) << status;
      continue;
    }
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.why));
  }
}

TEST(PlanTest, ReportsSayTheSame) {
  const PlanInput input = Input(kLlama8B, true, 80 * kGiB);
  const absl::StatusOr<Plan> plan = MakePlan(input);
  ASSERT_TRUE(plan.ok()) << plan.status();
  const auto json = nlohmann::json::parse(PlanJson(input, *plan));
  EXPECT_EQ(json["kv_bytes_per_token"], 131072);
  EXPECT_EQ(json["num_blocks"], plan->num_blocks);
  EXPECT_EQ(json["contexts"].size(), plan->contexts.size());
  const std::string text = PlanText(input, *plan);
  EXPECT_THAT(text, HasSubstr("8.03 B parameters"));
  EXPECT_THAT(text, HasSubstr("131072 bytes"));
}

TEST(PlanTest, APrefillWorkersBuffersCountWhereThereIsOne) {
  PlanInput input = Input(kLlama8B, true, 80 * kGiB);
  input.workers = 2;
  const absl::StatusOr<Plan> plan = MakePlan(input);
  ASSERT_TRUE(plan.ok()) << plan.status();
  // 4 for each of 16 peers and 2 of joining ones, of 8 MiB.
  EXPECT_EQ(plan->overhead_bytes, (int64_t{768} + 66 * 8) << 20);
}

TEST(PlanTest, TheProcessCountsOnACpu) {
  for (const int workers : {1, 4}) {
    PlanInput input = Input(kGpt2, false, 16 * kGiB);
    input.workers = workers;
    const absl::StatusOr<Plan> plan = MakePlan(input);
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_EQ(plan->budget_bytes, 16 * kGiB / workers);
    EXPECT_GT(plan->overhead_bytes, 0);
    // A worker more or less fills its share of a machine that is small.
    input.memory_bytes = workers * (plan->weight_bytes + plan->workspace_bytes +
                                    plan->overhead_bytes + 10 * kGiB / 100);
    const absl::StatusOr<Plan> tight = MakePlan(input);
    ASSERT_TRUE(tight.ok()) << tight.status();
    EXPECT_LE(tight->kv_bytes, 10 * kGiB / 100);
    EXPECT_GT(tight->kv_bytes, 10 * kGiB / 100 - tight->kv_block_bytes);
  }
}

TEST(PlanTest, TheServeLineHasWhatWasGiven) {
  PlanInput input = Input(kLlama8B, true, 80 * kGiB);
  const auto line = [&] {
    const absl::StatusOr<Plan> plan = MakePlan(input);
    return plan.ok() ? nlohmann::json::parse(PlanJson(input, *plan))["serve"]
                           .get<std::string>()
                     : std::string(plan.status().message());
  };
  EXPECT_EQ(line(), "tandem serve model --prefill 0 --decode 1");
  input.model = "my model's";
  EXPECT_EQ(line(), "tandem serve 'my model'\\''s' --prefill 0 --decode 1");
  input.model = "model";
  input.model = "org/name";
  input.revision = "v2";
  input.workers = 3;
  input.dtype = "bf16";
  input.quantization = "int8";
  input.kv_cache_dtype = "fp8";
  input.max_model_len = 8192;
  input.max_num_seqs = 16;
  input.max_num_batched_tokens = 1024;
  input.block_size = 32;
  input.gpu_memory_utilization = 0.8;
  EXPECT_EQ(line(),
            "tandem serve org/name --revision v2 --prefill 1 --decode 2 "
            "--dtype bf16 --quantization int8 --kv-cache-dtype fp8 "
            "--max-model-len 8192 --max-num-seqs 16 "
            "--max-num-batched-tokens 1024 --block-size 32 "
            "--gpu-memory-utilization 0.8");
  input = Input(kGpt2, false, 200 * kGiB);
  input.model = "models/gpt2/config.json";
  input.device = "cpu";
  // 128 sequences of 64 blocks of 16 positions of 36 864 bytes.
  EXPECT_EQ(line(),
            "tandem serve models/gpt2 --prefill 0 --decode 1 --device cpu "
            "--kv-cache-memory-bytes 4831838208");
}

TEST(PlanTest, EmbeddedModelIsReadFromItsDirectory) {
  PlanInput input;
  ASSERT_TRUE(
      ReadModel(std::string(TANDEM_SOURCE_DIR) + "/models/tales", &input).ok());
  EXPECT_EQ(input.spec.layers, 6);
}

// The engine keeps the file's type, whatever config.json says; without a file
// that counts, and where it is silent transformers' own default.
TEST(PlanTest, WeightsAreOfTheFilesTypeOrOfTheConfigs) {
  const struct {
    const char* why;
    const char* said;  // by config.json
    const char* file;  // its tensors' type
    const char* dtype;
    bool assumed;
  } cases[] = {{"nothing", "", "", "f32", true},
               {"the config", "bfloat16", "", "bf16", false},
               {"the file", "", "BF16", "bf16", false},
               {"the file goes first", "float32", "F16", "f16", false},
               {"a type that is none", "auto", "", "f32", true}};
  for (const auto& c : cases) {
    SCOPED_TRACE(c.why);
    const engine::TempDir dir;
    auto config = nlohmann::json::parse(kGpt2);
    if (*c.said != '\0') config["dtype"] = c.said;
    dir.Write("config.json", config.dump());
    if (*c.file != '\0') {
      // Codes, as of a quantised model, are no number's type.
      dir.Write(
          "model.safetensors",
          engine::SafetensorsFile({{"a", {"I32", {64}, engine::Zeros(256)}},
                                   {"b", {c.file, {16}, engine::Zeros(32)}}}));
    }
    for (const char* path : {"", "/config.json"}) {
      PlanInput input;
      input.gpu = true;
      input.memory_bytes = 80 * kGiB;
      ASSERT_TRUE(ReadModel(dir.path() + path, &input).ok());
      const absl::StatusOr<Plan> plan = MakePlan(input);
      ASSERT_TRUE(plan.ok()) << plan.status();
      const auto json = nlohmann::json::parse(PlanJson(input, *plan));
      EXPECT_EQ(json["dtype"], c.dtype);
      EXPECT_EQ(json["dtype_assumed"], c.assumed);
      EXPECT_EQ(PlanText(input, *plan).find("assumed") != std::string::npos,
                c.assumed);
      // One that is asked for is not.
      input.dtype = "bf16";
      EXPECT_EQ(nlohmann::json::parse(
                    PlanJson(input, *MakePlan(input)))["dtype_assumed"],
                false);
    }
  }
}

}  // namespace
}  // namespace tandem::plan
