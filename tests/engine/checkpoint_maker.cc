// SPDX-License-Identifier: Apache-2.0
#include "tests/engine/checkpoint_maker.h"

#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace tandem::engine {
namespace {

using nlohmann::json;

struct Shape {
  std::string name;
  int rows;  // 0: a vector
  int cols;
};

uint64_t Fnv1a(std::string_view text) {
  uint64_t value = 0xCBF29CE484222325;
  for (const char c : text) {
    value = (value ^ static_cast<uint8_t>(c)) * 0x100000001B3;
  }
  return value;
}

class SplitMix {
 public:
  explicit SplitMix(uint64_t state) : state_(state) {}
  uint64_t Next() {
    uint64_t z = state_ += 0x9E3779B97F4A7C15;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
    z = (z ^ z >> 27) * 0x94D049BB133111EB;
    return z ^ z >> 31;
  }

 private:
  uint64_t state_;
};

int Int(const json& config, const char* key) {
  return config.at(key).get<int>();
}

std::vector<Shape> Shapes(const json& spec) {
  if (spec.contains("tensors")) {
    std::vector<Shape> shapes;
    for (const json& tensor : spec["tensors"]) {
      const bool vector = tensor[1].size() == 1;
      shapes.push_back({tensor[0], vector ? 0 : tensor[1][0].get<int>(),
                        tensor[1].back().get<int>()});
    }
    return shapes;
  }
  const json& config = spec.at("config");
  const int hidden = Int(config, "hidden_size");
  const int wide = Int(config, "intermediate_size");
  const int heads = Int(config, "num_attention_heads");
  const int head_dim = config.value("head_dim", hidden / heads);
  const int query = heads * head_dim;
  const int key = Int(config, "num_key_value_heads") * head_dim;
  const int vocab = Int(config, "vocab_size");
  const bool attention_bias = config.value("attention_bias", false);
  const bool mlp_bias = config.value("mlp_bias", false);
  std::vector<Shape> shapes = {{"model.embed_tokens.weight", vocab, hidden}};
  for (int layer = 0; layer < Int(config, "num_hidden_layers"); ++layer) {
    const std::string at = absl::StrCat("model.layers.", layer, ".");
    shapes.push_back({at + "input_layernorm.weight", 0, hidden});
    shapes.push_back({at + "post_attention_layernorm.weight", 0, hidden});
    const auto add = [&](const char* name, int rows, int cols, bool bias) {
      shapes.push_back({absl::StrCat(at, name, ".weight"), rows, cols});
      if (bias) shapes.push_back({absl::StrCat(at, name, ".bias"), 0, rows});
    };
    add("self_attn.q_proj", query, hidden, attention_bias);
    add("self_attn.k_proj", key, hidden, attention_bias);
    add("self_attn.v_proj", key, hidden, attention_bias);
    add("self_attn.o_proj", hidden, query, attention_bias);
    add("mlp.gate_proj", wide, hidden, mlp_bias);
    add("mlp.up_proj", wide, hidden, mlp_bias);
    add("mlp.down_proj", hidden, wide, mlp_bias);
  }
  shapes.push_back({"model.norm.weight", 0, hidden});
  if (!config.at("tie_word_embeddings").get<bool>()) {
    shapes.push_back({"lm_head.weight", vocab, hidden});
  }
  return shapes;
}

// Value of one random draw; exact in the case's type.
float Value(uint64_t z, const std::string& name, const json& spec, bool wide) {
  const double fraction = std::ldexp(static_cast<double>(z >> 40), -23) - 1;
  if (absl::EndsWith(name, "norm.weight")) {
    const double coarse = (static_cast<double>(z >> 57) - 64) / 128;
    return static_cast<float>(1 + (wide ? fraction / 2 : coarse));
  }
  const double coarse = (static_cast<double>(z >> 56) - 128) / 128;
  const int exponent = absl::EndsWith(name, ".bias") ? -3
                       : absl::StrContains(name, "embed_tokens") ||
                               absl::StrContains(name, "lm_head")
                           ? Int(spec, "embedding_exponent")
                           : Int(spec, "matrix_exponent");
  return static_cast<float>(std::ldexp(wide ? fraction : coarse, exponent));
}

// REQUIRES: exact in f16, and normal or zero.
uint16_t ExactF16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = bits >> 16 & 0x8000;
  if (value == 0) return static_cast<uint16_t>(sign);
  const uint32_t exponent = (bits >> 23 & 0xff) - 127 + 15;
  return static_cast<uint16_t>(sign | exponent << 10 | (bits >> 13 & 0x3ff));
}

