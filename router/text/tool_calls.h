// SPDX-License-Identifier: Apache-2.0
// Tool calls in the text that a model writes, in the styles of some families:
//
//   hermes       <tool_call>{"name": .., "arguments": {..}}</tool_call>, any
//                number of them (Hermes, Qwen 2.5 and 3)
//   llama3_json  {"name": .., "parameters": {..}}, several divided by ';', with
//                or without <|python_tag|> before them (Llama 3.1 to 3.3)
//   mistral      [TOOL_CALLS] [{"name": .., "arguments": {..}}, ..], or
//                [TOOL_CALLS]name[ARGS]{..}, any number of them
//
// Those of qwen3_coder, glm45 and minimax_m2 have tags for each argument:
// tagged_calls.h. Those of deepseek_v3, deepseek_v31 and kimi_k2 have JSON
// between marks: marked_calls.h. Those of gemma4 are in gemma_calls.h, and
// openai (gpt-oss) has messages of their own: harmony.h. The names are those of
// vLLM's --tool-call-parser. Calls are complete when they are returned: text
// that only begins like one comes back unchanged, as content. So does all text
// around calls but spaces between two, or between one and an end of the text.

#ifndef TANDEM_ROUTER_TEXT_TOOL_CALLS_H_
#define TANDEM_ROUTER_TEXT_TOOL_CALLS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace tandem::router {

enum class ToolCallStyle {
  kNone,
  kLlama3Json,
  kHermes,
  kMistral,
  kOpenAi,
  kQwen3Coder,
  kGlm45,
  kMinimaxM2,
  kDeepSeekV3,
  kDeepSeekV31,
  kKimiK2,
  kGemma4,
};

// By one of its names, "none" included.
std::optional<ToolCallStyle> ToolCallStyleByName(std::string_view name);
std::string_view ToolCallStyleName(ToolCallStyle style);
// That of the calls which a chat template writes; kNone: of none known.
ToolCallStyle DetectToolCallStyle(std::string_view chat_template);
// What its calls are marked by. Tokenizers may have special tokens of them.
std::vector<std::string_view> ToolCallMarkers(ToolCallStyle style);

// 1..64 of A-Z, a-z, 0-9, '_' and '-', as OpenAI wants functions to be named.
bool IsFunctionName(std::string_view name);

// Of functions, the parameters whose values are JSON rather than text, where
// the model does not say which.
using JsonParameters = std::map<std::string, std::set<std::string>>;

// What a request wants to know of the calls in its output.
struct ToolCallOptions {
  ToolCallStyle style = ToolCallStyle::kNone;
  std::vector<std::string> names;       // of the functions there are
  JsonParameters json_parameters = {};  // of tagged calls
  bool parallel = true;                 // or the first call alone
  // Special tokens that are left out of the text, and mark calls in it.
  std::map<int32_t, std::string> markers;
  uint64_t id_seed = 0;  // that ids are made from, by the core
};

struct ParsedToolCall {
  std::string name;
  std::string arguments;  // a JSON object; if the model wrote one, as it did
  std::string id = {};    // the model's own; empty: it has none
};

class CallCandidate;

// Finds calls in a text that arrives in pieces. What it returns, joined, does
// not depend on how the text was cut. Time is linear in the text. Not
// thread-safe.
class ToolCallParser {
 public:
  // REQUIRES: a style other than kOpenAi, whose calls HarmonyOutput finds.
  // `names`: the functions there are. Calls without a marker (llama3_json)
  // count only if they name one of them: an answer may be JSON as well.
  ToolCallParser(ToolCallStyle style, std::vector<std::string> names,
                 JsonParameters json_parameters = {});
  ~ToolCallParser();

  struct Result {
    std::string text;  // no part of a call
    std::vector<ParsedToolCall> calls;
  };
  // `hidden`: the text of a special token, which is no content in any case.
  Result Push(std::string_view piece, bool hidden = false);
  // The text has ended.
  Result Finish();

  // Whether some of the text may become a call.
  bool holding() const { return !held_.empty(); }

 private:
  bool MayBegin(char c) const;
  std::unique_ptr<CallCandidate> NewCandidate(char c) const;
  void Run(Result* result);
  void Accept(Result* result);
  void GiveUp(Result* result);
  void Release(size_t end, Result* result);
  void Compact();

  const ToolCallStyle style_;
  const std::vector<std::string> names_;
  const JsonParameters json_parameters_;
  std::string held_;
  std::string flags_;  // of each of its bytes
  // In held_: bytes before the one are returned or dropped, those before the
  // other were looked at.
  size_t begin_ = 0;
  size_t cursor_ = 0;
  std::unique_ptr<CallCandidate> candidate_;  // of a call, from here on
  size_t candidate_begin_ = 0;
  // Only spaces since the text's beginning or the last call.
  bool in_gap_ = true;
  bool after_call_ = false;
  bool in_block_ = false;  // behind that call its block goes on
};

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_TEXT_TOOL_CALLS_H_
