// SPDX-License-Identifier: Apache-2.0
#include "router/http/openai_answer.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/error.h"
#include "router/http/json_fields.h"
#include "router/http/openai_tools.h"
#include "router/tool_call_output.h"
#include "router/work.h"

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

struct ErrorKind {
  int code;
  const char* type;
};

ErrorKind KindOf(absl::StatusCode code) {
  switch (code) {
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kOutOfRange:
    case absl::StatusCode::kFailedPrecondition:
      return {400, "invalid_request_error"};
    case absl::StatusCode::kUnauthenticated:
      return {401, "authentication_error"};
    case absl::StatusCode::kPermissionDenied:
      return {403, "permission_error"};
    case absl::StatusCode::kNotFound:
      return {404, "not_found_error"};
    case absl::StatusCode::kAlreadyExists:
      return {409, "conflict_error"};
    case absl::StatusCode::kResourceExhausted:
      return {429, "rate_limit_error"};
    case absl::StatusCode::kCancelled:
      return {499, "cancelled_error"};
    case absl::StatusCode::kUnimplemented:
      return {501, "not_implemented_error"};
    case absl::StatusCode::kUnavailable:
      return {503, "service_unavailable_error"};
    case absl::StatusCode::kDeadlineExceeded:
      return {504, "timeout_error"};
    default:
      return {500, "server_error"};
  }
}

// Whether the same call can succeed at another time. SDKs ask again twice after
// 409, 429 and all that is 500 or more, which may be a whole generation each.
bool MayRetry(const absl::Status& status) {
  const std::string reason = ErrorReason(status);
  switch (status.code()) {
    case absl::StatusCode::kResourceExhausted:
      return RetryAfter(status).has_value();
    case absl::StatusCode::kDeadlineExceeded:
    case absl::StatusCode::kUnimplemented:
      return false;
    default:
      return reason != "SUSPECT";
  }
}

json ErrorBody(const absl::Status& status, const FieldNames& names) {
  const std::map<std::string, std::string> metadata = ErrorMetadata(status);
  const auto field = metadata.find("field");
  const std::string reason = ErrorReason(status);
  json error = {{"message", ClientsMessage(status, names)},
                {"type", KindOf(status.code()).type},
                {"param", nullptr},
                {"code", nullptr}};
  if (field != metadata.end()) {
    error["param"] = ClientsName(field->second, names);
  }
  // OpenAI's clients know these two by other names.
  if (reason == "RATE_LIMITED") {
    error["code"] = "rate_limit_exceeded";
  } else if (reason == "API_KEY_INVALID") {
    error["code"] = "invalid_api_key";
  } else if (!reason.empty()) {
    error["code"] = absl::AsciiStrToLower(reason);
  }
  return {{"error", std::move(error)}};
}

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

double Milliseconds(const google::protobuf::Duration& duration) {
  const double ms = static_cast<double>(duration.seconds()) * 1e3 +
                    static_cast<double>(duration.nanos()) / 1e6;
  return std::round(ms * 1e3) / 1e3;
}

int Characters(const std::string& utf8) {
  return static_cast<int>(
      std::count_if(utf8.begin(), utf8.end(), [](char byte) {
        return (static_cast<unsigned char>(byte) & 0xC0) != 0x80;
      }));
}

// Completions' lists. What has no rank, the prompt's first token, has no log
// probability. `offset` counts characters.
template <typename Tokens>
json CompletionLogprobs(const Tokens& records, int* offset) {
  json offsets = json::array();
  json tokens = json::array();
  json values = json::array();
  json tops = json::array();
  for (const v1::TokenLogprob& token : records) {
    offsets.push_back(*offset);
    *offset += Characters(token.token());
    tokens.push_back(token.token());
    if (token.rank() == 0) {
      values.push_back(nullptr);
      tops.push_back(nullptr);
      continue;
    }
    values.push_back(token.logprob());
    std::map<std::string, float> top = {{token.token(), token.logprob()}};
    // Tokens of one text: the more probable one, so that it is seen that the
    // chosen one was not the first.
    for (const v1::TokenAlternative& other : token.top()) {
      float& logprob =
          top.emplace(other.token(), other.logprob()).first->second;
      logprob = std::max(logprob, other.logprob());
    }
    tops.push_back(std::move(top));
  }
  return {{"text_offset", std::move(offsets)},
          {"tokens", std::move(tokens)},
          {"token_logprobs", std::move(values)},
          {"top_logprobs", std::move(tops)}};
}