void AppendValue(float value, const std::string& dtype, std::string& out) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if (dtype == "F32") {
    out.append(reinterpret_cast<const char*>(&bits), 4);
    return;
  }
  const uint16_t narrow =
      dtype == "F16" ? ExactF16(value) : static_cast<uint16_t>(bits >> 16);
  out.append(reinterpret_cast<const char*>(&narrow), 2);
}

std::string SafetensorsFile(const json& spec,
                            const std::vector<Shape>& shapes) {
  const auto dtype = spec.at("dtype").get<std::string>();
  std::string data;
  std::string header = "{";
  for (const Shape& shape : shapes) {
    const size_t begin = data.size();
    SplitMix random(spec.at("seed").get<uint64_t>() ^ Fnv1a(shape.name));
    for (int i = 0; i < std::max(1, shape.rows) * shape.cols; ++i) {
      AppendValue(Value(random.Next(), shape.name, spec, dtype == "F32"), dtype,
                  data);
    }
    absl::StrAppend(&header, header.size() > 1 ? "," : "", "\"", shape.name,
                    "\":{\"dtype\":\"", dtype, "\",\"shape\":[",
                    shape.rows == 0 ? "" : absl::StrCat(shape.rows, ","),
                    shape.cols, "],\"data_offsets\":[", begin, ",", data.size(),
                    "]}");
  }
  header += "}";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  const uint64_t length = header.size();
  return std::string(reinterpret_cast<const char*>(&length), 8) + header + data;
}

}  // namespace

json ReadGolden(std::string_view file) {
  const std::string path = absl::StrCat(
      TANDEM_SOURCE_DIR "/tests/golden/engine/", std::string(file));
  std::ifstream stream(path);
  json content = json::parse(stream, nullptr, /*allow_exceptions=*/false);
  if (content.is_discarded()) {
    std::fprintf(stderr, "%s cannot be read\n", path.c_str());
    std::abort();
  }
  return content;
}

json LoadCases() {
  json cases = ReadGolden("cases.json");
  const json all = ReadGolden("tensors.json");
  for (const auto& [name, tensors] : all.items()) {
    cases[name]["tensors"] = tensors;
  }
  return cases;
}

void WriteAdapter(const json& adapter, const TempDir& dir) {
  dir.Write("adapter_config.json", adapter.at("config").dump());
  dir.Write("adapter_model.safetensors",
            SafetensorsFile(adapter, Shapes(adapter)));
}

void WriteCheckpoint(const json& spec, const TempDir& dir) {
  const json& config = spec.at("config");
  dir.Write("config.json", config.dump());
  const std::vector<Shape> shapes = Shapes(spec);
  const int shards = Int(spec, "shards");
  if (shards == 1) {
    dir.Write("model.safetensors", SafetensorsFile(spec, shapes));
    return;
  }
  json weight_map;
  for (int shard = 0; shard < shards; ++shard) {
    const std::string name =
        absl::StrFormat("model-%05d-of-%05d.safetensors", shard + 1, shards);
    std::vector<Shape> part;  // dealt out in turn
    for (size_t i = shard; i < shapes.size(); i += shards) {
      part.push_back(shapes[i]);
      weight_map[shapes[i].name] = name;
    }
    dir.Write(name, SafetensorsFile(spec, part));
  }
  dir.Write("model.safetensors.index.json",
            json{{"weight_map", weight_map}}.dump());
}

std::vector<int32_t> PromptIds(const json& spec, int length) {
  SplitMix random(spec.at("seed").get<uint64_t>() ^
                  Fnv1a(absl::StrCat("prompt ", length)));
  const int vocab = Int(spec.at("config"), "vocab_size");
  std::vector<int32_t> ids;
  for (int i = 0; i < length; ++i) {
    ids.push_back(static_cast<int32_t>(random.Next() % vocab));
  }
  return ids;
}

}  // namespace tandem::engine
