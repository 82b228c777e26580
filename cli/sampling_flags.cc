// SPDX-License-Identifier: Apache-2.0
#include "cli/sampling_flags.h"

#include <limits>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "cli/connect.h"
#include "common/lifecycle.h"
#include "common/read_file.h"

namespace tandem::cli {
namespace {

absl::Status AddIds(const char* flag, const std::vector<std::string>& texts,
                    google::protobuf::RepeatedField<uint32_t>* ids) {
  for (const std::string& text : texts) {
    uint32_t id;
    if (!absl::SimpleAtoi(text, &id)) {
      return UsageError(
          absl::StrCat("--", flag, ": '", text, "' is no token id"));
    }
    ids->Add(id);
  }
  return absl::OkStatus();
}

// "15043=2.5", or as llama.cpp writes it: "15043+2.5", "15043-1".
bool AddBias(const std::string& text, v1::SamplingOptions* sampling) {
  const size_t at = text.find_first_of("=+-");
  if (at == std::string::npos) return false;
  uint32_t id;
  float bias;
  if (!absl::SimpleAtoi(text.substr(0, at), &id) ||
      !absl::SimpleAtof(text.substr(text[at] == '-' ? at : at + 1), &bias)) {
    return false;
  }
  (*sampling->mutable_logit_bias())[id] = bias;
  return true;
}

absl::Status CheckTexts(const SamplingFlags& flags) {
  const std::pair<const char*, const std::string*> texts[] = {
      {"--json-schema", &flags.json_schema},
      {"--regex", &flags.regex},
      {"--grammar", &flags.grammar},
      {"--structural-tag", &flags.structural_tag},
      {"--cache-salt", &flags.cache_salt},
      {"--request-id", &flags.request_id},
      {"--model", &flags.model},
      {"--lora", &flags.lora}};
  for (const auto& [flag, text] : texts) {
    if (absl::Status status = CheckUtf8(flag, *text); !status.ok()) {
      return status;
    }
  }
  const std::pair<const char*, const std::vector<std::string>*> lists[] = {
      {"--bad-words", &flags.bad_words},
      {"--choice", &flags.choice},
      {"--stop", &flags.stop}};
  for (const auto& [flag, list] : lists) {
    for (const std::string& text : *list) {
      if (absl::Status status = CheckUtf8(flag, text); !status.ok()) {
        return status;
      }
    }
  }
  return absl::OkStatus();
}

// What the protocol's fields hold; what is too much there the router says.
constexpr Range kInt32 = {std::numeric_limits<int32_t>::min(),
                          std::numeric_limits<int32_t>::max()};

}  // namespace

void SamplingFlags::AddTo(CommandLine* line) {
  line->Group("Sampling");
  line->Add("temperature", &temperature, "0 is greedy", 0, 2);
  line->Add("top-p", &top_p, "Smallest set with this probability", 0, 1);
  line->AddInt("top-k", &top_k, "The k most probable; 0 or -1: all", kInt32);
  line->Add("min-p", &min_p, "Share of the most probable token", 0, 1);
  line->Add("typical-p", &typical_p,
            "Tokens of typical information with this probability", 0, 1);
  line->AddInt("seed", &seed, "Equal seeds give equal outputs");
  line->AddInt("n", &n, "Sequences of the answer", {1, 32});
  line->AddInt("best-of", &best_of,
               "Sequences of which the n most probable are returned", {1, 32});
  line->Group("Beam search");
  line->AddInt("beam-width", &beam_width,
               "Beams of a search; the n best hypotheses are returned",
               {1, 20});
  line->Add("length-penalty", &length_penalty,
            "Hypotheses are compared by sum / length ^ this", -10, 10);
  line->AddChoice("early-stopping", &early_stopping, {"false", "true", "never"},
                  "When a search with enough hypotheses ends");
  line->Group("Logits");
  line->Add("repetition-penalty", &repetition_penalty,
            "Factor on tokens of prompt and output", 0, 2);
  line->Add("presence-penalty", &presence_penalty,
            "Taken from each token of the output", -2, 2);
  line->Add("frequency-penalty", &frequency_penalty,
            "Taken from tokens of the output for each occurrence", -2, 2);
  line->AddList("logit-bias", &logit_bias,
                "Added to a token's logit: ID=BIAS or ID+BIAS or ID-BIAS");
  line->AddList("allowed-token-ids", &allowed_token_ids, "Draw no others");
  line->AddList("banned-token-ids", &banned_token_ids, "Never draw these");
  line->AddList("bad-words", &bad_words,
                "Text that must not be completed; repeatable",
                /*separator=*/0);
  line->Group("Structured output");
  line->Add("json-schema", &json_schema, "The output is JSON of this schema");
  line->Add("json-schema-file", &json_schema_file, "A file with one");
  line->Add("json-object", &json_object, "The output is a JSON object");
  line->Add("regex", &regex, "The output matches it, whole");
  line->Add("grammar", &grammar, "The output is of this grammar, in Lark");
  line->Add("grammar-file", &grammar_file, "A file with one");
  line->AddList("choice", &choice, "The output is one of these; repeatable",
                /*separator=*/0);
  line->Add("structural-tag", &structural_tag,
            "What follows a trigger in the output is constrained; JSON");
  line->Group("Stopping");
  line->AddInt("max-tokens", &max_tokens, "New tokens at most", kInt32);
  line->AddInt("min-tokens", &min_tokens, "New tokens before a stop counts",
               kInt32);
  line->AddList("stop", &stop, "Text that ends the output; repeatable",
                /*separator=*/0);
  line->AddList("stop-token-ids", &stop_token_ids, "Ids that end the output");
  line->Add("ignore-eos", &ignore_eos, "Go on past the model's end token");
  line->Add("include-stop-str-in-output", &include_stop,
            "Keep what ended the output");
  line->Add("max-time", &max_time_seconds, "Seconds; ends with time_limit", 0,
            1e6);
  line->Group("Request");
  line->AddInt("logprobs", &logprobs,
               "Log probabilities of the output's tokens, with so many "
               "alternatives in --json",
               {0, 20});
  line->AddInt("prompt-logprobs", &prompt_logprobs,
               "Log probabilities of the prompt's tokens, with so many "
               "alternatives in --json; --max-tokens 0 for nothing else",
               {0, 20});
  line->Add("attention", &attention,
            "Layers whose attention weights come with every token; needs "
            "--json: all, mean (of all) or 0,3,5");
  line->Add("echo", &echo, "The prompt's text before the output");
  line->AddChoice("placement", &placement, {"auto", "split", "local"},
                  "Prefill on a prefill worker (split) or in place (local)");
  line->Add("bypass-prefix-cache", &bypass_prefix_cache,
            "Compute the whole prompt");
  line->Add("no-kv-cache", &no_kv_cache,
            "Compute the whole sequence again for every token");
  line->Add("cache-salt", &cache_salt, "Share prefixes only with this salt");
  line->Add("request-id", &request_id, "Your name for this request");
  line->Add("model", &model, "Served model; empty: the only one");
  line->Add("lora", &lora, "LoRA adapter of the workers, by name");
}

absl::Status SamplingFlags::FillLogitRules(
    v1::SamplingOptions* sampling) const {
  if (repetition_penalty) {
    sampling->set_repetition_penalty(static_cast<float>(*repetition_penalty));
  }
  if (presence_penalty) {
    sampling->set_presence_penalty(static_cast<float>(*presence_penalty));
  }
  if (frequency_penalty) {
    sampling->set_frequency_penalty(static_cast<float>(*frequency_penalty));
  }
  for (const std::string& word : bad_words) sampling->add_bad_words(word);
  for (const std::string& text : logit_bias) {
    if (!AddBias(text, sampling)) {
      return UsageError(absl::StrCat("--logit-bias: '", text,
                                     "' is not of the form ID=BIAS"));
    }
  }
  absl::Status status = AddIds("allowed-token-ids", allowed_token_ids,
                               sampling->mutable_allowed_token_ids());
  if (!status.ok()) return status;
  return AddIds("banned-token-ids", banned_token_ids,
                sampling->mutable_banned_token_ids());
}

absl::Status SamplingFlags::FillAttention(v1::OutputOptions* output) const {
  if (attention.empty()) return absl::OkStatus();
  v1::AttentionOptions* const asked = output->mutable_attention();
  if (attention == "all") return absl::OkStatus();
  if (attention == "mean") {
    asked->set_mean(true);
    return absl::OkStatus();
  }
  for (const std::string& text :
       std::vector<std::string>(absl::StrSplit(attention, ','))) {
    int32_t layer = 0;
    if (!absl::SimpleAtoi(text, &layer) || layer < 0) {
      return UsageError(absl::StrCat("--attention: '", attention,
                                     "' is not all, mean or a list of layers"));
    }
    asked->add_layers(layer);
  }
  return absl::OkStatus();
}

absl::Status SamplingFlags::FillBeam(v1::GenerateRequest* request) const {
  if (!beam_width) {
    if (!length_penalty && early_stopping == "false") return absl::OkStatus();
    return UsageError(
        absl::StrCat(length_penalty ? "--length-penalty" : "--early-stopping",
                     " is of a beam search: give --beam-width as well"));
  }
  v1::BeamOptions* const beam = request->mutable_beam();
  beam->set_width(static_cast<int32_t>(*beam_width));
  if (length_penalty) {
    beam->set_length_penalty(static_cast<float>(*length_penalty));
  }
  beam->set_early_stopping(early_stopping == "true" ? v1::EARLY_STOPPING_TRUE
                           : early_stopping == "never"
                               ? v1::EARLY_STOPPING_NEVER
                               : v1::EARLY_STOPPING_FALSE);
  return absl::OkStatus();
}

absl::Status SamplingFlags::FillStructured(v1::GenerateRequest* request) const {
  const struct {
    const char* flag;
    bool set;
  } kFlags[] = {
      {"--json-schema", !json_schema.empty()},
      {"--json-schema-file", !json_schema_file.empty()},
      {"--json-object", json_object},
      {"--regex", !regex.empty()},
      {"--grammar", !grammar.empty()},
      {"--grammar-file", !grammar_file.empty()},
      {"--choice", !choice.empty()},
      {"--structural-tag", !structural_tag.empty()},
  };
  const char* first = nullptr;
  for (const auto& [flag, set] : kFlags) {
    if (!set) continue;
    if (first != nullptr) {
      return UsageError(
          absl::StrCat(first, " and ", flag, " exclude each other"));
    }
    first = flag;
  }
  if (first == nullptr) return absl::OkStatus();
  v1::StructuredOptions* const structured = request->mutable_structured();
  const auto read = [](const char* flag, const std::string& path,
                       std::string* text) {
    absl::StatusOr<std::string> content = ReadFile(path);
    if (!content.ok()) return content.status();
    *text = *std::move(content);
    return CheckUtf8(flag, *text);
  };
  if (!json_schema.empty()) structured->set_json_schema(json_schema);
  if (json_object) structured->set_json_object(true);
  if (!regex.empty()) structured->set_regex(regex);
  if (!grammar.empty()) structured->set_grammar(grammar);
  if (!structural_tag.empty()) structured->set_structural_tag(structural_tag);
  for (const std::string& value : choice) {
    structured->mutable_choice()->add_values(value);
  }
  if (!json_schema_file.empty()) {
    return read("--json-schema-file", json_schema_file,
                structured->mutable_json_schema());
  }
  if (!grammar_file.empty()) {
    return read("--grammar-file", grammar_file, structured->mutable_grammar());
  }
  return absl::OkStatus();
}

absl::Status SamplingFlags::Fill(v1::GenerateRequest* request) const {
  if (absl::Status status = CheckTexts(*this); !status.ok()) return status;
  v1::SamplingOptions* const sampling = request->mutable_sampling();
  if (temperature) sampling->set_temperature(static_cast<float>(*temperature));
  if (top_p) sampling->set_top_p(static_cast<float>(*top_p));
  if (min_p) sampling->set_min_p(static_cast<float>(*min_p));
  if (typical_p) sampling->set_typical_p(static_cast<float>(*typical_p));
  if (top_k) sampling->set_top_k(static_cast<int32_t>(*top_k));
  if (n) sampling->set_n(static_cast<int32_t>(*n));
  if (best_of) sampling->set_best_of(static_cast<int32_t>(*best_of));
  if (seed) sampling->set_seed(static_cast<uint64_t>(*seed));
  if (absl::Status status = FillLogitRules(sampling); !status.ok()) {
    return status;
  }
  if (absl::Status status = FillBeam(request); !status.ok()) return status;
  if (absl::Status status = FillStructured(request); !status.ok()) {
    return status;
  }
  v1::StoppingOptions* const stopping = request->mutable_stopping();
  if (max_tokens) stopping->set_max_tokens(static_cast<int32_t>(*max_tokens));
  if (min_tokens) stopping->set_min_tokens(static_cast<int32_t>(*min_tokens));
  for (const std::string& text : stop) stopping->add_stop(text);
  if (absl::Status status = AddIds("stop-token-ids", stop_token_ids,
                                   stopping->mutable_stop_token_ids());
      !status.ok()) {
    return status;
  }
  if (ignore_eos) stopping->set_ignore_eos(true);
  if (include_stop) stopping->set_include_stop_str_in_output(true);
  if (max_time_seconds) {
    const int64_t nanos = static_cast<int64_t>(*max_time_seconds * 1e9);
    stopping->mutable_max_time()->set_seconds(nanos / 1'000'000'000);
    stopping->mutable_max_time()->set_nanos(
        static_cast<int32_t>(nanos % 1'000'000'000));
  }
  if (absl::Status status = FillAttention(request->mutable_output());
      !status.ok()) {
    return status;
  }
  if (echo) request->mutable_output()->set_echo(true);
  if (logprobs) {
    request->mutable_output()->set_logprobs(static_cast<int32_t>(*logprobs));
  }
  if (prompt_logprobs) {
    request->mutable_output()->set_prompt_logprobs(
        static_cast<int32_t>(*prompt_logprobs));
  }
  request->set_placement(placement == "split"   ? v1::PLACEMENT_SPLIT
                         : placement == "local" ? v1::PLACEMENT_LOCAL
                                                : v1::PLACEMENT_AUTO);
  if (bypass_prefix_cache) {
    request->mutable_cache()->set_bypass_prefix_cache(true);
  }
  if (no_kv_cache) request->mutable_cache()->set_no_kv_cache(true);
  if (!cache_salt.empty()) {
    request->mutable_cache()->set_cache_salt(cache_salt);
  }
  request->set_request_id(request_id);
  request->set_model(model);
  request->set_adapter(lora);
  return absl::OkStatus();
}

}  // namespace tandem::cli
