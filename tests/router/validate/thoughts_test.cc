// SPDX-License-Identifier: Apache-2.0
// What must match something in answers of a model that may think first, and
// need not (Gemma 4): by the grammar that is compiled of a request, whatever is
// behind thoughts does.

#include <gtest/gtest.h>

#include <string>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "common/error.h"
#include "router/validate/validate.h"
#include "tests/router/validate/limits.h"
#include "tests/router/validate/tag_writer.h"

namespace tandem::router {
namespace {

class ThoughtsTest : public testing::Test {
 protected:
  ThoughtsTest() : limits_(Limits()) {
    limits_.vocabulary_size = writer_.vocab_size();
    limits_.tool_call_style = ToolCallStyle::kGemma4;
    limits_.tool_call_markers = {{5, "<|tool_call>"}};
    limits_.reasoning = ReasoningMarks{ReasoningStyle::kGemma4, 3, 4};
  }

  // `chat` and what is beside it, told to think or not.
  EffectiveRequest Asked(std::string_view think, std::string_view chat,
                         std::string_view beside) const {
    const auto effective = Validate(
        Parse(absl::StrCat(
            "chat { messages { role: 'user' } chat_template_kwargs { fields { "
            "key: 'enable_thinking' value { bool_value: ",
            std::string(think), " } } } ", std::string(chat), "} ",
            std::string(beside))),
        limits_);
    EXPECT_TRUE(effective.ok()) << effective.status();
    return *effective;
  }

  bool Allows(const EffectiveRequest& request, std::string_view text) {
    return writer_.Allows(request.structured->structural_tag(), text);
  }

  TagWriter writer_;
  ModelLimits limits_;
};

TEST_F(ThoughtsTest, AnAnswerMatchesBehindThemAndWithoutAny) {
  for (const char* const constraint :
       {"structured { regex: '[0-9]+' }",
        "structured { json_schema: '{\"type\":\"integer\"}' }",
        "structured { structural_tag: "
        "'{\"format\":{\"type\":\"regex\",\"pattern\":\"[0-9]+\"}}' }"}) {
    SCOPED_TRACE(constraint);
    const EffectiveRequest request = Asked("true", "", constraint);
    for (const char* const right :
         {"12", "^3thought\nHm. 3 {\n^412", "^3thought\n^47", "^3a^4^3b^47"}) {
      EXPECT_TRUE(Allows(request, right)) << right;
    }
    for (const char* const wrong :
         {"x", "Hm.12", "^3thought\n12", "^3thought\n^4x", "^3thought\n^4",
          "12^3a^4", "^3a^5call:f{}^412"}) {
      EXPECT_FALSE(Allows(request, wrong)) << wrong;
    }
    EXPECT_EQ(request.constraint_of, ConstraintOf::kClient);
    EXPECT_TRUE(request.constraint_field.starts_with("structured."));
    EXPECT_EQ(Asked("false", "", constraint).constraint_field, "");
  }
}

TEST_F(ThoughtsTest, SoDoCalls) {
  const std::string tools =
      "tools { name: 'f' strict: true parameters_json_schema: "
      "'{\"type\":\"object\",\"properties\":{\"days\":{\"type\":\"integer\"}},"
      "\"required\":[\"days\"],\"additionalProperties\":false}' } ";
  const std::string call = "^5call:f{\"days\":2}<tool_call|>";
  const std::string wrong = "^5call:f{\"days\":true}<tool_call|>";
  const EffectiveRequest forced =
      Asked("true", tools + "tool_choice: 'required' ", "");
  const EffectiveRequest free = Asked("true", tools, "");
  for (const EffectiveRequest* const request : {&forced, &free}) {
    for (const std::string thoughts : {"", "^3thought\nHm.^4"}) {
      EXPECT_TRUE(Allows(*request, thoughts + call)) << thoughts;
      EXPECT_FALSE(Allows(*request, thoughts + wrong)) << thoughts;
      EXPECT_EQ(Allows(*request, thoughts + "So."), request == &free);
    }
  }
  EXPECT_FALSE(Allows(Asked("false", tools, ""), "^3thought\nHm.^4" + call));
}

// A grammar that none can be made of is the client's field's.
TEST_F(ThoughtsTest, RefusalsSpeakOfWhatWasSent) {
  const EffectiveRequest request =
      Asked("true", "", "structured { regex: '[' }");
  const absl::Status told = InClientsTerms(
      request, MakeError(absl::StatusCode::kInvalidArgument,
                         "CONSTRAINT_INVALID", "structured.structural_tag: no",
                         {{"field", "structured.structural_tag"}}));
  EXPECT_EQ(ErrorMetadata(told)["field"], "structured.regex");
}

}  // namespace
}  // namespace tandem::router
