// SPDX-License-Identifier: Apache-2.0
// A checkpoint that does not fit its config is refused by the tensor's name;
// one that fits is loaded whole, with progress, in the format asked for.

#include "engine/model/model.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "engine/checkpoint/widen.h"
#include "engine/device/device_executor.h"
#include "engine/model/fingerprint.h"
#include "engine/model/forward.h"
#include "engine/model/rope.h"
#include "engine/model/weight_packer.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/checkpoint_maker.h"
#include "tests/engine/model/model_fixture.h"
#include "tests/engine/rig.h"

namespace tandem::engine {
namespace {

using kernels::DType;
using nlohmann::json;
using testing::HasSubstr;

TEST_F(ModelTest, QuantisesNothingTwice) {
  Write("llama3_scaled_bf16",
        {{"quantization_config", {{"quant_method", "awq"}, {"bits", 4}}}});
  const auto model = Load({.quantisation = DType::kInt8});
  EXPECT_EQ(model.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(model.status().message()),
              HasSubstr("quantised already; leave out --quantization int8"));
}

// Two workers that serve other lengths turn by other frequencies then.
TEST_F(ModelTest, PositionsServedAreInTheFingerprintWhereTheyMatter) {
  const struct {
    const char* name;
    int first;
    int second;
    bool matters;
  } cases[] = {{"llama_dynamic_f32", 256, 512, true},
               {"llama_dynamic_f32", 64, 128, false},  // within the first ones
               {"phi3_long_f32", 32, 64, false},
               {"phi3_long_f32", 64, 65, true},
               {"phi3_long_f32", 65, 512, false},
               {"llama_long_f32", 64, 65, true},
               {"llama_yarn_f32", 64, 512, false}};
  for (const auto& c : cases) {
    Write(c.name);
    const auto first = Load({.max_positions = c.first});
    ASSERT_TRUE(first.ok()) << first.status();
    const std::string canonical = (*first)->spec().Canonical();
    const auto second = Load({.max_positions = c.second});
    ASSERT_TRUE(second.ok()) << second.status();
    EXPECT_EQ((*second)->spec().Canonical() != canonical, c.matters)
        << c.name << ", " << c.first << " and " << c.second;
  }
}

// As transformers 5 writes Mistral 3's configs; its heads are as the file has
// them then.
TEST_F(ModelTest, TheFileDecidesWhetherADoubtfulHeadIsTied) {
  const auto head_is_embedding = [&](const char* name, bool part) {
    const bool whole = !part;
    json config = LoadCases()[name]["config"];
    config["tie_word_embeddings"] = whole;
    config["text_config"]["tie_word_embeddings"] = part;
    Write(name, config);
    const auto model = Load();
    EXPECT_TRUE(model.ok()) << model.status();
    return model.ok() && &(*model)->head() == &(*model)->embedding();
  };
  for (const bool part : {false, true}) {
    EXPECT_TRUE(head_is_embedding("gemma3_whole_f32", part));
    EXPECT_FALSE(head_is_embedding("mistral3_whole_f32", part));
  }
}

TEST_F(ModelTest, TheEmbeddingIsScaledInItsOwnType) {
  json spec = LoadCases()["gemma2_f32"];
  spec["config"]["hidden_size"] = 80;
  for (json& tensor : spec["tensors"]) {
    for (json& size : tensor[1]) {
      if (size == 64) size = 80;
    }
  }
  for (const auto& [dtype, scale] :
       {std::pair{"F32", std::sqrt(80.0)}, std::pair{"BF16", 8.9375}}) {
    spec["dtype"] = dtype;
    WriteCheckpoint(spec, dir_);
    const auto model = Load();
    ASSERT_TRUE(model.ok()) << model.status();
    EXPECT_DOUBLE_EQ((*model)->spec().embedding_scale, scale) << dtype;
  }
}

TEST_F(ModelTest, OldGpt2FilesHaveShorterNamesAndMasks) {
  json spec = LoadCases()["gpt2_f32"];
  for (json& tensor : spec["tensors"]) {
    tensor[0] = tensor[0].get<std::string>().substr(12);  // "transformer."
  }
  spec["tensors"].push_back({"h.0.attn.bias", {8, 8}});
  spec["tensors"].push_back({"h.0.attn.masked_bias", {1}});
  WriteCheckpoint(spec, dir_);
  EXPECT_TRUE(Load().ok()) << Load().status();
  spec["tensors"].push_back({"h.0.attn.sink", {8}});
  WriteCheckpoint(spec, dir_);
  EXPECT_THAT(std::string(Load().status().message()), HasSubstr("attn.sink"));
}

TEST_F(ModelTest, OldGptNeoXFilesHaveMasksAndFrequencies) {
  json spec = LoadCases()["gpt_neox_f32"];
  const std::string attention = "gpt_neox.layers.0.attention.";
  spec["tensors"].push_back({attention + "bias", {1, 1, 8, 8}});
  spec["tensors"].push_back({attention + "masked_bias", {1}});
  spec["tensors"].push_back({attention + "rotary_emb.inv_freq", {3}});
  WriteCheckpoint(spec, dir_);
  EXPECT_TRUE(Load().ok()) << Load().status();
}

TEST_F(ModelTest, TensorsForDraftsAreLeftOutWhereTheConfigNamesThem) {
  json spec = LoadCases()["glm4_moe_f32"];  // of three layers
  for (const char* name :
       {"model.layers.3.eh_proj.weight", "model.mtp_linear_proj.0.weight"}) {
    spec["tensors"].push_back({name, {8, 8}});
  }
  WriteCheckpoint(spec, dir_);
  EXPECT_THAT(std::string(Load().status().message()),
              HasSubstr("has no place in the model"));
  spec["config"]["num_nextn_predict_layers"] = 1;
  WriteCheckpoint(spec, dir_);
  ASSERT_TRUE(Load().ok()) << Load().status();
  const int64_t bytes = LeastWeightBytes(*checkpoint_, (*Load())->spec(), {});
  WriteCheckpoint(LoadCases()["glm4_moe_f32"], dir_);
  ASSERT_TRUE(Load().ok()) << Load().status();
  EXPECT_EQ(bytes, LeastWeightBytes(*checkpoint_, (*Load())->spec(), {}));
  spec["tensors"].push_back({"model.layers.4.eh_proj.weight", {8, 8}});
  WriteCheckpoint(spec, dir_);
  EXPECT_THAT(std::string(Load().status().message()),
              HasSubstr("model.layers.4.eh_proj.weight"));
}

TEST_F(ModelTest, ConfigsThatDoNotFitTheCheckpointAreRefusedByTensor) {
  const struct {
    const char* why;
    json changes;
    const char* complaint;
  } kConfigs[] = {
      {"a larger vocabulary",
       {{"vocab_size", 260}},
       "\"model.embed_tokens.weight\": shape [259, 64], but config.json asks "
       "for [260, 64]"},
      {"another width", {{"hidden_size", 128}}, "embed_tokens.weight"},
      {"more layers",
       {{"num_hidden_layers", 4}},
       "\"model.layers.3.input_layernorm.weight\" is missing"},
      {"a thousand layers",
       {{"num_hidden_layers", 1000}},
       "\"model.layers.3.input_layernorm.weight\" is missing"},
      {"fewer layers",
       {{"num_hidden_layers", 2}},
       "\"model.layers.2.input_layernorm.weight\" has no place"},
      {"fewer KV heads",
       {{"num_key_value_heads", 2}},
       "k_proj.weight\": shape [64, 64], but config.json asks for [32, 64]"},
      {"wider heads", {{"head_dim", 32}}, "q_proj.weight\": shape [64, 64]"},
      {"a wider MLP",
       {{"intermediate_size", 192}},
       "gate_proj.weight\": shape [176, 64]"},
      {"biases that are not there",
       {{"attention_bias", true}},
       "q_proj.bias\" is missing"},
      {"MLP biases that are not there",
       {{"mlp_bias", true}},
       "gate_proj.bias\" is missing"}};
  for (const auto& [why, changes, complaint] : kConfigs) {
    Write("llama2_mha_f32", changes);
    const absl::Status status = Load().status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << why;
    EXPECT_THAT(
        std::string(status.message()),
        testing::AllOf(testing::StartsWith(dir_.path()),
                       HasSubstr("model.safetensors"), HasSubstr(complaint)))
        << why;
  }
}

TEST_F(ModelTest, TensorsThatTheConfigDisownsAreRefused) {
  Write("llama_biases_f32", {{"mlp_bias", false}});
  EXPECT_THAT(std::string(Load().status().message()),
              HasSubstr("has no place in the model"));
}

TEST_F(ModelTest, ATiedHeadMayBeThereTwiceButNotAnother) {
  Write("llama2_mha_f32", {{"tie_word_embeddings", true}});
  EXPECT_THAT(std::string(Load().status().message()),
              HasSubstr("lm_head.weight differs from the embedding, but "
                        "tie_word_embeddings is true"));
  ASSERT_TRUE(checkpoint_.ok());
  const TensorInfo head = *checkpoint_->Find("lm_head.weight");
  const TensorInfo tokens = *checkpoint_->Find("model.embed_tokens.weight");
  std::ifstream in(checkpoint_->path(head), std::ios::binary);
  std::string file{std::istreambuf_iterator<char>(in), {}};
  const uint64_t bytes = head.end - head.begin;
  file.replace(head.begin, bytes, file.substr(tokens.begin, bytes));
  dir_.Write("model.safetensors", file);
  EXPECT_TRUE(Load().ok());
  // The same bytes are others in another type or shape.
  const size_t said = file.find("lm_head.weight");
  for (const auto& [from, to] :
       {std::pair{"F32", "I32"}, std::pair{"[259,64]", "[64,259]"}}) {
    std::string other = file;
    other.replace(other.find(from, said), strlen(from), to);
    dir_.Write("model.safetensors", other);
    EXPECT_THAT(std::string(Load().status().message()), HasSubstr("differs"))
        << to;
  }
  file[head.end - 1] ^= 1;
  dir_.Write("model.safetensors", file);
  EXPECT_THAT(std::string(Load().status().message()), HasSubstr("differs"));
}

TEST_F(ModelTest, ScalesOfAKvCacheAreLeftOut) {
  const struct {
    const char* name;
    bool said;  // by the config
    bool placed;
  } cases[] = {{"k_scale", true, true},
               {"v_scale", true, true},
               {"kv_scale", true, true},
               {"k_proj.k_scale", true, true},
               {"v_proj.v_scale", true, true},
               {"k_proj.output_scale", true, true},
               {"v_proj.output_scale", true, true},
               {"o_proj.output_scale", true, false},
               {"k_scales", true, false},
               {"k_scale", false, false}};
  for (const auto& c : cases) {
    json spec = LoadCases()["qwen3_f32"];
    json& config = spec["config"]["quantization_config"];
    config = {{"quant_method", "fp8"}};
    if (c.said) config["kv_cache_scheme"] = {{"num_bits", 8}};
    const std::string name = std::string("model.layers.0.self_attn.") + c.name;
    spec["tensors"].push_back({name, {1}});
    WriteCheckpoint(spec, dir_);
    const absl::Status status = Load().status();
    EXPECT_EQ(status.ok(), c.placed) << name << ": " << status;
    if (c.placed) continue;
    EXPECT_THAT(std::string(status.message()),
                HasSubstr(name + "\" has no place in the model"));
  }
}

// Published files have them, though nothing takes them.
TEST_F(ModelTest, WhatWouldMakeSharedKvIsLeftOut) {
  const struct {
    const char* name;
    bool placed;
  } cases[] = {{"model.layers.4.self_attn.k_proj.weight", true},
               {"model.layers.6.self_attn.v_proj.weight", true},
               {"model.layers.5.self_attn.k_norm.weight", true},
               {"model.layers.7.self_attn.k_proj.weight", false},
               {"model.layers.4.self_attn.kv_proj.weight", false},
               {"model.layers.4.mlp.k_proj.weight", false}};
  for (const auto& c : cases) {
    json spec = LoadCases()["gemma4_few_f32"];
    spec["tensors"].push_back({c.name, {32, 64}});
    WriteCheckpoint(spec, dir_);
    const absl::Status status = Load().status();
    EXPECT_EQ(status.ok(), c.placed) << c.name << ": " << status;
  }
}

TEST_F(ModelTest, WhatLayersAreToldIsScaledInItsOwnType) {
  json spec = LoadCases()["gemma4_few_f32"];
  for (const auto& [dtype, scale] :
       {std::pair{"F32", std::sqrt(12.0f)}, std::pair{"BF16", 3.46875f}}) {
    spec["dtype"] = dtype;
    WriteCheckpoint(spec, dir_);
    const auto model = Load();
    ASSERT_TRUE(model.ok()) << model.status();
    EXPECT_EQ((*model)->told().scale, scale) << dtype;
  }
}

TEST_F(ModelTest, EmbeddingsAreInt8BesideIntegerProducts) {
  Write("llama2_mha_f32");
  for (const auto& [quantisation, embedding] :
       {std::pair{DType::kFp8, DType::kF32},
        {DType::kInt8, DType::kInt8},
        {DType::kInt4, DType::kInt8},
        {DType::kW8A8, DType::kInt8}}) {
    const auto model = Load({.quantisation = quantisation});
    ASSERT_TRUE(model.ok()) << model.status();
    EXPECT_EQ((*model)->embedding().dtype(), embedding) << Name(quantisation);
    EXPECT_EQ((*model)->head().dtype(), embedding) << Name(quantisation);
    if (quantisation == DType::kFp8) continue;  // numbers alone, on a CPU
    EXPECT_EQ((*model)->layers()[0].qkv->dtype(), quantisation);
    EXPECT_EQ((*model)->layers()[0].gate_up->dtype(), quantisation);
    EXPECT_EQ((*model)->layers()[0].down->dtype(), quantisation);
    EXPECT_THAT((*model)->dequantised(), testing::IsEmpty());
  }
}

// Its sums would outgrow 32 bits.
TEST_F(ModelTest, RowsTooLongForW8A8BecomeInt8) {
  constexpr int kCols = kernels::kMaxW8A8Inputs + 32;
  dir_.Write(
      "model.safetensors",
      SafetensorsFile(
          {{"p.weight", {"BF16", {2, kCols}, Zeros(size_t{2} * 2 * kCols)}}}));
  const auto file = Checkpoint::Open(dir_.path());
  ASSERT_TRUE(file.ok()) << file.status();
  const ModelSpec spec;
  const LoadOptions options{.quantisation = DType::kW8A8};
  WeightPacker packer(spec, *file, options, backend_.get(),
                      [](uint64_t, uint64_t) {});
  std::unique_ptr<kernels::Matrix> matrix;
  const absl::Status packed =
      packer.Pack({{"p.weight", 2}}, kCols, MatrixUse::kProduct, matrix);
  ASSERT_TRUE(packed.ok()) << packed;
  EXPECT_EQ(matrix->dtype(), DType::kInt8);
}

// The table of what layers are told is much of a small model.
TEST_F(ModelTest, WhatLayersAreToldOfTokensIsNotQuantised) {
  Write("gemma4_few_f32");
  const auto plain = Load();
  ASSERT_TRUE(plain.ok()) << plain.status();
  const auto coded = Load({.quantisation = DType::kInt4});
  ASSERT_TRUE(coded.ok()) << coded.status();
  const Model::Told& told = (*coded)->told();
  EXPECT_EQ(told.table->dtype(), DType::kF32);
  EXPECT_EQ(told.projection->dtype(), DType::kInt4);
  EXPECT_EQ((*coded)->layers()[0].told.gate->dtype(), DType::kInt4);
  EXPECT_EQ((*coded)->layers()[6].gate_up->rows(), 4 * 72);
  // Numbers in four bits each, but for the table's.
  const ModelSpec& spec = (*plain)->spec();
  const int64_t table = int64_t{4} * 136 * 7 * 12;
  const int64_t whole = LeastWeightBytes(*checkpoint_, spec, {});
  EXPECT_EQ(
      LeastWeightBytes(*checkpoint_, spec,
                       {.weight_dtype = {}, .quantisation = DType::kInt4}),
      table + (whole - table) / 8);
}

TEST_F(ModelTest, AHeadThatIsNeitherTiedNorThereIsMissed) {
  Write("smollm_tied_bf16", {{"tie_word_embeddings", false}});
  EXPECT_THAT(std::string(Load().status().message()),
              HasSubstr("\"lm_head.weight\" is missing"));
}

TEST_F(ModelTest, ProgressAscendsToAllBytes) {
  Write("llama_sharded_f32");
  ASSERT_TRUE(Load().ok());
  EXPECT_TRUE(std::is_sorted(progress_.begin(), progress_.end()));
  EXPECT_GE(progress_.size(), 12);
  EXPECT_EQ(progress_.back(), total_);
  EXPECT_EQ(total_, checkpoint_->total_bytes());
}

TEST_F(ModelTest, WeightsKeepTheirFormatUnlessAskedOtherwise) {
  const struct {
    const char* name;
    std::optional<DType> asked;
    const char* format;
  } kFormats[] = {{"llama2_mha_f32", {}, "f32"},
                  {"smollm_tied_bf16", {}, "bf16"},
                  {"llama_f16", {}, "f32"},
                  {"llama2_mha_f32", DType::kBF16, "bf16"},
                  {"smollm_tied_bf16", DType::kF32, "f32"}};
  for (const auto& [name, asked, format] : kFormats) {
    Write(name);
    const auto model = Load({.weight_dtype = asked});
    ASSERT_TRUE(model.ok()) << model.status();
    EXPECT_EQ((*model)->weight_format(), format) << name;
    EXPECT_EQ((*model)->layers()[0].qkv->dtype(),
              std::string_view(format) == "f32" ? DType::kF32 : DType::kBF16);
    EXPECT_EQ(Numerics(*backend_, **model, DType::kBF16),
              backend_->numerics() + " weights=" + format + " kv=bf16");
  }
}

// What turns has to go through them as it is.
TEST_F(ModelTest, LatentAttentionsOwnMatricesAreNotQuantised) {
  Write("deepseek_v3_f32");
  const auto model = Load({.quantisation = DType::kInt8});
  ASSERT_TRUE(model.ok()) << model.status();
  const Model::Layer& layer = (*model)->layers()[0];
  EXPECT_EQ(layer.qkv, nullptr);
  EXPECT_EQ(layer.latent.kv->dtype(), DType::kF32);
  EXPECT_EQ(layer.latent.query_heads->dtype(), DType::kF32);
  EXPECT_EQ(layer.latent.value_heads->dtype(), DType::kF32);
  EXPECT_EQ(layer.latent.query_down->dtype(), DType::kInt8);
  EXPECT_EQ(layer.latent.query->dtype(), DType::kInt8);
  EXPECT_EQ(layer.latent.kv_down->dtype(), DType::kInt8);
  EXPECT_EQ(layer.output->dtype(), DType::kInt8);
  EXPECT_EQ((*model)->weight_format(), "f32+int8");
}

// Heads' queries before they meet keys, and their values, pass through what is
// made for queries that met them and for sums, and may be wider.
TEST_F(ModelTest, WorkspaceHasRoomForLatentAttentionsHeads) {
  Write("deepseek_v2_few_f32");
  const auto spec = LoadModelSpec(dir_.path());
  ASSERT_TRUE(spec.ok()) << spec.status();
  ASSERT_GT(spec->heads * spec->output_dim(), spec->qkv_rows(0));
  ASSERT_GT(spec->query_dim(), spec->head_dim);
  const int rows = 64;
  const auto w = Workspace::Create(*spec, rows, 1, nullptr, backend_.get());
  ASSERT_TRUE(w.ok()) << w.status();
  const auto floats = [](const void* begin, const void* end) {
    return static_cast<const float*>(end) - static_cast<const float*>(begin);
  };
  EXPECT_GE(floats(w->qkv, w->latent), rows * spec->heads * spec->output_dim());
  EXPECT_GE(floats(w->attention, w->delta),
            rows * spec->heads * spec->query_dim());
}

TEST_F(ModelTest, PositionsAreLimitedByTheModel) {
  Write("llama2_mha_f32");
  EXPECT_EQ((*Load())->max_positions(), 512);
  const auto fewer = Load({.max_positions = 100});
  EXPECT_EQ((*fewer)->max_positions(), 100);
  // So is what steps need of the device.
  EXPECT_EQ(DeviceExecutor::Limits({}, **fewer).positions, 100);
  EXPECT_THAT(std::string(Load({.max_positions = 513}).status().message()),
              HasSubstr("max_model_len 513 must be from 1 to 512"));
}

// Weights kept as f32 that came from bf16 give the logits of bf16 ones: the
// products widen, they do not round.
TEST_F(ModelTest, WideningWeightsChangesNoBit) {
  const json spec = LoadCases()["smollm_tied_bf16"];
  WriteCheckpoint(spec, dir_);
  std::vector<std::vector<float>> logits;
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    RigOptions options;
    options.load.weight_dtype = dtype;
    Rig rig(dir_.path(), backend_.get(), options);
    TestSequence sequence = rig.NewSequence(PromptIds(spec, 50), 50);
    TestSequence* one = &sequence;
    logits.push_back(rig.Advance({&one, 1}, 50).logits[0]);
  }
  EXPECT_EQ(logits[0], logits[1]);
}

// ---- Before anything is loaded.

TEST_F(ModelTest, WeightsTakeAtLeastWhatTheirNumbersDo) {
  Write("llama2_mha_f32");
  const auto spec = LoadModelSpec(dir_.path());
  const auto file = Checkpoint::Open(dir_.path());
  ASSERT_TRUE(spec.ok() && file.ok());
  const auto whole = static_cast<int64_t>(file->total_bytes());
  EXPECT_EQ(LeastWeightBytes(*file, *spec, {}), whole);
  EXPECT_EQ(LeastWeightBytes(*file, *spec, {.weight_dtype = DType::kBF16}),
            whole / 2);
  for (const DType bytes : {DType::kInt8, DType::kW8A8}) {
    EXPECT_EQ(LeastWeightBytes(*file, *spec,
                               {.weight_dtype = {}, .quantisation = bytes}),
              whole / 4);
  }
  EXPECT_EQ(
      LeastWeightBytes(*file, *spec,
                       {.weight_dtype = {}, .quantisation = DType::kInt4}),
      whole / 8);
}

// ---- The fingerprint.

std::string Hash(const std::string& directory, int threads = 1) {
  const auto checkpoint = Checkpoint::Open(directory);
  EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
  return HashWeights(*checkpoint, threads, [](uint64_t, uint64_t) {});
}

TEST(Fingerprint, WeightsHashTheSameInOneFileOrManyAndByAnyThreads) {
  json spec = LoadCases()["llama_sharded_f32"];
  TempDir sharded;
  WriteCheckpoint(spec, sharded);
  spec["shards"] = 1;
  TempDir single;
  WriteCheckpoint(spec, single);
  EXPECT_EQ(Hash(sharded.path()), Hash(single.path()));
  EXPECT_EQ(Hash(sharded.path(), 3), Hash(single.path()));
  EXPECT_EQ(Hash(single.path()).size(), 64);
}

TEST(Fingerprint, AnyChangedByteNameOrShapeChangesTheWeightsHash) {
  const auto file = [](const std::string& header, const std::string& data) {
    const uint64_t length = header.size();
    return std::string(reinterpret_cast<const char*>(&length), 8) + header +
           data;
  };
  const std::string base =
      R"({"a":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]}})";
  std::vector<std::string> hashes;
  for (const auto& [header, data] :
       std::vector<std::pair<std::string, std::string>>{
           {base, "12345678"},
           {base, "12345679"},
           {base, "02345678"},
           {R"({"b":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]}})",
            "12345678"},
           {R"({"a":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]}})",
            "12345678"},
           {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})",
            "12345678"},
           {R"({"a":{"dtype":"I32","shape":[2,1],"data_offsets":[0,8]}})",
            "12345678"}}) {
    TempDir dir;
    dir.Write("model.safetensors", file(header, data));
    hashes.push_back(Hash(dir.path()));
  }
  std::sort(hashes.begin(), hashes.end());
  EXPECT_EQ(std::unique(hashes.begin(), hashes.end()), hashes.end());
}

