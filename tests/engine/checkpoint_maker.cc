// SPDX-License-Identifier: Apache-2.0
#include "tests/engine/checkpoint_maker.h"

#include <algorithm>
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
#include "common/fnv.h"
#include "engine/checkpoint/safetensors.h"

namespace tandem::engine {
namespace {

using nlohmann::json;

struct Shape {
  std::string name;
  int rows;  // 0: a vector
  int cols;
  int stack = 0;  // matrices in the tensor; 0: it is one
};

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
      const auto shape = tensor[1].get<std::vector<int>>();
      shapes.push_back({tensor[0], shape.size() < 2 ? 0 : shape.end()[-2],
                        shape.back(), shape.size() < 3 ? 0 : shape[0]});
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

// Or another factor that is 1 or so.
bool IsNorm(const std::string& name) {
  const auto ends = [&](const char* end) { return absl::EndsWith(name, end); };
  return ends("norm.weight") || ends("_scalar") || ends(".scale") ||
         ends("_scale") || absl::StrContains(name, ".norms.") ||
         absl::StrContains(name, "layernorm_");
}

// How a tensor's values follow from random draws; exact in the case's type.
struct Values {
  Values(const std::string& name, const json& spec)
      : norm(IsNorm(name)), wide(spec.at("dtype") == "F32") {
    if (norm) return;
    exponent = absl::EndsWith(name, ".bias") ? -3
               : absl::StrContains(name, "embed_tokens") ||
                       absl::StrContains(name, "lm_head")
                   ? Int(spec, "embedding_exponent")
                   : Int(spec, "matrix_exponent");
  }

  float Of(uint64_t z) const {
    const double fraction = static_cast<double>(z >> 40) * 0x1p-23 - 1;
    if (norm) {
      const double coarse = (static_cast<double>(z >> 57) - 64) / 128;
      return static_cast<float>(1 + (wide ? fraction / 2 : coarse));
    }
    const double coarse = (static_cast<double>(z >> 56) - 128) / 128;
    return static_cast<float>(std::ldexp(wide ? fraction : coarse, exponent));
  }

  bool norm;
  bool wide;
  int exponent = 0;
};

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
    const int values =
        std::max(1, shape.stack) * std::max(1, shape.rows) * shape.cols;
    const Values drawn(shape.name, spec);
    for (int i = 0; i < values; ++i) {
      AppendValue(drawn.Of(random.Next()), dtype, data);
    }
    absl::StrAppend(&header, header.size() > 1 ? "," : "", "\"", shape.name,
                    "\":{\"dtype\":\"", dtype, "\",\"shape\":[",
                    shape.stack == 0 ? "" : absl::StrCat(shape.stack, ","),
                    shape.rows == 0 ? "" : absl::StrCat(shape.rows, ","),
                    shape.cols, "],\"data_offsets\":[", begin, ",", data.size(),
                    "]}");
  }
  header += "}";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  const uint64_t length = header.size();
  return std::string(reinterpret_cast<const char*>(&length), 8) + header + data;
}

// ---- Products as quantisers leave them.

int64_t Size(size_t n) { return static_cast<int64_t>(n); }

// f16 scales of 2^-7 to 2^-4, each of three digits.
uint16_t RandomScale(std::mt19937& random) {
  return static_cast<uint16_t>((8 + random() % 3) << 10 | (random() % 4) << 8);
}
double ValueOfScale(uint16_t bits) {
  return std::ldexp(1024 + (bits & 0x3ff), (bits >> 10) - 25);
}

// Codes of 4 bits, in groups of 32 inputs.
struct Nibbles {
  size_t rows, cols, groups;
  std::vector<int32_t> group_of = {};  // [cols]
  std::vector<uint32_t> codes = {};    // [rows, cols]
  std::vector<uint32_t> zeros = {};    // [rows, groups]
  std::vector<uint16_t> scales = {};   // [rows, groups], f16
};

Nibbles DrawNibbles(size_t rows, size_t cols, std::mt19937& random) {
  Nibbles drawn{.rows = rows, .cols = cols, .groups = (cols + 31) / 32};
  for (size_t i = 0; i < cols; ++i) {
    drawn.group_of.push_back(static_cast<int32_t>(i / 32));
  }
  for (size_t i = 0; i < rows * cols; ++i) drawn.codes.push_back(random() % 16);
  for (size_t i = 0; i < rows * drawn.groups; ++i) {
    drawn.zeros.push_back(random() % 16);
    drawn.scales.push_back(RandomScale(random));
  }
  return drawn;
}

