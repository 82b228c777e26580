// SPDX-License-Identifier: Apache-2.0
#include "engine/model_config.h"

#include <array>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "engine/config_fields.h"
#include "engine/file.h"
#include "engine/json.h"

namespace tandem::engine {
namespace {

using nlohmann::json;

// What `transformers` takes for keys that a family's config.json leaves out.
struct Family {
  std::string_view architecture;
  std::string_view model_type;
  int kv_heads;  // 0: as many as heads
  int max_positions;
  int sliding_window;  // 0: none
};

constexpr std::array<Family, 2> kFamilies = {{
    {"LlamaForCausalLM", "llama", 0, 2048, 0},
    {"MistralForCausalLM", "mistral", 8, 131072, 4096},
}};

constexpr int kMaxWidth = 1 << 20;
constexpr int kMaxPositions = 1 << 24;  // exact in f32

std::string SupportedFamilies() {
  return absl::StrCat(
      "one of ",
      absl::StrJoin(kFamilies, ", ", [](std::string* out, const Family& f) {
        out->append(f.architecture);
      }));
}

// By "architectures"; by "model_type" in the older files without them.
const Family* FindFamily(ConfigFields& fields) {
  const json* architectures = fields.Find("architectures");
  const std::string model_type = fields.String("model_type", "");
  std::string given = "missing";
  if (architectures != nullptr) {
    given = ShowJson(*architectures);
    const json* first = architectures->is_array() && architectures->size() == 1
                            ? &architectures->front()
                            : nullptr;
    if (first != nullptr) given = ShowJson(*first);
    for (const Family& family : kFamilies) {
      if (first != nullptr && *first == family.architecture) return &family;
    }
  } else {
    for (const Family& family : kFamilies) {
      if (model_type == family.model_type) return &family;
    }
    if (!model_type.empty()) {
      fields.Refuse("model_type", Quote(model_type),
                    "llama or mistral where architectures is missing");
    }
  }
  fields.Refuse("architectures", given, SupportedFamilies());
  return nullptr;
}

void ReadLlama3(ConfigFields& scaling, RopeSpec& rope) {
  rope.kind = RopeSpec::Kind::kLlama3;
  rope.factor = scaling.Double("factor", 1, 1e6);
  rope.low_freq_factor = scaling.Double("low_freq_factor", 1e-3, 1e6);
  rope.high_freq_factor = scaling.Double("high_freq_factor", 1e-3, 1e6);
  rope.original_max_positions =
      scaling.Int("original_max_position_embeddings", 1, kMaxPositions);
  if (rope.high_freq_factor <= rope.low_freq_factor) {
    scaling.Refuse(
        "high_freq_factor", absl::StrCat(rope.high_freq_factor),
        absl::StrCat("above low_freq_factor, ", rope.low_freq_factor));
  }
}

// "rope_theta" and "rope_scaling" as of transformers 4, or both together in
// "rope_parameters" as of transformers 5.
void ReadRope(ConfigFields& fields, RopeSpec& rope) {
  rope.theta = fields.Double("rope_theta", 1, 1e12, 10000.0);
  for (const char* key : {"rope_parameters", "rope_scaling"}) {
    const json* object = fields.Find(key);
    if (object == nullptr) continue;
    if (!object->is_object()) {
      return fields.Refuse(key, ShowJson(*object), "an object or null");
    }
    ConfigFields scaling(fields.path(), *object, absl::StrCat(key, "."));
    rope.theta = scaling.Double("rope_theta", 1, 1e12, rope.theta);
    const std::string kind =
        scaling.String("rope_type", scaling.String("type", "default"));
    if (kind == "llama3") {
      ReadLlama3(scaling, rope);
    } else if (kind != "default") {
      scaling.Refuse("rope_type", Quote(kind), "default or llama3");
    }
    if (scaling.Double("partial_rotary_factor", 0, 1, 1.0) != 1.0) {
      scaling.Refuse("partial_rotary_factor", "below 1", "1 or left out");
    }
    return fields.Fail(scaling.status());
  }
}

void ReadShapes(ConfigFields& fields, const Family& family, ModelSpec& spec) {
  spec.hidden_size = fields.Int("hidden_size", 8, kMaxWidth);
  spec.intermediate_size = fields.Int("intermediate_size", 1, kMaxWidth);
  spec.layers = fields.Int("num_hidden_layers", 1, 1024);
  spec.heads = fields.Int("num_attention_heads", 1, 1024);
  spec.kv_heads =
      fields.Int("num_key_value_heads", 1, 1024,
                 family.kv_heads == 0 ? spec.heads : family.kv_heads);
  spec.vocab_size = fields.Int("vocab_size", 2, 1 << 22);
  spec.max_positions = fields.Int("max_position_embeddings", 1, kMaxPositions,
                                  family.max_positions);
  if (!fields.status().ok()) return;
  if (spec.heads % spec.kv_heads != 0) {
    fields.Refuse(
        "num_key_value_heads", absl::StrCat(spec.kv_heads),
        absl::StrCat("a divisor of num_attention_heads, ", spec.heads));
  }
  const bool given = fields.Find("head_dim") != nullptr;
  if (!given && spec.hidden_size % spec.heads != 0) {
    fields.Refuse("num_attention_heads", absl::StrCat(spec.heads),
                  absl::StrCat("a divisor of hidden_size, ", spec.hidden_size,
                               ", where head_dim is missing"));
  }
  const int64_t implied = spec.hidden_size / spec.heads;
  spec.head_dim =
      given ? fields.Int("head_dim", 8, 256) : static_cast<int>(implied);
  if (spec.head_dim < 8 || spec.head_dim > 256 || spec.head_dim % 8 != 0) {
    fields.Refuse(given ? "head_dim" : "hidden_size / num_attention_heads",
                  absl::StrCat(spec.head_dim), "a multiple of 8 from 8 to 256");
  }
}

// What would change the arithmetic in ways that are not implemented.
void RefuseUnsupported(ConfigFields& fields, const Family& family,
                       const ModelSpec& spec) {
  const std::string activation = fields.String("hidden_act", "silu");
  if (activation != "silu") {
    fields.Refuse("hidden_act", Quote(activation), "silu");
  }
  if (family.sliding_window == 0) return;
  const json* given = fields.Find("sliding_window");
  const int window = fields.HasNull("sliding_window")
                         ? 0
                         : fields.Int("sliding_window", 1, kMaxPositions,
                                      family.sliding_window);
  if (window != 0 && window < spec.max_positions) {
    fields.Refuse("sliding_window",
                  absl::StrCat(window, given == nullptr ? " by default" : ""),
                  absl::StrCat("null, or at least max_position_embeddings, ",
                               spec.max_positions,
                               ": windowed attention is not implemented"));
  }
}

// An id, a list of ids, or nothing.
std::vector<int32_t> ReadIds(ConfigFields& fields, std::string_view field,
                             int vocab_size) {
  std::vector<int32_t> ids;
  const json* value = fields.Find(field);
  if (value == nullptr) return ids;
  const auto add = [&](const json& element) {
    const json one = {{field, element}};
    ConfigFields single(fields.path(), one);
    ids.push_back(single.Int(field, 0, vocab_size - 1));
    fields.Fail(single.status());
  };
  if (!value->is_array()) {
    add(*value);
  } else if (value->size() > 256) {
    fields.Refuse(field, ShowJson(*value), "an id or at most 256 of them");
  } else {
    for (const json& element : *value) add(element);
  }
  return ids;
}

void ReadSpecialIds(ConfigFields& fields, ModelSpec& spec) {
  const std::vector<int32_t> bos =
      ReadIds(fields, "bos_token_id", spec.vocab_size);
  if (!bos.empty()) spec.bos_id = bos.front();
  std::vector<int32_t> eos = ReadIds(fields, "eos_token_id", spec.vocab_size);
  if (!eos.empty()) spec.eos_ids = std::move(eos);
}

absl::Status ReadGeneration(const std::string& path, std::string_view text,
                            ModelSpec& spec) {
  const absl::StatusOr<json> parsed = ParseJson(path, text);
  if (!parsed.ok()) return parsed.status();
  if (!parsed->is_object()) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": must be a JSON object"));
  }
  ConfigFields fields(path, *parsed);
  ReadSpecialIds(fields, spec);
  SamplingDefaults& sampling = spec.sampling;
  if (fields.Find("do_sample") != nullptr) {
    sampling.do_sample = fields.Bool("do_sample", false);
  }
  sampling.temperature = fields.OptionalDouble("temperature", 0, 100);
  sampling.top_p = fields.OptionalDouble("top_p", 0, 1);
  sampling.min_p = fields.OptionalDouble("min_p", 0, 1);
  sampling.repetition_penalty =
      fields.OptionalDouble("repetition_penalty", 0, 100);
  sampling.top_k = fields.OptionalInt("top_k", 0, INT32_MAX);
  return fields.status();
}

}  // namespace