TEST(Fingerprint, LargeTensorsAreHashedPieceByPiece) {
  // 40 MiB: three pieces, the last one short.
  const uint64_t size = 40 << 20;
  const std::string header =
      absl::StrCat(R"({"a":{"dtype":"U8","shape":[)", size,
                   R"(],"data_offsets":[0,)", size, "]}}");
  const uint64_t length = header.size();
  std::string content(reinterpret_cast<const char*>(&length), 8);
  content += header;
  for (uint64_t i = 0; i < size; ++i) {
    content.push_back(static_cast<char>(i * 2654435761u >> 24));
  }
  TempDir dir;
  dir.Write("model.safetensors", content);
  const std::string whole = Hash(dir.path(), 1);
  EXPECT_EQ(Hash(dir.path(), 2), whole);
  for (const uint64_t at : {uint64_t{17} << 20, size - 1}) {
    std::string changed = content;
    changed[8 + length + at] ^= 1;
    dir.Write("model.safetensors", changed);
    EXPECT_NE(Hash(dir.path(), 2), whole) << at;
  }
}

TEST(Fingerprint, TokenizerFilesAllCount) {
  TempDir dir;
  std::vector<std::string> hashes = {*HashTokenizer(dir.path())};
  std::filesystem::create_directory(dir.path() + "/additional_chat_templates");
  for (const char* name :
       {"tokenizer.json", "tokenizer_config.json", "added_tokens.json",
        "chat_template.jinja", "chat_template.json",
        "additional_chat_templates/tool_use.jinja"}) {
    dir.Write(name, "{}");
    hashes.push_back(*HashTokenizer(dir.path()));
    dir.Write(name, "{ }");
    hashes.push_back(*HashTokenizer(dir.path()));
  }
  dir.Write("special_tokens_map.json", "{}");
  EXPECT_EQ(*HashTokenizer(dir.path()), hashes.back());
  std::sort(hashes.begin(), hashes.end());
  EXPECT_EQ(std::unique(hashes.begin(), hashes.end()), hashes.end());
}

