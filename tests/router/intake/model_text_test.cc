// SPDX-License-Identifier: Apache-2.0
// What the router learns of a model's directory.

#include "router/intake/model_text.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/engine/temp_dir.h"

namespace tandem::router {
namespace {

using nlohmann::json;

// vLLM stops at the tokenizer's end token and at those of the configs: many a
// fine-tune has another in its tokenizer than its base has in its configs.
TEST(ModelText, EndTokensAreTheConfigsAndTheTokenizers) {
  const struct {
    const char* why;
    json config, generation;
    std::vector<int32_t> expected;
  } cases[] = {{"the tokenizer's alone", nullptr, nullptr, {2}},
               {"the same", 2, 2, {2}},
               {"another in config.json", 7, nullptr, {7, 2}},
               {"others in generation_config.json", 7, {8, 9}, {8, 9, 2}},
               {"it among others", nullptr, {2, 9}, {2, 9}}};
  const std::string tales = TANDEM_SOURCE_DIR "/models/tales/";
  for (const auto& c : cases) {
    SCOPED_TRACE(c.why);
    const engine::TempDir dir;
    for (const char* name : {"tokenizer.json", "tokenizer_config.json"}) {
      std::filesystem::copy(tales + name, dir.path());  // which ends by 2
    }
    dir.Write("config.json", json({{"architectures", {"LlamaForCausalLM"}},
                                   {"hidden_size", 64},
                                   {"intermediate_size", 128},
                                   {"num_hidden_layers", 2},
                                   {"num_attention_heads", 4},
                                   {"vocab_size", 1024},
                                   {"eos_token_id", c.config}})
                                 .dump());
    dir.Write("generation_config.json",
              json({{"eos_token_id", c.generation}}).dump());
    const auto model = ModelText::Load(dir.path(), {});
    ASSERT_TRUE(model.ok()) << model.status();
    EXPECT_EQ((*model)->limits().eos_token_ids, c.expected);
  }
}

// A model whose tokenizer knows `marks`, with this chat template.
void WriteModel(const std::string& chat_template,
                const std::vector<std::string_view>& marks,
                const engine::TempDir& dir) {
  const std::string tales = TANDEM_SOURCE_DIR "/models/tales/";
  json tokenizer = json::parse(std::ifstream(tales + "tokenizer.json"));
  int id = 0;
  for (const json& token : tokenizer["model"]["vocab"]) {
    id = std::max(id, token.get<int>() + 1);
  }
  for (const json& token : tokenizer["added_tokens"]) {
    id = std::max(id, token["id"].get<int>() + 1);
  }
  for (const std::string_view mark : marks) {
    if (tokenizer["model"]["vocab"].contains(mark)) continue;  // <|end|>
    tokenizer["added_tokens"].push_back({{"id", id++},
                                         {"content", mark},
                                         {"single_word", false},
                                         {"lstrip", false},
                                         {"rstrip", false},
                                         {"normalized", false},
                                         {"special", true}});
  }
  dir.Write("tokenizer.json", tokenizer.dump());
  std::filesystem::copy(tales + "tokenizer_config.json", dir.path());
  dir.Write("chat_template.jinja", chat_template);
  dir.Write("config.json", json({{"architectures", {"LlamaForCausalLM"}},
                                 {"hidden_size", 64},
                                 {"intermediate_size", 128},
                                 {"num_hidden_layers", 2},
                                 {"num_attention_heads", 4},
                                 {"vocab_size", id},
                                 {"eos_token_id", 2}})
                               .dump());
}

constexpr char kHarmonyTemplate[] =
    "{% if tools %}{{ tools|tojson }}{% endif %}{% for m in messages %}"
    "<|start|>{{ m.role }}<|channel|>final<|message|>{{ m.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}";

TEST(ModelText, ParsersOfGptOssGoTogether) {
  const std::vector<std::string_view> all(kHarmonyMarks.begin(),
                                          kHarmonyMarks.end());
  const std::vector<std::string_view> few(
      kHarmonyMarks.begin(), kHarmonyMarks.begin() + kNeededHarmonyMarks);
  const std::vector<std::string_view> none;
  const std::string plain =
      "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}";
  const struct {
    const char* why;
    std::string chat_template;
    const std::vector<std::string_view>& marks;
    const char *calls, *reasoning;
    // Whether it is Harmony, reasoning is told apart, and calls are.
    bool harmony, reasons, tool_calls;
  } cases[] = {
      {"by itself", kHarmonyTemplate, all, "auto", "auto", true, true, true},
      {"with few marks", kHarmonyTemplate, few, "auto", "auto", true, true,
       true},
      {"by name", plain, all, "openai", "openai_gptoss", true, true, true},
      {"calls by name", plain, all, "openai", "auto", true, true, true},
      {"reasoning by name", plain, all, "auto", "openai_gptoss", true, true,
       false},
      {"without calls", kHarmonyTemplate, all, "none", "auto", true, true,
       false},
      {"without reasoning", kHarmonyTemplate, all, "auto", "none", true, false,
       true},
      {"without both", kHarmonyTemplate, all, "none", "none", false, false,
       false},
      {"without marks", kHarmonyTemplate, none, "auto", "auto", false, false,
       false},
      {"another template", plain, all, "auto", "auto", false, false, false},
      {"another style", kHarmonyTemplate, all, "hermes", "auto", false, false,
       false},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.why);
    const engine::TempDir dir;
    WriteModel(c.chat_template, c.marks, dir);
    const auto model = ModelText::Load(
        dir.path(),
        {.tool_call_parser = c.calls, .reasoning_parser = c.reasoning});
    ASSERT_TRUE(model.ok()) << model.status();
    const ModelLimits& limits = (*model)->limits();
    EXPECT_EQ(limits.harmony.has_value(), c.harmony);
    EXPECT_EQ(limits.tool_call_style == ToolCallStyle::kOpenAi, c.tool_calls);
    EXPECT_FALSE(limits.reasoning.has_value());
    std::vector<int32_t> ends = {2};
    if (!c.harmony) {
      EXPECT_EQ(limits.eos_token_ids, ends);
      continue;
    }
    EXPECT_EQ(limits.harmony->reasoning, c.reasons);
    EXPECT_EQ(limits.harmony->marks.size(), c.marks.size());
    for (const auto& [id, mark] : limits.harmony->marks) {
      EXPECT_EQ((*model)->TokenText(id), mark);
      if (mark == kHarmonyCall || mark == kHarmonyReturn) ends.push_back(id);
    }
    EXPECT_EQ(limits.eos_token_ids, ends);
  }
}

TEST(ModelText, ATemplateMayAddToArguments) {
  const engine::TempDir dir;
  WriteModel(
      "{% for m in messages %}{% if m['content'] is none %}"
      "{% for call in m['tool_calls'] %}{{ '<' + call['function']['name'] + '|'"
      " + call['function']['arguments'] + '>' }}{% endfor %}"
      "{% else %}{{ m['content'] }}{% endif %}{% endfor %}",
      {}, dir);
  const auto model = ModelText::Load(dir.path(), {});
  ASSERT_TRUE(model.ok()) << model.status();
  v1::GenerateRequest request;
  v1::ChatMessage* const message = request.mutable_chat()->add_messages();
  message->set_role("assistant");
  v1::ToolCall* const call = message->add_tool_calls();
  call->set_name("f");
  call->set_arguments_json(R"({"b": 1, "a": [2]})");
  const auto prompt = (*model)->Encode(request);
  ASSERT_TRUE(prompt.ok()) << prompt.status();
  EXPECT_EQ(prompt->rendered, R"(<f|{"b": 1, "a": [2]}>)");
}

TEST(ModelText, ReasoningIsKnownByItself) {
  const std::string plain =
      "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}";
  const std::string glm = plain + "{# <tool_call><arg_key> </think> #}";
  const std::string minimax =
      plain +
      "{# <minimax:tool_call><invoke name=\"\"><parameter name=\"\"> "
      "</think> #}";
  const std::string deepseek31 =
      plain +
      "{# <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}"
      "<｜tool▁call▁end｜> #}";
  const std::string deepseek = deepseek31 + "{# function\n```json #}";
  const std::string kimi = plain +
                           "{# <|tool_calls_section_begin|><|tool_call_begin|>"
                           "<|tool_call_argument_begin|><|tool_call_end|> #}";
  const std::string thinks = "{# </think> #}";
  const std::vector<std::string_view> marks = {kThinkBegin, kThinkEnd};
  const std::vector<std::string_view> channel = {kChannelBegin, kChannelEnd};
  const std::vector<std::string_view> none;
  constexpr auto kAsQwen = ReasoningStyle::kQwen3;
  constexpr auto kAsDeepSeek = ReasoningStyle::kDeepSeekR1;
  const struct {
    const char* why;
    std::string chat_template;
    const std::vector<std::string_view>& marks;
    const char* reasoning;
    std::optional<ReasoningStyle> style;
  } cases[] = {
      {"GLM", glm, marks, "auto", kAsQwen},
      {"GLM, by name", plain, marks, "glm45", kAsQwen},
      {"MiniMax", minimax, marks, "auto", kAsDeepSeek},
      {"MiniMax, by name", plain, marks, "minimax_m2", kAsDeepSeek},
      {"DeepSeek V3", deepseek, marks, "auto", std::nullopt},
      {"DeepSeek R1", deepseek + thinks, marks, "auto", kAsDeepSeek},
      {"DeepSeek V3.1", deepseek31 + thinks, marks, "auto",
       ReasoningStyle::kDeepSeekV3},
      {"DeepSeek V3.1, by name", plain, marks, "deepseek_v3",
       ReasoningStyle::kDeepSeekV3},
      {"Kimi K2", kimi, marks, "auto", std::nullopt},
      {"Kimi K2 Thinking", kimi + thinks, marks, "auto",
       ReasoningStyle::kKimiK2},
      {"Kimi K2, by name", plain, marks, "kimi_k2", ReasoningStyle::kKimiK2},
      {"Gemma 4", plain + "{# <|channel>thought\n<channel|> #}", channel,
       "auto", ReasoningStyle::kGemma4},
      {"Gemma 4, by name", plain, channel, "gemma4", ReasoningStyle::kGemma4},
      {"without marks", glm, none, "auto", std::nullopt},
      {"not wanted", glm, marks, "none", std::nullopt},
      {"another", plain + "{# <tool_call> </think> #}", marks, "auto",
       std::nullopt},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.why);
    const engine::TempDir dir;
    WriteModel(c.chat_template, c.marks, dir);
    const auto model = ModelText::Load(
        dir.path(),
        {.tool_call_parser = "auto", .reasoning_parser = c.reasoning});
    ASSERT_TRUE(model.ok()) << model.status();
    const auto& reasoning = (*model)->limits().reasoning;
    ASSERT_EQ(reasoning.has_value(), c.style.has_value());
    if (reasoning) {
      EXPECT_EQ(reasoning->style, *c.style);
    }
  }
}

