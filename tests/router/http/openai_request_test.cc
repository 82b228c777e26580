// SPDX-License-Identifier: Apache-2.0
// Bodies as clients send them, against the messages that they must become.
#include "router/http/openai_request.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/error.h"
#include "gmock/gmock.h"
#include "google/protobuf/text_format.h"
#include "google/protobuf/util/message_differencer.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "router/intake/chat_json.h"
#include "router/text/tool_calls.h"
#include "text/chat_template.h"

namespace tandem::router {
namespace {

using ::testing::HasSubstr;

v1::GenerateRequest Text(const std::string& text) {
  v1::GenerateRequest request;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(text, &request));
  return request;
}

void ExpectSame(const v1::GenerateRequest& got, const std::string& want) {
  google::protobuf::util::MessageDifferencer differ;
  std::string difference;
  differ.ReportDifferencesToString(&difference);
  EXPECT_TRUE(differ.Compare(Text(want), got)) << difference;
}

TEST(OpenAiRequestTest, EveryFieldOfACompletion) {
  const auto request = ParseCompletion(R"({
    "model": "tales", "prompt": "Once", "request_id": "mine", "priority": 0,
    "temperature": 0.5, "top_p": 0.25, "min_p": 0.125, "typical_p": 0.75,
    "frequency_penalty": -1, "presence_penalty": 1.5, "repetition_penalty": 2,
    "top_k": 7, "n": 2, "best_of": 3, "seed": -1,
    "logit_bias": {"5": -100, "6": 1.5}, "allowed_token_ids": [1, 2],
    "banned_token_ids": [3], "bad_words": "ugly",
    "max_tokens": 9, "min_tokens": 1, "stop": ["a", "b"],
    "stop_token_ids": [4], "ignore_eos": true,
    "include_stop_str_in_output": true, "skip_special_tokens": false,
    "logprobs": 3, "echo": true,
    "return_token_ids": true, "cache_salt": "mine",
    "user": "somebody", "no_such_field": {"a": [1]}, "suffix": null,
    "stream": true, "stream_options": {"include_usage": true}})");
  ASSERT_TRUE(request.ok()) << request.status();
  EXPECT_FALSE(request->chat);
  EXPECT_TRUE(request->stream);
  EXPECT_TRUE(request->include_usage);
  EXPECT_FALSE(request->continuous_usage_stats);
  EXPECT_TRUE(request->return_token_ids);
  ASSERT_EQ(request->prompts.size(), 1u);
  ExpectSame(request->prompts[0], R"pb(
    model: "tales"
    text: "Once"
    request_id: "mine"
    priority: 0
    sampling {
      temperature: 0.5
      top_p: 0.25
      min_p: 0.125
      typical_p: 0.75
      frequency_penalty: -1
      presence_penalty: 1.5
      repetition_penalty: 2
      top_k: 7
      n: 2
      best_of: 3
      seed: 18446744073709551615
      logit_bias { key: 5 value: -100 }
      logit_bias { key: 6 value: 1.5 }
      allowed_token_ids: 1
      allowed_token_ids: 2
      banned_token_ids: 3
      bad_words: "ugly"
    }
    stopping {
      max_tokens: 9
      min_tokens: 1
      stop: "a"
      stop: "b"
      stop_token_ids: 4
      ignore_eos: true
      include_stop_str_in_output: true
    }
    output {
      logprobs: 3
      echo: true
      prompt_logprobs: 3
      return_token_ids: true
      skip_special_tokens: false
    }
    cache { cache_salt: "mine" })pb");
}

TEST(OpenAiRequestTest, SpecialTokensAndTimeAreTheClientsToSay) {
  const auto text = ParseCompletion(
      R"({"prompt": ["a", [1, 2]], "add_special_tokens": false,
          "max_time": 1.25, "chat_template": null})");
  ASSERT_TRUE(text.ok()) << text.status();
  ExpectSame(text->prompts[0], R"pb(
    text: "a"
    add_special_tokens: false
    stopping { max_time { seconds: 1 nanos: 250000000 } }
    sampling {}
    output {})pb");
  // Ids are used as they are.
  EXPECT_FALSE(text->prompts[1].has_add_special_tokens());
  const auto chat = ParseChatCompletion(
      R"({"messages": [{"role": "user"}], "add_special_tokens": true})");
  ASSERT_TRUE(chat.ok()) << chat.status();
  EXPECT_TRUE(chat->prompts[0].add_special_tokens());
  EXPECT_FALSE(chat->prompts[0].stopping().has_max_time());
}