// vLLM's: by id, the token's own and the most probable ones.
json PromptLogprob(const v1::TokenLogprob& token) {
  if (token.rank() == 0) return nullptr;
  const auto record = [](float logprob, int rank, const std::string& text) {
    return json{{"logprob", logprob}, {"rank", rank}, {"decoded_token", text}};
  };
  json records = json::object();
  int rank = 0;
  for (const v1::TokenAlternative& other : token.top()) {
    records[absl::StrCat(other.token_id())] =
        record(other.logprob(), ++rank, other.token());
  }
  records[absl::StrCat(token.token_id())] =
      record(token.logprob(), token.rank(), token.token());
  return records;
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

json ChatLogprob(const std::string& token, float logprob) {
  json bytes = json::array();
  for (const char byte : token)
    bytes.push_back(static_cast<unsigned char>(byte));
  return {{"token", token}, {"logprob", logprob}, {"bytes", std::move(bytes)}};
}

}  // namespace

json UsageJson(const v1::Usage& usage) {
  return {
      {"prompt_tokens", usage.prompt_tokens()},
      {"completion_tokens", usage.completion_tokens()},
      {"total_tokens", usage.prompt_tokens() + usage.completion_tokens()},
      {"prompt_tokens_details", {{"cached_tokens", usage.cached_tokens()}}},
      {"completion_tokens_details",
       {{"reasoning_tokens", usage.reasoning_tokens()},
        {"accepted_prediction_tokens", usage.accepted_prediction_tokens()},
        {"rejected_prediction_tokens", usage.rejected_prediction_tokens()}}}};
}

json TimingsJson(const v1::GenerateDone& done) {
  const v1::Timings& timings = done.timings();
  return {
      {"queue_ms", Milliseconds(timings.queue())},
      {"prefill_ms", Milliseconds(timings.prefill())},
      {"handoff_ms", Milliseconds(timings.handoff())},
      {"handoff_exposed_ms", Milliseconds(timings.handoff_exposed())},
      {"time_to_first_token_ms", Milliseconds(timings.time_to_first_token())},
      {"decode_ms", Milliseconds(timings.decode())},
      {"total_ms", Milliseconds(timings.total())},
      {"kv_bytes", timings.kv_bytes()},
      {"way", timings.way()},
      {"retries", timings.retries()},
      {"preemptions", timings.preemptions()},
      {"prefill_worker", done.workers().prefill()},
      {"decode_worker", done.workers().decode()}};
}

json WorkJson(const v1::Work& work) {
  return {{"steps", work.steps()},
          {"positions_computed", work.positions_computed()},
          {"kv_rows", work.kv_rows()},
          {"positions_attended", work.positions_attended()},
          {"query_key_pairs", work.query_key_pairs()},
          {"weight_bytes_read", work.weight_bytes_read()},
          {"kv_bytes_read", work.kv_bytes_read()},
          {"kv_bytes_written", work.kv_bytes_written()},
          {"matrix_flops", work.matrix_flops()},
          {"attention_flops", work.attention_flops()}};
}

HttpResponse ErrorResponse(const absl::Status& status,
                           const FieldNames& names) {
  HttpResponse response{.code = KindOf(status.code()).code,
                        .content_type = "application/json",
                        .body = DumpJson(ErrorBody(status, names))};
  if (ErrorReason(status) == "CONTENT_TYPE") response.code = 415;
  if (response.code == 401) {  // RFC 6750, section 3
    response.headers.emplace_back(
        "WWW-Authenticate",
        ErrorReason(status) == "API_KEY_INVALID"
            ? "Bearer realm=\"tandem\", error=\"invalid_token\""
            : "Bearer realm=\"tandem\"");
  }
  if (const auto wait = RetryAfter(status)) {
    const int64_t seconds = std::max<int64_t>(
        1, absl::ToInt64Seconds(absl::Ceil(*wait, absl::Seconds(1))));
    response.headers.emplace_back("Retry-After", absl::StrCat(seconds));
  }
  if (response.code >= 409 && !MayRetry(status)) {
    response.headers.emplace_back("x-should-retry", "false");
  }
  return response;
}

