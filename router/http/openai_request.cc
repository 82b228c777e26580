// SPDX-License-Identifier: Apache-2.0
#include "router/http/openai_request.h"

#include <google/protobuf/util/json_util.h>

#include <charconv>
#include <cmath>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/checkpoint/json.h"
#include "router/http/json_fields.h"
#include "router/http/openai_structured.h"
#include "router/http/openai_tools.h"
#include "router/intake/chat_json.h"
#include "router/validate/errors.h"

namespace tandem::router {
namespace {

using nlohmann::json;

constexpr size_t kMaxOptionBytes = 1 << 20;
constexpr double kMaxTimeSeconds = 3600;

absl::StatusOr<json> ParseBody(std::string_view body) {
  absl::StatusOr<json> parsed = engine::ParseJson("the body", body);
  if (!parsed.ok()) {
    return MakeError(absl::StatusCode::kInvalidArgument, "JSON_INVALID",
                     std::string(parsed.status().message()));
  }
  if (!parsed->is_object()) {
    return MakeError(absl::StatusCode::kInvalidArgument, "JSON_INVALID",
                     "the body must be a JSON object");
  }
  return parsed;
}

// {"50256": -100}
void ReadLogitBias(JsonFields* fields, v1::SamplingOptions* sampling) {
  const json* const biases = fields->Object("logit_bias");
  if (biases == nullptr) return;
  for (const auto& [key, value] : biases->items()) {
    uint32_t id = 0;
    const auto [end, error] =
        std::from_chars(key.data(), key.data() + key.size(), id);
    if (error != std::errc() || end != key.data() + key.size() ||
        !value.is_number()) {
      return fields->Refuse("logit_bias", *biases,
                            "an object of token ids to numbers is needed");
    }
    (*sampling->mutable_logit_bias())[id] = value.get<float>();
  }
}

void ReadSampling(JsonFields* fields, v1::SamplingOptions* sampling) {
  const auto number = [&](const char* name, auto set) {
    if (const auto value = fields->Number(name)) {
      (sampling->*set)(static_cast<float>(*value));
    }
  };
  number("temperature", &v1::SamplingOptions::set_temperature);
  number("top_p", &v1::SamplingOptions::set_top_p);
  number("min_p", &v1::SamplingOptions::set_min_p);
  number("typical_p", &v1::SamplingOptions::set_typical_p);
  number("frequency_penalty", &v1::SamplingOptions::set_frequency_penalty);
  number("presence_penalty", &v1::SamplingOptions::set_presence_penalty);
  number("repetition_penalty", &v1::SamplingOptions::set_repetition_penalty);
  if (const auto k = fields->Int32("top_k")) sampling->set_top_k(*k);
  if (const auto n = fields->Int32("n")) sampling->set_n(*n);
  if (const auto n = fields->Int32("best_of")) sampling->set_best_of(*n);
  if (const auto seed = fields->Bits("seed")) sampling->set_seed(*seed);
  ReadLogitBias(fields, sampling);
  constexpr char kAllowed[] = "allowed_token_ids";
  for (uint32_t id : fields->TokenIds(kAllowed)) {
    sampling->add_allowed_token_ids(id);
  }
  // Whoever worked out that there is none does not want all of them.
  if (const json* given = fields->Array(kAllowed);
      given != nullptr && given->empty()) {
    fields->Refuse(kAllowed, *given, "at least one token id is needed");
  }
  for (uint32_t id : fields->TokenIds("banned_token_ids")) {
    sampling->add_banned_token_ids(id);
  }
  for (std::string& word : fields->Strings("bad_words")) {
    sampling->add_bad_words(std::move(word));
  }
}

// In seconds, as transformers has it.
void ReadMaxTime(JsonFields* fields, v1::StoppingOptions* stopping) {
  const std::optional<double> seconds = fields->Number("max_time");
  if (!seconds) return;
  if (!(*seconds > 0 && *seconds <= kMaxTimeSeconds)) {
    return fields->Refuse("max_time", *seconds,
                          absl::StrCat("must be above 0 and at most ",
                                       kMaxTimeSeconds, " seconds"));
  }
  const auto nanos = static_cast<int64_t>(std::ceil(*seconds * 1e9));
  stopping->mutable_max_time()->set_seconds(nanos / 1'000'000'000);
  stopping->mutable_max_time()->set_nanos(
      static_cast<int32_t>(nanos % 1'000'000'000));
}

void ReadStopping(JsonFields* fields, v1::StoppingOptions* stopping,
                  FieldNames* names) {
  // The later name of the two wins, as with OpenAI.
  for (const char* name : {"max_tokens", "max_completion_tokens"}) {
    if (const auto n = fields->Int32(name)) {
      stopping->set_max_tokens(*n);
      (*names)["stopping.max_tokens"] = name;
    }
  }
  ReadMaxTime(fields, stopping);
  if (const auto n = fields->Int32("min_tokens")) stopping->set_min_tokens(*n);
  for (std::string& stop : fields->Strings("stop")) {
    stopping->add_stop(std::move(stop));
  }
  for (uint32_t id : fields->TokenIds("stop_token_ids")) {
    stopping->add_stop_token_ids(id);
  }
  if (const auto on = fields->Bool("ignore_eos")) stopping->set_ignore_eos(*on);
  if (const auto on = fields->Bool("include_stop_str_in_output")) {
    stopping->set_include_stop_str_in_output(*on);
  }
}

// Of a beam search alone. Clients that send their defaults with every request
// may do so.
void RefuseWithoutBeams(JsonFields* fields) {
  constexpr char kNeeds[] = "needs use_beam_search = true";
  if (fields->Number("length_penalty").value_or(1) != 1) {
    fields->Refuse("length_penalty", *fields->Find("length_penalty"), kNeeds);
  }
  const json* const early = fields->Find("early_stopping");
  if (early != nullptr && *early != false) {
    fields->Refuse("early_stopping", *early, kNeeds);
  }
}

// vLLM's: as many beams as sequences, unless best_of says how many.
void ReadBeam(JsonFields* fields, v1::GenerateRequest* request,
              FieldNames* names) {
  if (!fields->Bool("use_beam_search").value_or(false)) {
    return RefuseWithoutBeams(fields);
  }
  (*names)["beam"] = "use_beam_search";
  v1::BeamOptions* const beam = request->mutable_beam();
  v1::SamplingOptions* const sampling = request->mutable_sampling();
  const int n = sampling->has_n() ? sampling->n() : 1;
  beam->set_width(sampling->has_best_of() ? sampling->best_of() : n);
  (*names)["beam.width"] = sampling->has_best_of() ? "best_of" : "n";
  sampling->clear_best_of();
  if (const auto penalty = fields->Number("length_penalty")) {
    beam->set_length_penalty(static_cast<float>(*penalty));
  }
  const json* const early = fields->Find("early_stopping");
  if (early == nullptr) return;
  if (early->is_boolean()) {
    beam->set_early_stopping(early->get<bool>() ? v1::EARLY_STOPPING_TRUE
                                                : v1::EARLY_STOPPING_FALSE);
  } else if (*early == "never") {
    beam->set_early_stopping(v1::EARLY_STOPPING_NEVER);
  } else {
    fields->Refuse("early_stopping", *early, "true, false or \"never\"");
  }
}

// Tandem's own: true (all layers), "mean" (of all), or {layers, mean}.
void ReadAttention(JsonFields* fields, bool stream, v1::OutputOptions* output) {
  const json* const asked = fields->Find("attention");
  if (asked == nullptr || *asked == false) return;
  if (!stream) {
    return fields->Refuse("attention", *asked,
                          "only together with stream = true");
  }
  v1::AttentionOptions* const attention = output->mutable_attention();
  if (*asked == true) return;
  if (*asked == "mean") return attention->set_mean(true);
  if (!asked->is_object()) {
    return fields->Refuse(
        "attention", *asked,
        "true, false, \"mean\" or an object with layers and mean");
  }
  JsonFields inner(*asked, "attention.");
  if (const auto on = inner.Bool("mean")) attention->set_mean(*on);
  for (const uint32_t layer : inner.TokenIds("layers")) {
    attention->add_layers(static_cast<int32_t>(layer));
  }
  fields->Keep(inner.status());
}

// Tandem's own: who computes, and what of the caches it uses.
void ReadComputing(JsonFields* fields, v1::GenerateRequest* base) {
  if (const auto on = fields->Bool("bypass_prefix_cache")) {
    base->mutable_cache()->set_bypass_prefix_cache(*on);
  }
  if (const auto on = fields->Bool("no_kv_cache")) {
    base->mutable_cache()->set_no_kv_cache(*on);
  }
  const std::optional<std::string> placement = fields->String("placement");
  if (!placement || *placement == "auto") return;
  if (*placement == "split") {
    base->set_placement(v1::PLACEMENT_SPLIT);
  } else if (*placement == "local") {
    base->set_placement(v1::PLACEMENT_LOCAL);
  } else {
    fields->Refuse("placement", *placement, "one of auto, split, local");
  }
}

// What both kinds of body share.
void ReadCommon(std::string_view body, JsonFields* fields,
                OpenAiRequest* request, v1::GenerateRequest* base) {
  if (auto model = fields->String("model")) base->set_model(*model);
  if (auto id = fields->String("request_id")) base->set_request_id(*id);
  if (const auto level = fields->Int32("priority")) base->set_priority(*level);
  if (auto salt = fields->String("cache_salt")) {
    base->mutable_cache()->set_cache_salt(*salt);
  }
  ReadSampling(fields, base->mutable_sampling());
  ReadBeam(fields, base, &request->names);
  ReadStopping(fields, base->mutable_stopping(), &request->names);
  const std::string constraint = ReadStructured(body, fields, base);
  if (!constraint.empty()) request->names["structured"] = constraint;
  v1::OutputOptions* const output = base->mutable_output();
  if (const auto on = fields->Bool("skip_special_tokens")) {
    output->set_skip_special_tokens(*on);
  }
  if (const auto n = fields->Int32("prompt_logprobs")) {
    output->set_prompt_logprobs(*n);
    request->prompt_logprobs = true;
  }
  if (const auto on = fields->Bool("echo")) output->set_echo(*on);
  if (const auto on = fields->Bool("add_special_tokens")) {
    base->set_add_special_tokens(*on);
  }
  request->work = fields->Bool("work").value_or(false);
  if (request->work) output->set_work(true);
  request->return_token_ids = fields->Bool("return_token_ids").value_or(false);
  if (request->return_token_ids) output->set_return_token_ids(true);

  ReadComputing(fields, base);
  for (const char* name : {"chat_template", "truncate_prompt_tokens"}) {
    if (const json* const value = fields->Find(name)) {
      fields->Refuse(name, *value, "is not offered");
    }
  }

  request->stream = fields->Bool("stream").value_or(false);
  ReadAttention(fields, request->stream, output);
  if (request->stream && request->prompt_logprobs) {
    fields->Refuse("prompt_logprobs", output->prompt_logprobs(),
                   "not together with stream = true; completions stream those "
                   "of echo with logprobs");
  }
  const json* const options = fields->Object("stream_options");
  if (options == nullptr) return;
  if (!request->stream) {
    return fields->Refuse("stream_options", *options,
                          "only together with stream = true");
  }
  JsonFields inner(*options, "stream_options.");
  request->include_usage = inner.Bool("include_usage").value_or(false);
  request->continuous_usage_stats =
      inner.Bool("continuous_usage_stats").value_or(false);
  if (request->continuous_usage_stats) {
    output->set_return_token_ids(true);  // to count them by
  }
  fields->Keep(inner.status());
}

// A string, a list of strings, a list of token ids, or a list of such lists.
void ReadPrompts(JsonFields* fields, const v1::GenerateRequest& base,
                 std::vector<v1::GenerateRequest>* prompts) {
  static const json kNone;
  const json* const prompt = fields->Find("prompt");
  constexpr char kForms[] =
      "a string, a list of token ids, or a list of either is needed";
  if (prompt == nullptr) return fields->Refuse("prompt", kNone, kForms);
  const auto add = [&](const json& one) {
    v1::GenerateRequest request = base;
    if (one.is_string()) {
      request.set_text(one.get<std::string>());
    } else if (one.is_array() && !one.empty()) {
      request.clear_add_special_tokens();  // used as they are
      const json holder = {{"prompt", one}};
      JsonFields ids(holder, "");
      for (uint32_t id : ids.TokenIds("prompt")) {
        request.mutable_token_ids()->add_ids(id);
      }
      fields->Keep(ids.status());
    } else {
      fields->Refuse("prompt", one, kForms);
    }
    prompts->push_back(std::move(request));
  };
  const bool many =
      prompt->is_array() && !prompt->empty() && !prompt->front().is_number();
  if (!many) return add(*prompt);
  if (prompt->size() > kMaxPrompts) {
    return fields->Refuse("prompt", prompt->size(),
                          absl::StrCat("at most ", kMaxPrompts, " prompts"));
  }
  // Each gets a copy of all options.
  if (base.ByteSizeLong() * prompt->size() > kMaxOptionBytes) {
    return fields->Refuse("prompt", prompt->size(),
                          "fewer prompts, or shorter lists in other fields");
  }
  for (const json& one : *prompt) add(one);
}

// Text, or a list of parts of which only text is known.
void ReadContent(JsonFields* fields, v1::ChatMessage* message) {
  const json* const content = fields->Find("content");
  if (content == nullptr) return;
  if (content->is_string()) {
    return message->set_content(content->get<std::string>());
  }
  if (!content->is_array()) {
    return fields->Refuse("content", *content,
                          "a string or a list of parts is needed");
  }
  static const json kNone;
  for (size_t i = 0; i < content->size(); ++i) {
    const json& part = (*content)[i];
    const std::string where = absl::StrCat("content[", i, "]");
    if (!part.is_object()) {
      return fields->Refuse(where, part, "an object is needed");
    }
    JsonFields inner(part, absl::StrCat(fields->prefix(), where, "."));
    const std::string type = inner.String("type").value_or("");
    const std::optional<std::string> text = inner.String("text");
    fields->Keep(inner.status());
    if (type != "text") {
      return fields->Refuse(where + ".type", type,
                            "only parts of type text are understood");
    }
    if (!text) {
      return fields->Refuse(where + ".text", kNone, "a string is needed");
    }
    message->add_parts()->set_text(*text);
  }
}

void ReadMessages(JsonFields* fields, v1::Chat* chat) {
  static const json kNone;
  const json* const messages = fields->Array("messages");
  if (messages == nullptr) {
    return fields->Refuse("messages", kNone, "a list of messages is needed");
  }
  for (size_t i = 0; i < messages->size(); ++i) {
    const json& item = (*messages)[i];
    const std::string where = absl::StrCat("messages[", i, "]");
    if (!item.is_object()) {
      return fields->Refuse(where, item, "an object is needed");
    }
    JsonFields inner(item, where + ".");
    v1::ChatMessage* const message = chat->add_messages();
    const std::string role = inner.String("role").value_or("");
    // OpenAI's later name for it, which templates do not know.
    message->set_role(role == "developer" ? "system" : role);
    ReadContent(&inner, message);
    if (auto name = inner.String("name")) message->set_name(*name);
    if (auto id = inner.String("tool_call_id")) message->set_tool_call_id(*id);
    for (const char* name : {"reasoning", "reasoning_content"}) {
      if (auto text = inner.String(name)) message->set_reasoning_content(*text);
    }
    ReadToolCalls(&inner, message);
    if (const json* const call = inner.Find("function_call")) {
      inner.Refuse("function_call", *call, "say it as tool_calls");
    }
    fields->Keep(inner.status());
  }
}

void ReadChat(std::string_view body, JsonFields* fields, v1::Chat* chat) {
  ReadMessages(fields, chat);
  ReadTools(body, fields, chat);
  if (const auto on = fields->Bool("add_generation_prompt")) {
    chat->set_add_generation_prompt(*on);
  }
  if (const auto on = fields->Bool("continue_final_message")) {
    chat->set_continue_final_message(*on);
  }
  if (const json* const extra = fields->Object("chat_template_kwargs")) {
    const auto status = google::protobuf::util::JsonStringToMessage(
        DumpJson(*extra), chat->mutable_chat_template_kwargs());
    if (!status.ok()) {
      fields->Refuse("chat_template_kwargs", *extra, "an object is needed");
    }
  }
  // A variable like those, of which templates know their own values.
  const auto effort = fields->String("reasoning_effort");
  if (!effort) return;
  auto& variables = *chat->mutable_chat_template_kwargs()->mutable_fields();
  if (variables.contains("reasoning_effort")) return;
  variables["reasoning_effort"].set_string_value(*effort);
}

// What `echo` is of a chat, as vLLM has it: the beginning of the answer that
// the client gave. Other messages, a system's among them, are none of the
// answer.
std::string BeginningOfAnswer(const v1::Chat& chat) {
  if (!chat.continue_final_message() || chat.messages().empty()) return "";
  const v1::ChatMessage& last = *chat.messages().rbegin();
  return last.role() == "assistant" ? ContentOf(last) : "";
}

FieldNames NamesInChats() {
  return {{"prompt", "messages"},
          {"text", "messages"},
          {"chat", "messages"},
          {"output.logprobs", "top_logprobs"}};
}

// What would change the answer, were it ignored.
void RefuseNotOffered(JsonFields* fields) {
  constexpr std::pair<const char*, const char*> kNames[] = {
      {"functions", "is not offered; take tools"},
      {"function_call", "is not offered; take tool_choice"},
      {"documents", "is not offered; put them into a message"}};
  for (const auto& [name, allowed] : kNames) {
    if (const json* const value = fields->Find(name)) {
      fields->Refuse(name, *value, allowed);
    }
  }
}

}  // namespace

absl::StatusOr<OpenAiRequest> ParseCompletion(std::string_view body) {
  const absl::StatusOr<json> parsed = ParseBody(body);
  if (!parsed.ok()) return parsed.status();
  JsonFields fields(*parsed, "");
  OpenAiRequest request;
  request.names = {{"text", "prompt"}, {"token_ids.ids", "prompt"}};
  v1::GenerateRequest base;
  ReadCommon(body, &fields, &request, &base);
  if (const auto n = fields.Int32("logprobs")) {
    base.mutable_output()->set_logprobs(*n);
    request.echo_logprobs = base.output().echo();
    if (request.echo_logprobs && base.has_beam()) {
      fields.Refuse("echo", true, "excludes use_beam_search with logprobs");
    }
  }
  // As vLLM has it.
  if (request.echo_logprobs && !request.prompt_logprobs) {
    base.mutable_output()->set_prompt_logprobs(base.output().logprobs());
  }
  if (base.stopping().has_max_tokens() && base.stopping().max_tokens() == 0 &&
      !base.output().has_prompt_logprobs()) {
    fields.Refuse("max_tokens", 0,
                  "at least 1 is needed without echo and logprobs, or "
                  "prompt_logprobs");
  }
  if (const auto suffix = fields.String("suffix"); suffix && !suffix->empty()) {
    fields.Refuse("suffix", *suffix, "is not offered");
  }
  ReadPrompts(&fields, base, &request.prompts);
  if (!fields.status().ok()) return fields.status();
  return request;
}

absl::StatusOr<OpenAiRequest> ParseChatCompletion(std::string_view body) {
  const absl::StatusOr<json> parsed = ParseBody(body);
  if (!parsed.ok()) return parsed.status();
  JsonFields fields(*parsed, "");
  OpenAiRequest request;
  request.chat = true;
  request.names = NamesInChats();
  v1::GenerateRequest base;
  ReadCommon(body, &fields, &request, &base);
  ReadChat(body, &fields, base.mutable_chat());
  RefuseNotOffered(&fields);
  if (base.output().echo()) request.echoed = BeginningOfAnswer(base.chat());
  base.mutable_output()->clear_echo();
  const std::optional<int32_t> top = fields.Int32("top_logprobs");
  if (fields.Bool("logprobs").value_or(false)) {
    base.mutable_output()->set_logprobs(top.value_or(0));
  } else if (top.value_or(0) != 0) {
    fields.Refuse("top_logprobs", *top, "only together with logprobs = true");
  }
  if (!fields.status().ok()) return fields.status();
  request.prompts.push_back(std::move(base));
  return request;
}

absl::StatusOr<v1::TokenizeRequest> ParseTokenize(std::string_view body) {
  const absl::StatusOr<json> parsed = ParseBody(body);
  if (!parsed.ok()) return parsed.status();
  JsonFields fields(*parsed, "");
  v1::TokenizeRequest request;
  request.set_model(fields.String("model").value_or(""));
  if (fields.Find("messages") != nullptr) {
    ReadChat(body, &fields, request.mutable_chat());
  } else if (const auto prompt = fields.String("prompt")) {
    request.set_text(*prompt);
  } else {
    fields.Refuse("prompt", nullptr, "one of prompt and messages is needed");
  }
  if (const auto on = fields.Bool("add_special_tokens")) {
    request.set_add_special_tokens(*on);
  }
  request.set_return_tokens(fields.Bool("return_token_strs").value_or(false));
  if (!fields.status().ok()) return fields.status();
  return request;
}

absl::StatusOr<v1::DetokenizeRequest> ParseDetokenize(std::string_view body) {
  const absl::StatusOr<json> parsed = ParseBody(body);
  if (!parsed.ok()) return parsed.status();
  JsonFields fields(*parsed, "");
  v1::DetokenizeRequest request;
  request.set_model(fields.String("model").value_or(""));
  if (fields.Find("tokens") == nullptr) {
    fields.Refuse("tokens", nullptr, "a list of token ids is needed");
  }
  for (uint32_t id : fields.TokenIds("tokens")) request.add_token_ids(id);
  request.set_skip_special_tokens(false);  // as vLLM does
  if (!fields.status().ok()) return fields.status();
  return request;
}

absl::StatusOr<v1::LoadLoraAdapterRequest> ParseLoadLoraAdapter(
    std::string_view body) {
  const absl::StatusOr<json> parsed = ParseBody(body);
  if (!parsed.ok()) return parsed.status();
  JsonFields fields(*parsed, "");
  v1::LoadLoraAdapterRequest request;
  request.set_lora_name(fields.String("lora_name").value_or(""));
  request.set_lora_path(fields.String("lora_path").value_or(""));
  if (fields.Bool("load_inplace").value_or(false)) {
    fields.Refuse("load_inplace", true,
                  "an adapter is unloaded before another takes its name");
  }
  if (!fields.status().ok()) return fields.status();
  return request;
}

absl::StatusOr<v1::UnloadLoraAdapterRequest> ParseUnloadLoraAdapter(
    std::string_view body) {
  const absl::StatusOr<json> parsed = ParseBody(body);
  if (!parsed.ok()) return parsed.status();
  JsonFields fields(*parsed, "");
  v1::UnloadLoraAdapterRequest request;
  request.set_lora_name(fields.String("lora_name").value_or(""));
  if (request.lora_name().empty()) {
    fields.Refuse("lora_name", request.lora_name(), "a name is needed");
  }
  if (!fields.status().ok()) return fields.status();
  return request;
}

}  // namespace tandem::router