TEST(Fingerprint, HasFourNamedParts) {
  TempDir dir;
  WriteCheckpoint(LoadCases()["llama_f16"], dir);
  const auto backend = NewCpu(1);
  Rig rig(dir.path(), backend.get());
  const auto checkpoint = Checkpoint::Open(dir.path());
  ASSERT_TRUE(checkpoint.ok());
  const auto parts = Fingerprint(dir.path(), *checkpoint, rig.model(), *backend,
                                 DType::kF32, 2, [](uint64_t, uint64_t) {});
  ASSERT_TRUE(parts.ok()) << parts.status();
  EXPECT_THAT(*parts,
              testing::UnorderedElementsAre(
                  testing::Pair("weights", Hash(dir.path())),
                  testing::Pair("config", rig.spec().Canonical()),
                  testing::Pair("tokenizer", *HashTokenizer(dir.path())),
                  testing::Pair("numerics", "cpu-3 weights=f32 kv=f32")));
}

// ---- Rope and widening, by their definitions.

TEST(Rope, TablesTurnByPositionTimesFrequency) {
  const RopeTables tables = MakeRopeTables({.theta = 10000}, 8, 3);
  ASSERT_EQ(tables.cos.size(), 12);
  const double frequencies[] = {1, 0.1, 0.01, 0.001};
  for (int position = 0; position < 3; ++position) {
    for (int i = 0; i < 4; ++i) {
      EXPECT_FLOAT_EQ(tables.cos[position * 4 + i],
                      std::cos(position * frequencies[i]));
      EXPECT_FLOAT_EQ(tables.sin[position * 4 + i],
                      std::sin(position * frequencies[i]));
    }
  }
}

