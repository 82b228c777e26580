// SPDX-License-Identifier: Apache-2.0
// What must match something in answers that are messages (gpt-oss): by the
// grammar that is compiled of a request, the answer or the call alone does, and
// what comes of it is read again as clients get it.

#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/error.h"
#include "gmock/gmock.h"
#include "router/text/harmony.h"
#include "router/validate/errors.h"
#include "router/validate/validate.h"
#include "tests/router/validate/limits.h"
#include "tests/router/validate/tag_writer.h"

namespace tandem::router {
namespace {

// Special tokens of models/tales stand for marks; ^1 is the token 1.
const char* const kMarkOf[] = {nullptr,       "<|start|>",   "<|end|>",
                               "<|channel|>", "<|message|>", "<|constrain|>"};

class HarmonyAnswersTest : public testing::Test {
 protected:
  HarmonyAnswersTest() : limits_(Limits()) {
    limits_.vocabulary_size = writer_.vocab_size();
    limits_.tool_call_style = ToolCallStyle::kOpenAi;
    limits_.harmony.emplace();
    for (int id = 1; id <= 5; ++id) limits_.harmony->marks[id] = kMarkOf[id];
  }

  static v1::GenerateRequest Chat(const std::string& fields) {
    return Parse(absl::StrCat("chat { messages { role: 'user' } ", fields));
  }
  static std::string Tools() {
    return R"(tools { name: 'f' parameters_json_schema:
        '{"type":"object","properties":{"days":{"type":"integer"}},)"
           R"("required":["days"],"additionalProperties":false}' }
        tools { name: 'g' } )";
  }

  // Whether an answer to `request` may be `text`, and all of it.
  bool Allows(const v1::GenerateRequest& request, std::string_view text) {
    const auto effective = Validate(request, limits_);
    EXPECT_TRUE(effective.ok()) << effective.status();
    if (!effective.ok() || !effective->structured) return false;
    return writer_.Allows(effective->structured->structural_tag(), text);
  }

  // "reasoning|content|name(arguments)..".
  std::string Read(std::string_view text) {
    ToolCallOptions options;
    options.style = ToolCallStyle::kOpenAi;
    HarmonyOutput output(*limits_.harmony, &options, 0);
    v1::GenerateDelta delta;
    while (!text.empty()) {
      const bool mark = text.front() == '^';
      const std::string_view piece = mark ? "" : text.substr(0, 1);
      output.Arrives(mark ? text[1] - '0' : 0, piece);
      output.Release(piece, &delta);
      text.remove_prefix(mark ? 2 : 1);
    }
    output.Finish(&delta);
    google::protobuf::RepeatedPtrField<v1::ToolCall> calls;
    JoinToolCalls(delta.tool_calls(), &calls);
    std::string read =
        absl::StrCat(delta.reasoning_content(), "|", delta.text(), "|");
    for (const v1::ToolCall& call : calls) {
      absl::StrAppend(&read, call.name(), "(", call.arguments_json(), ")");
    }
    return read;
  }

  struct Allowed {
    const char* text;
    const char* read;  // null: it is not
  };
  void Check(const v1::GenerateRequest& request,
             const std::vector<Allowed>& texts) {
    for (const Allowed& c : texts) {
      EXPECT_EQ(Allows(request, c.text), c.read != nullptr) << c.text;
      if (c.read != nullptr) {
        EXPECT_EQ(Read(c.text), c.read) << c.text;
      }
    }
  }

