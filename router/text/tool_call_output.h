// SPDX-License-Identifier: Apache-2.0
// From a sequence's text to the content and the tool calls of its deltas. The
// text comes without its special tokens, some of which mark calls: they are
// told apart, with their places in it.

#ifndef TANDEM_ROUTER_TEXT_TOOL_CALL_OUTPUT_H_
#define TANDEM_ROUTER_TEXT_TOOL_CALL_OUTPUT_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <utility>

#include "common/random.h"
#include "router/text/tool_calls.h"
#include "tandem/v1/inference.pb.h"

namespace tandem::router {

// Puts a sequence's calls into its deltas, with ids of their own.
class ToolCallDeltas {
 public:
  // `index`: the sequence's.
  ToolCallDeltas(const ToolCallOptions& options, int index);

  void Add(const ParsedToolCall& call, v1::GenerateDelta* delta);
  bool any() const { return calls_ > 0; }

 private:
  std::string NewId();

  const bool parallel_;
  const bool short_ids_;
  SeededRandom random_;
  int calls_ = 0;  // told of
};

class ToolCallOutput {
 public:
  // `index`: the sequence's, for ids of its own.
  ToolCallOutput(const ToolCallOptions& options, int index);

  // A token was drawn whose text, of so many bytes, will be released later.
  void Arrives(int32_t token_id, size_t bytes);
  // The next of that text; what it lets go is added to `delta`.
  void Release(std::string_view text, v1::GenerateDelta* delta);
  // Nothing follows.
  void Finish(v1::GenerateDelta* delta);

  bool any() const { return calls_.any(); }

 private:
  void Add(const ToolCallParser::Result& result, v1::GenerateDelta* delta);

  const ToolCallOptions options_;
  ToolCallParser parser_;
  ToolCallDeltas calls_;
  size_t arrived_ = 0;   // bytes of text
  size_t released_ = 0;  // of them
  // Markers that wait for the text before them, with its length.
  std::deque<std::pair<size_t, std::string>> marks_;
};

// The whole calls that deltas come to, appended to those that earlier deltas
// of the same sequence came to.
void JoinToolCalls(
    const google::protobuf::RepeatedPtrField<v1::ToolCallDelta>& deltas,
    google::protobuf::RepeatedPtrField<v1::ToolCall>* calls);
// The other way round.
void SplitToolCalls(
    const google::protobuf::RepeatedPtrField<v1::ToolCall>& calls,
    google::protobuf::RepeatedPtrField<v1::ToolCallDelta>* deltas);

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_TEXT_TOOL_CALL_OUTPUT_H_