TEST(Rope, QueriesGrowWithTheirPosition) {
  EXPECT_THAT(QueryScales({.original_max_positions = 2, .query_beta = 0.5}, 5),
              testing::ElementsAre(
                  1, 1, 1 + 0.5f * std::log(2.0f), 1 + 0.5f * std::log(2.0f),
                  testing::FloatEq(1 + 0.5f * std::log(3.0f))));
  EXPECT_THAT(QueryScales({.original_max_positions = 2}, 5),
              testing::IsEmpty());
}

TEST(Rope, NeighboursThatTurnTogetherStandHalfAHeadApart) {
  EXPECT_THAT(RotaryOrder({.theta = 10000, .interleaved = true}, 8, 2),
              testing::ElementsAre(0, 2, 4, 6, 1, 3, 5, 7,  //
                                   8, 10, 12, 14, 9, 11, 13, 15));
  EXPECT_THAT(
      RotaryOrder({.theta = 10000, .rotary_dim = 4, .interleaved = true}, 8, 1),
      testing::ElementsAre(0, 2, 4, 5, 1, 3, 6, 7));
}

TEST(Rope, TheLastDimensionsMayTurn) {
  RopeSpec rope{.theta = 10000, .rotary_dim = 4, .trailing = true};
  EXPECT_THAT(RotaryOrder(rope, 8, 2),
              testing::ElementsAre(4, 5, 0, 1, 6, 7, 2, 3,  //
                                   12, 13, 8, 9, 14, 15, 10, 11));
  rope.interleaved = true;
  EXPECT_THAT(RotaryOrder(rope, 8, 1),
              testing::ElementsAre(4, 6, 0, 1, 5, 7, 2, 3));
}