TEST(OpenAiRequestTest, EchoWithLogprobsScoresThePrompt) {
  const struct {
    const char* fields;
    int prompt_logprobs;  // -1: none
    bool echoed;          // before those of the output
    bool listed;          // in a field of their own
  } kCases[] = {
      {R"("echo": true, "logprobs": 0)", 0, true, false},
      {R"("echo": true, "logprobs": 5)", 5, true, false},
      {R"("echo": true)", -1, false, false},
      {R"("logprobs": 5)", -1, false, false},
      {R"("prompt_logprobs": 2)", 2, false, true},
      {R"("echo": true, "logprobs": 5, "prompt_logprobs": 2)", 2, true, true},
  };
  for (const auto& c : kCases) {
    SCOPED_TRACE(c.fields);
    const auto request = ParseCompletion(
        std::string(R"({"prompt": "x", "max_tokens": 1, )") + c.fields + "}");
    ASSERT_TRUE(request.ok()) << request.status();
    const v1::OutputOptions& output = request->prompts[0].output();
    EXPECT_EQ(output.has_prompt_logprobs(), c.prompt_logprobs >= 0);
    EXPECT_EQ(output.prompt_logprobs(), std::max(0, c.prompt_logprobs));
    EXPECT_EQ(request->echo_logprobs, c.echoed);
    EXPECT_EQ(request->prompt_logprobs, c.listed);
    EXPECT_EQ(request->prompts[0].stopping().max_tokens(), 1);
  }
  const auto streamed = ParseCompletion(
      R"({"prompt": "x", "stream": true, "prompt_logprobs": 1})");
  EXPECT_THAT(std::string(streamed.status().message()),
              HasSubstr("prompt_logprobs = 1: not together with stream"));
}

TEST(OpenAiRequestTest, ABeamSearchHasAsManyBeamsAsSequences) {
  const auto beams = [](const std::string& fields) {
    const auto request = ParseCompletion(
        R"({"prompt": "x", "use_beam_search": true)" + fields + "}");
    EXPECT_TRUE(request.ok()) << request.status();
    v1::GenerateRequest part;
    *part.mutable_sampling() = request->prompts.at(0).sampling();
    *part.mutable_beam() = request->prompts.at(0).beam();
    return part;
  };
  ExpectSame(beams(R"(, "n": 3)"), "sampling { n: 3 } beam { width: 3 }");
  ExpectSame(beams(R"(, "n": 2, "best_of": 5, "length_penalty": 0.5)"),
             "sampling { n: 2 } beam { width: 5 length_penalty: 0.5 }");
  ExpectSame(
      beams(R"(, "early_stopping": true)"),
      "sampling { } beam { width: 1 early_stopping: EARLY_STOPPING_TRUE }");
  ExpectSame(
      beams(R"(, "early_stopping": "never")"),
      "sampling { } beam { width: 1 early_stopping: EARLY_STOPPING_NEVER }");
  const auto wrong = ParseCompletion(
      R"({"prompt": "x", "use_beam_search": true, "early_stopping": 3})");
  EXPECT_THAT(std::string(wrong.status().message()),
              HasSubstr("early_stopping"));
}

TEST(OpenAiRequestTest, WhatOnlyBeamsHeedNeedsThem) {
  const auto parse = [](const std::string& fields) {
    return ParseCompletion(R"({"prompt": "x", )" + fields + "}");
  };
  for (const char* defaults :
       {R"("length_penalty": 1.0, "early_stopping": false)",
        R"("length_penalty": 1, "use_beam_search": false)",
        R"("length_penalty": null, "early_stopping": null)"}) {
    const auto request = parse(defaults);
    ASSERT_TRUE(request.ok()) << defaults << ": " << request.status();
    EXPECT_FALSE(request->prompts.at(0).has_beam()) << defaults;
  }
  const std::pair<const char*, const char*> wrong[] = {
      {R"("length_penalty": 2, "use_beam_search": false)",
       "length_penalty = 2: needs use_beam_search = true"},
      {R"("length_penalty": 0)",
       "length_penalty = 0: needs use_beam_search = true"},
      {R"("length_penalty": "1")",
       "length_penalty = \"1\": a number is needed"},
      {R"("early_stopping": true)",
       "early_stopping = true: needs use_beam_search = true"},
      {R"("early_stopping": "never")",
       "early_stopping = \"never\": needs use_beam_search = true"},
  };
  for (const auto& [fields, message] : wrong) {
    EXPECT_EQ(std::string(parse(fields).status().message()), message);
  }
}

