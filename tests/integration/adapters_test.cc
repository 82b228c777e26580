// SPDX-License-Identifier: Apache-2.0
// Adapters through a whole cluster: mixed with the model as it is, by both
// ways, with a decode worker killed among them; and who may share prefixes.

#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "nlohmann/json.hpp"
#include "tests/integration/cluster.h"
#include "tests/integration/load.h"

namespace tandem::integration {
namespace {

using nlohmann::json;
using std::chrono::seconds;
using testing::ElementsAre;
using testing::HasSubstr;

constexpr int kRank = 4;

// An adapter of the embedded model's attention and gates, drawn from `seed`.
void WriteAdapter(const std::string& directory, unsigned seed) {
  std::ifstream file(EmbeddedModel() + "/config.json");
  const json config = json::parse(file);
  const int hidden = config["hidden_size"];
  const int wide = config["intermediate_size"];
  const int head_dim = config["head_dim"];
  const int query = config["num_attention_heads"].get<int>() * head_dim;
  const int key = config["num_key_value_heads"].get<int>() * head_dim;
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, 0.15f);
  std::string data;
  json header;
  const auto add = [&](const std::string& name, int rows, int cols) {
    const size_t begin = data.size();
    for (int i = 0; i < rows * cols; ++i) {
      const float value = normal(random);
      data.append(reinterpret_cast<const char*>(&value), sizeof value);
    }
    header[name] = {{"dtype", "F32"},
                    {"shape", {rows, cols}},
                    {"data_offsets", {begin, data.size()}}};
  };
  for (int layer = 0; layer < config["num_hidden_layers"]; ++layer) {
    for (const auto& [module, rows] :
         {std::pair<std::string, int>{"self_attn.q_proj", query},
          {"self_attn.k_proj", key},
          {"self_attn.v_proj", key},
          {"mlp.gate_proj", wide}}) {
      const std::string name =
          absl::StrCat("base_model.model.model.layers.", layer, ".", module);
      add(name + ".lora_A.weight", kRank, hidden);
      add(name + ".lora_B.weight", rows, kRank);
    }
  }
  const std::string text = header.dump();
  const uint64_t length = text.size();
  std::filesystem::create_directories(directory);
  std::ofstream out(directory + "/adapter_model.safetensors", std::ios::binary);
  out.write(reinterpret_cast<const char*>(&length), sizeof length);
  out << text << data;
  std::ofstream(directory + "/adapter_config.json")
      << json({{"peft_type", "LORA"}, {"r", kRank}, {"lora_alpha", 8}});
}

class LoraTest : public testing::Test {
 protected:
  LoraTest() {
    char pattern[] = "/tmp/tandem-lora.XXXXXX";
    directory_ = mkdtemp(pattern);
    WriteAdapter(directory_ + "/verse", 1);
    WriteAdapter(directory_ + "/prose", 2);
  }
  ~LoraTest() override { std::filesystem::remove_all(directory_); }

  ClusterOptions Options() const {
    return {.prefill = 1,
            .decode = 2,
            .worker_arguments = {"--max-num-batched-tokens", "32",
                                 "--max-lora-rank", "8", "--lora-modules",
                                 absl::StrCat("verse=", directory_, "/verse"),
                                 "--lora-modules",
                                 absl::StrCat("prose=", directory_, "/prose")}};
  }