  TagWriter writer_;
  ModelLimits limits_;
};

TEST_F(HarmonyAnswersTest, TheLastMessageMatches) {
  for (const char* const constraint :
       {"} structured { regex: '[0-9]+' }",
        "} structured { structural_tag: "
        "'{\"format\":{\"type\":\"regex\",\"pattern\":\"[0-9]+\"}}' }",
        "} structured { json_schema: '{\"type\":\"integer\"}' }"}) {
    SCOPED_TRACE(constraint);
    Check(Chat(constraint),
          {{"^3final^412", "|12|"},
           {"^3analysis^4Hm. {\n^2^1assistant^3final^412", "Hm. {\n|12|"},
           {"^3analysis^4^2^1assistant^3analysis^4b^2^1assistant^3final^47",
            "b|7|"},
           {"12", nullptr},
           {"^412", nullptr},
           {"^3final^4x", nullptr},
           {"^3final^4", nullptr},
           {"^3final^412^2", nullptr},
           {"^3analysis^412", nullptr},
           {"^3analysis^412^2", nullptr},
           {"^3commentary^412", nullptr},
           {"^3commentary to=functions.f ^5json^4{}", nullptr}});
  }
  const auto effective =
      Validate(Chat("} structured { regex: '[0-9]+' }"), limits_);
  EXPECT_EQ(effective->constraint_field, "structured.regex");
  EXPECT_EQ(effective->model_end_ids, limits_.eos_token_ids);
}

TEST_F(HarmonyAnswersTest, ACallThatMustBeMade) {
  Check(Chat(absl::StrCat(Tools(), "tool_choice: 'required' }")),
        {{"^3commentary to=functions.f ^5json^4{\"days\": 2}",
          "||f({\"days\": 2})"},
         {"^3commentary to=functions.f json^4{\"days\": 2}",
          "||f({\"days\": 2})"},
         {" to=functions.f^3commentary json^4{\"days\": 2}",
          "||f({\"days\": 2})"},
         {" to=functions.g^3commentary ^5json^4{}", "||g({})"},
         {"^3analysis^4Hm.^2^1assistant^3commentary to=functions.g ^5json^4{}",
          "Hm.||g({})"},
         {"^3analysis^4Hm.^2^1assistant to=functions.g^3commentary json^4{}",
          "Hm.||g({})"},
         {"^3commentary to=functions.f ^5json^4{\"day\": 2}", nullptr},
         {"^3commentary to=functions.h ^5json^4{}", nullptr},
         {"^3commentary to=functions.f ^5json^4", nullptr},
         {"^3commentary^4I look.", nullptr},
         {"^3final^4Yes", nullptr},
         {"{\"days\": 2}", nullptr}});
  Check(Chat(absl::StrCat(Tools(), "tool_choice_function: 'f' }")),
        {{"^3commentary to=functions.f ^5json^4{\"days\": 2}",
          "||f({\"days\": 2})"},
         {"^3commentary to=functions.g ^5json^4{}", nullptr}});
  // A tokenizer may know no <|constrain|>.
  limits_.harmony->marks.erase(5);
  Check(Chat(absl::StrCat(Tools(), "tool_choice_function: 'f' }")),
        {{"^3commentary to=functions.f json^4{\"days\": 2}",
          "||f({\"days\": 2})"}});
}

TEST_F(HarmonyAnswersTest, ACallOrAnAnswerThatMatches) {
  Check(
      Chat(absl::StrCat(Tools(), "} structured { regex: '[0-9]+' }")),
      {{"^3final^412", "|12|"},
       {"^3analysis^4Hm.^2^1assistant^3final^412", "Hm.|12|"},
       // No strict function: any object.
       {"^3commentary to=functions.f ^5json^4{\"x\": []}", "||f({\"x\": []})"},
       {"^3final^4x", nullptr},
       {"^3commentary^4I look.", nullptr}});
}

TEST_F(HarmonyAnswersTest, StrictFunctionsAreHeldToInFreeText) {
  const std::string strict =
      absl::StrCat(Tools(),
                   "tools { name: 's' strict: true "
                   "parameters_json_schema: '{\"properties\":{\"a\":"
                   "{\"type\":\"integer\"}},\"required\":[\"a\"],"
                   "\"additionalProperties\":false}' } }");
  Check(Chat(strict),
        {{"^3final^4Yes, {I} do.\n", "|Yes, {I} do.\n|"},
         {"^3final^4", "||"},
         {"^3analysis^4Hm.^2^1assistant^3commentary^4I look.^2^1assistant"
          "^3commentary to=functions.s ^5json^4{\"a\": 1}",
          "Hm.|I look.|s({\"a\": 1})"},
         {" to=functions.f^3commentary json^4{\"x\": 1}", "||f({\"x\": 1})"},
         {"^3commentary to=functions.s ^5json^4{\"a\": \"1\"}", nullptr},
         {"^3commentary to=functions.s ^5json^4{}", nullptr},
         {"^3commentary to=functions.t ^5json^4{}", nullptr}});
}

// Though it is a part of another text that is compiled.
TEST_F(HarmonyAnswersTest, WhatIsWrongIsToldOfTheClientsOwnField) {
  const auto effective = Validate(Chat("} structured { regex: '[' }"), limits_);
  ASSERT_TRUE(effective.ok()) << effective.status();
  const absl::Status told = InClientsTerms(
      *effective, ConstraintInvalid("structured.structural_tag", "(text)",
                                    "an open bracket"));
  EXPECT_EQ(ErrorMetadata(told)["field"], "structured.regex");
  EXPECT_THAT(told.message(), testing::HasSubstr("(in a message)"));
  EXPECT_THAT(told.message(), testing::HasSubstr("an open bracket"));
}

// With --reasoning-parser none thoughts are content, which must match.
TEST_F(HarmonyAnswersTest, ThoughtsThatAreContentAreNone) {
  limits_.harmony->reasoning = false;
  Check(Chat("} structured { regex: '[0-9]+' }"),
        {{"^3final^412", "|12|"},
         {"^3analysis^4Hm.^2^1assistant^3final^412", nullptr}});
}

// With --tool-call-parser none too.
TEST_F(HarmonyAnswersTest, AnswersMatchWhereCallsAreText) {
  limits_.tool_call_style = ToolCallStyle::kNone;
  Check(Chat(absl::StrCat(Tools(), "} structured { regex: '[0-9]+' }")),
        {{"^3analysis^4Hm.^2^1assistant^3final^412", "Hm.|12|"},
         {"^3commentary to=functions.g ^5json^4{}", nullptr}});
}

TEST_F(HarmonyAnswersTest, WithinAnAnswerItselfAllThatIsToComeMatches) {
  const auto effective = Validate(
      Chat("continue_final_message: true } structured { regex: '[0-9]+' }"),
      limits_);
  ASSERT_TRUE(effective.ok()) << effective.status();
  EXPECT_EQ(effective->structured->regex(), "[0-9]+");
  EXPECT_TRUE(effective->harmony.has_value());
  // Nor is the text of completions any message.
  const auto text =
      Validate(Parse("text: 'a' structured { regex: '[0-9]+' }"), limits_);
  ASSERT_TRUE(text.ok()) << text.status();
  EXPECT_EQ(text->structured->regex(), "[0-9]+");
  EXPECT_FALSE(text->harmony.has_value());
}

TEST_F(HarmonyAnswersTest, WhatHasNoPlaceInMessagesIsRefused) {
  const auto refused = [&](const std::string& fields) {
    const auto effective = Validate(Chat(fields), limits_);
    EXPECT_EQ(effective.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(effective.status().message(), testing::HasSubstr("message"));
    return ErrorMetadata(effective.status())["field"];
  };
  const std::string old =
      "} structured { structural_tag: '{\"structures\":[],\"triggers\":[]}' }";
  EXPECT_EQ(refused(old), "structured.structural_tag");
  EXPECT_EQ(refused(Tools() + old), "structured.structural_tag");
  EXPECT_EQ(refused(absl::StrCat(Tools(),
                                 "tool_choice: 'required' "
                                 "continue_final_message: true }")),
            "chat.continue_final_message");
}

}  // namespace
}  // namespace tandem::router