TEST(OpenAiRequestTest, PromptsComeInFourForms) {
  const auto prompts = [](const std::string& prompt) {
    const auto request = ParseCompletion("{\"prompt\": " + prompt + "}");
    EXPECT_TRUE(request.ok()) << request.status();
    std::vector<std::string> all;
    for (const v1::GenerateRequest& one : request->prompts) {
      all.push_back(one.has_text() ? one.text() : "ids:");
      for (uint32_t id : one.token_ids().ids()) {
        all.back() += std::to_string(id) + ",";
      }
    }
    return all;
  };
  using Strings = std::vector<std::string>;
  EXPECT_EQ(prompts(R"("a")"), Strings({"a"}));
  EXPECT_EQ(prompts(R"(["a", "b"])"), Strings({"a", "b"}));
  EXPECT_EQ(prompts("[1, 2]"), Strings({"ids:1,2,"}));
  EXPECT_EQ(prompts("[[1, 2], [3]]"), Strings({"ids:1,2,", "ids:3,"}));
}

TEST(OpenAiRequestTest, AChat) {
  const auto request = ParseChatCompletion(R"({
    "messages": [
      {"role": "developer", "content": "Be kind."},
      {"role": "user", "content": [{"type": "text", "text": "Hello"},
                                   {"type": "text", "text": " you"}]},
      {"role": "assistant", "content": null, "reasoning_content": "hm"},
      {"role": "user", "content": "Go on", "name": "Mia"}],
    "max_tokens": 5, "max_completion_tokens": 6, "logprobs": true,
    "top_logprobs": 4, "add_generation_prompt": false,
    "continue_final_message": true, "chat_template_kwargs": {"deep": [1]},
    "tool_choice": "auto"})");
  ASSERT_TRUE(request.ok()) << request.status();
  EXPECT_TRUE(request->chat);
  EXPECT_FALSE(request->stream);
  ASSERT_EQ(request->prompts.size(), 1u);
  ExpectSame(request->prompts[0], R"pb(
    chat {
      messages { role: "system" content: "Be kind." }
      messages {
        role: "user"
        parts { text: "Hello" }
        parts { text: " you" }
      }
      messages { role: "assistant" reasoning_content: "hm" }
      messages { role: "user" content: "Go on" name: "Mia" }
      add_generation_prompt: false
      continue_final_message: true
      chat_template_kwargs {
        fields {
          key: "deep"
          value { list_value { values { number_value: 1 } } }
        }
      }
    }
    sampling {}
    stopping { max_tokens: 6 }
    output { logprobs: 4 })pb");
}