absl::StatusOr<ModelSpec> ParseModelSpec(const std::string& config_path,
                                         std::string_view config,
                                         const std::string& generation_path,
                                         std::string_view generation) {
  const absl::StatusOr<json> parsed = ParseJson(config_path, config);
  if (!parsed.ok()) return parsed.status();
  if (!parsed->is_object()) {
    return absl::InvalidArgumentError(
        absl::StrCat(config_path, ": must be a JSON object"));
  }
  ConfigFields fields(config_path, *parsed);
  const Family* family = FindFamily(fields);
  if (family == nullptr) return fields.status();
  ModelSpec spec;
  spec.architecture = std::string(family->architecture);
  ReadShapes(fields, *family, spec);
  if (!fields.status().ok()) return fields.status();
  spec.norm_eps = fields.Double("rms_norm_eps", 1e-12, 0.1, 1e-6);
  ReadRope(fields, spec.rope);
  spec.attention_bias = fields.Bool("attention_bias", false);
  spec.mlp_bias = fields.Bool("mlp_bias", false);
  spec.tied_head = fields.Bool("tie_word_embeddings", false);
  spec.quantisation = ReadQuantisation(fields);
  RefuseUnsupported(fields, *family, spec);
  ReadSpecialIds(fields, spec);
  if (!fields.status().ok()) return fields.status();
  if (!generation.empty()) {
    const absl::Status status =
        ReadGeneration(generation_path, generation, spec);
    if (!status.ok()) return status;
  }
  return spec;
}