std::vector<double> NumbersOf(const Nibbles& drawn) {
  std::vector<double> numbers;
  for (size_t i = 0; i < drawn.codes.size(); ++i) {
    const size_t at = i / drawn.cols * drawn.groups +
                      static_cast<size_t>(drawn.group_of[i % drawn.cols]);
    numbers.push_back((static_cast<double>(drawn.codes[i]) -
                       static_cast<double>(drawn.zeros[at])) *
                      ValueOfScale(drawn.scales[at]));
  }
  return numbers;
}

// [down, across] words, each the sum of value(i, j, 0) to value(i, j, 7) in
// their places, from the low bits up.
template <typename Value>
FileTensor Words(size_t down, size_t across, const Value& value) {
  std::vector<uint32_t> words(down * across);
  for (size_t i = 0; i < words.size(); ++i) {
    for (size_t k = 0; k < 8; ++k) {
      words[i] += value(i / across, i % across, k) << k * 4;
    }
  }
  return {"I32", {Size(down), Size(across)}, BytesOf(words)};
}

FileTensor ScalesByGroup(const Nibbles& drawn) {
  std::vector<uint16_t> turned;
  for (size_t group = 0; group < drawn.groups; ++group) {
    for (size_t row = 0; row < drawn.rows; ++row) {
      turned.push_back(drawn.scales[row * drawn.groups + group]);
    }
  }
  return {"F16", {Size(drawn.groups), Size(drawn.rows)}, BytesOf(turned)};
}

CodedProduct OrderedNibbles(size_t rows, size_t cols, std::mt19937& random,
                            std::mt19937& of_inputs) {
  Nibbles drawn = DrawNibbles(rows, cols, random);
  std::shuffle(drawn.group_of.begin(), drawn.group_of.end(), of_inputs);
  CodedProduct made{.numbers = NumbersOf(drawn)};
  made.tensors[".qweight"] =
      Words(cols / 8, rows, [&](size_t i, size_t j, size_t k) {
        return drawn.codes[j * cols + i * 8 + k];
      });
  made.tensors[".qzeros"] =
      Words(drawn.groups, rows / 8, [&](size_t i, size_t j, size_t k) {
        return drawn.zeros[(j * 8 + k) * drawn.groups + i] - 1;
      });
  made.tensors[".scales"] = ScalesByGroup(drawn);
  made.tensors[".g_idx"] = {"I32", {Size(cols)}, BytesOf(drawn.group_of)};
  return made;
}

// Each group's inputs anywhere: GPTQ finds one order for all products of the
// same inputs, here those of as many.
CodedProduct ActOrder(size_t rows, size_t cols, std::mt19937& random) {
  std::mt19937 of_inputs(static_cast<uint32_t>(cols));
  return OrderedNibbles(rows, cols, random, of_inputs);
}
CodedProduct OrdersApart(size_t rows, size_t cols, std::mt19937& random) {
  return OrderedNibbles(rows, cols, random, random);
}

CodedProduct Awq(size_t rows, size_t cols, std::mt19937& random) {
  static constexpr size_t kOrder[8] = {0, 2, 4, 6, 1, 3, 5, 7};
  const Nibbles drawn = DrawNibbles(rows, cols, random);
  CodedProduct made{.numbers = NumbersOf(drawn)};
  made.tensors[".qweight"] =
      Words(cols, rows / 8, [&](size_t i, size_t j, size_t k) {
        return drawn.codes[(j * 8 + kOrder[k]) * cols + i];
      });
  made.tensors[".qzeros"] =
      Words(drawn.groups, rows / 8, [&](size_t i, size_t j, size_t k) {
        return drawn.zeros[(j * 8 + kOrder[k]) * drawn.groups + i];
      });
  made.tensors[".scales"] = ScalesByGroup(drawn);
  return made;
}