TEST(OpenAiRequestTest, ToolsAndConstraintsReachTheCoreWhichJudgesThem) {
  const auto request = ParseChatCompletion(R"({
    "messages": [{"role": "user", "content": "?"},
      {"role": "assistant", "tool_calls": [{"id": "c1", "type": "function",
        "function": {"name": "f", "arguments": "{}"}}]},
      {"role": "tool", "tool_call_id": "c1", "content": "4"}],
    "tools": [{"type": "function", "function": {"name": "f",
      "description": "d", "parameters": {"type": "object"}}}],
    "tool_choice": "auto",
    "response_format": {"type": "json_schema",
                        "json_schema": {"name": "n", "schema": {"a": 1}}}})");
  ASSERT_TRUE(request.ok()) << request.status();
  const v1::GenerateRequest& prompt = request->prompts[0];
  EXPECT_EQ(prompt.chat().tool_choice(), "auto");
  EXPECT_EQ(prompt.chat().tools(0).parameters_json_schema(),
            R"({"type":"object"})");
  EXPECT_EQ(prompt.chat().messages(1).tool_calls(0).name(), "f");
  EXPECT_EQ(prompt.chat().messages(2).tool_call_id(), "c1");
  EXPECT_EQ(prompt.structured().json_schema(), R"({"a":1})");
  const auto choice = ParseCompletion(
      R"({"prompt": "a", "structured_outputs": {"choice": ["x", "y"]}})");
  ASSERT_TRUE(choice.ok()) << choice.status();
  EXPECT_EQ(choice->prompts[0].structured().choice().values_size(), 2);
  // Properties keep their order, in all forms of a schema.
  for (
      const char* body :
      {R"({"prompt":"a","structured_outputs":{"json":{"z":1,"a":2}}})",
       R"({"prompt":"a","structured_outputs":{"json":"{\"z\":1,\"a\":2}"}})",
       R"({"prompt":"a","guided_json":{"z":1,"a":2}})",
       R"({"prompt":"a","response_format":{"type":"json_schema","json_schema":)"
       R"({"name":"n","schema":{"z":1,"a":2}}}})"}) {
    const auto ordered = ParseCompletion(body);
    ASSERT_TRUE(ordered.ok()) << ordered.status();
    EXPECT_EQ(ordered->prompts[0].structured().json_schema(),
              R"({"z":1,"a":2})");
  }
  const auto tag = ParseCompletion(
      R"({"prompt":"a","response_format":{"type":"structural_tag","triggers":)"
      R"(["<"],"structures":[]}})");
  ASSERT_TRUE(tag.ok());
  EXPECT_EQ(tag->prompts[0].structured().structural_tag(),
            R"({"type":"structural_tag","triggers":["<"],"structures":[]})");
  const auto guided =
      ParseCompletion(R"({"prompt":"a","guided_choice":["x"]})");
  ASSERT_TRUE(guided.ok());
  EXPECT_EQ(guided->prompts[0].structured().choice().values(0), "x");
  const auto object = ParseCompletion(
      R"({"prompt":"a","response_format":{"type":"json_object",)"
      R"("schema":{"z":1,"a":[7]}}})");
  ASSERT_TRUE(object.ok());
  EXPECT_EQ(object->prompts[0].structured().json_schema(),
            R"({"z":1,"a":[7]})");
  const auto both = ParseCompletion(
      R"({"prompt":"a","response_format":{"type":"json_object"},)"
      R"("structured_outputs":{"regex":"a"}})");
  ASSERT_FALSE(both.ok());
  EXPECT_NE(both.status().message().find("structured_outputs.regex"),
            std::string::npos);
  EXPECT_NE(both.status().message().find("response_format"), std::string::npos);
}

// Prompts and grammars are made of schemas: members keep their order.
TEST(OpenAiRequestTest, SchemasOfToolsKeepTheirOrder) {
  const auto request = ParseChatCompletion(R"({
    "metadata": {"tools": [{"function": 1}]},
    "tools": [{"type": "function", "function": {"parameters":
      {"z": {"y": 1, "b": [{"d": 1.0, "c": "\u00e9"}]}, "a": 1}, "name": "f"}},
      {"type": "function", "function": {"name": "g", "strict": true}}],
    "parallel_tool_calls": false,
    "tool_choice": {"type": "function", "function": {"name": "g"}},
    "messages": [{"role": "user", "content": "?"}]})");
  ASSERT_TRUE(request.ok()) << request.status();
  const v1::Chat& chat = request->prompts[0].chat();
  EXPECT_EQ(chat.tools(0).parameters_json_schema(),
            "{\"z\":{\"y\":1,\"b\":[{\"d\":1.0,\"c\":\"\u00e9\"}]},\"a\":1}");
  EXPECT_EQ(chat.tools(1).parameters_json_schema(), "");
  EXPECT_FALSE(chat.tools(0).has_strict());
  EXPECT_TRUE(chat.tools(1).strict());
  EXPECT_EQ(chat.tool_choice_function(), "g");
  EXPECT_FALSE(chat.has_tool_choice());
  EXPECT_TRUE(chat.has_parallel_tool_calls() && !chat.parallel_tool_calls());
}

