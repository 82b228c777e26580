// SPDX-License-Identifier: Apache-2.0
// What the configs may say. Everything that would change how codes are read,
// and is not implemented, is refused by its field.

#include "engine/checkpoint/quantisation.h"

#include <algorithm>
#include <iterator>
#include <string_view>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "engine/checkpoint/config_fields.h"
#include "engine/checkpoint/json.h"

namespace tandem::engine {
namespace {

using nlohmann::json;
using Method = Quantisation::Method;

// -1 (or nothing) is a scale for each row.
int ReadGroup(ConfigFields& fields, int fallback) {
  const int group = fields.Int("group_size", -1, 1 << 20, fallback);
  if (group == -1) return 0;
  if (group < kernels::kCodeGroup || group % kernels::kCodeGroup != 0) {
    fields.Refuse("group_size", absl::StrCat(group), "-1 or a multiple of 32");
  }
  return group;
}

// Rules by module ("-:REGEX": left as they are, which files show).
void RefuseDynamic(ConfigFields& fields) {
  const json* const rules = fields.Find("dynamic");
  if (rules == nullptr) return;
  if (!rules->is_object()) {
    fields.Refuse("dynamic", ShowJson(*rules), "an object");
    return;
  }
  for (const auto& [modules, numbers] : rules->items()) {
    if (modules.starts_with("-:") || numbers.empty()) continue;
    fields.Refuse(absl::StrCat("dynamic.", modules), ShowJson(numbers),
                  "empty: all modules have the same numbers");
  }
}

Quantisation ReadGptq(ConfigFields& fields) {
  RefuseDynamic(fields);
  Quantisation result{.method = Method::kGptq};
  result.bits = fields.Int("bits", 1, 16);
  if (result.bits != 4 && result.bits != 8) {
    fields.Refuse("bits", absl::StrCat(result.bits), "4 or 8");
  }
  result.group = ReadGroup(fields, -1);
  const std::string format =
      fields.String("checkpoint_format", "gptq");  // else Marlin's and others'
  if (format != "gptq" && format != "gptq_v2") {
    fields.Refuse("checkpoint_format", absl::StrCat("\"", format, "\""),
                  "gptq or gptq_v2");
  }
  if (fields.Bool("is_marlin_format", false)) {  // before it had that field
    fields.Refuse("is_marlin_format", "true", "false");
  }
  result.zeros_less_one = format == "gptq";
  result.zeros = !fields.Bool("sym", true);
  return result;
}

Quantisation ReadAwq(ConfigFields& fields) {
  Quantisation result{.method = Method::kAwq, .bits = 4};
  const int bits = fields.Int("bits", 1, 16);
  if (bits != 4) fields.Refuse("bits", absl::StrCat(bits), "4");
  result.group = ReadGroup(fields, -1);
  result.zeros = fields.Bool("zero_point", true);
  const std::string version =
      absl::AsciiStrToLower(fields.String("version", "gemm"));
  if (version != "gemm") {
    fields.Refuse("version", absl::StrCat("\"", version, "\""), "gemm");
  }
  return result;
}

// [outputs, inputs] that share a scale.
void ReadBlock(ConfigFields& fields, std::string_view field, const json& block,
               Quantisation* result) {
  const auto fits = [](const json& size, int64_t least) {
    return size.is_number_integer() && size >= least && size <= 1 << 20;
  };
  if (!block.is_array() || block.size() != 2 || !fits(block[0], 1) ||
      !fits(block[1], kernels::kCodeGroup) ||
      block[1].get<int>() % kernels::kCodeGroup != 0) {
    fields.Refuse(field, ShowJson(block),
                  "two numbers, the second a multiple of 32");
    return;
  }
  result->block_rows = block[0].get<int>();
  result->group = block[1].get<int>();
}

// As transformers and vLLM write it: blocks, or a scale for each matrix.
Quantisation ReadFp8(ConfigFields& fields) {
  Quantisation result{.method = Method::kPlain, .e4m3 = true};
  const std::string type = fields.String("fmt", "e4m3");
  if (type != "e4m3" && type != "float8_e4m3fn") {
    fields.Refuse("fmt", absl::StrCat("\"", type, "\""), "e4m3");
  }
  if (const json* const block = fields.Find("weight_block_size")) {
    ReadBlock(fields, "weight_block_size", *block, &result);
  }
  return result;
}

constexpr Quantisation kNvfp4 = {
    .method = Method::kNvfp4, .bits = 4, .group = 16};
constexpr Quantisation kPackedMxfp4 = {
    .method = Method::kPackedMxfp4, .bits = 4, .group = 32};

// NVIDIA's Model Optimizer.
Quantisation ReadModelOptimizer(ConfigFields& fields) {
  const std::string algorithm = fields.String("quant_algo", "");
  Quantisation result = kNvfp4;
  if (algorithm == "FP8" || algorithm == "FP8_PER_CHANNEL_PER_TOKEN") {
    result = {.method = Method::kPlain, .e4m3 = true};
  } else if (algorithm != "NVFP4") {
    fields.Refuse("quant_algo", absl::StrCat("\"", algorithm, "\""),
                  "FP8, FP8_PER_CHANNEL_PER_TOKEN or NVFP4");
  } else if (const int group = fields.Int("group_size", 1, 1 << 20, 16);
             group != 16) {
    fields.Refuse("group_size", absl::StrCat(group), "16");
  }
  result.kv_scales = fields.Find("kv_cache_quant_algo") != nullptr;
  return result;
}

// Older ones have an object around what they say.
Quantisation ReadModelOptimizers(ConfigFields& outer) {
  const json* const inner = outer.Find("quantization");
  if (inner == nullptr) return ReadModelOptimizer(outer);
  if (!inner->is_object()) {
    outer.Refuse("quantization", ShowJson(*inner), "an object");
    return {};
  }
  ConfigFields fields(outer.path(), *inner, "quantization.");
  const Quantisation result = ReadModelOptimizer(fields);
  outer.Fail(fields.status());
  return result;
}

bool IsFp4(std::string_view format) {
  return format == "nvfp4-pack-quantized" || format == "mxfp4-pack-quantized";
}

Quantisation ReadFp4(ConfigFields& fields, std::string_view format, int bits,
                     const std::string& type) {
  const Quantisation result =
      format == "nvfp4-pack-quantized" ? kNvfp4 : kPackedMxfp4;
  const int group = fields.Int("group_size", 1, 1 << 20, result.group);
  if (bits != 4 || type != "float" || group != result.group) {
    fields.Refuse(
        "num_bits",
        absl::StrCat(bits, " of type ", type, " in groups of ", group),
        absl::StrCat("4 of type float in groups of ", result.group));
  }
  return result;
}

// Whether activations become int8 with a scale for each token. One for all of
// them, which was found before or not, is found of each token instead.
bool HasScaledTokens(ConfigFields& outer, const json& group) {
  const auto found = group.find("input_activations");
  if (found == group.end() || found->is_null()) return false;
  if (!found->is_object()) {
    outer.Refuse("config_groups.input_activations", ShowJson(*found),
                 "an object or null");
    return false;
  }
  ConfigFields fields(outer.path(), *found,
                      "quantization_config.config_groups.input_activations.");
  const std::string strategy = fields.String(
      "strategy", fields.Find("group_size") == nullptr ? "tensor" : "group");
  const bool scaled = fields.Int("num_bits", 1, 16, 8) == 8 &&
                      fields.String("type", "int") == "int" &&
                      fields.Bool("symmetric", true) &&
                      (strategy == "token" || strategy == "tensor");
  outer.Fail(fields.status());
  return scaled;
}

// The weights of the only group of compressed-tensors' config_groups.
Quantisation ReadGroupOf(ConfigFields& outer, const std::string& format,
                         const json& group) {
  Quantisation result;
  const auto weights = group.is_object() ? group.find("weights") : group.end();
  if (!group.is_object() || weights == group.end() || !weights->is_object()) {
    outer.Refuse("config_groups", ShowJson(group), "an object with weights");
    return result;
  }
  ConfigFields fields(outer.path(), *weights,
                      "quantization_config.config_groups.weights.");
  const int bits = fields.Int("num_bits", 1, 16);
  const std::string type = fields.String("type", "int");
  const std::string strategy = fields.String("strategy", "channel");
  if (IsFp4(format)) {
    result = ReadFp4(fields, format, bits, type);
    outer.Fail(fields.status());
    return result;
  }
  if (strategy == "group") {
    result.group = ReadGroup(fields, -1);
  } else if (strategy == "block" && format != "pack-quantized") {
    const json* const block = fields.Find("block_structure");
    ReadBlock(fields, "block_structure", block == nullptr ? json() : *block,
              &result);
  } else if (strategy != "channel" && strategy != "tensor") {
    fields.Refuse("strategy", absl::StrCat("\"", strategy, "\""),
                  "group, channel, tensor or (not pack-quantized) block");
  }
  if (format == "pack-quantized") {
    result.method = Method::kPacked;
    result.bits = bits;
    result.zeros = !fields.Bool("symmetric", true);
    if (type != "int" || (bits != 4 && bits != 8)) {
      fields.Refuse("num_bits", absl::StrCat(bits, " of type ", type),
                    "4 or 8 of type int");
    }
  } else {
    result.method = Method::kPlain;
    result.e4m3 = type == "float";
    result.w8a8 = type == "int" && format != "float-quantized" &&
                  (strategy == "channel" || strategy == "tensor") &&
                  fields.Bool("symmetric", true) &&
                  HasScaledTokens(outer, group);
    if (bits != 8 || (type != "int" && type != "float")) {
      fields.Refuse("num_bits", absl::StrCat(bits, " of type ", type),
                    "8 of type int or float");
    }
  }
  outer.Fail(fields.status());
  return result;
}

// Those of weights are in them already; others (of activations or of the
// cache) are not computed.
void RefuseTransforms(ConfigFields& fields) {
  static constexpr char kField[] = "transform_config";
  const json* const config = fields.Find(kField);
  if (config == nullptr) return;
  const auto refuse = [&](const json& value) {
    fields.Refuse(kField, ShowJson(value),
                  "an object of config_groups, each with a list `apply`");
  };
  if (!config->is_object()) return refuse(*config);
  const auto groups = config->find("config_groups");
  if (groups == config->end() || groups->is_null()) return;
  if (!groups->is_object()) return refuse(*groups);
  for (const json& group : *groups) {
    const auto apply = group.is_object() ? group.find("apply") : group.end();
    if (apply == group.end() || !apply->is_array()) return refuse(group);
    for (const json& to : *apply) {
      const json location = to.is_object() ? to.value("location", json()) : to;
      if (location != "weight_input" && location != "weight_output") {
        fields.Refuse(absl::StrCat(kField, ".location"),
                      location.is_null() ? "missing" : ShowJson(location),
                      "weight_input or weight_output");
      }
    }
  }
}

void RefuseSparsity(ConfigFields& outer) {
  const json* const config = outer.Find("sparsity_config");
  if (config == nullptr) return;
  if (!config->is_object()) {
    outer.Refuse("sparsity_config", ShowJson(*config), "an object");
    return;
  }
  ConfigFields fields(outer.path(), *config,
                      "quantization_config.sparsity_config.");
  const json* const format = fields.Find("format");
  if (format != nullptr && *format != "dense") {
    fields.Refuse("format", ShowJson(*format), "dense");
  }
  outer.Fail(fields.status());
}

Quantisation ReadCompressed(ConfigFields& fields) {
  RefuseTransforms(fields);
  RefuseSparsity(fields);
  const std::string format = fields.String("format", "");
  if (format != "pack-quantized" && format != "int-quantized" &&
      format != "float-quantized" && format != "naive-quantized" &&
      !IsFp4(format)) {
    fields.Refuse("format", absl::StrCat("\"", format, "\""),
                  "pack-, int-, float-, naive-, nvfp4-pack- or "
                  "mxfp4-pack-quantized");
    return {};
  }
  const json* groups = fields.Find("config_groups");
  if (groups == nullptr || !groups->is_object() || groups->size() != 1) {
    fields.Refuse("config_groups",
                  groups == nullptr ? "missing" : ShowJson(*groups),
                  "an object with one group");
    return {};
  }
  return ReadGroupOf(fields, format, groups->begin().value());
}

}  // namespace

std::string Quantisation::Canonical() const {
  static constexpr std::string_view kNames[] = {
      "", "gptq", "awq", "packed", "plain", "mxfp4", "packed_mxfp4", "nvfp4"};
  if (method == Method::kNone) return "";
  return absl::StrCat(
      " quantised=", std::string(kNames[static_cast<int>(method)]),
      " bits=", bits, " group=", group, " zeros_less_one=", zeros_less_one,
      block_rows == 0 ? "" : absl::StrCat(" block_rows=", block_rows),
      w8a8 ? " w8a8=1" : "");
}

std::string_view Quantisation::DequantisedFor() const {
  if (method == Method::kNvfp4) return "nvfp4";
  return e4m3 && group != 0 ? "fp8 in groups" : "";
}

Quantisation ReadQuantisation(ConfigFields& outer) {
  const json* config = outer.Find("quantization_config");
  if (config == nullptr) return {};
  if (!config->is_object()) {
    outer.Refuse("quantization_config", ShowJson(*config), "an object or null");
    return {};
  }
  ConfigFields fields(outer.path(), *config, "quantization_config.");
  const std::string method = fields.String("quant_method", "");
  Quantisation result;
  if (method == "gptq") {
    result = ReadGptq(fields);
  } else if (method == "awq") {
    result = ReadAwq(fields);
  } else if (method == "compressed-tensors") {
    result = ReadCompressed(fields);
  } else if (method == "fp8") {
    result = ReadFp8(fields);
  } else if (method == "mxfp4") {
    result = {.method = Method::kMxfp4, .bits = 4, .group = 32};
  } else if (method == "modelopt" || method == "modelopt_fp4") {
    result = ReadModelOptimizers(fields);
  } else {
    fields.Refuse("quant_method", absl::StrCat("\"", method, "\""),
                  "gptq, awq, compressed-tensors, fp8, mxfp4 or modelopt");
  }
  result.kv_scales |= fields.Find("kv_cache_scheme") != nullptr;
  outer.Fail(fields.status());
  return result;
}

absl::StatusOr<Quantisation> ParseQuantizeConfig(const std::string& path,
                                                 std::string_view text) {
  const absl::StatusOr<json> parsed = ParseJson(path, text);
  if (!parsed.ok()) return parsed.status();
  if (!parsed->is_object()) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": must be a JSON object"));
  }
  ConfigFields fields(path, *parsed);
  // The first of both knew one method, and did not name it.
  const bool optimizers = parsed->contains("quantization");
  const std::string only = optimizers ? "modelopt" : "gptq";
  const std::string method = fields.String("quant_method", only);
  if (method != only) fields.Refuse("quant_method", ShowJson(method), only);
  const Quantisation result =
      optimizers ? ReadModelOptimizers(fields) : ReadGptq(fields);
  if (!fields.status().ok()) return fields.status();
  return result;
}

bool IsKvScale(std::string_view name) {
  static constexpr std::string_view kEnds[] = {
      ".k_scale", ".v_scale", ".kv_scale", ".k_proj.output_scale",
      ".v_proj.output_scale"};
  return std::any_of(std::begin(kEnds), std::end(kEnds),
                     [&](std::string_view end) { return name.ends_with(end); });
}

}  // namespace tandem::engine
