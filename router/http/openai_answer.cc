// SPDX-License-Identifier: Apache-2.0
#include "router/http/openai_answer.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "router/core/work.h"
#include "router/http/json_fields.h"
#include "router/http/openai_logprobs.h"
#include "router/http/openai_tools.h"
#include "router/http/openai_usage.h"
#include "router/text/tool_call_output.h"

namespace tandem::router {
namespace {

using nlohmann::json;

std::string Event(const json& value) {
  return absl::StrCat("data: ", DumpJson(value), "\n\n");
}

// Before the closing brace of an object; `value` is JSON.
void AddMember(const std::string& name, const std::string& value,
               std::string* object) {
  object->pop_back();
  absl::StrAppend(object, object->size() > 1 ? "," : "", "\"", name,
                  "\":", value, "}");
}

constexpr char kDone[] = "data: [DONE]\n\n";

const char* ReasonName(v1::FinishReason reason) {
  switch (reason) {
    case v1::FINISH_REASON_STOP:
      return "stop";
    case v1::FINISH_REASON_LENGTH:
    case v1::FINISH_REASON_TIME_LIMIT:
      return "length";
    case v1::FINISH_REASON_TOOL_CALLS:
      return "tool_calls";
    default:
      return "abort";  // vLLM's word, also for what an operator ended
  }
}

// One list for each token of the delta: {layer, weights} for each layer asked
// for, or one with layer -1 for their mean.
json AttentionJson(const v1::GenerateDelta& delta) {
  constexpr double kDigits = 1e6;  // six decimals
  json tokens = json::array();
  for (const v1::TokenAttention& token : delta.attention()) {
    json layers = json::array();
    for (const v1::AttentionWeights& layer : token.layers()) {
      json weights = json::array();
      for (const float weight : layer.weights()) {
        weights.push_back(std::round(static_cast<double>(weight) * kDigits) /
                          kDigits);
      }
      layers.push_back(
          {{"layer", layer.layer()}, {"weights", std::move(weights)}});
    }
    tokens.push_back(std::move(layers));
  }
  return tokens;
}

// Reasoning and content, as far as there is any; of neither, empty content.
json ContentDelta(const v1::GenerateDelta& delta) {
  json message = json::object();
  if (!delta.reasoning_content().empty()) {
    message["reasoning_content"] = delta.reasoning_content();
  }
  if (!delta.text().empty() || message.empty()) {
    message["content"] = delta.text();
  }
  return message;
}

}  // namespace

OpenAiAnswer::OpenAiAnswer(const OpenAiRequest& request, std::string model,
                           int64_t created)
    : chat_(request.chat),
      stream_(request.stream),
      include_usage_(request.include_usage),
      continuous_usage_(request.continuous_usage_stats),
      work_(request.work),
      return_token_ids_(request.return_token_ids),
      wants_logprobs_(request.prompts.front().output().has_logprobs()),
      prompt_logprobs_(request.prompt_logprobs),
      echo_logprobs_(request.echo_logprobs),
      echoed_(request.echoed),
      names_(request.names),
      model_(std::move(model)),
      created_(created),
      prompts_(request.prompts.size()) {
  for (size_t i = 0; i < prompts_.size(); ++i) {
    prompts_[i].sequences = std::max(1, request.prompts[i].sampling().n());
    bytes_ += echoed_.size() * static_cast<size_t>(prompts_[i].sequences);
  }
}

std::string OpenAiAnswer::Add(int prompt, const v1::GenerateResponse& event) {
  if (id_.empty() && !event.request_id().empty()) {
    absl::string_view id = event.request_id();
    // Each of several prompts is a request of its own, ID-0, ID-1, ...
    if (prompts_.size() > 1)
      absl::ConsumeSuffix(&id, absl::StrCat("-", prompt));
    id_ = absl::StrCat(chat_ ? "chatcmpl-" : "cmpl-", id);
  }
  switch (event.event_case()) {
    case v1::GenerateResponse::kStarted:
      return OnStarted(prompt, event.started());
    case v1::GenerateResponse::kDelta:
      return OnDelta(prompt, event.delta());
    case v1::GenerateResponse::kPromptLogprobs:
      return OnPromptLogprobs(prompt, event.prompt_logprobs());
    case v1::GenerateResponse::kFinished:
      return OnFinished(prompt, event.finished());
    case v1::GenerateResponse::kDone:
      prompts_[static_cast<size_t>(prompt)].done = event.done();
      return "";
    case v1::GenerateResponse::EVENT_NOT_SET:
      return "";
  }
  return "";
}

std::string OpenAiAnswer::OnStarted(int prompt,
                                    const v1::GenerateStarted& started) {
  Prompt& state = prompts_[static_cast<size_t>(prompt)];
  state.prompt_tokens = started.prompt_tokens();
  state.cached_tokens = started.cached_tokens();
  state.seed = started.sampling().seed();
  state.system_fingerprint = started.system_fingerprint();
  if (return_token_ids_) state.token_ids = started.prompt_token_ids();
  if (!stream_ || (!chat_ && !return_token_ids_)) return "";
  std::string events;
  for (int i = 0; i < state.sequences; ++i) {
    json first = {{"logprobs", nullptr}, {"finish_reason", nullptr}};
    if (chat_) {
      first["delta"] = {{"role", "assistant"}, {"content", ""}};
    } else {
      first["text"] = "";
      first["prompt_token_ids"] = state.token_ids;
    }
    events += Chunk(prompt, i, std::move(first), /*first=*/true);
    if (echoed_.empty()) continue;
    events += Chunk(prompt, i,
                    {{"delta", {{"content", echoed_}}},
                     {"logprobs", nullptr},
                     {"finish_reason", nullptr}});
  }
  return events;
}

std::string OpenAiAnswer::OnDelta(int prompt, const v1::GenerateDelta& delta) {
  Choice& choice = At(prompt, delta.index());
  choice.tokens += delta.token_ids_size();
  choice.reasoning_tokens =
      std::max(choice.reasoning_tokens, delta.reasoning_tokens());
  if (delta.has_work()) choice.work = delta.work();
  json logprobs = wants_logprobs_ ? Logprobs(&choice, delta) : json();
  if (!stream_) {
    Gather(&choice, delta, logprobs);
    return "";
  }
  json chunk = {{"logprobs", std::move(logprobs)}, {"finish_reason", nullptr}};
  if (chat_) {
    chunk["delta"] = ContentDelta(delta);
  } else {
    chunk["text"] = delta.text();
  }
  if (return_token_ids_) chunk["token_ids"] = delta.token_ids();
  if (!delta.attention().empty()) {
    chunk["attention"] = AttentionJson(delta);
  }
  // Chunks of calls have one piece each, which SDKs count on; the first chunk
  // tells of all tokens.
  std::string events;
  const bool has_calls = chat_ && !delta.tool_calls().empty();
  const bool has_text =
      !delta.text().empty() || !delta.reasoning_content().empty();
  if (!has_calls || has_text) {
    events = Chunk(prompt, delta.index(), std::move(chunk));
    chunk = {{"logprobs", nullptr}, {"finish_reason", nullptr}};
  }
  for (const v1::ToolCallDelta& call : delta.tool_calls()) {
    if (!has_calls) break;
    chunk["delta"] = {{"tool_calls", {ToolCallDeltaJson(call)}}};
    events += Chunk(prompt, delta.index(), std::move(chunk));
    chunk = {{"logprobs", nullptr}, {"finish_reason", nullptr}};
  }
  return events;
}

// As text: hundreds of thousands of records would be slow to make and to free
// at the end.
void OpenAiAnswer::Gather(Choice* choice, const v1::GenerateDelta& delta,
                          const json& logprobs) {
  choice->text += delta.text();
  choice->reasoning += delta.reasoning_content();
  bytes_ += delta.text().size() + delta.reasoning_content().size();
  JoinToolCalls(delta.tool_calls(), &choice->tool_calls);
  bytes_ += delta.tool_calls().empty() ? 0 : delta.ByteSizeLong();
  if (return_token_ids_) {
    Append(DumpJson(json(delta.token_ids())), &choice->token_ids);
  }
  if (!logprobs.is_null()) AppendLogprobs(logprobs, choice);
}

void OpenAiAnswer::Append(const std::string& array, std::string* list) {
  if (array.size() <= 2) return;  // "[]"
  if (!list->empty()) *list += ',';
  list->append(array, 1, array.size() - 2);
  bytes_ += array.size();
}

void OpenAiAnswer::AppendLogprobs(const json& logprobs, Choice* choice) {
  for (const auto& [name, list] : logprobs.items()) {
    Append(DumpJson(list), &choice->logprobs[name]);
  }
}

// Where they are echoed each choice has them, as it has the prompt's text.
std::string OpenAiAnswer::OnPromptLogprobs(int prompt,
                                           const v1::PromptLogprobs& scores) {
  Prompt& state = prompts_[static_cast<size_t>(prompt)];
  if (prompt_logprobs_) {
    json records = json::array();
    for (const v1::TokenLogprob& token : scores.tokens()) {
      records.push_back(PromptLogprob(token));
    }
    const size_t before = bytes_;
    Append(DumpJson(records), &state.logprobs);
    if (!chat_) {  // each choice has them
      bytes_ += (bytes_ - before) * static_cast<size_t>(state.sequences - 1);
    }
  }
  if (!echo_logprobs_) return "";
  // Every choice is here: nothing of its own comes before all of these.
  CharacterCount scored = At(prompt, 0).scored;
  const json logprobs = CompletionLogprobs(scores.tokens(), &scored);
  std::map<std::string, std::string> lists;
  for (const auto& [name, list] : logprobs.items()) {
    lists[name] = DumpJson(list);
  }
  std::string events;
  for (int i = 0; i < state.sequences; ++i) {
    Choice& choice = At(prompt, i);
    choice.scored = scored;
    if (stream_) {
      events += Chunk(
          prompt, i,
          {{"text", ""}, {"logprobs", logprobs}, {"finish_reason", nullptr}});
      continue;
    }
    for (const auto& [name, list] : lists) Append(list, &choice.logprobs[name]);
  }
  return events;
}

std::string OpenAiAnswer::OnFinished(int prompt,
                                     const v1::GenerateFinished& finished) {
  Choice& choice = At(prompt, finished.index());
  choice.finish_reason = ReasonName(finished.finish_reason());
  if (finished.has_stop_string()) {
    choice.stop_reason = finished.stop_string();
  } else if (finished.has_stop_token_id()) {
    choice.stop_reason = finished.stop_token_id();
  }
  if (!stream_) {
    // Without a token there are no records, but their lists, which clients
    // go through.
    if (wants_logprobs_) AppendLogprobs(Logprobs(&choice, {}), &choice);
    return "";
  }
  json chunk = {{"logprobs", nullptr},
                {"finish_reason", choice.finish_reason},
                {"stop_reason", choice.stop_reason}};
  if (chat_) {
    chunk["delta"] = json::object();
  } else {
    chunk["text"] = "";
  }
  return Chunk(prompt, finished.index(), std::move(chunk));
}

std::string OpenAiAnswer::Finish() {
  if (stream_) {
    std::string events;
    if (include_usage_) {
      json last = Head(/*chunk=*/true, Fingerprint());
      last["choices"] = json::array();
      last["usage"] = UsageOfAll();
      AddServing(&last);
      events = Event(last);
    }
    return events + kDone;
  }
  json head = Head(/*chunk=*/false, Fingerprint());
  head["usage"] = UsageOfAll();
  AddServing(&head);
  if (return_token_ids_ && chat_) {
    head["prompt_token_ids"] = prompts_.front().token_ids;
  }
  std::string choices;
  for (size_t p = 0; p < prompts_.size(); ++p) {
    for (int i = 0; i < prompts_[p].sequences; ++i) {
      if (!choices.empty()) choices += ',';
      choices += WholeChoice(static_cast<int>(p), i);
    }
  }
  std::string body = DumpJson(head);
  if (prompt_logprobs_ && chat_) {
    AddMember("prompt_logprobs",
              absl::StrCat("[", prompts_.front().logprobs, "]"), &body);
  }
  AddMember("choices", absl::StrCat("[", choices, "]"), &body);
  return body;
}

std::string OpenAiAnswer::Fail(const absl::Status& status) const {
  return Event(ErrorJson(status, names_)) + kDone;
}

void OpenAiAnswer::AddServing(json* answer) const {
  const v1::GenerateDone& done = prompts_.front().done;
  (*answer)["timings"] = TimingsJson(done);
  if (std::any_of(prompts_.begin(), prompts_.end(), [](const Prompt& prompt) {
        return prompt.done.not_reproducible();
      })) {
    (*answer)["reproducible"] = false;
  }
  // Of several prompts nobody could tell whose it is.
  if (prompts_.size() > 1) return;
  (*answer)["seed"] = prompts_.front().seed;
  if (done.has_work()) (*answer)["work"] = WorkJson(done.work());
}

OpenAiAnswer::Choice& OpenAiAnswer::At(int prompt, int index) {
  std::vector<Choice>& choices = prompts_[static_cast<size_t>(prompt)].choices;
  if (static_cast<int>(choices.size()) <= index) {
    choices.resize(static_cast<size_t>(index) + 1);
  }
  return choices[static_cast<size_t>(index)];
}

int OpenAiAnswer::Index(int prompt, int index) const {
  return prompt * prompts_.front().sequences + index;
}

json OpenAiAnswer::Logprobs(Choice* choice, const v1::GenerateDelta& delta) {
  if (chat_) {
    json content = json::array();
    for (const v1::TokenLogprob& token : delta.logprobs()) {
      json record = ChatLogprob(token.token(), token.logprob());
      json top = json::array();
      for (const v1::TokenAlternative& other : token.top()) {
        top.push_back(ChatLogprob(other.token(), other.logprob()));
      }
      record["top_logprobs"] = std::move(top);
      content.push_back(std::move(record));
    }
    return {{"content", std::move(content)}};
  }
  return CompletionLogprobs(delta.logprobs(), &choice->scored);
}

std::string OpenAiAnswer::Chunk(int prompt, int index, json choice,
                                bool first) {
  const std::string& fingerprint =
      prompts_[static_cast<size_t>(prompt)].system_fingerprint;
  json chunk =
      Head(/*chunk=*/true, fingerprint.empty() ? json() : json(fingerprint));
  if (first && chat_ && return_token_ids_) {
    chunk["prompt_token_ids"] = prompts_[static_cast<size_t>(prompt)].token_ids;
  }
  if (work_) chunk["work"] = WorkSoFar();
  choice["index"] = Index(prompt, index);
  chunk["choices"] = json::array({std::move(choice)});
  if (continuous_usage_) {
    chunk["usage"] = UsageSoFar();
  } else if (include_usage_) {
    chunk["usage"] = nullptr;
  }
  return Event(chunk);
}

json OpenAiAnswer::Head(bool chunk, json fingerprint) const {
  return {{"id", id_},
          {"object", !chat_  ? "text_completion"
                     : chunk ? "chat.completion.chunk"
                             : "chat.completion"},
          {"created", created_},
          {"model", model_},
          {"system_fingerprint", std::move(fingerprint)}};
}

json OpenAiAnswer::Fingerprint() const {
  json of_all;
  for (const Prompt& prompt : prompts_) {
    if (prompt.system_fingerprint.empty()) continue;
    if (!of_all.is_null() && of_all != prompt.system_fingerprint) return json();
    of_all = prompt.system_fingerprint;
  }
  return of_all;
}

std::string OpenAiAnswer::WholeChoice(int prompt, int index) const {
  const Prompt& state = prompts_[static_cast<size_t>(prompt)];
  static const Choice kEmpty;
  const bool there = index < static_cast<int>(state.choices.size());
  const Choice& choice =
      there ? state.choices[static_cast<size_t>(index)] : kEmpty;
  json whole = {{"index", Index(prompt, index)},
                {"finish_reason", choice.finish_reason},
                {"stop_reason", choice.stop_reason}};
  if (chat_) {
    const std::string content = echoed_ + choice.text;
    whole["message"] = {
        {"role", "assistant"}, {"content", content}, {"refusal", nullptr}};
    json& message = whole["message"];
    if (!choice.reasoning.empty()) {
      message["reasoning_content"] = choice.reasoning;
      if (content.empty()) message["content"] = nullptr;
    }
    if (!choice.tool_calls.empty()) {
      message["tool_calls"] = ToolCallsJson(choice.tool_calls);
      if (content.empty()) message["content"] = nullptr;
    }
  } else {
    whole["text"] = choice.text;
  }
  if (return_token_ids_ && !chat_) {
    whole["prompt_token_ids"] = state.token_ids;
  }
  if (!wants_logprobs_) whole["logprobs"] = nullptr;
  std::string text = DumpJson(whole);
  if (return_token_ids_) {
    AddMember("token_ids", absl::StrCat("[", choice.token_ids, "]"), &text);
  }
  if (wants_logprobs_) {
    std::string lists = "{}";
    for (const auto& [name, list] : choice.logprobs) {
      AddMember(name, absl::StrCat("[", list, "]"), &lists);
    }
    AddMember("logprobs", lists, &text);
  }
  if (prompt_logprobs_ && !chat_) {
    AddMember("prompt_logprobs", absl::StrCat("[", state.logprobs, "]"), &text);
  }
  return text;
}

json OpenAiAnswer::UsageSoFar() const {
  int prompt = 0;
  int cached = 0;
  int completion = 0;
  int reasoning = 0;
  for (const Prompt& state : prompts_) {
    prompt += state.prompt_tokens;
    cached += state.cached_tokens;
    for (const Choice& choice : state.choices) {
      completion += choice.tokens;
      reasoning += choice.reasoning_tokens;
    }
  }
  v1::Usage usage;
  usage.set_prompt_tokens(prompt);
  usage.set_cached_tokens(cached);
  usage.set_completion_tokens(completion);
  usage.set_reasoning_tokens(reasoning);
  return UsageJson(usage);
}

json OpenAiAnswer::WorkSoFar() const {
  v1::Work sum;
  for (const Prompt& state : prompts_) {
    for (const Choice& choice : state.choices) AddWork(choice.work, &sum);
  }
  return sum.steps() > 0 ? WorkJson(sum) : json();
}

json OpenAiAnswer::UsageOfAll() const {
  v1::Usage sum;
  for (const Prompt& state : prompts_) {
    const v1::Usage& usage = state.done.usage();
    sum.set_prompt_tokens(sum.prompt_tokens() + usage.prompt_tokens());
    sum.set_completion_tokens(sum.completion_tokens() +
                              usage.completion_tokens());
    sum.set_cached_tokens(sum.cached_tokens() + usage.cached_tokens());
    sum.set_reasoning_tokens(sum.reasoning_tokens() + usage.reasoning_tokens());
    sum.set_accepted_prediction_tokens(sum.accepted_prediction_tokens() +
                                       usage.accepted_prediction_tokens());
    sum.set_rejected_prediction_tokens(sum.rejected_prediction_tokens() +
                                       usage.rejected_prediction_tokens());
  }
  return UsageJson(sum);
}

}  // namespace tandem::router