// In time that grows with the body alone: the other way took minutes.
TEST(OpenAiRequestTest, LongListsAndRepeatedMembersCostNoMoreThanTheirText) {
  const auto with = [](const std::string& tools) {
    return ParseChatCompletion(absl::StrCat(
        R"({"messages": [{"role": "user", "content": "?"}], )", tools, "}"));
  };
  const auto tool = [](const std::string& parameters) {
    return absl::StrCat(
        R"("tools": [{"type": "function", "function": {"name": "f", )",
        parameters, "}}]");
  };
  std::string list = "{}";
  for (int i = 0; i < 200000; ++i) list += ",{}";
  const auto listed = with(tool(R"("parameters": {"enum": [)" + list + "]}"));
  ASSERT_TRUE(listed.ok()) << listed.status();
  EXPECT_EQ(listed->prompts[0].chat().tools(0).parameters_json_schema(),
            R"({"enum":[)" + list + "]}");

  std::string members = "\"a\":1";
  for (int i = 0; i < 100000; ++i) absl::StrAppend(&members, ",\"", i, "\":1");
  for (const std::string& body :
       {tool(R"("parameters": {)" + members + R"(}, "parameters": {})"),
        tool(R"("parameters": {)" + members + "}"),
        R"("tools": {)" + members + "}, " + tool(R"("parameters": {})")}) {
    const auto refused = with(body);
    ASSERT_FALSE(refused.ok());
    EXPECT_NE(refused.status().message().find("at most 512 members"),
              std::string::npos);
  }
  // The last of several is the one.
  const auto last = with(R"("tools": [], )" + tool(R"("parameters": {"b": 1,
      "a": 2, "b": 3})"));
  ASSERT_TRUE(last.ok()) << last.status();
  EXPECT_EQ(last->prompts[0].chat().tools(0).parameters_json_schema(),
            R"({"b":3,"a":2})");
}

TEST(OpenAiRequestTest, ReasoningEffortIsAVariableOfTheTemplate) {
  const auto variables = [](const std::string& fields) {
    const auto request = ParseChatCompletion(
        R"({"messages": [{"role": "user", "content": "?"}], )" + fields + "}");
    EXPECT_TRUE(request.ok()) << request.status();
    return request->prompts[0].chat().chat_template_kwargs().ShortDebugString();
  };
  const auto effort = [](const std::string& value) {
    return "fields { key: \"reasoning_effort\" value { string_value: \"" +
           value + "\" } }";
  };
  EXPECT_EQ(variables(R"("reasoning_effort": "high")"), effort("high"));
  EXPECT_EQ(variables(R"("reasoning_effort": "minimal",
                         "chat_template_kwargs": {})"),
            effort("minimal"));
  EXPECT_EQ(variables(R"("reasoning_effort": "high", "chat_template_kwargs":
                         {"reasoning_effort": "low"})"),
            effort("low"));
  EXPECT_EQ(variables(R"("reasoning_effort": null)"), "");
  const auto tokenize =
      ParseTokenize(R"({"messages": [], "reasoning_effort": "low"})");
  ASSERT_TRUE(tokenize.ok());
  EXPECT_EQ(tokenize->chat().chat_template_kwargs().ShortDebugString(),
            effort("low"));
}