TEST(ModelText, CallsMayEndReasoning) {
  const std::string_view kimi = "<|tool_calls_section_begin|>";
  const std::string_view gemma = "<|tool_call>";
  const struct {
    const char* parser;
    std::vector<std::string_view> marks;
    bool calls_end;
  } cases[] = {
      {"kimi_k2", {kThinkBegin, kThinkEnd, kimi}, true},
      {"deepseek_r1", {kThinkBegin, kThinkEnd, kimi}, false},
      {"gemma4", {kChannelBegin, kChannelEnd, gemma}, true},
      {"gemma4", {kChannelBegin, kChannelEnd}, false},
  };
  for (const auto& c : cases) {
    const engine::TempDir dir;
    WriteModel("{{ messages }}", c.marks, dir);
    const auto model =
        ModelText::Load(dir.path(), {.reasoning_parser = c.parser});
    ASSERT_TRUE(model.ok()) << model.status();
    const ReasoningMarks& marks = *(*model)->limits().reasoning;
    EXPECT_EQ(marks.calls_id, c.calls_end ? marks.end_id + 1 : -1);
  }
}

TEST(ModelText, WhatATemplateRefusesIsTheFieldThatIsWrong) {
  const engine::TempDir dir;
  WriteModel(
      "{% if messages|length > 1 %}{{ raise_exception('one!') }}"
      "{% endif %}{{ messages[0].content }}",
      {}, dir);
  const auto model = ModelText::Load(dir.path(), {});
  ASSERT_TRUE(model.ok()) << model.status();
  const auto refusal = [&](int messages, const char* name) {
    v1::Chat chat;
    for (int i = 0; i < messages; ++i) {
      v1::ChatMessage* const message = chat.add_messages();
      message->set_role("user");
      message->set_content("hello");
    }
    (*chat.mutable_chat_template_kwargs()->mutable_fields())[name]
        .set_bool_value(true);
    return (*model)->Encode(chat, /*add_special_tokens=*/false).status();
  };
  EXPECT_TRUE(refusal(1, "thinking").ok()) << refusal(1, "thinking");
  EXPECT_EQ(ErrorMetadata(refusal(2, "thinking"))["field"], "chat");
  EXPECT_EQ(ErrorMetadata(refusal(1, "bos_token"))["field"],
            "chat.chat_template_kwargs");
}