CodedProduct PackedInt4(size_t rows, size_t cols, std::mt19937& random) {
  const Nibbles drawn = DrawNibbles(rows, cols, random);
  const std::vector<int64_t> shape = {Size(rows), Size(cols)};
  CodedProduct made{.numbers = NumbersOf(drawn)};
  made.tensors[".weight_packed"] =
      Words(rows, cols / 8, [&](size_t i, size_t j, size_t k) {
        return drawn.codes[i * cols + j * 8 + k];
      });
  made.tensors[".weight_zero_point"] =
      Words(rows / 8, drawn.groups, [&](size_t i, size_t j, size_t k) {
        return drawn.zeros[(i * 8 + k) * drawn.groups + j];
      });
  made.tensors[".weight_scale"] = {
      "F16", {Size(rows), Size(drawn.groups)}, BytesOf(drawn.scales)};
  made.tensors[".weight_shape"] = {"I64", {2}, BytesOf(shape)};
  return made;
}

// The number of an e4m3 code that is not NaN.
double ValueOfE4m3(uint8_t code) {
  const int exponent = code >> 3 & 15;
  const double magnitude = exponent == 0
                               ? std::ldexp(code & 7, -9)
                               : std::ldexp(8 + (code & 7), exponent - 10);
  return code >= 0x80 ? -magnitude : magnitude;
}

// A scale for each row.
CodedProduct Bytes(bool e4m3, size_t rows, size_t cols, std::mt19937& random) {
  std::vector<uint16_t> scales(rows);
  for (uint16_t& scale : scales) scale = RandomScale(random);
  std::vector<float> wide;  // int8 codes reach further
  for (const uint16_t scale : scales) {
    wide.push_back(static_cast<float>(ValueOfScale(scale) / 16));
  }
  std::vector<uint8_t> codes(rows * cols);
  CodedProduct made;
  for (size_t i = 0; i < codes.size(); ++i) {
    codes[i] = static_cast<uint8_t>(random() & (e4m3 ? 0xbf : 0xff));
    const size_t row = i / cols;
    made.numbers.push_back(
        e4m3 ? ValueOfE4m3(codes[i]) * ValueOfScale(scales[row])
             : static_cast<int8_t>(codes[i]) * double{wide[row]});
  }
  made.tensors = {
      {".weight",
       {e4m3 ? "F8_E4M3" : "I8", {Size(rows), Size(cols)}, BytesOf(codes)}},
      {".weight_scale",
       {e4m3 ? "F16" : "F32",
        {Size(rows), 1},
        e4m3 ? BytesOf(scales) : BytesOf(wide)}}};
  return made;
}
CodedProduct Int8(size_t rows, size_t cols, std::mt19937& random) {
  return Bytes(false, rows, cols, random);
}
CodedProduct Fp8(size_t rows, size_t cols, std::mt19937& random) {
  return Bytes(true, rows, cols, random);
}

// Of outputs, by 32 inputs; scales have all digits.
constexpr size_t kBlockRows = 40;
CodedProduct Fp8Blocks(size_t rows, size_t cols, std::mt19937& random) {
  const size_t down = (rows + kBlockRows - 1) / kBlockRows;
  const size_t across = (cols + 31) / 32;
  std::vector<float> scales(down * across);
  for (float& scale : scales) {
    scale = static_cast<float>(random() % (1 << 24)) * 0x1p-27f;
  }
  std::vector<uint8_t> codes(rows * cols);
  CodedProduct made;
  for (size_t i = 0; i < codes.size(); ++i) {
    codes[i] = static_cast<uint8_t>(random() & 0xbf);  // below 2
    const size_t block = i / cols / kBlockRows * across + i % cols / 32;
    made.numbers.push_back(ValueOfE4m3(codes[i]) * double{scales[block]});
  }
  made.tensors = {
      {".weight", {"F8_E4M3", {Size(rows), Size(cols)}, BytesOf(codes)}},
      {".weight_scale_inv",
       {"F32", {Size(down), Size(across)}, BytesOf(scales)}}};
  return made;
}

json Compressed(const char* format, json weights, json activations = {}) {
  return {{"quant_method", "compressed-tensors"},
          {"format", format},
          {"ignore", {"lm_head"}},
          {"config_groups",
           {{"group_0",
             {{"targets", {"Linear"}},
              {"weights", std::move(weights)},
              {"input_activations", std::move(activations)}}}}}};
}

}  // namespace