std::string ReadWhole(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// What transformers' apply_chat_template makes of the same chats, from a
// client's body to the prompt.
TEST(OpenAiRequestTest, PromptsWithToolsAreThoseOfTransformers) {
  auto golden = nlohmann::ordered_json::parse(ReadWhole(
      std::string(TANDEM_SOURCE_DIR) + "/tests/golden/text/tool_prompts.json"));
  const std::string directory =
      testing::TempDir() + "/openai_request_test_model";
  std::filesystem::create_directories(directory);
  ASSERT_GT(golden["cases"].size(), 40u);
  for (const auto& c : golden["cases"]) {
    SCOPED_TRACE(c["name"].get<std::string>());
    auto config = golden["tokens"];
    config["chat_template"] = golden["templates"][c["family"]];
    std::ofstream(directory + "/tokenizer_config.json") << config.dump();
    const auto chat_template = text::ChatTemplate::Load(directory);
    ASSERT_TRUE(chat_template.ok()) << chat_template.status();
    const std::string source = chat_template->Source(true);
    EXPECT_NE(DetectToolCallStyle(source), ToolCallStyle::kNone);
    const ChatForm form = ChatFormOf(source);
    const auto request = ParseChatCompletion(c["request"].dump());
    ASSERT_TRUE(request.ok()) << request.status();
    const v1::Chat& chat = request->prompts[0].chat();
    const std::string messages = MessagesJson(chat, form);
    const std::string tools = ToolsJson(chat, form);
    const std::string extra =
        c["request"].value("chat_template_kwargs", golden["none"]).dump();
    const auto prompt =
        chat_template->Render({.messages_json = messages,
                               .tools_json = tools,
                               .extra_json = extra == "null" ? "" : extra});
    ASSERT_TRUE(prompt.ok()) << prompt.status();
    EXPECT_EQ(*prompt, c["expected"].get<std::string>());
  }
  std::filesystem::remove_all(directory);
}

TEST(OpenAiRequestTest, WrongFieldsAreNamed) {
  struct Case {
    const char* body;
    const char* field;  // "": not a matter of a field
    const char* text;
  };
  const Case completions[] = {
      {"", "",
       "the body: not valid JSON: parse error at line 1, column 1: syntax "
       "error while parsing value - unexpected end of input; expected '[', "
       "'{', or a literal"},
      {"[1]", "", "must be a JSON object"},
      {R"({"prompt": "a", "x":)", "", "not valid JSON"},
      {"{}", "prompt", "is needed"},
      {R"({"prompt": ""})", nullptr, ""},
      {R"({"prompt": []})", "prompt", "is needed"},
      {R"({"prompt": [[]]})", "prompt", "is needed"},
      {R"({"prompt": {"a": 1}})", "prompt", "is needed"},
      {R"({"prompt": [1, -2]})", "prompt", "token ids are needed"},
      {R"({"prompt": [1, 2.5]})", "prompt", "token ids are needed"},
      {R"({"prompt": ["a", [1], 3]})", "prompt", "is needed"},
      {R"({"prompt": "a", "allowed_token_ids": []})", "allowed_token_ids",
       "at least one token id is needed"},
      {R"({"prompt": "a", "allowed_token_ids": null})", nullptr, ""},
      {R"({"prompt": "a", "temperature": "hot"})", "temperature",
       "temperature = \"hot\": a number is needed"},
      {R"({"prompt": "a", "n": 1.5})", "n", "a whole number is needed"},
      {R"({"prompt": "a", "n": 1e30})", "n", "to 2147483647 is needed"},
      {R"({"prompt": "a", "n": 4294967296})", "n", "to 2147483647 is needed"},
      {R"({"prompt": "a", "n": 2.0})", nullptr, ""},
      {R"({"prompt": "a", "seed": 18446744073709551615})", nullptr, ""},
      {R"({"prompt": "a", "guided_regex": "a", "guided_choice": ["b"]})",
       "guided_choice", "guided_choice = (set): excludes guided_regex"},
      {R"({"prompt": "a", "seed": 1e20})", "seed",
       "from -2^63 to 2^64 - 1 is needed"},
      {R"({"prompt": "a", "max_tokens": 0, "echo": true})", "max_tokens",
       "without echo and logprobs"},
      {R"({"prompt": "a", "max_tokens": 0, "echo": true, "logprobs": 1})",
       nullptr, ""},
      {R"({"prompt": "a", "max_tokens": 0, "prompt_logprobs": 1})", nullptr,
       ""},
      {R"({"prompt": "a", "echo": true, "logprobs": 1, "n": 2,
           "use_beam_search": true})",
       "echo", "excludes use_beam_search with logprobs"},
      {R"({"prompt": "a", "stop": [1]})", "stop", "list of strings"},
      {R"({"prompt": "a", "logit_bias": {"x": 1}})", "logit_bias", "token ids"},
      {R"({"prompt": "a", "logit_bias": {"5": "1"}})", "logit_bias",
       "token ids"},
      {R"({"prompt": "a", "logprobs": true})", "logprobs", "whole number"},
      {R"({"prompt": "a", "stream": 1})", "stream", "true or false"},
      {R"({"prompt": "a", "stream_options": {"include_usage": true}})",
       "stream_options", "only together with stream"},
      {R"({"prompt": "a", "stream": true, "stream_options":
           {"include_usage": 1}})",
       "stream_options.include_usage", "true or false"},
      {R"({"prompt": "a", "response_format": {"type": "xml"}})",
       "response_format.type", "json_schema"},
      {R"({"prompt": "a", "suffix": "z"})", "suffix", "not offered"},
      {R"({"prompt": "a", "chat_template": "{{ x }}"})", "chat_template",
       "not offered"},
      {R"({"prompt": "a", "truncate_prompt_tokens": 5})",
       "truncate_prompt_tokens", "not offered"},
      {R"({"prompt": "a", "max_time": 0})", "max_time",
       "above 0 and at most 3600 seconds"},
      {R"({"prompt": "a", "max_time": 3600.5})", "max_time", "at most 3600"},
  };
  const Case chats[] = {
      {"{}", "messages", "is needed"},
      {R"({"messages": "hi"})", "messages", "a list is needed"},
      {R"({"messages": ["hi"]})", "messages[0]", "an object is needed"},
      {R"({"messages": [{"role": "user", "content": 5}]})",
       "messages[0].content", "a string or a list of parts"},
      {R"({"messages": [{"role": "user", "content":
           [{"type": "image_url", "image_url": {"url": "x"}}]}]})",
       "messages[0].content[0].type", "only parts of type text"},
      {R"({"messages": [{"role": "user", "content":
           [{"type": "text", "text": "a"}, {"type": "text"}]}]})",
       "messages[0].content[1].text", "a string is needed"},
      {R"({"messages": [{"role": "assistant", "function_call": {}}]})",
       "messages[0].function_call", "tool_calls"},
      {R"({"messages": [{"role": "user", "content":
           [{"type": "text", "text": 5}]}]})",
       "messages[0].content[0].text", "a string is needed"},
      {R"({"messages": [{"role": "user", "content": "a"}],
           "top_logprobs": 2})",
       "top_logprobs", "only together with logprobs"},
      {R"({"messages": [], "tools": [{"type": "function"}]})", "tools",
       "with a function"},
      {R"({"messages": [], "tools": [{"type": "custom", "function": {}}]})",
       "tools[0].type", "only functions"},
      {R"({"messages": [], "tools": [{"function": {"parameters": "x"}}]})",
       "tools[0].function.parameters", "an object is needed"},
      {R"({"messages": [], "tool_choice": {"type": "function"}})",
       "tool_choice", "a function's name"},
      {R"({"messages": [], "tool_choice":
           {"type": "custom", "function": {"name": "f"}}})",
       "tool_choice", "a function's name"},
      {R"({"messages": [], "parallel_tool_calls": "no"})",
       "parallel_tool_calls", "true or false"},
      {R"({"messages": [{"role": "assistant", "tool_calls": [
           {"function": {"name": "f", "arguments": {}}}]}]})",
       "messages[0].tool_calls[0].function.arguments", "a string is needed"},
      {R"({"messages": [], "reasoning_effort": 1})", "reasoning_effort",
       "a string is needed"},
      {R"({"messages": [], "chat_template_kwargs": [1]})",
       "chat_template_kwargs", "an object is needed"},
      {R"({"messages": [], "functions": [{"name": "f"}]})", "functions",
       "not offered; take tools"},
      {R"({"messages": [], "function_call": "auto"})", "function_call",
       "not offered; take tool_choice"},
      {R"({"messages": [], "documents": [{"text": "a"}]})", "documents",
       "not offered"},
      {R"({"messages": [{"role": "user"}], "functions": null,
           "documents": null})",
       nullptr, ""},
  };
  const auto check = [](const Case& c, const auto& parsed) {
    if (c.field == nullptr) {
      EXPECT_TRUE(parsed.ok()) << c.body << parsed.status();
      return;
    }
    ASSERT_EQ(parsed.status().code(), absl::StatusCode::kInvalidArgument)
        << c.body;
    EXPECT_THAT(std::string(parsed.status().message()), HasSubstr(c.text))
        << c.body;
    const auto metadata = ErrorMetadata(parsed.status());
    const auto field = metadata.find("field");
    EXPECT_EQ(field == metadata.end() ? "" : field->second, c.field) << c.body;
  };
  for (const Case& c : completions) check(c, ParseCompletion(c.body));
  for (const Case& c : chats) check(c, ParseChatCompletion(c.body));
  std::string many = "{\"prompt\": [\"a\"";
  for (int i = 0; i < kMaxPrompts; ++i) many += ", \"a\"";
  check({"many", "prompt", "at most 128 prompts"},
        ParseCompletion(many + "]}"));
  std::string copies = R"({"prompt": ["a", "a", "a", "a"], "stop": ["s")";
  for (int i = 0; i < 100'000; ++i) copies += ", \"s\"";
  check({"copies", "prompt", "fewer prompts"}, ParseCompletion(copies + "]}"));
  std::string deep = "{\"prompt\": ";
  for (int i = 0; i < 1000; ++i) deep += "[";
  check({"deep", "", "nested deeper"}, ParseCompletion(deep));
}