// Members of a Struct are in another order each time.
TEST(ModelText, EqualVariablesMakeEqualPrompts) {
  const engine::TempDir dir;
  WriteModel("{{ document|tojson }}", {}, dir);
  const auto model = ModelText::Load(dir.path(), {});
  ASSERT_TRUE(model.ok()) << model.status();
  for (int i = 0; i < 20; ++i) {
    v1::Chat chat;
    chat.add_messages()->set_role("user");
    auto& document =
        *(*chat.mutable_chat_template_kwargs()->mutable_fields())["document"]
             .mutable_struct_value()
             ->mutable_fields();
    for (int member = 0; member < 8; ++member) {
      const char name = static_cast<char>('a' + (member * 3 + i) % 8);
      document[std::string(1, name)].set_bool_value(true);
    }
    const auto prompt = (*model)->Encode(chat, /*add_special_tokens=*/false);
    ASSERT_TRUE(prompt.ok()) << prompt.status();
    EXPECT_EQ(prompt->rendered,
              R"({"a": true, "b": true, "c": true, "d": true, "e": true, )"
              R"("f": true, "g": true, "h": true})");
  }
}

TEST(ModelText, ParsersThatCannotBeAreRefused) {
  const std::vector<std::string_view> all(kHarmonyMarks.begin(),
                                          kHarmonyMarks.end());
  const struct {
    std::vector<std::string_view> marks;
    const char *calls, *reasoning, *why;
  } cases[] = {
      {{}, "openai", "auto", "no token <|start|>"},
      {{}, "auto", "openai_gptoss", "no token <|start|>"},
      {{"<|start|>", "<|channel|>"}, "openai", "none", "no token <|message|>"},
      {all, "hermes", "openai_gptoss", "go together"},
      {all, "xml", "auto", "is not known"},
      {all, "auto", "r2", "is not known"},
      {all, "auto", "gemma4", "no token <|channel>"},
  };
  for (const auto& c : cases) {
    const engine::TempDir dir;
    WriteModel(kHarmonyTemplate, c.marks, dir);
    const auto model = ModelText::Load(
        dir.path(),
        {.tool_call_parser = c.calls, .reasoning_parser = c.reasoning});
    EXPECT_EQ(model.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(model.status().message(), testing::HasSubstr(c.why));
  }
  // Marks of <think> are no messages.
  std::vector<std::string_view> marks = all;
  marks.insert(marks.end(), {"<think>", "</think>"});
  const engine::TempDir dir;
  WriteModel(kHarmonyTemplate, marks, dir);
  const auto model = ModelText::Load(
      dir.path(), {.tool_call_parser = "auto", .reasoning_parser = "qwen3"});
  EXPECT_THAT(model.status().message(), testing::HasSubstr("go together"));
}

}  // namespace
}  // namespace tandem::router