const std::map<std::string, CodedForm>& CodedForms() {
  static const auto* const forms = new std::map<std::string, CodedForm>{
      {"gptq_act_order",
       {{{"quant_method", "gptq"},
         {"bits", 4},
         {"group_size", 32},
         {"desc_act", true},
         {"sym", false}},
        ActOrder}},
      {"gptq_orders_apart",
       {{{"quant_method", "gptq"},
         {"bits", 4},
         {"group_size", 32},
         {"desc_act", true},
         {"sym", false}},
        OrdersApart}},
      {"awq",
       {{{"quant_method", "awq"},
         {"bits", 4},
         {"group_size", 32},
         {"zero_point", true},
         {"version", "gemm"}},
        Awq}},
      {"packed_int4",
       {Compressed("pack-quantized", {{"num_bits", 4},
                                      {"type", "int"},
                                      {"strategy", "group"},
                                      {"group_size", 32},
                                      {"symmetric", false}}),
        PackedInt4}},
      {"int8",
       {Compressed("int-quantized", {{"num_bits", 8},
                                     {"type", "int"},
                                     {"strategy", "channel"},
                                     {"symmetric", true}}),
        Int8}},
      {"w8a8",
       {Compressed("int-quantized",
                   {{"num_bits", 8},
                    {"type", "int"},
                    {"strategy", "channel"},
                    {"symmetric", true}},
                   {{"num_bits", 8},
                    {"type", "int"},
                    {"strategy", "token"},
                    {"symmetric", true},
                    {"dynamic", true}}),
        Int8}},
      {"fp8",
       {Compressed("float-quantized", {{"num_bits", 8},
                                       {"type", "float"},
                                       {"strategy", "channel"},
                                       {"symmetric", true}}),
        Fp8}},
      {"fp8_blocks",
       {{{"quant_method", "fp8"},
         {"activation_scheme", "dynamic"},
         {"weight_block_size", {kBlockRows, 32}}},
        Fp8Blocks}}};
  return *forms;
}

void WriteCoded(const json& spec, const CodedForm& form, const TempDir& coded,
                const TempDir* plain) {
  WriteCheckpoint(spec, coded);
  json config = spec.at("config");
  if (plain != nullptr) plain->Write("config.json", config.dump());
  config["quantization_config"] = form.config;
  coded.Write("config.json", config.dump());
  FileTensors codes, numbers;
  {
    const auto old = Checkpoint::Open(coded.path());
    if (!old.ok()) {
      std::fprintf(stderr, "%s\n", old.status().ToString().c_str());
      std::abort();
    }
    std::mt19937 random(1);
    for (const TensorInfo& tensor : old->tensors()) {
      const auto bytes = old->bytes(tensor);
      FileTensor copy = {
          std::string(tensor.dtype),
          tensor.shape,
          {reinterpret_cast<const char*>(bytes.data()), bytes.size()}};
      const bool product = absl::StartsWith(tensor.name, "model.layers.") &&
                           tensor.shape.size() == 2 &&
                           !absl::EndsWith(tensor.name, ".gate.weight");
      if (!product) {
        codes[tensor.name] = numbers[tensor.name] = copy;
        continue;
      }
      CodedProduct made =
          form.make(static_cast<size_t>(tensor.shape[0]),
                    static_cast<size_t>(tensor.shape[1]), random);
      const std::string stem = tensor.name.substr(0, tensor.name.size() - 7);
      for (auto& [behind, part] : made.tensors) {
        codes[stem + behind] = std::move(part);
      }
      copy.bytes =
          BytesOf(std::vector<float>(made.numbers.begin(), made.numbers.end()));
      numbers[tensor.name] = copy;
    }
  }
  coded.Write("model.safetensors", SafetensorsFile(codes));
  if (plain != nullptr) {
    plain->Write("model.safetensors", SafetensorsFile(numbers));
  }
}

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

const json& LoadCases() {
  static const json* const cases = [] {
    auto* const all = new json(ReadGolden("cases.json"));
    const json named = ReadGolden("tensors.json");
    for (const auto& [name, tensors] : named.items()) {
      (*all)[name]["tensors"] = tensors;
    }
    return all;
  }();
  return *cases;
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
