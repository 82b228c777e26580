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
constexpr int64_t kMaxDrafts = 192;  // in a step

absl::Status Refused(auto... parts) {
  return absl::InvalidArgumentError(
      absl::StrCat("--speculative-config: ", parts...));
}

absl::Status ReadInt(const std::string& name, const json& value, int most,
                     int* out) {
  if (!value.is_number_integer() || value < 1 || value > most) {
    return Refused(name, " is ", value.dump(), ", expected a number of 1 to ",
                   most);
  }
  *out = value.get<int>();
  return absl::OkStatus();
}

absl::Status ReadMethod(const json& value) {
  if (value == "ngram") return absl::OkStatus();
  return Refused("method is ", value.dump(),
                 ", expected \"ngram\" (draft models are not served)");
}

}  // namespace

absl::StatusOr<engine::Speculation> ParseSpeculativeConfig(
    const std::string& text) {
  engine::Speculation speculation;
  if (text.empty()) return speculation;
  const json config = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!config.is_object()) {
    return Refused(text,
                   " is not a JSON object, expected e.g. {\"method\": "
                   "\"ngram\", \"num_speculative_tokens\": 5}");
  }
  int min = 0;
  int max = 0;
  for (const auto& [name, value] : config.items()) {
    absl::Status status;
    if (name == "method") {
      status = ReadMethod(value);
    } else if (name == "num_speculative_tokens") {
      status =
          ReadInt(name, value, kMaxSpeculativeTokens, &speculation.num_tokens);
    } else if (name == "prompt_lookup_min") {
      status = ReadInt(name, value, kMaxLookup, &min);
    } else if (name == "prompt_lookup_max") {
      status = ReadInt(name, value, kMaxLookup, &max);
    } else if (name == "model") {
      status = Refused("model is ", value.dump(),
                       ": draft models are not served; leave it out, with "
                       "\"method\": \"ngram\"");
    } else {
      status = Refused("there is no '", name,
                       "'; method, num_speculative_tokens, prompt_lookup_min "
                       "and prompt_lookup_max are known");
    }
    if (!status.ok()) return status;
  }
  if (!config.contains("method")) {
    return Refused("method is missing, expected \"ngram\"");
  }
  if (speculation.num_tokens == 0) {
    return Refused("num_speculative_tokens is missing, expected 1 to ",
                   kMaxSpeculativeTokens);
  }
  if (min == 0) min = max > 0 ? max : kDefaultLookup;
  if (max == 0) max = min;
  if (min > max) {
    return Refused("prompt_lookup_min is ", min, ", prompt_lookup_max is ", max,
                   ": expected no more than that");
  }
  speculation.lookup_min = min;
  speculation.lookup_max = max;
  return speculation;
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