absl::StatusOr<ModelSpec> LoadModelSpec(const std::string& directory) {
  const std::string config_path = directory + "/config.json";
  const std::string generation_path = directory + "/generation_config.json";
  const absl::StatusOr<std::string> config =
      ReadFile(config_path, kMaxConfigBytes);
  if (!config.ok()) return config.status();
  std::string generation;
  if (FileExists(generation_path)) {
    absl::StatusOr<std::string> text =
        ReadFile(generation_path, kMaxConfigBytes);
    if (!text.ok()) return text.status();
    generation = *std::move(text);
    if (generation.empty()) generation.push_back(' ');  // there, and not JSON
  }
  return ParseModelSpec(config_path, *config, generation_path, generation);
}

std::string ModelSpec::Canonical() const {
  // %.17g tells any two doubles apart.
  std::string text = absl::StrFormat(
      "%s hidden=%d intermediate=%d layers=%d heads=%d kv_heads=%d "
      "head_dim=%d vocab=%d max_positions=%d norm=rms eps=%.17g act=silu "
      "attention_bias=%d mlp_bias=%d tied=%d rope_theta=%.17g",
      architecture, hidden_size, intermediate_size, layers, heads, kv_heads,
      head_dim, vocab_size, max_positions, norm_eps, attention_bias, mlp_bias,
      tied_head, rope.theta);
  if (rope.kind == RopeSpec::Kind::kLlama3) {
    absl::StrAppendFormat(
        &text, " rope=llama3 factor=%.17g low=%.17g high=%.17g original=%d",
        rope.factor, rope.low_freq_factor, rope.high_freq_factor,
        rope.original_max_positions);
  }
  absl::StrAppend(&text, quantisation.Canonical());
  return text;
}

}  // namespace tandem::engine