TEST(Rope, WhatDoesNotTurnStandsBehindWhatDoes) {
  const RopeSpec rope{.theta = 10000, .rotary_dim = 4, .attention_factor = 2};
  EXPECT_THAT(RotaryOrder(rope, 8, 2),
              testing::ElementsAre(0, 1, 4, 5, 2, 3, 6, 7,  //
                                   8, 9, 12, 13, 10, 11, 14, 15));
  EXPECT_THAT(RotaryOrder({.theta = 10000}, 8, 2), testing::IsEmpty());
  const RopeTables tables = MakeRopeTables(rope, 8, 2);
  EXPECT_THAT(tables.cos,
              testing::ElementsAre(2, 2,  //
                                   testing::FloatEq(2 * std::cos(1.0f)),
                                   testing::FloatEq(2 * std::cos(0.01f))));
  EXPECT_THAT(tables.sin,
              testing::ElementsAre(0, 0,  //
                                   testing::FloatEq(2 * std::sin(1.0f)),
                                   testing::FloatEq(2 * std::sin(0.01f))));
}

// Four heads of two that share two of keys: [2, 2 + 2, 2].
TEST(Rope, FusedRowsOfGroupsComeToLieQueriesFirst) {
  EXPECT_THAT(FusedOrder({.theta = 10000}, 2, 4, 2, /*in_groups=*/true),
              testing::ElementsAre(0, 1, 2, 3, 8, 9, 10, 11,  //
                                   4, 5, 12, 13, 6, 7, 14, 15));
  EXPECT_THAT(FusedOrder({.theta = 10000, .interleaved = true}, 4, 1, 1,
                         /*in_groups=*/true),
              testing::ElementsAre(0, 2, 1, 3, 4, 6, 5, 7, 8, 9, 10, 11));
  EXPECT_THAT(FusedOrder({.theta = 10000}, 2, 4, 2, /*in_groups=*/false),
              testing::IsEmpty());
}

