// SPDX-License-Identifier: Apache-2.0
// Chats with tools: which are refused, and which calls are looked for.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/error.h"
#include "router/validate/errors.h"
#include "router/validate/validate.h"
#include "tests/router/validate/limits.h"

namespace tandem::router {
namespace {

v1::GenerateRequest WithTools(int tools) {
  v1::GenerateRequest request =
      Parse("chat { messages { role: 'u' content: 'hi' } }");
  for (int i = 0; i < tools; ++i) {
    request.mutable_chat()->add_tools()->set_name(absl::StrCat("f", i));
  }
  return request;
}

TEST(ValidateTools, AtMost128) {
  EXPECT_TRUE(Validate(WithTools(128), Limits()).ok());
  EXPECT_EQ(ErrorMetadata(Validate(WithTools(129), Limits()).status())["field"],
            "chat.tools");
}

TEST(ValidateTools, AreRefusedWhereTheModelCouldNotUseThem) {
  ModelLimits limits = Limits();
  limits.tool_call_style.reset();
  EXPECT_THAT(std::string(Validate(WithTools(1), limits).status().message()),
              testing::HasSubstr("--tool-call-parser"));
  limits.template_has_tools = false;
  EXPECT_THAT(std::string(Validate(WithTools(1), limits).status().message()),
              testing::HasSubstr("knows no tools"));
  v1::GenerateRequest none = WithTools(1);
  none.mutable_chat()->set_tool_choice("none");
  EXPECT_TRUE(Validate(none, limits).ok());
}

TEST(ValidateTools, AForcedCallIsAText) {
  v1::GenerateRequest request = WithTools(2);
  EXPECT_FALSE(Validate(request, Limits())->structured.has_value());
  request.mutable_chat()->set_tool_choice("required");
  const auto effective = Validate(request, Limits());
  ASSERT_TRUE(effective.ok()) << effective.status();
  EXPECT_TRUE(effective->structured->has_structural_tag());
  EXPECT_EQ(effective->model_end_ids, Limits().eos_token_ids);
  EXPECT_TRUE(effective->tool_calls.has_value());
  ModelLimits limits = Limits();
  limits.tool_call_style = ToolCallStyle::kNone;
  EXPECT_EQ(ErrorMetadata(Validate(request, limits).status())["field"],
            "chat.tool_choice");
}

TEST(ValidateTools, AnAnswerOfAFormMayGiveWayToACall) {
  v1::GenerateRequest request = WithTools(2);
  request.mutable_structured()->set_regex("[0-9]");
  EXPECT_TRUE(Validate(request, Limits())->structured->has_structural_tag());
  request.mutable_chat()->set_tool_choice("none");
  EXPECT_EQ(Validate(request, Limits())->structured->regex(), "[0-9]");
}

TEST(ValidateTools, AStrictOneIsKeptToWhereNothingElseIsAsked) {
  v1::GenerateRequest request = WithTools(2);
  request.mutable_chat()->mutable_tools(1)->set_strict(true);
  const auto effective = Validate(request, Limits());
  ASSERT_TRUE(effective.ok()) << effective.status();
  EXPECT_TRUE(effective->structured->has_structural_tag());
  EXPECT_EQ(effective->constraint_of, ConstraintOf::kTools);
  EXPECT_EQ(effective->model_end_ids, Limits().eos_token_ids);
  EXPECT_EQ(std::count(effective->features.begin(), effective->features.end(),
                       "structured"),
            1);
  request.mutable_beam()->set_width(2);
  EXPECT_EQ(ErrorMetadata(Validate(request, Limits()).status())["field"],
            "beam");
  request.clear_beam();
  request.mutable_chat()->set_tool_choice("none");
  EXPECT_FALSE(Validate(request, Limits())->structured.has_value());
  request.mutable_chat()->clear_tool_choice();
  request.mutable_stopping()->set_max_tokens(0);
  request.mutable_output()->set_prompt_logprobs(0);
  const auto scored = Validate(request, Limits());
  ASSERT_TRUE(scored.ok()) << scored.status();
  EXPECT_FALSE(scored->structured.has_value());
  request.mutable_stopping()->set_max_tokens(1);
  request.mutable_chat()->mutable_tools(1)->set_parameters_json_schema(
      R"({"type":"array"})");
  EXPECT_EQ(ErrorMetadata(Validate(request, Limits()).status())["field"],
            "chat.tools[1].parameters_json_schema");
}

// What a client sent is named, and the text that was made of it never shown.
TEST(ValidateStructured, ARefusalIsToldOfWhatTheClientSent) {
  const struct {
    bool own, required, strict;
    const char* told;  // ": why" behind it
  } cases[] = {
      {true, false, false, "structured.regex = (with chat.tools)"},
      {true, false, true, "chat.tools = (schemas, or structured.regex)"},
      {false, true, false, "chat.tools = (schemas)"},
  };
  for (const auto& c : cases) {
    v1::GenerateRequest request = WithTools(2);
    if (c.own) request.mutable_structured()->set_regex("[0-9]");
    if (c.required) request.mutable_chat()->set_tool_choice("required");
    request.mutable_chat()->mutable_tools(1)->set_strict(c.strict);
    const auto effective = Validate(request, Limits());
    ASSERT_TRUE(effective.ok()) << effective.status();
    const absl::Status told = InClientsTerms(
        *effective,
        ConstraintInvalid("structured.structural_tag",
                          effective->structured->structural_tag(), "why"));
    EXPECT_EQ(told.message(), absl::StrCat(c.told, ": why"));
    const std::string field =
        std::string(c.told).substr(0, std::string(c.told).find(' '));
    EXPECT_EQ(ErrorMetadata(told)["field"], field);
    EXPECT_EQ(ErrorReason(told), "CONSTRAINT_INVALID");
    const absl::Status slow = InClientsTerms(
        *effective,
        MakeError(absl::StatusCode::kResourceExhausted, "QUEUE_FULL",
                  "structured.structural_tag: takes too long",
                  {{"field", "structured.structural_tag"}}, absl::Seconds(1)));
    EXPECT_EQ(slow.message(), absl::StrCat(field, ": takes too long"));
    EXPECT_EQ(RetryAfter(slow), absl::Seconds(1));
  }
  v1::GenerateRequest request;
  request.set_text("x");
  request.mutable_structured()->set_regex("(");
  const absl::Status own = ConstraintInvalid("structured.regex", "(", "why");
  EXPECT_EQ(InClientsTerms(*Validate(request, Limits()), own), own);
}

TEST(ValidateStructured, NamedEndsComeInSpiteOfIgnoreEos) {
  ModelLimits limits = Limits();
  limits.eos_token_ids = {3, 4};
  const struct {
    bool ignore_eos;
    std::vector<uint32_t> stop;
    std::vector<int32_t> ends;
    bool ignored;
  } cases[] = {{false, {}, {3, 4}, false},
               {false, {4}, {3, 4}, false},
               {true, {}, {3, 4}, true},
               {true, {9}, {3, 4}, true},
               {true, {4, 9}, {4}, false}};
  for (const auto& c : cases) {
    v1::GenerateRequest request;
    request.set_text("x");
    request.mutable_structured()->set_regex("a*");
    request.mutable_stopping()->set_ignore_eos(c.ignore_eos);
    for (const uint32_t id : c.stop) {
      request.mutable_stopping()->add_stop_token_ids(id);
    }
    const auto effective = Validate(request, limits);
    ASSERT_TRUE(effective.ok()) << effective.status();
    const v1::StructuredParams params =
        ToSamplingParams(*effective).structured();
    EXPECT_EQ(std::vector<int32_t>(params.end_token_ids().begin(),
                                   params.end_token_ids().end()),
              c.ends);
    EXPECT_EQ(params.ignore_end(), c.ignored);
  }
}

TEST(ValidateTools, TellWhichCallsAreLookedFor) {
  ModelLimits limits = Limits();
  limits.tool_call_markers = {{7, "<tool_call>"}};
  v1::GenerateRequest request = WithTools(2);
  auto effective = Validate(request, limits);
  ASSERT_TRUE(effective.ok() && effective->tool_calls.has_value());
  EXPECT_EQ(effective->tool_calls->style, ToolCallStyle::kHermes);
  EXPECT_EQ(effective->tool_calls->names,
            (std::vector<std::string>{"f0", "f1"}));
  EXPECT_TRUE(effective->tool_calls->parallel);
  EXPECT_EQ(effective->tool_calls->markers.size(), 1u);
  // Of calls in tags the schema says what is text.
  request.mutable_chat()->mutable_tools(1)->set_parameters_json_schema(
      R"({"properties": {"a": {"type": "string"}, "b": {"type": "number"}}})");
  EXPECT_TRUE(Validate(request, limits)->tool_calls->json_parameters.empty());
  limits.tool_call_style = ToolCallStyle::kGlm45;
  EXPECT_EQ(Validate(request, limits)->tool_calls->json_parameters,
            (JsonParameters{{"f1", {"b"}}}));
  limits.tool_call_style = ToolCallStyle::kHermes;
  // In the text they are seen without help.
  request.mutable_output()->set_skip_special_tokens(false);
  request.mutable_chat()->set_parallel_tool_calls(false);
  effective = Validate(request, limits);
  EXPECT_FALSE(effective->tool_calls->parallel);
  EXPECT_TRUE(effective->tool_calls->markers.empty());
  request.mutable_chat()->set_tool_choice("none");
  EXPECT_FALSE(Validate(request, limits)->tool_calls.has_value());
  request.mutable_chat()->clear_tool_choice();
  limits.tool_call_style = ToolCallStyle::kNone;
  EXPECT_FALSE(Validate(request, limits)->tool_calls.has_value());
  request.mutable_chat()->clear_tools();
  EXPECT_FALSE(Validate(request, Limits())->tool_calls.has_value());
}

}  // namespace
}  // namespace tandem::router