// What the parser read last is the client's: it may be of any length and have
// control characters.
TEST(OpenAiRequestTest, JsonErrorsHaveAPositionAndNoneOfTheBody) {
  const std::string body = "{\"prompt\": \"" + std::string(1000, 'x');
  for (const char* const end : {"\x1b\"}", "\x7f\xff\"}", "\n\"}"}) {
    const auto parsed = ParseCompletion(body + end);
    const std::string message(parsed.status().message());
    EXPECT_THAT(message, HasSubstr("at line "));
    EXPECT_THAT(message, HasSubstr("invalid string: "));
    EXPECT_LT(message.size(), 300u);
    for (const char c : message) {
      EXPECT_TRUE(c >= ' ' && c <= '~') << message;
    }
  }
  const auto wide =
      ParseCompletion("{\"seed\": 1" + std::string(1000, '0') + ".0}");
  EXPECT_THAT(std::string(wide.status().message()),
              HasSubstr("number overflow"));
  EXPECT_LT(wide.status().message().size(), 300u);
}

TEST(OpenAiRequestTest, Text) {
  const auto tokenize = ParseTokenize(
      R"({"prompt": "a", "add_special_tokens": false,
          "return_token_strs": true})");
  ASSERT_TRUE(tokenize.ok());
  EXPECT_EQ(tokenize->text(), "a");
  EXPECT_TRUE(tokenize->has_add_special_tokens());
  EXPECT_TRUE(tokenize->return_tokens());
  EXPECT_TRUE(ParseTokenize(R"({"messages": []})")->has_chat());
  EXPECT_FALSE(ParseTokenize("{}").ok());
  const auto detokenize = ParseDetokenize(R"({"tokens": [1, 2]})");
  EXPECT_EQ(detokenize->token_ids_size(), 2);
  EXPECT_TRUE(detokenize->has_skip_special_tokens());
  EXPECT_FALSE(detokenize->skip_special_tokens());
  EXPECT_FALSE(ParseDetokenize("{}").ok());
}

