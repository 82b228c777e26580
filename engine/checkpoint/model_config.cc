// SPDX-License-Identifier: Apache-2.0
#include "engine/checkpoint/model_config.h"

#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/checkpoint/config_family.h"
#include "engine/checkpoint/config_fields.h"
#include "engine/checkpoint/experts_config.h"
#include "engine/checkpoint/file.h"
#include "engine/checkpoint/json.h"
#include "engine/checkpoint/layers_config.h"
#include "kernels/types.h"

namespace tandem::engine {
namespace {

using nlohmann::json;

constexpr int kMaxWidth = 1 << 20;

// Of latent attention, whose heads share what keys and values are made of.
void ReadLatentShapes(ConfigFields& fields, ModelSpec& spec) {
  if (spec.kv_heads != spec.heads) {
    fields.Refuse("num_key_value_heads", absl::StrCat(spec.kv_heads),
                  absl::StrCat(spec.heads, ", as num_attention_heads, where ",
                               "attention is latent"));
  }
  const auto multiple = [&](const char* field, int most) {
    const int value = fields.Int(field, 8, most);
    if (value % 8 != 0) {
      fields.Refuse(field, absl::StrCat(value), "a multiple of 8");
    }
    return value;
  };
  spec.kv_rank = multiple("kv_lora_rank", kMaxWidth);
  if (fields.Find("q_lora_rank") != nullptr) {
    spec.query_rank = multiple("q_lora_rank", kMaxWidth);
  }
  spec.rope.rotary_dim = multiple("qk_rope_head_dim", kernels::kMaxHeadDim);
  spec.still_dim = multiple("qk_nope_head_dim", kernels::kMaxHeadDim);
  spec.value_dim = fields.Int("v_head_dim", 1, kernels::kMaxHeadDim,
                              spec.hidden_size / spec.heads);
  spec.kv_heads = 1;
  spec.head_dim = spec.kv_rank + spec.rope.rotary_dim;
  if (spec.head_dim > kernels::kMaxHeadDim) {
    fields.Refuse("kv_lora_rank + qk_rope_head_dim",
                  absl::StrCat(spec.head_dim),
                  absl::StrCat("at most ", kernels::kMaxHeadDim));
  }
}

void ReadShapes(ConfigFields& fields, const Family& family, ModelSpec& spec) {
  const ConfigKeys& keys = family.keys;
  spec.hidden_size = fields.Int(keys.hidden_size, 8, kMaxWidth);
  spec.layers = fields.Int(keys.layers, 1, 1024);
  const auto or_missing = [](int fallback) {
    return fallback > 0 ? std::optional<int>(fallback) : std::nullopt;
  };
  spec.heads = fields.Int(keys.heads, 1, 1024, or_missing(family.heads));
  const bool as_many = family.kv_heads == 0 || fields.HasNull(keys.kv_heads);
  spec.kv_heads = fields.Int(keys.kv_heads, 1, 1024,
                             as_many ? spec.heads : family.kv_heads);
  spec.vocab_size =
      fields.Int("vocab_size", 2, 1 << 20,  // as Backend::Sample takes
                 or_missing(family.vocab_size));
  spec.max_positions =
      fields.Int(keys.max_positions, 1, kMaxPositions, family.max_positions);
  if (!fields.status().ok()) return;
  if (spec.heads % spec.kv_heads != 0) {
    fields.Refuse(keys.kv_heads, absl::StrCat(spec.kv_heads),
                  absl::StrCat("a divisor of ", std::string(keys.heads), ", ",
                               spec.heads));
  }
  if (family.latent) return ReadLatentShapes(fields, spec);
  // Null is transformers' word for hidden_size / heads.
  const bool given = fields.Find("head_dim") != nullptr ||
                     (family.head_dim > 0 && !fields.HasNull("head_dim"));
  if (!given && spec.hidden_size % spec.heads != 0) {
    fields.Refuse(
        keys.heads, absl::StrCat(spec.heads),
        absl::StrCat("a divisor of ", std::string(keys.hidden_size), ", ",
                     spec.hidden_size, ", where head_dim is missing"));
  }
  spec.head_dim =
      given ? fields.Int("head_dim", 8, 256, or_missing(family.head_dim))
            : spec.hidden_size / spec.heads;
  if (spec.head_dim < 8 || spec.head_dim > 256 || spec.head_dim % 8 != 0) {
    fields.Refuse(given ? "head_dim" : "hidden_size / num_attention_heads",
                  absl::StrCat(spec.head_dim), "a multiple of 8 from 8 to 256");
  }
}

// Kernels have gpt-oss's numbers.
void ReadClampedSwiGlu(ConfigFields& fields, const std::string& name,
                       ModelSpec& spec) {
  spec.activation = kernels::Activation::kClampedSwiGlu;
  if (name != "silu") fields.Refuse("hidden_act", Quote(name), "silu");
  const auto expect = [&](const char* field, float value) {
    const double given = fields.Double(field, -1e6, 1e6, value);
    if (static_cast<float>(given) != value) {
      fields.Refuse(field, absl::StrCat(given), absl::StrCat(value));
    }
  };
  expect("swiglu_limit", kernels::kSwiGluLimit);
  expect("swiglu_alpha", kernels::kSwiGluAlpha);
}

void ReadActivation(ConfigFields& fields, const Family& family,
                    ModelSpec& spec) {
  const std::string name =
      fields.String(family.keys.activation, family.activation);
  if (family.clamped_swiglu) return ReadClampedSwiGlu(fields, name, spec);
  if (name == "silu") {
    spec.activation = kernels::Activation::kSilu;
  } else if (name == "gelu_pytorch_tanh" || name == "gelu_new" ||
             name == "gelu_fast" || (family.gelu_is_tanh && name == "gelu")) {
    spec.activation = kernels::Activation::kGeluTanh;
  } else if (!spec.is_gated() && name == "gelu") {
    spec.activation = kernels::Activation::kGelu;
  } else if (!spec.is_gated() && name == "relu2") {
    spec.activation = kernels::Activation::kRelu2;
  } else {
    fields.Refuse(family.keys.activation, Quote(name),
                  spec.is_gated()
                      ? "silu, gelu_pytorch_tanh, gelu_new or gelu_fast"
                      : "silu, gelu, gelu_pytorch_tanh, gelu_new, gelu_fast or "
                        "relu2");
  }
}

void ReadBiases(ConfigFields& fields, const Family& family, ModelSpec& spec) {
  switch (family.biases) {
    case Biases::kNone:
      break;
    case Biases::kByConfig:
      spec.output_bias = spec.qkv_bias = fields.Bool("attention_bias", false);
      spec.mlp_bias = fields.Bool("mlp_bias", false);
      break;
    case Biases::kAttention:
      spec.output_bias = spec.qkv_bias = fields.Bool("attention_bias", false);
      break;
    case Biases::kQkv:
      spec.qkv_bias = true;
      break;
    case Biases::kQkvByConfig:
      spec.qkv_bias = fields.Bool("attention_bias", true);
      spec.output_bias = fields.Bool("attention_out_bias", false);
      spec.mlp_bias = fields.Bool("mlp_bias", false);
      break;
    case Biases::kRestAlways:
      spec.output_bias = spec.qkv_bias = fields.Bool("attention_bias", true);
      spec.mlp_bias = spec.router_bias = true;
      break;
    case Biases::kQkvIfSaid:
      spec.qkv_bias = fields.Bool("attention_bias", false);
      break;
    case Biases::kQkvUnlessDenied:
      spec.qkv_bias = fields.Bool("qkv_bias", true);
      break;
    case Biases::kUseQkvBias:
      spec.qkv_bias = fields.Bool("use_qkv_bias", false);
      break;
    case Biases::kUseBias:
      spec.qkv_bias = spec.output_bias = spec.mlp_bias =
          fields.Bool("use_bias", false);
      break;
    case Biases::kAllIfSaid:
      spec.qkv_bias = spec.output_bias = spec.mlp_bias =
          fields.Bool("bias", false);
      break;
    case Biases::kAll:
      spec.qkv_bias = spec.output_bias = spec.mlp_bias = true;
      break;
  }
}

void ReadParallel(ConfigFields& fields, const Family& family, ModelSpec& spec) {
  const bool chosen = family.parallel == Parallel::kByConfig &&
                      fields.Bool("use_parallel_residual", false);
  if (chosen) spec.names.mlp_norm = "";
  const bool own_norms = family.parallel == Parallel::kUnlessDenied &&
                         fields.Bool("use_parallel_residual", true);
  spec.parallel = chosen || own_norms || family.parallel == Parallel::kAlways;
}

// Falcon's layers, of an old kind or a new one.
void ReadDecoder(ConfigFields& fields, ModelSpec& spec) {
  static constexpr char kNew[] = "new_decoder_architecture";
  static constexpr char kNorms[] = "num_ln_in_parallel_attn";
  const bool is_new = fields.Bool(kNew, false);
  spec.parallel = fields.Bool("parallel_attn", true);
  const int norms = fields.Int(kNorms, 1, 2, is_new ? 2 : 1);
  if (is_new && !spec.parallel) {
    fields.Refuse("parallel_attn", "false",
                  absl::StrCat("true or left out where ", kNew, " is true"));
  }
  if (!is_new && spec.parallel && norms == 2) {
    fields.Refuse(kNorms, "2",
                  absl::StrCat("1 or left out unless ", kNew, " is true"));
  }
  if (!is_new) {
    spec.kv_heads = fields.Bool("multi_query", true) ? 1 : spec.heads;
  }
  if (!spec.parallel) return;
  const bool own = norms == 2;
  if (own) spec.names.input_norm = "ln_attn";
  spec.names.mlp_norm = own ? "ln_mlp" : "";
}

// Layers' outputs are added times `residual`. Here they are added as they are,
// to a stream that is 1 / residual of its own: norms take all of that out
// again, with an epsilon in the same measure.
void ScaleResidual(double residual, ModelSpec& spec) {
  spec.embedding_scale /= residual;
  spec.norm_eps /= residual * residual;
}

// Of Granite.
void ReadMultipliers(ConfigFields& fields, ModelSpec& spec) {
  const auto multiplier = [&](const char* field) {
    return fields.Double(field, 1e-4, 1e6, 1.0);
  };
  spec.embedding_scale = multiplier("embedding_multiplier");
  ScaleResidual(multiplier("residual_multiplier"), spec);
  spec.attention_scale = multiplier("attention_multiplier");
  spec.logit_scale = 1 / multiplier("logits_scaling");
}

// Of MiniCPM. Null is transformers' word for what scales nothing.
void ReadDepthScale(ConfigFields& fields, ModelSpec& spec) {
  spec.embedding_scale = fields.Double("scale_emb", 1e-4, 1e6, 12.0);
  if (!fields.HasNull("scale_depth")) {
    ScaleResidual(fields.Double("scale_depth", 1e-4, 1e6, 1.4) /
                      std::sqrt(static_cast<double>(spec.layers)),
                  spec);
  }
  if (!fields.HasNull("dim_model_base")) {
    spec.logit_scale =
        fields.Double("dim_model_base", 1, kMaxWidth, 256.0) / spec.hidden_size;
  }
}

// What scales and caps scores, logits and the embedding.
void ReadScales(ConfigFields& fields, const Family& family, ModelSpec& spec) {
  double per_head = spec.query_dim();
  if (family.query_pre_scalar) {
    per_head = fields.Double("query_pre_attn_scalar", 1e-3, 1e6, 256.0);
  }
  spec.attention_scale =
      family.plain_scores ? 1 : spec.rope.score_scale / std::sqrt(per_head);
  if (family.scaled_embedding) {
    spec.embedding_scale = std::sqrt(static_cast<double>(spec.hidden_size));
    spec.embedding_scale_rounds = true;
  }
  if (family.multipliers) ReadMultipliers(fields, spec);
  if (family.depth_scale) ReadDepthScale(fields, spec);
  if (family.logit_scale > 0) {
    spec.logit_scale =
        fields.Double("logit_scale", 1e-6, 1e6, family.logit_scale);
  }
  if (!family.caps) return;
  const auto cap = [&](const char* field, double fallback) {
    return fields.HasNull(field) ? 0.0
                                 : fields.Double(field, 1e-2, 1e6, fallback);
  };
  // Gemma 3's configs have the key too, which its attention never reads.
  if (family.score_cap > 0) {
    spec.score_cap = cap("attn_logit_softcapping", family.score_cap);
  }
  if (family.logit_cap > 0 || fields.Find("final_logit_softcapping")) {
    spec.logit_cap = cap("final_logit_softcapping", family.logit_cap);
  }
}

// What would change the arithmetic in ways that are not implemented.
void RefuseUnsupported(ConfigFields& fields, const Family& family) {
  std::vector<std::pair<const char*, bool>> flags = {
      {"add_cross_attention", false},
      {"scale_attn_by_inverse_layer_idx", false},
      {"scale_attn_weights", true},
      {"alibi", false},
      {"apply_residual_connection_post_layernorm", false},
      {"use_cla", false}};  // keys and values of other layers
  // Of pictures alone it says nothing of text.
  static constexpr char kBidirectional[] = "use_bidirectional_attention";
  const json* both_ways = fields.Find(kBidirectional);
  if (both_ways == nullptr || *both_ways != "vision") {
    flags.push_back({kBidirectional, false});
  }
  // To others it says what they do anyway.
  if (family.biases == Biases::kAll) flags.push_back({"use_bias", true});
  if (family.norms_key != "qk_layernorm") {
    flags.push_back({"qk_layernorm", false});
  }
  // Hunyuan's norms are there without it.
  if (family.turned_norms) flags.push_back({"use_qk_norm", true});
  // Of q and k it would be by such a norm too.
  if (family.norm == NormKind::kCentred && family.norms_key.empty()) {
    flags.push_back({"use_qk_norm", false});
  }
  // Experts by themselves have none.
  if (family.biases == Biases::kUseBias && !family.keys.experts.empty()) {
    flags.push_back({"use_bias", false});
  }
  if (const json* clip = fields.Find("clip_qkv"); clip != nullptr) {
    fields.Refuse("clip_qkv", ShowJson(*clip), "null or left out");
  }
  // Of Granites that have other layers beside attention.
  static constexpr char kPositions[] = "position_embedding_type";
  if (family.multipliers && fields.String(kPositions, "rope") != "rope") {
    fields.Refuse(kPositions, ShowJson(*fields.Find(kPositions)),
                  "rope or left out");
  }
  for (const auto& [field, expected] : flags) {
    if (fields.Bool(field, expected) != expected) {
      fields.Refuse(field, expected ? "false" : "true",
                    expected ? "true or left out" : "false or left out");
    }
  }
}

// An id, a list of ids, or nothing. Those that the vocabulary lacks are never
// drawn: configs name them for tokens that a model was not given.
std::vector<int32_t> ReadIds(ConfigFields& fields, std::string_view field,
                             int vocab_size) {
  std::vector<int32_t> ids;
  const json* value = fields.Find(field);
  if (value == nullptr) return ids;
  const auto add = [&](const json& element) {
    if (!element.is_number_integer()) {
      return fields.Refuse(field, ShowJson(element), "a whole number");
    }
    if (element >= 0 && element < vocab_size) {
      ids.push_back(element.get<int32_t>());
    }
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

void ReadEndIds(ConfigFields& fields, ModelSpec& spec) {
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
  ReadEndIds(fields, spec);
  SamplingDefaults& sampling = spec.sampling;
  if (fields.Find("do_sample") != nullptr) {
    sampling.do_sample = fields.Bool("do_sample", false);
  }
  sampling.temperature = fields.OptionalDouble("temperature", 0, 100);
  sampling.top_p = fields.OptionalDouble("top_p", 0, 1);
  sampling.min_p = fields.OptionalDouble("min_p", 0, 1);
  sampling.repetition_penalty =
      fields.OptionalDouble("repetition_penalty", 0, 100);
  sampling.top_k = fields.OptionalInt("top_k", -1, INT32_MAX);
  return fields.status();
}

// By config.json; where that says nothing by `older`, a quantize_config.json or
// hf_quant_config.json.
void ReadEitherQuantisation(ConfigFields& fields, const std::string& older_path,
                            std::string_view older, ModelSpec& spec) {
  spec.quantisation = ReadQuantisation(fields);
  const bool given = fields.Find("quantization_config") != nullptr;
  if (!given && !older.empty()) {
    const auto read = ParseQuantizeConfig(older_path, older);
    fields.Fail(read.status());
    if (read.ok()) spec.quantisation = *read;
  }
  using Method = Quantisation::Method;
  const Method method = spec.quantisation.method;
  if (method == Method::kNone) return;
  const bool in_turns = spec.names.stack == ExpertStack::kInTurns;
  if (in_turns != (method == Method::kMxfp4)) {
    fields.Refuse("quantization_config", "given",
                  in_turns
                      ? "absent or mxfp4: experts are in one tensor"
                      : "absent or another: only gpt-oss's experts are mxfp4");
  } else if (spec.names.stack == ExpertStack::kHalves) {
    fields.Refuse("quantization_config", "given",
                  "absent: experts are in one tensor");
  }
  if (!spec.names.transposed) return;
  static constexpr char kWhy[] =
      "absent: matrices of this family lie the other way round";
  if (given) {
    fields.Refuse("quantization_config", "given", kWhy);
  } else {
    fields.Fail(absl::InvalidArgumentError(
        absl::StrCat(older_path, ": must be ", kWhy)));
  }
}

// "" if there is none, and never if there is one.
absl::StatusOr<std::string> ReadIfThere(const std::string& path) {
  if (!FileExists(path)) return "";
  absl::StatusOr<std::string> text = ReadFile(path, kMaxConfigBytes);
  if (text.ok() && text->empty()) text->push_back(' ');  // and not JSON
  return text;
}

}  // namespace

absl::StatusOr<ModelSpec> ParseModelSpec(const std::string& config_path,
                                         std::string_view config,
                                         const std::string& generation_path,
                                         std::string_view generation,
                                         const std::string& quantize_path,
                                         std::string_view quantize) {
  const absl::StatusOr<json> parsed = ParseJson(config_path, config);
  if (!parsed.ok()) return parsed.status();
  if (!parsed->is_object()) {
    return absl::InvalidArgumentError(
        absl::StrCat(config_path, ": must be a JSON object"));
  }
  const absl::StatusOr<TextPart> part = FindTextPart(config_path, *parsed);
  if (!part.ok()) return part.status();
  const Family* const family = part->family;
  ConfigFields fields(config_path, part->config, part->prefix);
  ModelSpec spec;
  spec.architecture = std::string(family->architecture);
  spec.names = family->names;
  spec.norm = family->norm;
  spec.wide_norms = family->wide_norms;
  spec.turned_norms = family->turned_norms;
  spec.normed_values = family->normed_values;
  spec.head_bias = family->head_bias;
  ReadParallel(fields, *family, spec);
  if (!family->norms_key.empty() && !fields.Bool(family->norms_key, false)) {
    spec.names.query_norm = spec.names.key_norm = "";
  }
  ReadShapes(fields, *family, spec);
  if (!fields.status().ok()) return fields.status();
  if (family->parallel == Parallel::kByDecoder) ReadDecoder(fields, spec);
  const std::string_view eps = family->keys.norm_eps;
  spec.norm_eps = eps.empty()
                      ? family->norm_eps
                      : fields.Double(eps, 1e-12, 0.1, family->norm_eps);
  ReadLayers(fields, *family, spec);
  const int turned = spec.rope.rotary_dim;  // of latent attention
  ReadRope(fields, *family, spec.latent() ? turned : spec.full_dim(),
           spec.latent() ? turned : spec.head_dim, HasWindows(spec),
           &spec.max_positions, &spec.rope, &spec.local_rope);
  if (spec.latent()) {
    spec.rope.rotary_dim = turned;
    spec.rope.trailing = true;
    spec.rope.interleaved =
        family->interleaved_rope && fields.Bool("rope_interleave", true);
  }
  DropIdleWindow(*family, spec);
  ReadScales(fields, *family, spec);
  ReadActivation(fields, *family, spec);
  ReadFeedForward(fields, *family, kMaxWidth, &spec);
  ReadBiases(fields, *family, spec);
  spec.tied_head = fields.Bool("tie_word_embeddings", family->tied_head);
  spec.head_in_doubt = part->either_ties && !spec.tied_head;
  ReadEitherQuantisation(fields, quantize_path, quantize, spec);
  RefuseUnsupported(fields, *family);
  ReadEndIds(fields, spec);
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
  std::string quantize_path = directory + "/quantize_config.json";
  const auto config = ReadFile(config_path, kMaxConfigBytes);
  if (!config.ok()) return config.status();
  const auto generation = ReadIfThere(generation_path);
  if (!generation.ok()) return generation.status();
  auto quantize = ReadIfThere(quantize_path);
  if (quantize.ok() && quantize->empty()) {
    quantize_path = directory + "/hf_quant_config.json";
    quantize = ReadIfThere(quantize_path);
  }
  if (!quantize.ok()) return quantize.status();
  return ParseModelSpec(config_path, *config, generation_path, *generation,
                        quantize_path, *quantize);
}

}  // namespace tandem::engine
