// SPDX-License-Identifier: Apache-2.0
// What router/validate/validate.h says of chats and their tools.

#include <algorithm>
#include <cstddef>
#include <optional>
#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/features.h"
#include "common/utf8.h"
#include "router/text/json_scanner.h"
#include "router/validate/errors.h"
#include "router/validate/forced_call.h"
#include "router/validate/validate.h"
#include "router/validate/validate_steps.h"

namespace tandem::router {
namespace {

std::string Shortened(const std::string& text) {
  return text.size() <= 128
             ? text
             : absl::StrCat(std::string(Utf8Head(text, 128)), "...");
}

absl::Status CheckFunctionName(const std::string& field,
                               const std::string& name) {
  if (IsFunctionName(name)) return absl::OkStatus();
  return FieldInvalid(field, name.empty() ? "(empty)" : Shortened(name),
                      "1..64 of A-Z, a-z, 0-9, '_' and '-' are needed");
}

absl::Status CheckJsonObject(const std::string& field,
                             const std::string& text) {
  JsonScanner scanner;
  auto verdict = JsonScanner::Verdict::kMore;
  bool begun = false;
  for (size_t i = 0; i < text.size(); ++i) {
    if (IsJsonSpace(text[i]) &&
        (!begun || verdict == JsonScanner::Verdict::kComplete)) {
      continue;
    }
    begun = true;
    verdict = verdict == JsonScanner::Verdict::kMore
                  ? scanner.Push(text[i])
                  : JsonScanner::Verdict::kBroken;
    if (verdict != JsonScanner::Verdict::kBroken) continue;
    return FieldInvalid(
        field, "(text)",
        absl::StrCat("a JSON object is needed, nested in at most ",
                     JsonScanner::kMaxDepth, " levels; byte ", i,
                     " is not of one"));
  }
  if (text.empty() || verdict == JsonScanner::Verdict::kComplete) {
    return absl::OkStatus();
  }
  return FieldInvalid(field, "(text)", "a JSON object is needed, to its end");
}

absl::Status CheckToolCalls(const std::string& where,
                            const v1::ChatMessage& message,
                            std::set<std::string>* ids) {
  const std::string field = absl::StrCat(where, ".tool_calls");
  if (!message.tool_calls().empty() && message.role() != "assistant") {
    return FieldInvalid(field, "(set)", "only an assistant calls tools");
  }
  if (message.tool_calls_size() > kMaxTools) {
    return FieldInvalid(field,
                        absl::StrCat(message.tool_calls_size(), " calls"),
                        absl::StrCat("at most ", kMaxTools));
  }
  for (int i = 0; i < message.tool_calls_size(); ++i) {
    const v1::ToolCall& call = message.tool_calls(i);
    const std::string at = absl::StrCat(field, "[", i, "]");
    if (call.id().empty() || !ValidateRequestId(call.id()).ok()) {
      return FieldInvalid(absl::StrCat(at, ".id"),
                          call.id().empty() ? "(empty)" : "(text)",
                          absl::StrCat("1..", kMaxRequestIdBytes,
                                       " printable ASCII characters are "
                                       "needed"));
    }
    TANDEM_ROUTER_RETURN_IF_ERROR(
        CheckFunctionName(absl::StrCat(at, ".name"), call.name()));
    TANDEM_ROUTER_RETURN_IF_ERROR(CheckJsonObject(
        absl::StrCat(at, ".arguments_json"), call.arguments_json()));
    ids->insert(call.id());
  }
  return absl::OkStatus();
}

// A tool's message names a call before it.
absl::Status CheckToolCallId(const std::string& where,
                             const v1::ChatMessage& message,
                             const std::set<std::string>& ids) {
  const std::string field = absl::StrCat(where, ".tool_call_id");
  const std::string& id = message.tool_call_id();
  if (message.role() != "tool") {
    if (id.empty()) return absl::OkStatus();
    return FieldInvalid(field, "(set)", "only of messages of role tool");
  }
  if (ids.contains(id)) return absl::OkStatus();
  return FieldInvalid(field, id.empty() ? "(empty)" : Shortened(id),
                      "the id of a call in an earlier message is needed");
}

absl::Status CheckMessages(const v1::Chat& chat) {
  std::set<std::string> call_ids;
  for (int i = 0; i < chat.messages_size(); ++i) {
    const v1::ChatMessage& message = chat.messages(i);
    const std::string where = absl::StrCat("chat.messages[", i, "]");
    if (message.role().empty()) {
      return FieldInvalid(absl::StrCat(where, ".role"), "(empty)", "is needed");
    }
    if (!message.content().empty() && !message.parts().empty()) {
      return FieldInvalid(absl::StrCat(where, ".parts"), "(set)",
                          "either content or parts, not both");
    }
    for (int p = 0; p < message.parts_size(); ++p) {
      if (!message.parts(p).has_text()) {
        return FieldInvalid(absl::StrCat(where, ".parts[", p, "]"),
                            "(not text)", "only text parts are allowed");
      }
    }
    TANDEM_ROUTER_RETURN_IF_ERROR(CheckToolCallId(where, message, call_ids));
    TANDEM_ROUTER_RETURN_IF_ERROR(CheckToolCalls(where, message, &call_ids));
  }
  return absl::OkStatus();
}

absl::Status CheckTools(const v1::Chat& chat, const ModelLimits& limits) {
  if (chat.tools_size() > kMaxTools) {
    return FieldInvalid("chat.tools", absl::StrCat(chat.tools_size(), " tools"),
                        absl::StrCat("at most ", kMaxTools));
  }
  size_t bytes = 0;
  std::set<std::string> names;
  for (int i = 0; i < chat.tools_size(); ++i) {
    const v1::Tool& tool = chat.tools(i);
    const std::string at = absl::StrCat("chat.tools[", i, "]");
    TANDEM_ROUTER_RETURN_IF_ERROR(
        CheckFunctionName(absl::StrCat(at, ".name"), tool.name()));
    if (!names.insert(tool.name()).second) {
      return FieldInvalid(absl::StrCat(at, ".name"), tool.name(),
                          "another tool has this name");
    }
    bytes += tool.name().size() + tool.description().size() +
             tool.parameters_json_schema().size();
    if (bytes > kMaxToolBytes) {
      return FieldInvalid("chat.tools", "(list)",
                          absl::StrCat("at most ", kMaxToolBytes,
                                       " bytes of names, descriptions and "
                                       "schemas"));
    }
    TANDEM_ROUTER_RETURN_IF_ERROR(
        CheckJsonObject(absl::StrCat(at, ".parameters_json_schema"),
                        tool.parameters_json_schema()));
  }
  if (!WantsTools(chat)) return absl::OkStatus();
  if (!limits.template_has_tools) {
    return FieldInvalid("chat.tools", "(set)",
                        "this model's chat template knows no tools");
  }
  if (limits.tool_call_style) return absl::OkStatus();
  return FieldInvalid(
      "chat.tools", "(set)",
      "the style of this model's tool calls is not known: the server needs "
      "--tool-call-parser (with none, calls come back as text)");
}

absl::Status CheckToolChoice(const v1::Chat& chat, const ModelLimits& limits) {
  const std::string& choice = chat.tool_choice();
  if (chat.has_tool_choice() && chat.has_tool_choice_function()) {
    return FieldInvalid("chat.tool_choice_function", "(set)",
                        "excludes tool_choice");
  }
  if (chat.has_tool_choice() && choice != "auto" && choice != "none" &&
      choice != "required") {
    return FieldInvalid("chat.tool_choice", Shortened(choice),
                        "must be auto, none, required or a function by name");
  }
  if (!ForcesCall(chat)) return absl::OkStatus();
  const char* const field =
      chat.has_tool_choice() ? "chat.tool_choice" : "chat.tool_choice_function";
  const std::string& value =
      chat.has_tool_choice() ? choice : chat.tool_choice_function();
  if (chat.tools().empty()) {
    return FieldInvalid(field, Shortened(value), "needs chat.tools");
  }
  const bool is_tool =
      std::any_of(chat.tools().begin(), chat.tools().end(),
                  [&](const v1::Tool& tool) { return tool.name() == value; });
  if (chat.has_tool_choice_function() && !is_tool) {
    return FieldInvalid(field, Shortened(value), "is none of chat.tools");
  }
  if (limits.tool_call_style == ToolCallStyle::kNone) {
    return FieldInvalid(field, Shortened(value),
                        "this server was started with --tool-call-parser none");
  }
  return absl::OkStatus();
}

// Whether an answer begins with reasoning, as far as prompt and request say.
bool Reasons(ReasoningStyle style, PromptReasoning prompt,
             std::optional<bool> asked) {
  switch (style) {
    case ReasoningStyle::kDeepSeekV3:
      return prompt == PromptReasoning::kBegun;
    case ReasoningStyle::kQwen3:
      // Of templates that say nothing then.
      return prompt != PromptReasoning::kOver && asked.value_or(true);
    default:
      return prompt != PromptReasoning::kOver;
  }
}

}  // namespace

bool WantsTools(const v1::Chat& chat) {
  return !chat.tools().empty() && chat.tool_choice() != "none";
}

absl::Status ValidateChat(const v1::Chat& chat, const ModelLimits& limits) {
  if (!limits.has_chat_template) {
    return FieldInvalid("chat", "(set)",
                        "this model has no chat template; use text");
  }
  if (chat.messages().empty()) {
    return FieldInvalid("chat.messages", "(empty)",
                        "at least one message is needed");
  }
  TANDEM_ROUTER_RETURN_IF_ERROR(CheckMessages(chat));
  TANDEM_ROUTER_RETURN_IF_ERROR(CheckTools(chat, limits));
  TANDEM_ROUTER_RETURN_IF_ERROR(CheckToolChoice(chat, limits));
  if (chat.add_generation_prompt() && chat.continue_final_message()) {
    return FieldInvalid("chat.continue_final_message", "true",
                        "excludes add_generation_prompt");
  }
  return absl::OkStatus();
}

std::optional<bool> AskedToThink(const v1::Chat& chat) {
  const auto& extra = chat.chat_template_kwargs().fields();
  const auto said = extra.find("enable_thinking");
  if (said == extra.end() || !said->second.has_bool_value()) return {};
  return said->second.bool_value();
}

void NoteReasoning(const v1::Chat& chat, absl::Span<const int32_t> prompt,
                   const ModelLimits& limits, EffectiveRequest* effective) {
  if (!limits.reasoning) return;
  const PromptReasoning left =
      ReasoningIn(prompt, *limits.reasoning, limits.eos_token_ids);
  // Gemma may think unasked.
  const bool gemma = limits.reasoning->style == ReasoningStyle::kGemma4;
  if (!gemma && !Reasons(limits.reasoning->style, left, AskedToThink(chat))) {
    return;
  }
  effective->reasoning = limits.reasoning;
  effective->reasoning->content_first =
      gemma && left != PromptReasoning::kBegun;
  if (!effective->structured) return;
  effective->reasoning->calls_id = -1;
  // Workers wait for its end with what must match, unless that has a place for
  // thoughts.
  if (!effective->reasoning->content_first) {
    effective->features.emplace_back(kFeatureStructuredAfter);
  }
}

}  // namespace tandem::router
