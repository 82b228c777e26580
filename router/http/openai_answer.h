// SPDX-License-Identifier: Apache-2.0
// The core's events as OpenAI's JSON: whole bodies, or server-sent events in
// the order in which clients expect them. One object per call of a client,
// whose prompts' events may interleave; choice indices count through them,
// prompt by prompt.

#ifndef TANDEM_ROUTER_HTTP_OPENAI_ANSWER_H_
#define TANDEM_ROUTER_HTTP_OPENAI_ANSWER_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/http/server.h"
#include "nlohmann/json.hpp"
#include "router/http/field_names.h"
#include "router/http/openai_error.h"
#include "router/http/openai_logprobs.h"
#include "router/http/openai_request.h"

namespace tandem::router {

class OpenAiAnswer {
 public:
  // `model` is the served name; `created` in seconds since 1970.
  OpenAiAnswer(const OpenAiRequest& request, std::string model,
               int64_t created);

  // Takes an event of the prompt-th prompt. Of a streamed answer: the events
  // that it comes to ("data: ...\n\n", possibly none or several).
  std::string Add(int prompt, const v1::GenerateResponse& event);

  // Gathered for an answer that is not streamed.
  size_t bytes() const { return bytes_; }

  // After all prompts have ended. Of a streamed answer: usage where asked for,
  // and [DONE]; else the whole body.
  std::string Finish();
  // An error before an answer has begun.
  HttpResponse Refuse(const absl::Status& status) const {
    return ErrorResponse(status, names_);
  }
  // An error in the midst of a stream, and [DONE].
  std::string Fail(const absl::Status& status) const;

 private:
  struct Choice {
    // Of an answer that is not streamed; lists as JSON without brackets.
    std::string text;
    std::string reasoning;
    google::protobuf::RepeatedPtrField<v1::ToolCall> tool_calls;
    std::map<std::string, std::string> logprobs;
    std::string token_ids;
    std::string finish_reason;
    nlohmann::json stop_reason;
    CharacterCount scored;  // of completions' tokens with logprobs
    int tokens = 0;
    int reasoning_tokens = 0;  // of them
    v1::Work work;             // so far, where asked for
  };
  struct Prompt {
    int sequences = 1;
    std::string logprobs;  // vLLM's prompt_logprobs, likewise
    int prompt_tokens = 0;
    int cached_tokens = 0;  // of them, when computing began
    uint64_t seed = 0;
    std::string system_fingerprint;
    nlohmann::json token_ids;  // where asked for
    v1::GenerateDone done;
    std::vector<Choice> choices;
  };

  std::string OnStarted(int prompt, const v1::GenerateStarted& started);
  std::string OnDelta(int prompt, const v1::GenerateDelta& delta);
  std::string OnPromptLogprobs(int prompt, const v1::PromptLogprobs& scores);
  std::string OnFinished(int prompt, const v1::GenerateFinished& finished);
  Choice& At(int prompt, int index);
  int Index(int prompt, int index) const;
  void Gather(Choice* choice, const v1::GenerateDelta& delta,
              const nlohmann::json& logprobs);
  // `array` is one of JSON.
  void Append(const std::string& array, std::string* list);
  void AppendLogprobs(const nlohmann::json& logprobs, Choice* choice);
  nlohmann::json Logprobs(Choice* choice, const v1::GenerateDelta& delta);
  // One event with one choice. `first` of it: with the prompt's token ids,
  // where asked for.
  std::string Chunk(int prompt, int index, nlohmann::json choice,
                    bool first = false);
  nlohmann::json Head(bool chunk, nlohmann::json fingerprint) const;
  // Of all prompts; null where none has one, or not all have the same.
  nlohmann::json Fingerprint() const;
  // What is told beside the usage.
  void AddServing(nlohmann::json* answer) const;
  std::string WholeChoice(int prompt, int index) const;
  nlohmann::json UsageSoFar() const;
  // Null where no worker told.
  nlohmann::json WorkSoFar() const;
  nlohmann::json UsageOfAll() const;

  const bool chat_;
  const bool stream_;
  const bool include_usage_;
  const bool continuous_usage_;
  const bool work_;  // in chunks
  const bool return_token_ids_;
  const bool wants_logprobs_;
  const bool prompt_logprobs_;  // as a field of their own
  const bool echo_logprobs_;    // before those of the output
  const std::string echoed_;
  const FieldNames names_;
  const std::string model_;
  const int64_t created_;
  std::string id_;
  std::vector<Prompt> prompts_;
  size_t bytes_ = 0;
};

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_HTTP_OPENAI_ANSWER_H_
