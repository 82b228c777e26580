// SPDX-License-Identifier: Apache-2.0
#include "router/validate/forced_call.h"

#include <algorithm>
#include <cstdint>
#include <string_view>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "nlohmann/json.hpp"
#include "router/text/gemma_calls.h"
#include "router/text/json_scanner.h"
#include "router/text/marked_calls.h"
#include "router/text/tagged_calls.h"
#include "router/validate/errors.h"

namespace tandem::router {
namespace {

std::string Quoted(const std::string& text) {
  return nlohmann::json(text).dump();
}

// Formats of structural tags, as JSON text: schemas keep their order in it.
std::string Constant(const std::string& text) {
  return absl::StrCat(R"({"type":"const_string","value":)", Quoted(text), "}");
}

std::string Joined(std::string_view type,
                   const std::vector<std::string>& elements) {
  if (elements.size() == 1) return elements.front();
  return absl::StrCat(R"({"type":")", std::string(type), R"(","elements":[)",
                      absl::StrJoin(elements, ","), "]}");
}

std::string Sequence(const std::vector<std::string>& elements) {
  return Joined("sequence", elements);
}

// A special token, as which the mark counts like its text.
std::optional<std::string> TokenOf(const std::string& mark,
                                   const ModelLimits& limits) {
  for (const auto& [id, marker] : limits.tool_call_markers) {
    if (marker != mark) continue;
    return absl::StrCat(R"({"type":"token","token":)", id, "}");
  }
  return std::nullopt;
}

std::string Mark(const std::string& text, const ModelLimits& limits) {
  const std::optional<std::string> token = TokenOf(text, limits);
  return token ? Joined("or", {*token, Constant(text)}) : Constant(text);
}

// All that may stand for it, as elements of a list.
std::string MarkForms(const std::string& text, const ModelLimits& limits) {
  const std::optional<std::string> token = TokenOf(text, limits);
  return absl::StrCat(token ? *token + "," : "", Quoted(text));
}

struct MarkedContent {
  std::string begin;
  std::string content;
  std::string end;  // empty: none
};

// Text, and the contents of these wherever they begin in it.
std::string Triggered(const std::vector<MarkedContent>& all,
                      const ModelLimits& limits) {
  std::vector<std::string> triggers;
  std::vector<std::string> tags;
  for (const MarkedContent& one : all) {
    triggers.push_back(MarkForms(one.begin, limits));
    tags.push_back(absl::StrCat(R"({"begin":[)", triggers.back(),
                                R"(],"content":)", one.content, R"(,"end":[)",
                                MarkForms(one.end, limits), "]}"));
  }
  return absl::StrCat(R"({"type":"triggered_tags","triggers":[)",
                      absl::StrJoin(triggers, ","), R"(],"tags":[)",
                      absl::StrJoin(tags, ","), "]}");
}

// One call or more of these.
std::string Several(const std::vector<std::string>& calls,
                    const std::string& separator) {
  return absl::StrCat(
      R"({"type":"tags_with_separator","at_least_one":true,"separator":)",
      Quoted(separator), R"(,"tags":[{"begin":"","content":)",
      Joined("or", calls), R"(,"end":""}]})");
}

// The tool's schema, which must be one of objects.
absl::StatusOr<std::string> ObjectSchema(const v1::Tool& tool, int index) {
  if (tool.parameters_json_schema().empty()) {
    return R"({"type":"object","properties":{},"additionalProperties":false})";
  }
  const std::string schema(
      absl::StripAsciiWhitespace(tool.parameters_json_schema()));
  JsonScanner scanner;
  for (const char c : schema) scanner.Push(c);
  for (const JsonScanner::Member& member : scanner.members()) {
    const auto slice = [&](size_t begin, size_t end) {
      return std::string_view(schema).substr(begin, end - begin);
    };
    if (slice(member.key_begin, member.key_end) != R"("type")") continue;
    if (slice(member.value_begin, member.value_end) == R"("object")") {
      return schema;
    }
    return FieldInvalid(
        absl::StrCat("chat.tools[", index, "].parameters_json_schema"),
        "(schema)",
        "\"type\": \"object\" is needed where a call must satisfy it");
  }
  return absl::StrCat(R"({"type":"object")",
                      scanner.members().empty() ? "" : ",", schema.substr(1));
}

// Harmony's mark; empty where the model has none.
std::string HarmonyMark(std::string_view mark, const ModelLimits& limits) {
  for (const auto& [id, text] : limits.harmony->marks) {
    if (text != mark) continue;
    return absl::StrCat(R"({"type":"token","token":)", id, "}");
  }
  return "";
}

// Any number of messages in these channels, and the role of the next.
std::string MessagesIn(const std::vector<std::string>& channels,
                       const ModelLimits& limits) {
  const std::string text = absl::StrCat(
      R"({"type":"tag","begin":)", HarmonyMark(kHarmonyMessage, limits),
      R"(,"content":{"type":"any_text"},"end":)",
      HarmonyMark(kHarmonyEnd, limits), "}");
  std::vector<std::string> tags;
  tags.reserve(channels.size());
  for (const std::string& channel : channels) {
    tags.push_back(absl::StrCat(
        R"({"begin":)", HarmonyMark(kHarmonyChannel, limits), R"(,"content":)",
        Sequence({Constant(channel), text, HarmonyMark(kHarmonyStart, limits)}),
        R"(,"end":"assistant"})"));
  }
  return absl::StrCat(R"({"type":"tags_with_separator","separator":"",)",
                      R"("tags":[)", absl::StrJoin(tags, ","), "]}");
}

// One of these messages behind thoughts, as far as those are no content.
std::string BehindThoughts(const std::vector<std::string>& messages,
                           const ModelLimits& limits) {
  const std::string any = Joined("or", messages);
  if (!limits.harmony->reasoning) return any;
  return Sequence({MessagesIn({"analysis"}, limits), any});
}

std::string FinalMessage(const std::string& format, const ModelLimits& limits) {
  return Sequence({HarmonyMark(kHarmonyChannel, limits), Constant("final"),
                   HarmonyMark(kHarmonyMessage, limits), format});
}

// The function stands behind the channel or before it, as models have learned
// the one and see the other in the template's earlier calls.
std::string HarmonyCall(const std::string& name, const std::string& arguments,
                        const ModelLimits& limits) {
  const std::string channel = HarmonyMark(kHarmonyChannel, limits);
  const std::string constrain = HarmonyMark(kHarmonyConstrain, limits);
  std::string type = Constant("json");
  if (!constrain.empty()) {
    type = Joined("or", {Sequence({constrain, type}), type});
  }
  return Sequence(
      {Joined("or",
              {Sequence({channel, Constant(absl::StrCat(
                                      "commentary to=functions.", name, " "))}),
               Sequence({Constant(absl::StrCat(" to=functions.", name)),
                         channel, Constant("commentary ")})}),
       type, HarmonyMark(kHarmonyMessage, limits), arguments});
}

std::string MarkedCall(const CallMarks& marks, const std::string& name,
                       const std::string& arguments,
                       const ModelLimits& limits) {
  std::vector<std::string> parts;
  for (const CallPart& part : marks.call) {
    switch (part.kind) {
      case CallPart::Kind::kText:
        parts.push_back(Mark(std::string(part.text), limits));
        break;
      case CallPart::Kind::kName:
        parts.push_back(Constant(absl::StrCat(std::string(part.text), name)));
        break;
      case CallPart::Kind::kIndex:
        parts.push_back(R"({"type":"regex","pattern":"0|[1-9][0-9]{0,3}"})");
        break;
      case CallPart::Kind::kArguments:
        parts.push_back(arguments);
        break;
    }
  }
  return Sequence(parts);
}

// One as it stands among others; of tagged ones what is within the function's
// tags, an object in place of the parameters.
std::string Call(const std::string& name, const std::string& schema,
                 const ModelLimits& limits) {
  const std::string arguments =
      absl::StrCat(R"({"type":"json_schema","json_schema":)", schema, "}");
  const auto object = [&](const char* key, const char* before,
                          const char* after) {
    return Sequence({Constant(absl::StrCat(before, R"({"name": )", Quoted(name),
                                           ", \"", key, "\": ")),
                     arguments, Constant(absl::StrCat("}", after))});
  };
  if (const CallTags* const tags = CallTagsOf(*limits.tool_call_style)) {
    return Sequence(
        {Constant(absl::StrCat(name, std::string(tags->name_end), "\n")),
         arguments, Constant("\n")});
  }
  if (const CallMarks* const marks = CallMarksOf(*limits.tool_call_style)) {
    return MarkedCall(*marks, name, arguments, limits);
  }
  switch (*limits.tool_call_style) {
    case ToolCallStyle::kHermes:
      return object("arguments", "\n", "\n");
    case ToolCallStyle::kMistral:
      if (limits.tool_calls_by_name) {
        return Sequence({Constant(name), Mark("[ARGS]", limits), arguments});
      }
      return object("arguments", "", "");
    case ToolCallStyle::kGemma4:
      return Sequence({Constant(absl::StrCat("call:", name)), arguments});
    case ToolCallStyle::kOpenAi:
      return HarmonyCall(name, arguments, limits);
    default:
      return object("parameters", "", "");
  }
}

std::string Member(const char* type, const char* key,
                   const std::string& value) {
  return absl::StrCat(R"({"type":")", type, R"(",")", key, R"(":)", value, "}");
}

// The member "format" of a client's own tag, as it is written: a text of any
// depth and of any number of members is looked at once, and nothing is built
// of it. Of several the last counts, as for whoever parses it.
absl::StatusOr<std::optional<std::string>> FormatIn(const std::string& text) {
  const std::string tag(absl::StripAsciiWhitespace(text));
  JsonScanner scanner;
  JsonScanner::Verdict verdict = JsonScanner::Verdict::kMore;
  size_t read = 0;
  while (read < tag.size() && verdict == JsonScanner::Verdict::kMore) {
    verdict = scanner.Push(tag[read++]);
  }
  if (verdict != JsonScanner::Verdict::kComplete || read < tag.size()) {
    return ConstraintInvalid(
        "structured.structural_tag", tag.empty() ? "(empty)" : tag,
        absl::StrCat("must be a JSON object of depth ", JsonScanner::kMaxDepth,
                     " or less where the chat has tools"));
  }
  std::optional<std::string> format;
  for (const JsonScanner::Member& member : scanner.members()) {
    const auto slice = [&](size_t begin, size_t end) {
      return std::string_view(tag).substr(begin, end - begin);
    };
    if (slice(member.key_begin, member.key_end) == R"("format")") {
      format = slice(member.value_begin, member.value_end);
    }
  }
  return format;
}

// As an element of a structural tag; schemas keep their order.
absl::StatusOr<std::optional<std::string>> FormatOf(
    const v1::StructuredOptions& answer) {
  switch (answer.constraint_case()) {
    case v1::StructuredOptions::kJsonSchema:
      if (!nlohmann::json::accept(answer.json_schema())) return std::nullopt;
      return Member("json_schema", "json_schema", answer.json_schema());
    case v1::StructuredOptions::kJsonObject:
      return Member("json_schema", "json_schema", R"({"type":"object"})");
    case v1::StructuredOptions::kRegex:
      return Member("regex", "pattern", Quoted(answer.regex()));
    case v1::StructuredOptions::kGrammar:
      return Member("grammar", "grammar", Quoted(answer.grammar()));
    case v1::StructuredOptions::kChoice: {
      std::vector<std::string> quoted;
      for (const std::string& value : answer.choice().values()) {
        quoted.push_back(Quoted(value));
      }
      if (quoted.empty()) return std::nullopt;
      return Member("grammar", "grammar",
                    Quoted(absl::StrCat("start: CHOICE\nCHOICE: ",
                                        absl::StrJoin(quoted, " | "), "\n")));
    }
    case v1::StructuredOptions::kStructuralTag:
      return FormatIn(answer.structural_tag());
    case v1::StructuredOptions::CONSTRAINT_NOT_SET:
      break;
  }
  return std::nullopt;
}

absl::StatusOr<std::optional<std::string>> FormatInMessage(
    const v1::StructuredOptions& answer) {
  absl::StatusOr<std::optional<std::string>> format = FormatOf(answer);
  if (format.ok() && !*format && answer.has_structural_tag()) {
    return ConstraintInvalid(
        "structured.structural_tag", "(text)",
        "must have \"format\": this model answers in messages, which "
        "\"structures\" and \"triggers\" know nothing of");
  }
  return format;
}

// One of these tagged calls, without the marks of its block. Grammars read it
// by strings: none may begin as those do that may stand in its place.
std::string InBlock(const std::string& any, const CallTags& tags) {
  if (tags.name_begin.empty()) return any;
  return Sequence({Constant("\n"), Constant(std::string(tags.name_begin)), any,
                   Constant(std::string(tags.call_end))});
}

// Text with any number of these tagged calls. Some models begin no block.
std::string TextWithTagged(const std::string& any, const CallTags& tags,
                           const ModelLimits& limits) {
  const std::string begin(tags.block_begin);
  const std::string end(tags.block_end);
  if (tags.name_begin.empty()) return Triggered({{begin, any, end}}, limits);
  const std::string block =
      Sequence({Several({InBlock(any, tags)}, ""), Constant("\n")});
  return Triggered(
      {{begin, block, end},
       {std::string(tags.name_begin), any, std::string(tags.call_end)}},
      limits);
}

// One of these calls, with the marks around it.
std::string AnyOf(const std::vector<std::string>& calls,
                  const ModelLimits& limits) {
  const std::string any = Joined("or", calls);
  if (const CallTags* const tags = CallTagsOf(*limits.tool_call_style)) {
    return Sequence({Mark(std::string(tags->block_begin), limits),
                     InBlock(any, *tags), Constant("\n"),
                     Mark(std::string(tags->block_end), limits)});
  }
  if (const CallMarks* const marks = CallMarksOf(*limits.tool_call_style)) {
    return Sequence({Mark(std::string(marks->block_begin), limits), any,
                     Mark(std::string(marks->block_end), limits)});
  }
  switch (*limits.tool_call_style) {
    case ToolCallStyle::kHermes:
      return Sequence(
          {Mark("<tool_call>", limits), any, Mark("</tool_call>", limits)});
    case ToolCallStyle::kGemma4:
      return Sequence({Mark(std::string(kGemmaCallBegin), limits), any,
                       Mark(std::string(kGemmaCallEnd), limits)});
    case ToolCallStyle::kMistral:
      if (limits.tool_calls_by_name) {
        return Sequence({Mark("[TOOL_CALLS]", limits), any});
      }
      return Sequence(
          {Mark("[TOOL_CALLS]", limits), Constant("["), any, Constant("]")});
    case ToolCallStyle::kOpenAi:
      return BehindThoughts(calls, limits);
    default:
      return any;
  }
}

// A text that is no call of Llama's, which bears no mark: it begins otherwise.
std::string NoCall() {
  return absl::StrCat(R"({"type":"grammar","grammar":)",
                      Quoted("start: TEXT\n"
                             R"(TEXT: /(.|\n)*/ & ~/[ \t\r\n]*\{(.|\n)*/)"
                             R"( & ~/(.|\n)*<\|python_tag\|>(.|\n)*/)"),
                      "}");
}

// Text with any number of these calls.
std::string TextWith(const std::vector<std::string>& calls,
                     const ModelLimits& limits) {
  if (const CallTags* const tags = CallTagsOf(*limits.tool_call_style)) {
    return TextWithTagged(Joined("or", calls), *tags, limits);
  }
  if (const CallMarks* const marks = CallMarksOf(*limits.tool_call_style)) {
    return Triggered({{std::string(marks->block_begin),
                       Several(calls, std::string(marks->between)),
                       std::string(marks->block_end)}},
                     limits);
  }
  switch (*limits.tool_call_style) {
    case ToolCallStyle::kHermes:
      return Triggered({{"<tool_call>", Joined("or", calls), "</tool_call>"}},
                       limits);
    case ToolCallStyle::kGemma4:
      return Triggered({{std::string(kGemmaCallBegin), Joined("or", calls),
                         std::string(kGemmaCallEnd)}},
                       limits);
    case ToolCallStyle::kMistral:
      if (limits.tool_calls_by_name) {
        return Triggered({{"[TOOL_CALLS]", Joined("or", calls), ""}}, limits);
      }
      return Triggered(
          {{"[TOOL_CALLS]",
            Sequence({Constant("["), Several(calls, ", "), Constant("]")}),
            ""}},
          limits);
    case ToolCallStyle::kOpenAi: {
      // A call ends the answer.
      std::vector<std::string> last = calls;
      last.push_back(FinalMessage(R"({"type":"any_text"})", limits));
      return Sequence(
          {MessagesIn({"analysis", "commentary"}, limits), Joined("or", last)});
    }
    default: {
      const std::string all = Several(calls, "; ");
      return Joined("or", {all, Sequence({Mark("<|python_tag|>", limits), all}),
                           NoCall()});
    }
  }
}

// Of each tool: with its schema where it is strict, else with any object.
absl::StatusOr<std::vector<std::string>> AnyCalls(const v1::Chat& chat,
                                                  const ModelLimits& limits) {
  std::vector<std::string> calls;
  for (int i = 0; i < chat.tools_size(); ++i) {
    const v1::Tool& tool = chat.tools(i);
    absl::StatusOr<std::string> schema = R"({"type":"object"})";
    if (tool.strict()) schema = ObjectSchema(tool, i);
    if (!schema.ok()) return schema.status();
    calls.push_back(Call(tool.name(), *schema, limits));
  }
  return calls;
}

std::string Tag(const std::string& format) {
  return absl::StrCat(R"({"type":"structural_tag","format":)", format, "}");
}

}  // namespace

bool ForcesCall(const v1::Chat& chat) {
  return chat.tool_choice() == "required" || chat.has_tool_choice_function();
}

absl::StatusOr<std::string> ForcedCallTag(const v1::Chat& chat,
                                          const ModelLimits& limits) {
  std::vector<std::string> calls;
  for (int i = 0; i < chat.tools_size(); ++i) {
    const v1::Tool& tool = chat.tools(i);
    if (chat.has_tool_choice_function() &&
        tool.name() != chat.tool_choice_function()) {
      continue;
    }
    absl::StatusOr<std::string> schema = ObjectSchema(tool, i);
    if (!schema.ok()) return schema.status();
    calls.push_back(Call(tool.name(), *schema, limits));
  }
  return Tag(AnyOf(calls, limits));
}

absl::StatusOr<std::optional<std::string>> CallOrAnswerTag(
    const v1::Chat& chat, const v1::StructuredOptions& answer,
    const ModelLimits& limits) {
  const bool messages = limits.tool_call_style == ToolCallStyle::kOpenAi;
  const absl::StatusOr<std::optional<std::string>> format =
      messages ? FormatInMessage(answer) : FormatOf(answer);
  if (!format.ok()) return format.status();
  if (!*format) return std::nullopt;
  auto calls = AnyCalls(chat, limits);
  if (!calls.ok()) return calls.status();
  if (messages) {
    calls->push_back(FinalMessage(**format, limits));
    return Tag(BehindThoughts(*calls, limits));
  }
  return Tag(Joined("or", {AnyOf(*calls, limits), **format}));
}

absl::StatusOr<std::optional<std::string>> AnswerTag(
    const v1::StructuredOptions& answer, const ModelLimits& limits) {
  const absl::StatusOr<std::optional<std::string>> format =
      FormatInMessage(answer);
  if (!format.ok()) return format.status();
  if (!*format) return std::nullopt;
  return Tag(BehindThoughts({FinalMessage(**format, limits)}, limits));
}

absl::StatusOr<std::optional<std::string>> BehindThoughtsTag(
    const v1::StructuredOptions& text, const ReasoningMarks& marks) {
  const absl::StatusOr<std::optional<std::string>> format = FormatOf(text);
  if (!format.ok()) return format.status();
  if (!*format) return std::nullopt;
  const auto token = [](int32_t id) {
    return absl::StrCat(R"({"type":"token","token":)", id, "}");
  };
  return Tag(
      Sequence({absl::StrCat(R"({"type":"tags_with_separator","separator":"",)",
                             R"("tags":[{"begin":)", token(marks.begin_id),
                             R"(,"content":{"type":"any_text"},"end":)",
                             token(marks.end_id), "}]}"),
                **format}));
}

bool HasStrictTool(const v1::Chat& chat) {
  return std::any_of(chat.tools().begin(), chat.tools().end(),
                     [](const v1::Tool& tool) { return tool.strict(); });
}

absl::StatusOr<std::string> StrictCallsTag(const v1::Chat& chat,
                                           const ModelLimits& limits) {
  const auto calls = AnyCalls(chat, limits);
  if (!calls.ok()) return calls.status();
  return Tag(TextWith(*calls, limits));
}

}  // namespace tandem::router
