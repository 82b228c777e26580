// SPDX-License-Identifier: Apache-2.0
#include "worker/speculation.h"

#include <algorithm>
#include <cstdint>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"

namespace tandem::worker {
namespace {

using nlohmann::json;

constexpr int kMaxLookup = 64;  // tokens of an n-gram
constexpr int kDefaultLookup = 5;
constexpr int kMaxBlocks = 1 << 28;
constexpr int64_t kMaxDrafts = 192;  // in a step

absl::Status ReadInt(const std::string& name, const json& value, int most,
                     int* out) {
  if (!value.is_number_integer() || value < 1 || value > most) {
    return InvalidSpeculation(name, " is ", value.dump(),
                              ", expected a number of 1 to ", most);
  }
  *out = value.get<int>();
  return absl::OkStatus();
}

absl::Status ReadString(const std::string& name, const json& value,
                        std::string* out) {
  if (!value.is_string() || value == "") {
    return InvalidSpeculation(name, " is ", value.dump(),
                              ", expected a string");
  }
  *out = value.get<std::string>();
  return absl::OkStatus();
}

// As it stands there.
struct Fields {
  std::string method;
  std::string model;
  std::string quantization;
  int tokens = 0;
  int min = 0;
  int max = 0;
  int blocks = 0;
  bool adaptive = true;
};

absl::Status ReadField(const std::string& name, const json& value,
                       Fields* fields) {
  if (name == "method") return ReadString(name, value, &fields->method);
  if (name == "model") return ReadString(name, value, &fields->model);
  if (name == "quantization") {
    return ReadString(name, value, &fields->quantization);
  }
  const struct {
    const char* name;
    int most;
    int* out;
  } numbers[] = {
      {"num_speculative_tokens", kMaxSpeculativeTokens, &fields->tokens},
      {"prompt_lookup_min", kMaxLookup, &fields->min},
      {"prompt_lookup_max", kMaxLookup, &fields->max},
      {"num_kv_blocks", kMaxBlocks, &fields->blocks}};
  for (const auto& number : numbers) {
    if (name == number.name) {
      return ReadInt(name, value, number.most, number.out);
    }
  }
  if (name == "adaptive") {
    if (!value.is_boolean()) {
      return InvalidSpeculation(name, " is ", value.dump(),
                                ", expected true or false");
    }
    fields->adaptive = value.get<bool>();
    return absl::OkStatus();
  }
  return InvalidSpeculation(
      "there is no '", name,
      "'; method, model, quantization, num_speculative_tokens, "
      "prompt_lookup_min, prompt_lookup_max, num_kv_blocks and "
      "adaptive are known");
}

// What goes with which method.
absl::Status CheckFields(const Fields& fields) {
  const bool drafts = fields.method == "draft_model";
  if (fields.method.empty()) {
    return InvalidSpeculation(
        "method is missing, expected \"ngram\", or \"model\" with the "
        "directory of a draft model");
  }
  if (!drafts && fields.method != "ngram") {
    return InvalidSpeculation("method is \"", fields.method,
                              "\", expected \"ngram\" or \"draft_model\"");
  }
  if (drafts && fields.model.empty()) {
    return InvalidSpeculation(
        "method \"draft_model\" needs \"model\", the draft model's "
        "directory");
  }
  const char* const stray = drafts                         ? nullptr
                            : fields.blocks > 0            ? "num_kv_blocks"
                            : !fields.quantization.empty() ? "quantization"
                            : !fields.model.empty()        ? "model"
                                                           : nullptr;
  if (stray != nullptr) {
    return InvalidSpeculation(
        stray, " is for method \"draft_model\", not for \"ngram\"");
  }
  if (drafts && fields.min + fields.max > 0) {
    return InvalidSpeculation(
        "prompt_lookup_min and prompt_lookup_max are for method \"ngram\", "
        "not for \"draft_model\"");
  }
  if (fields.tokens == 0) {
    return InvalidSpeculation(
        "num_speculative_tokens is missing, expected 1 to ",
        kMaxSpeculativeTokens);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<SpeculativeConfig> ParseSpeculativeConfig(
    const std::string& text) {
  SpeculativeConfig parsed;
  if (text.empty()) return parsed;
  const json config = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!config.is_object()) {
    return InvalidSpeculation(
        text,
        " is not a JSON object, expected e.g. {\"method\": "
        "\"ngram\", \"num_speculative_tokens\": 5}");
  }
  Fields fields;
  for (const auto& [name, value] : config.items()) {
    const absl::Status status = ReadField(name, value, &fields);
    if (!status.ok()) return status;
  }
  if (fields.method.empty() && !fields.model.empty()) {
    fields.method = "draft_model";
  }
  const absl::Status status = CheckFields(fields);
  if (!status.ok()) return status;
  int min = fields.min;
  int max = fields.max;
  if (min == 0) min = max > 0 ? max : kDefaultLookup;
  if (max == 0) max = min;
  if (min > max) {
    return InvalidSpeculation("prompt_lookup_min is ", min,
                              ", prompt_lookup_max is ", max,
                              ": expected no more than that");
  }
  parsed.speculation.num_tokens = fields.tokens;
  parsed.speculation.lookup_min = min;
  parsed.speculation.lookup_max = max;
  parsed.speculation.adapt = fields.adaptive;
  parsed.draft_model = fields.model;
  if (!fields.quantization.empty()) {
    parsed.draft_quantization = fields.quantization;
  }
  parsed.draft_num_blocks = fields.blocks;
  return parsed;
}

int MaxDraws(const engine::Speculation& speculation, int max_num_seqs,
             int max_num_batched_tokens) {
  const int64_t drafts =
      std::min(kMaxDrafts, int64_t{max_num_seqs} * speculation.num_tokens);
  return static_cast<int>(std::max<int64_t>(
      max_num_seqs,
      std::min<int64_t>(max_num_batched_tokens, max_num_seqs + drafts)));
}

}  // namespace tandem::worker
