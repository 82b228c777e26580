// SPDX-License-Identifier: Apache-2.0
#include "router/text/tool_call_output.h"

#include <algorithm>

namespace tandem::router {

ToolCallDeltas::ToolCallDeltas(const ToolCallOptions& options, int index)
    : parallel_(options.parallel),
      short_ids_(options.style == ToolCallStyle::kMistral),
      random_(options.id_seed + static_cast<uint64_t>(index)) {}

void ToolCallDeltas::Add(const ParsedToolCall& call, v1::GenerateDelta* delta) {
  if (calls_ > 0 && !parallel_) return;
  v1::ToolCallDelta* const first = delta->add_tool_calls();
  first->set_index(calls_);
  first->set_id(call.id.empty() ? NewId() : call.id);
  first->set_name(call.name);
  v1::ToolCallDelta* const rest = delta->add_tool_calls();
  rest->set_index(calls_);
  rest->set_arguments_json(call.arguments);
  ++calls_;
}

// Mistral's templates accept no other ids than nine letters and digits; for
// all others the form is OpenAI's.
std::string ToolCallDeltas::NewId() {
  constexpr std::string_view kLetters =
      "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
  std::string id = short_ids_ ? "" : "call_";
  for (int i = short_ids_ ? 9 : 24; i > 0; --i) {
    id.push_back(kLetters[random_.Below(kLetters.size())]);
  }
  return id;
}

ToolCallOutput::ToolCallOutput(const ToolCallOptions& options, int index)
    : options_(options),
      parser_(options.style, options.names, options.json_parameters),
      calls_(options, index) {}

void ToolCallOutput::Arrives(int32_t token_id, size_t bytes) {
  const auto marker = options_.markers.find(token_id);
  if (marker != options_.markers.end()) {
    marks_.emplace_back(arrived_, marker->second);
  }
  arrived_ += bytes;
}

void ToolCallOutput::Release(std::string_view text, v1::GenerateDelta* delta) {
  const auto take = [&](size_t bytes) {
    Add(parser_.Push(text.substr(0, bytes)), delta);
    text.remove_prefix(bytes);
    released_ += bytes;
  };
  while (!marks_.empty() && marks_.front().first <= released_ + text.size()) {
    take(marks_.front().first - released_);
    Add(parser_.Push(marks_.front().second, /*hidden=*/true), delta);
    marks_.pop_front();
  }
  take(text.size());
}

void ToolCallOutput::Finish(v1::GenerateDelta* delta) {
  Add(parser_.Finish(), delta);
}

void ToolCallOutput::Add(const ToolCallParser::Result& result,
                         v1::GenerateDelta* delta) {
  delta->mutable_text()->append(result.text);
  for (const ParsedToolCall& call : result.calls) calls_.Add(call, delta);
}

void JoinToolCalls(
    const google::protobuf::RepeatedPtrField<v1::ToolCallDelta>& deltas,
    google::protobuf::RepeatedPtrField<v1::ToolCall>* calls) {
  for (const v1::ToolCallDelta& delta : deltas) {
    while (calls->size() <= delta.index()) calls->Add();
    v1::ToolCall* const call = calls->Mutable(delta.index());
    if (!delta.id().empty()) call->set_id(delta.id());
    if (!delta.name().empty()) call->set_name(delta.name());
    call->mutable_arguments_json()->append(delta.arguments_json());
  }
}

void SplitToolCalls(
    const google::protobuf::RepeatedPtrField<v1::ToolCall>& calls,
    google::protobuf::RepeatedPtrField<v1::ToolCallDelta>* deltas) {
  for (int i = 0; i < calls.size(); ++i) {
    v1::ToolCallDelta* const first = deltas->Add();
    first->set_index(i);
    first->set_id(calls[i].id());
    first->set_name(calls[i].name());
    v1::ToolCallDelta* const rest = deltas->Add();
    rest->set_index(i);
    rest->set_arguments_json(calls[i].arguments_json());
  }
}

}  // namespace tandem::router