TEST(Rope, Llama3KeepsFastStretchesSlowAndBlendsBetween) {
  const RopeSpec plain{.theta = 500000};
  RopeSpec scaled = plain;
  scaled.kind = RopeSpec::Kind::kLlama3;
  scaled.factor = 8;
  scaled.low_freq_factor = 1;
  scaled.high_freq_factor = 4;
  scaled.original_max_positions = 8192;
  const std::vector<double> before = RopeFrequencies(plain, 128);
  const std::vector<double> after = RopeFrequencies(scaled, 128);
  int kept = 0, stretched = 0, blended = 0;
  for (int i = 0; i < 64; ++i) {
    const double turns = 8192 * before[i] / (2 * M_PI);  // in the old context
    if (turns > 4) {
      EXPECT_EQ(after[i], before[i]) << i;
      ++kept;
    } else if (turns < 1) {
      EXPECT_EQ(after[i], before[i] / 8) << i;
      ++stretched;
    } else {
      EXPECT_NEAR(after[i] / before[i], ((turns - 1) * 7 / 8 + 3.0 / 8) / 3,
                  1e-12)
          << i;
      ++blended;
    }
  }
  EXPECT_GT(kept, 20);
  EXPECT_GT(stretched, 20);
  EXPECT_GT(blended, 3);
}

TEST(Widen, EveryHalfPrecisionNumberIsItsValue) {
  for (int bits = 0; bits < 1 << 16; ++bits) {
    const int exponent = bits >> 10 & 31;
    const int mantissa = bits & 1023;
    const double sign = bits >> 15 ? -1 : 1;
    const float value = WidenF16(static_cast<uint16_t>(bits));
    if (exponent == 31) {
      EXPECT_EQ(std::isnan(value), mantissa != 0);
      EXPECT_EQ(std::isinf(value), mantissa == 0);
    } else {
      ASSERT_EQ(value, sign * (exponent == 0 ? std::ldexp(mantissa, -24)
                                             : std::ldexp(1024 + mantissa,
                                                          exponent - 25)))
          << bits;
    }
    EXPECT_EQ(std::signbit(value), bits >> 15 != 0);
  }
}

TEST(Widen, BrainFloatsAreTheUpperHalf) {
  EXPECT_EQ(WidenBF16(0x3F80), 1.0f);
  EXPECT_EQ(WidenBF16(0xC049), -3.140625f);
}

}  // namespace
}  // namespace tandem::engine