  std::string directory_;
};

v1::GenerateRequest With(const std::string& adapter, const std::string& prompt,
                         int max_tokens) {
  v1::GenerateRequest request = TextRequest(prompt, max_tokens);
  request.mutable_stopping()->set_ignore_eos(true);
  request.set_adapter(adapter);
  return request;
}

TEST_F(LoraTest, AdaptersAreMixedAndOutliveADecodeWorker) {
  Cluster cluster(Options());
  ASSERT_TRUE(cluster.Start().ok());
  std::vector<v1::GenerateRequest> requests;
  int i = 0;
  for (const std::string& prompt : SomePrompts(4, 7)) {
    for (const char* adapter : {"", "verse", "prose"}) {
      requests.push_back(With(adapter, prompt, 40));
      requests.back().set_placement(i++ % 2 == 0 ? v1::PLACEMENT_SPLIT
                                                 : v1::PLACEMENT_LOCAL);
    }
  }
  const std::vector<Expectation> expected = RunAlone(&cluster, requests);
  ASSERT_EQ(expected.size(), requests.size());
  for (size_t p = 0; p < expected.size(); p += 3) {
    EXPECT_NE(expected[p].token_ids, expected[p + 1].token_ids);
    EXPECT_NE(expected[p].token_ids, expected[p + 2].token_ids);
    EXPECT_NE(expected[p + 1].token_ids, expected[p + 2].token_ids);
  }
  Load load(&cluster, &expected, 6);
  load.WaitForEveryStream();
  cluster.Kill("decode-0");
  load.WaitForEveryStream();
  ASSERT_TRUE(cluster.Restart("decode-0").ok());
  load.WaitForEveryStream();
  EXPECT_TRUE(load.Finish());
  EXPECT_EQ(load.faults(), "");
  EXPECT_GT(load.retries(), 0);
  EXPECT_EQ(cluster.WhatIsLeft(), "");
}

TEST_F(LoraTest, PrefixesStayWithTheirAdapter) {
  ClusterOptions options = Options();
  options.decode = 1;
  Cluster cluster(options);
  ASSERT_TRUE(cluster.Start().ok());
  const std::string prompt = SomePrompts(1, 9)[0];
  std::string text;
  while (text.size() < 400) absl::StrAppend(&text, prompt, " ");
  const auto cached = [&](const std::string& adapter) {
    const Outcome outcome = cluster.Generate(With(adapter, text, 4));
    EXPECT_TRUE(outcome.status.ok()) << outcome.status;
    return outcome.done.usage().cached_tokens();
  };
  for (const char* adapter : {"", "verse", "prose"}) {
    EXPECT_EQ(cached(adapter), 0) << adapter;
  }
  for (const char* adapter : {"", "verse", "prose"}) {
    EXPECT_GE(cached(adapter), 16) << adapter;
  }
  EXPECT_EQ(cluster.WhatIsLeft(), "");
}

TEST_F(LoraTest, NamesAreModelsToo) {
  ClusterOptions options = Options();
  options.decode = 1;
  Cluster cluster(options);
  ASSERT_TRUE(cluster.Start().ok());
  const auto client = cluster.Client();
  v1::ListModelsResponse models;
  for (int tries = 0; tries < 100 && models.models_size() < 3; ++tries) {
    grpc::ClientContext context;
    ASSERT_TRUE(client->ListModels(&context, {}, &models).ok());
  }
  std::vector<std::string> names;
  for (const auto& model : models.models()) names.push_back(model.model());
  EXPECT_THAT(names, ElementsAre("tales", "prose", "verse"));
  EXPECT_EQ(models.models(1).parent(), "tales");

  v1::GenerateRequest by_field = With("verse", "One day", 12);
  v1::GenerateRequest by_model = With("", "One day", 12);
  by_model.set_model("verse");
  const Outcome one = cluster.Generate(by_field);
  const Outcome two = cluster.Generate(by_model);
  EXPECT_TRUE(one.status.ok()) << one.status;
  EXPECT_EQ(one.token_ids, two.token_ids);
  EXPECT_NE(one.token_ids, cluster.Generate(With("", "One day", 12)).token_ids);

  const Outcome unknown = cluster.Generate(With("rhyme", "One day", 12));
  EXPECT_EQ(unknown.status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(unknown.status.message()),
              HasSubstr("adapter = rhyme: there are prose, verse"));
  by_field.set_model("prose");
  EXPECT_EQ(cluster.Generate(by_field).status.code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(cluster.WhatIsLeft(), "");
}

}  // namespace
}  // namespace tandem::integration
