// SPDX-License-Identifier: Apache-2.0
#include "tests/integration/adapter_file.h"

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "tests/integration/cluster.h"

namespace tandem::integration {

using nlohmann::json;

void WriteAdapter(const std::string& directory, unsigned seed, int rank) {
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
      add(name + ".lora_A.weight", rank, hidden);
      add(name + ".lora_B.weight", rows, rank);
    }
  }
  const std::string text = header.dump();
  const uint64_t length = text.size();
  std::filesystem::create_directories(directory);
  std::ofstream out(directory + "/adapter_model.safetensors", std::ios::binary);
  out.write(reinterpret_cast<const char*>(&length), sizeof length);
  out << text << data;
  std::ofstream(directory + "/adapter_config.json")
      << json({{"peft_type", "LORA"}, {"r", rank}, {"lora_alpha", 8}});
}

}  // namespace tandem::integration