TEST(ParseLora, VllmsFields) {
  const auto load = ParseLoadLoraAdapter(
      R"({"lora_name": "verse", "lora_path": "/v", "lora_int_id": 3})");
  ASSERT_TRUE(load.ok()) << load.status();
  EXPECT_EQ(load->lora_name(), "verse");
  EXPECT_EQ(load->lora_path(), "/v");
  EXPECT_TRUE(ParseLoadLoraAdapter(R"({"load_inplace": false})").ok());
  EXPECT_THAT(
      std::string(
          ParseLoadLoraAdapter(R"({"load_inplace": true})").status().message()),
      testing::HasSubstr("load_inplace"));
  EXPECT_FALSE(ParseLoadLoraAdapter(R"({"lora_name": 1})").ok());
  const auto unload = ParseUnloadLoraAdapter(R"({"lora_name": "verse"})");
  ASSERT_TRUE(unload.ok()) << unload.status();
  EXPECT_EQ(unload->lora_name(), "verse");
  EXPECT_FALSE(ParseUnloadLoraAdapter("[]").ok());
}

TEST(OpenAiRequestTest, WhoComputesAndWhatIsShownOfIt) {
  const auto request = ParseCompletion(R"({"prompt": "a", "stream": true,
    "attention": {"layers": [0, 3], "mean": true}, "placement": "split",
    "bypass_prefix_cache": true, "no_kv_cache": true})");
  ASSERT_TRUE(request.ok()) << request.status();
  ExpectSame(request->prompts[0], R"pb(
    text: "a"
    sampling {}
    stopping {}
    output {
      attention {
        layers: [ 0, 3 ]
        mean: true
      }
    }
    placement: PLACEMENT_SPLIT
    cache { bypass_prefix_cache: true no_kv_cache: true })pb");
  const auto attention = [](const std::string& value) {
    const auto parsed = ParseCompletion(
        R"({"prompt": "a", "stream": true, "attention": )" + value + "}");
    EXPECT_TRUE(parsed.ok()) << parsed.status();
    return parsed->prompts[0].output();
  };
  EXPECT_TRUE(attention("true").has_attention());
  EXPECT_FALSE(attention("true").attention().mean());
  EXPECT_TRUE(attention("\"mean\"").attention().mean());
  EXPECT_FALSE(attention("false").has_attention());
  for (const char* wrong :
       {R"({"prompt": "a", "attention": true})",
        R"({"prompt": "a", "stream": true, "attention": "all"})",
        R"({"prompt": "a", "stream": true, "attention": {"layers": [-1]}})"}) {
    const auto refused = ParseCompletion(wrong);
    EXPECT_THAT(std::string(refused.status().message()), HasSubstr("attention"))
        << wrong;
  }
  EXPECT_THAT(
      std::string(ParseCompletion(R"({"prompt": "a", "placement": "both"})")
                      .status()
                      .message()),
      HasSubstr("placement"));
}

}  // namespace
}  // namespace tandem::router