HttpResponse ListenerError(int code, const std::string& message) {
  const char* const type = code == 404   ? "not_found_error"
                           : code == 503 ? "service_unavailable_error"
                           : code >= 500 ? "server_error"
                                         : "invalid_request_error";
  const json error = {{"message", message},
                      {"type", type},
                      {"param", nullptr},
                      {"code", nullptr}};
  return {.code = code,
          .content_type = "application/json",
          .body = DumpJson({{"error", error}})};
}

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
      names_(request.names),
      model_(std::move(model)),
      created_(created),
      prompts_(request.prompts.size()) {
  for (size_t i = 0; i < prompts_.size(); ++i) {
    prompts_[i].sequences = std::max(1, request.prompts[i].sampling().n());
  }
}

std::string OpenAiAnswer::Add(int prompt, const v1::GenerateResponse& event) {
  if (id_.empty() && !event.request_id().empty()) {
    id_ = absl::StrCat(chat_ ? "chatcmpl-" : "cmpl-", event.request_id());
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
  }
  return events;
}

std::string OpenAiAnswer::OnDelta(int prompt, const v1::GenerateDelta& delta) {
  Choice& choice = At(prompt, delta.index());
  choice.tokens += delta.token_ids_size();
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
  int offset = At(prompt, 0).text_offset;
  const json logprobs = CompletionLogprobs(scores.tokens(), &offset);
  std::map<std::string, std::string> lists;
  for (const auto& [name, list] : logprobs.items()) {
    lists[name] = DumpJson(list);
  }
  std::string events;
  for (int i = 0; i < state.sequences; ++i) {
    Choice& choice = At(prompt, i);
    choice.text_offset = offset;
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
  if (!stream_) return "";
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
      json last = Head(/*chunk=*/true);
      last["choices"] = json::array();
      last["usage"] = UsageOfAll();
      AddServing(&last);
      events = Event(last);
    }
    return events + kDone;
  }
  json head = Head(/*chunk=*/false);
  head["usage"] = UsageOfAll();
  AddServing(&head);
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
  return Event(ErrorBody(status, names_)) + kDone;
}

void OpenAiAnswer::AddServing(json* answer) const {
  const v1::GenerateDone& done = prompts_.front().done;
  (*answer)["timings"] = TimingsJson(done);
  // Of several prompts nobody could tell whose it is.
  if (prompts_.size() == 1 && done.has_work()) {
    (*answer)["work"] = WorkJson(done.work());
  }
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
  // Echoed text has no records here, but its place.
  if (delta.logprobs().empty() && !echo_logprobs_) {
    choice->text_offset += Characters(delta.text());
  }
  return CompletionLogprobs(delta.logprobs(), &choice->text_offset);
}

std::string OpenAiAnswer::Chunk(int prompt, int index, json choice,
                                bool first) {
  json chunk = Head(/*chunk=*/true);
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

json OpenAiAnswer::Head(bool chunk) const {
  return {{"id", id_},
          {"object", !chat_  ? "text_completion"
                     : chunk ? "chat.completion.chunk"
                             : "chat.completion"},
          {"created", created_},
          {"model", model_}};
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
    whole["message"] = {
        {"role", "assistant"}, {"content", choice.text}, {"refusal", nullptr}};
    json& message = whole["message"];
    if (!choice.reasoning.empty()) {
      message["reasoning_content"] = choice.reasoning;
      if (choice.text.empty()) message["content"] = nullptr;
    }
    if (!choice.tool_calls.empty()) {
      message["tool_calls"] = ToolCallsJson(choice.tool_calls);
      if (choice.text.empty()) message["content"] = nullptr;
    }
  } else {
    whole["text"] = choice.text;
  }
  if (return_token_ids_) whole["prompt_token_ids"] = state.token_ids;
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
  for (const Prompt& state : prompts_) {
    prompt += state.prompt_tokens;
    cached += state.cached_tokens;
    for (const Choice& choice : state.choices) completion += choice.tokens;
  }
  v1::Usage usage;
  usage.set_prompt_tokens(prompt);
  usage.set_cached_tokens(cached);
  usage.set_completion_tokens(completion);
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
