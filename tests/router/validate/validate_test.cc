// SPDX-License-Identifier: Apache-2.0
// Every field of a request at its limits and one beyond: accepted, or refused
// with INVALID_ARGUMENT that names the field.

#include "router/validate/validate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/error.h"
#include "router/validate/errors.h"
#include "tests/router/validate/limits.h"

namespace tandem::router {
namespace {

struct FieldCase {
  const char* field;  // named by the refusal; "" where it is accepted
  std::string text;   // in protobuf's text format, besides a text prompt
};

std::string Tools(const std::string& tool, const std::string& rest = "") {
  return absl::StrCat("chat { messages { role: 'u' } tools { ", tool, " } ",
                      rest, " }");
}

std::string Stops(int count) {
  return absl::StrCat(
      "stopping { stop: [",
      absl::StrJoin(std::vector<std::string>(count, "'a'"), ","), "] }");
}

std::string Called(const std::string& call, const std::string& next = "") {
  return absl::StrCat(
      "chat { messages { role: 'assistant' tool_calls { ", call, " } } ",
      next.empty() ? "" : absl::StrCat("messages { ", next, " }"), " }");
}

const FieldCase kFieldCases[] = {
    {"", ""},
    // request_id
    {"", "request_id: 'a b~'"},
    {"", absl::StrCat("request_id: '", std::string(128, 'a'), "'")},
    {"request_id", absl::StrCat("request_id: '", std::string(129, 'a'), "'")},
    {"request_id", "request_id: 'a\\nb'"},
    {"request_id", "request_id: '\\303\\251'"},
    {"request_id", "request_id: '\\177'"},
    // model
    {"", "model: ''"},
    {"", "model: 'm'"},
    // sampling.temperature
    {"", "sampling { temperature: 0 }"},
    {"", "sampling { temperature: 2 }"},
    {"", "sampling { temperature: 1e-30 }"},
    {"sampling.temperature", "sampling { temperature: -0.01 }"},
    {"sampling.temperature", "sampling { temperature: 2.01 }"},
    {"sampling.temperature", "sampling { temperature: nan }"},
    {"sampling.temperature", "sampling { temperature: inf }"},
    {"sampling.temperature", "sampling { temperature: -inf }"},
    // sampling.top_p
    {"", "sampling { top_p: 1 }"},
    {"", "sampling { top_p: 1e-6 }"},
    {"sampling.top_p", "sampling { top_p: 0 }"},
    {"sampling.top_p", "sampling { top_p: -1 }"},
    {"sampling.top_p", "sampling { top_p: 1.001 }"},
    {"sampling.top_p", "sampling { top_p: nan }"},
    {"sampling.top_p", "sampling { top_p: inf }"},
    // sampling.top_k
    {"", "sampling { top_k: -1 }"},
    {"", "sampling { top_k: 0 }"},
    {"", "sampling { top_k: 1 }"},
    {"", "sampling { top_k: 1000 }"},
    {"sampling.top_k", "sampling { top_k: -2 }"},
    {"sampling.top_k", "sampling { top_k: 1001 }"},
    {"sampling.top_k", "sampling { top_k: 2147483647 }"},
    {"sampling.top_k", "sampling { top_k: -2147483648 }"},
    // sampling.min_p
    {"", "sampling { min_p: 0 }"},
    {"", "sampling { min_p: 1 }"},
    {"sampling.min_p", "sampling { min_p: -0.001 }"},
    {"sampling.min_p", "sampling { min_p: 1.001 }"},
    {"sampling.min_p", "sampling { min_p: nan }"},
    {"sampling.min_p", "sampling { min_p: inf }"},
    // sampling.seed
    {"", "sampling { seed: 0 }"},
    {"", "sampling { seed: 18446744073709551615 }"},
    // sampling.n, best_of
    {"", "sampling { n: 1 }"},
    {"sampling.n", "sampling { n: 0 }"},
    {"", "sampling { n: 32 }"},
    {"sampling.n", "sampling { n: 33 }"},
    {"sampling.n", "sampling { n: 2 temperature: 0 }"},
    {"sampling.n", "sampling { n: -1 }"},
    {"", "sampling { best_of: 1 }"},
    {"", "sampling { best_of: 32 }"},
    {"", "sampling { best_of: 3 n: 3 }"},
    {"sampling.best_of", "sampling { best_of: 33 }"},
    {"sampling.best_of", "sampling { best_of: 2 n: 3 }"},
    {"sampling.best_of", "sampling { best_of: 2 temperature: 0 }"},
    {"sampling.best_of", "sampling { best_of: 0 }"},
    // penalties
    {"", "sampling { frequency_penalty: -2 }"},
    {"", "sampling { frequency_penalty: 2 }"},
    {"sampling.frequency_penalty", "sampling { frequency_penalty: 2.01 }"},
    {"sampling.frequency_penalty", "sampling { frequency_penalty: nan }"},
    {"", "sampling { presence_penalty: -2 }"},
    {"", "sampling { presence_penalty: 2 }"},
    {"sampling.presence_penalty", "sampling { presence_penalty: -2.01 }"},
    {"sampling.presence_penalty", "sampling { presence_penalty: nan }"},
    {"", "sampling { repetition_penalty: 1 }"},
    {"sampling.repetition_penalty", "sampling { repetition_penalty: 0 }"},
    {"", "sampling { repetition_penalty: 2 }"},
    {"", "sampling { repetition_penalty: 0.5 }"},
    {"sampling.repetition_penalty", "sampling { repetition_penalty: 2.01 }"},
    {"sampling.repetition_penalty", "sampling { repetition_penalty: -1 }"},
    {"sampling.repetition_penalty", "sampling { repetition_penalty: nan }"},
    {"", "sampling { typical_p: 1 }"},
    {"", "sampling { typical_p: 1e-6 }"},
    {"sampling.typical_p", "sampling { typical_p: 0 }"},
    {"sampling.typical_p", "sampling { typical_p: 1.001 }"},
    {"sampling.typical_p", "sampling { typical_p: nan }"},
    // single ids
    {"", "sampling { logit_bias { key: 999 value: -100 } }"},
    {"", "sampling { logit_bias { key: 0 value: 100 } }"},
    {"sampling.logit_bias", "sampling { logit_bias { key: 1000 value: 0 } }"},
    {"sampling.logit_bias", "sampling { logit_bias { key: 1 value: 101 } }"},
    {"sampling.logit_bias", "sampling { logit_bias { key: 1 value: nan } }"},
    {"sampling.logit_bias", "sampling { logit_bias { key: 1 value: -inf } }"},
    // nothing is generated
    {"", "stopping { max_tokens: 0 } output { prompt_logprobs: 0 }"},
    {"stopping.max_tokens",
     "stopping { max_tokens: 0 } "
     "output { prompt_logprobs: 0 attention { layers: 0 } }"},
    {"stopping.max_tokens", "stopping { max_tokens: 0 } beam { width: 2 }"},
    {"", "sampling { allowed_token_ids: [0, 999] }"},
    {"sampling.allowed_token_ids", "sampling { allowed_token_ids: 1000 }"},
    {"", "sampling { banned_token_ids: [0, 999] }"},
    {"sampling.banned_token_ids", "sampling { banned_token_ids: 1000 }"},
    {"", "sampling { bad_words: 'x' }"},
    {"", absl::StrCat("sampling { bad_words: '", std::string(64, 'a'), "' }")},
    {"sampling.bad_words", "sampling { bad_words: ['x', ''] }"},
    {"sampling.bad_words",
     absl::StrCat("sampling { bad_words: '", std::string(65, 'a'), "' }")},
    // stopping.max_tokens
    {"", "stopping { max_tokens: 1 }"},
    {"", "stopping { max_tokens: 100 }"},
    {"stopping.max_tokens", "stopping { max_tokens: 0 }"},
    {"stopping.max_tokens", "stopping { max_tokens: -1 }"},
    {"stopping.max_tokens", "stopping { max_tokens: 101 }"},
    {"stopping.max_tokens", "stopping { max_tokens: 2147483647 }"},
    // stopping.min_tokens
    {"", "stopping { min_tokens: 0 }"},
    {"stopping.min_tokens", "stopping { min_tokens: -1 }"},
    {"stopping.min_tokens", "stopping { min_tokens: -2147483648 }"},
    // stopping.stop
    {"", "stopping { stop: 'a' }"},
    {"", absl::StrCat("stopping { stop: '", std::string(256, 'a'), "' }")},
    {"stopping.stop", "stopping { stop: '' }"},
    {"stopping.stop", "stopping { stop: 'a' stop: '' }"},
    {"stopping.stop",
     absl::StrCat("stopping { stop: '", std::string(257, 'a'), "' }")},
    {"", Stops(32)},
    {"stopping.stop", Stops(33)},
    // stopping.stop_token_ids
    {"", "stopping { stop_token_ids: 0 }"},
    {"", "stopping { stop_token_ids: 999 }"},
    {"stopping.stop_token_ids", "stopping { stop_token_ids: 1000 }"},
    {"stopping.stop_token_ids", "stopping { stop_token_ids: 4294967295 }"},
    {"stopping.stop_token_ids", "stopping { stop_token_ids: 2147483648 }"},
    {"", "stopping { ignore_eos: true include_stop_str_in_output: true }"},
    // stopping.max_time
    {"", "stopping { max_time { nanos: 1 } }"},
    {"", "stopping { max_time { seconds: 3600 } }"},
    {"stopping.max_time", "stopping { max_time { } }"},
    {"stopping.max_time", "stopping { max_time { seconds: 3600 nanos: 1 } }"},
    {"stopping.max_time", "stopping { max_time { seconds: -1 } }"},
    {"stopping.max_time", "stopping { max_time { nanos: -1 } }"},
    {"stopping.max_time", "stopping { max_time { seconds: 1 nanos: -1 } }"},
    {"stopping.max_time", "stopping { max_time { nanos: 1000000000 } }"},
    {"stopping.max_time",
     "stopping { max_time { seconds: 9223372036854775807 } }"},
    // output
    {"", "output { logprobs: 0 }"},
    {"", "output { logprobs: 20 }"},
    {"output.logprobs", "output { logprobs: -1 }"},
    {"output.logprobs", "output { logprobs: 21 }"},
    {"output.logprobs", "output { logprobs: 2147483647 }"},
    {"", "output { prompt_logprobs: 0 }"},
    {"", "output { prompt_logprobs: 20 echo: true }"},
    {"output.prompt_logprobs", "output { prompt_logprobs: -1 }"},
    {"output.prompt_logprobs", "output { prompt_logprobs: 21 }"},
    {"output.prompt_logprobs",
     "output { prompt_logprobs: 1 } beam { width: 2 }"},
    // Nothing but scores.
    {"", "stopping { max_tokens: 0 } output { prompt_logprobs: 0 }"},
    {"stopping.max_tokens",
     "stopping { max_tokens: -1 } output { prompt_logprobs: 0 }"},
    {"stopping.max_tokens",
     "stopping { max_tokens: 0 } output { prompt_logprobs: 0 }"
     " sampling { n: 2 temperature: 1 }"},
    {"stopping.max_tokens",
     "stopping { max_tokens: 0 } output { prompt_logprobs: 0 }"
     " sampling { best_of: 2 temperature: 1 }"},
    {"output.attention", "output { attention { } }"},  // not offered here
    {"", "cache { no_kv_cache: false }"},
    {"cache.no_kv_cache", "cache { no_kv_cache: true }"},  // not offered here
    {"", "output { echo: false }"},
    {"", "output { echo: true }"},
    {"output.echo", "output { echo: true text: false }"},
    {"", "output { text: false }"},
    {"output.text", "output { text: false } stopping { stop: 'a' }"},
    {"", "output { text: true } stopping { stop: 'a' }"},
    {"", "output { skip_special_tokens: false return_token_ids: true }"},
    // structured, beam, priority
    {"structured", "structured { }"},
    {"structured", "structured { regex: 'a' } beam { width: 2 }"},
    {"structured",
     "structured { regex: 'a' } stopping { max_tokens: 0 } "
     "output { prompt_logprobs: 0 }"},
    {"structured.json_object", "structured { json_object: false }"},
    // The model has two end tokens.
    {"", "beam { width: 2 }"},
    {"", "beam { width: 1 } sampling { n: 1 seed: 3 repetition_penalty: 2 }"},
    {"", "beam { width: 18 } sampling { n: 18 temperature: 0 top_k: -1 }"},
    {"", "beam { width: 20 } stopping { ignore_eos: true }"},
    {"beam.width", "beam { }"},
    {"beam.width", "beam { length_penalty: 2 }"},
    {"beam.width", "beam { width: 0 }"},
    {"beam.width", "beam { width: 19 }"},
    {"beam.width", "beam { width: 18 } stopping { stop_token_ids: 9 }"},
    {"beam.width", "beam { width: 2147483647 }"},
    {"beam.length_penalty", "beam { width: 2 length_penalty: 10.1 }"},
    {"beam.length_penalty", "beam { width: 2 length_penalty: nan }"},
    {"beam.early_stopping", "beam { width: 2 early_stopping: 3 }"},
    {"sampling.n", "beam { width: 2 } sampling { n: 3 }"},
    {"sampling.best_of", "beam { width: 2 } sampling { best_of: 2 }"},
    {"sampling.temperature", "beam { width: 2 } sampling { temperature: 1 }"},
    {"sampling.top_p", "beam { width: 2 } sampling { top_p: 0.5 }"},
    {"sampling.top_k", "beam { width: 2 } sampling { top_k: 5 }"},
    {"sampling.min_p", "beam { width: 2 } sampling { min_p: 0.5 }"},
    {"sampling.typical_p", "beam { width: 2 } sampling { typical_p: 0.5 }"},
    {"stopping.stop", "beam { width: 2 } stopping { stop: 'a' }"},
    {"", "priority: 0"},
    {"", "priority: 7"},
    {"", "priority: -1"},
    // placement
    {"", "placement: PLACEMENT_UNSPECIFIED"},
    {"", "placement: PLACEMENT_AUTO"},
    {"", "placement: PLACEMENT_SPLIT"},
    {"", "placement: PLACEMENT_LOCAL"},
    {"placement", "placement: 4"},
    {"placement", "placement: -1"},
    // cache
    {"", "cache { cache_salt: '' bypass_prefix_cache: true }"},
    {"", absl::StrCat("cache { cache_salt: '", std::string(64, 's'), "' }")},
    {"cache.cache_salt",
     absl::StrCat("cache { cache_salt: '", std::string(65, 's'), "' }")},
    // prompts
    {"", "text: ''"},
    {"", "token_ids { ids: [0, 999] }"},
    {"token_ids.ids", "token_ids { }"},
    {"", "text: '' add_special_tokens: false"},
    {"", "chat { messages { role: 'user' } } add_special_tokens: true"},
    {"add_special_tokens", "token_ids { ids: 1 } add_special_tokens: true"},
    {"token_ids.ids", "token_ids { ids: 1000 }"},
    {"token_ids.ids", "token_ids { ids: [1, 4294967295] }"},
    {"", "chat { messages { role: 'user' content: 'hi' } }"},
    {"", "chat { messages { role: 'user' parts { text: 'hi' } } }"},
    {"", "chat { messages { role: 'user' } }"},
    {"chat.messages", "chat { }"},
    {"chat.messages[0].role", "chat { messages { content: 'hi' } }"},
    {"chat.messages[1].role",
     "chat { messages { role: 'u' } messages { content: 'hi' } }"},
    {"chat.messages[0].parts",
     "chat { messages { role: 'u' content: 'a' parts { text: 'b' } } }"},
    {"chat.messages[1].parts[1]",
     "chat { messages { role: 'u' } "
     "messages { role: 'u' parts { text: 'a' } parts { } } }"},
    // tools
    {"", Tools("name: 'get_weather-2'")},
    {"", Tools(absl::StrCat("name: '", std::string(64, 'f'), "'"))},
    {"", Tools("name: 'f' parameters_json_schema: ' {\"a\": [1]} '")},
    {"", Tools("name: 'f' } tools { name: 'g'")},
    {"chat.tools[0].name", Tools("")},
    {"chat.tools[0].name", Tools("name: 'f.g'")},
    {"chat.tools[0].name",
     Tools(absl::StrCat("name: '", std::string(65, 'f'), "'"))},
    {"chat.tools[1].name", Tools("name: 'f' } tools { name: 'f'")},
    {"chat.tools[0].parameters_json_schema",
     Tools("name: 'f' parameters_json_schema: '[]'")},
    {"chat.tools[0].parameters_json_schema",
     Tools("name: 'f' parameters_json_schema: '{\"a\":}'")},
    {"chat.tools[0].parameters_json_schema",
     Tools("name: 'f' parameters_json_schema: '{} {}'")},
    {"chat.tools[0].parameters_json_schema",
     Tools("name: 'f' parameters_json_schema: '{'")},
    {"chat.tools[0].parameters_json_schema",
     Tools("name: 'f' parameters_json_schema: ' '")},
    {"", Tools(absl::StrCat("name: 'f' description: '",
                            std::string((256 << 10) - 1, 'd'), "'"))},
    {"chat.tools", Tools(absl::StrCat("name: 'f' description: '",
                                      std::string(256 << 10, 'd'), "'"))},
    {"", Tools("name: 'f'", "tool_choice: 'auto'")},
    {"", Tools("name: 'f'", "tool_choice: 'none' parallel_tool_calls: false")},
    {"", "chat { messages { role: 'u' } tool_choice: 'auto' }"},
    {"chat.tool_choice", Tools("name: 'f'", "tool_choice: 'f'")},
    {"chat.tool_choice", Tools("name: 'f'", "tool_choice: ''")},
    {"", Tools("name: 'f'", "tool_choice: 'required'")},
    {"", Tools("name: 'f'", "tool_choice_function: 'f'")},
    {"chat.tool_choice_function",
     Tools("name: 'f'", "tool_choice_function: 'g'")},
    {"chat.tool_choice",
     "chat { messages { role: 'u' } tool_choice: 'required' }"},
    {"chat.tools[0].parameters_json_schema",
     Tools("name: 'f' parameters_json_schema: '{\"type\": \"string\"}'",
           "tool_choice: 'required'")},
    {"chat.tool_choice", Tools("name: 'f'", "tool_choice: 'required'") +
                             " structured { regex: 'a' }"},
    {"chat.tool_choice",
     Tools("name: 'f'", "tool_choice: 'required'") + " beam { width: 2 }"},
    {"chat.tool_choice_function",
     Tools("name: 'f'", "tool_choice_function: 'f'") +
         " output { text: false }"},
    {"chat.tool_choice_function",
     Tools("name: 'f'", "tool_choice: 'auto' tool_choice_function: 'f'")},
    // tool calls
    {"", Called("id: 'c1' name: 'f' arguments_json: '{}'")},
    {"", Called("id: 'c1' name: 'f'")},
    {"chat.messages[0].tool_calls[0].id", Called("name: 'f'")},
    {"chat.messages[0].tool_calls[0].id", Called("id: 'c\\n' name: 'f'")},
    {"chat.messages[0].tool_calls[0].name", Called("id: 'c1'")},
    {"chat.messages[0].tool_calls[0].arguments_json",
     Called("id: 'c1' name: 'f' arguments_json: '\"\"'")},
    {"chat.messages[0].tool_calls",
     "chat { messages { role: 'u' tool_calls { id: 'c' name: 'f' } } }"},
    {"", Called("id: 'c1' name: 'f'", "role: 'tool' tool_call_id: 'c1'")},
    {"chat.messages[1].tool_call_id",
     Called("id: 'c1' name: 'f'", "role: 'tool' tool_call_id: 'c2'")},
    {"chat.messages[1].tool_call_id",
     Called("id: 'c1' name: 'f'", "role: 'tool'")},
    {"chat.messages[1].tool_call_id",
     Called("id: 'c1' name: 'f'", "role: 'user' tool_call_id: 'c1'")},
    {"", "chat { messages { role: 'u' } continue_final_message: true }"},
    {"chat.continue_final_message",
     "chat { messages { role: 'u' } continue_final_message: true "
     "add_generation_prompt: true }"},
};

TEST(Validate, NamesTheFieldOfEveryWrongValue) {
  EXPECT_GE(std::size(kFieldCases), 120u);
  for (const FieldCase& c : kFieldCases) {
    v1::GenerateRequest request = Parse(c.text);
    if (request.prompt_case() == v1::GenerateRequest::PROMPT_NOT_SET) {
      request.set_text("x");
    }
    const auto effective = Validate(request, Limits());
    if (std::string(c.field).empty()) {
      EXPECT_TRUE(effective.ok()) << c.text << " " << effective.status();
      continue;
    }
    ASSERT_FALSE(effective.ok()) << c.text;
    EXPECT_EQ(effective.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(ErrorReason(effective.status()), "FIELD_INVALID");
    EXPECT_EQ(ErrorMetadata(effective.status())["field"], c.field) << c.text;
    EXPECT_THAT(std::string(effective.status().message()),
                ::testing::StartsWith(std::string(c.field) + " = "));
  }
}

TEST(Validate, APromptIsNeeded) {
  EXPECT_EQ(ErrorMetadata(
                Validate(v1::GenerateRequest(), Limits()).status())["field"],
            "prompt");
}

TEST(Validate, ChatNeedsATemplate) {
  ModelLimits limits = Limits();
  limits.has_chat_template = false;
  const auto status =
      Validate(Parse("chat { messages { role: 'u' } }"), limits).status();
  EXPECT_EQ(ErrorMetadata(status)["field"], "chat");
}

TEST(Validate, UnknownModelIsNotFound) {
  ModelLimits limits = Limits();
  limits.adapters.emplace();
  const auto status = Validate(Parse("text: 'x' model: 'M'"), limits).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(ErrorReason(status), "MODEL_NOT_FOUND");
  EXPECT_EQ(ErrorMetadata(status)["served"], "m");
}

TEST(Validate, TooManyStopTokens) {
  v1::GenerateRequest request = Parse("text: 'x'");
  for (int i = 0; i < kMaxStopTokenIds; ++i) {
    request.mutable_stopping()->add_stop_token_ids(i);
  }
  EXPECT_TRUE(Validate(request, Limits()).ok());
  request.mutable_stopping()->add_stop_token_ids(0);
  EXPECT_FALSE(Validate(request, Limits()).ok());
}

TEST(Validate, LongValuesAreShownByTheirHeads) {
  v1::GenerateRequest request = Parse("text: 'x'");
  request.mutable_cache()->set_cache_salt(std::string(100'000, 's'));
  EXPECT_LT(Validate(request, Limits()).status().message().size(), 300u);
}

TEST(Validate, NoCharacterOfThemIsShownInPart) {
  for (size_t before = 70; before < 90; ++before) {
    const std::string value =
        std::string(before, 'x') + "\xf0\x9f\x98\x80" + std::string(9, 'y');
    const std::string message(FieldInvalid("f", value, "a").message());
    const size_t shown = message.find("\xf0");
    EXPECT_EQ(shown != std::string::npos,
              message.find("\xf0\x9f\x98\x80") != std::string::npos);
    EXPECT_EQ(shown != std::string::npos, before <= 76) << message;
  }
}

TEST(Validate, EffectiveValuesAreAllSet) {
  EffectiveRequest e = *Validate(Parse("text: 'x'"), Limits());
  EXPECT_EQ(e.sampling.temperature(), 1);
  EXPECT_EQ(e.sampling.top_k(), 40);  // the model's own
  EXPECT_TRUE(e.sampling.has_n() && e.sampling.has_top_p());
  EXPECT_FALSE(e.sampling.has_seed());  // the core draws it
  EXPECT_TRUE(e.output.text());
  EXPECT_TRUE(e.output.skip_special_tokens());
  EXPECT_FALSE(e.output.return_token_ids());
  EXPECT_EQ(e.placement, v1::PLACEMENT_AUTO);
  EXPECT_THAT(e.end_token_ids, ::testing::ElementsAre(2, 3));
  EXPECT_EQ(ToSamplingParams(e).logprobs(), -1);
  ASSERT_TRUE(FitToContext(40, Limits(), &e).ok());
  EXPECT_EQ(e.stopping.max_tokens(), 60);
}

TEST(Validate, BeamsDrawNothingAndGoToWorkers) {
  EffectiveRequest e = *Validate(
      Parse("text: 'x' beam { width: 4 early_stopping: EARLY_STOPPING_NEVER } "
            "sampling { n: 3 }"),
      Limits());
  EXPECT_EQ(e.sampling.temperature(), 0);
  EXPECT_EQ(e.sampling.top_k(), 0) << "the model's own is for sampling";
  EXPECT_EQ(e.beam->length_penalty(), 1);
  const v1::SamplingParams params = ToSamplingParams(e);
  EXPECT_EQ(params.beam().width(), 4);
  EXPECT_EQ(params.beam().best(), 3);
  EXPECT_EQ(params.beam().length_penalty(), 1);
  EXPECT_EQ(params.beam().early_stopping(), v1::EARLY_STOPPING_NEVER);
  EXPECT_FALSE(
      ToSamplingParams(*Validate(Parse("text: 'x'"), Limits())).has_beam());
}

TEST(Validate, BeamOptionsWithoutAWidthSayWhatIsMissing) {
  EXPECT_EQ(std::string(Validate(Parse("text: 'x' beam { length_penalty: 2 }"),
                                 Limits())
                            .status()
                            .message()),
            "beam.width = (not set): is needed for a beam search");
}

TEST(FitToContext, BeamsFitTheCacheHoweverTheyPart) {
  ModelLimits limits = Limits();
  limits.context_length = 1000;
  limits.kv_blocks = 20;
  limits.kv_block_size = 16;
  EffectiveRequest e = *Validate(Parse("text: 'x' beam { width: 4 }"), limits);
  // Two full blocks are shared, and each beam may have four of its own.
  ASSERT_TRUE(FitToContext(40, limits, &e).ok());
  EXPECT_EQ(e.stopping.max_tokens(), 6 * 16 - 40);
  for (const int more : {0, 1}) {
    EffectiveRequest asked =
        *Validate(Parse("text: 'x' beam { width: 4 }"), limits);
    asked.stopping.set_max_tokens(6 * 16 - 40 + more);
    const absl::Status status = FitToContext(40, limits, &asked);
    EXPECT_EQ(status.ok(), more == 0) << status;
    if (more == 1) {
      EXPECT_EQ(ErrorMetadata(status)["field"], "beam.width");
    }
  }
  // Not known, not checked; of a worker that comes or goes one is known alone.
  for (int* unknown : {&limits.kv_block_size, &limits.kv_blocks}) {
    ModelLimits half = limits;
    (unknown == &limits.kv_blocks ? half.kv_blocks : half.kv_block_size) = 0;
    EffectiveRequest asked =
        *Validate(Parse("text: 'x' beam { width: 4 }"), half);
    ASSERT_TRUE(FitToContext(40, half, &asked).ok());
    EXPECT_EQ(asked.stopping.max_tokens(), 1000 - 40);
  }
}

// With a window of 11, and 32 rows in a step, a sequence has 4 blocks at once.
TEST(FitToContext, BeamsBehindAWindowFitHoweverLongTheyAre) {
  ModelLimits limits = Limits();
  limits.context_length = 1000;
  limits.kv_blocks = 20;
  limits.kv_block_size = 16;
  struct Row {
    int sequences, width;
    bool fits;
  };
  for (const Row& row : {Row{0, 2, false}, Row{1, 2, false}, Row{5, 2, true},
                         Row{5, 4, true}, Row{5, 5, true}, Row{5, 6, false}}) {
    limits.kv_sequences = row.sequences;
    EffectiveRequest e =
        *Validate(Parse("text: 'x' beam { width: 2 }"), limits);
    e.beam->set_width(row.width);
    EffectiveRequest open = e;
    e.stopping.set_max_tokens(120);
    const absl::Status status = FitToContext(300, limits, &e);
    EXPECT_EQ(status.ok(), row.fits) << status;
    if (!row.fits) {
      EXPECT_EQ(ErrorMetadata(status)["field"], "beam.width");
      continue;
    }
    ASSERT_TRUE(FitToContext(300, limits, &open).ok());
    EXPECT_EQ(open.stopping.max_tokens(), 1000 - 300);
  }
}

TEST(Validate, RequestsOverrideTheModel) {
  EffectiveRequest e =
      *Validate(Parse("text: 'x' sampling { top_k: -1 seed: 9 temperature: 0 } "
                      "stopping { ignore_eos: true stop_token_ids: [7, 3] } "
                      "output { text: false logprobs: 4 }"),
                Limits());
  EXPECT_EQ(e.sampling.top_k(), 0);
  EXPECT_EQ(ToSamplingParams(e).seed(), 9u);
  EXPECT_EQ(ToSamplingParams(e).temperature(), 0);
  EXPECT_EQ(ToSamplingParams(e).logprobs(), 4);
  EXPECT_THAT(e.end_token_ids, ::testing::ElementsAre(7, 3));
  EXPECT_TRUE(e.output.return_token_ids());  // without text there is no other
}

TEST(Validate, RulesGoToWorkersOnlyWhereThereAreSome) {
  EXPECT_FALSE(
      ToSamplingParams(*Validate(Parse("text: 'x'"), Limits())).has_rules());
  EffectiveRequest e = *Validate(
      Parse("text: 'x' sampling { typical_p: 0.5 repetition_penalty: 1.25 "
            "presence_penalty: -1 frequency_penalty: 0.5 "
            "logit_bias { key: 5 value: 2 } allowed_token_ids: [5, 6, 7] "
            "banned_token_ids: 6 bad_words: 'x' }"),
      Limits());
  EXPECT_EQ(e.sampling.bad_words_size(), 1);  // the client reads it back
  e.bad_word_ids = {{7, 8}};
  const v1::SamplingParams params = ToSamplingParams(e);
  EXPECT_EQ(params.typical_p(), 0.5f);
  const v1::LogitRules& rules = params.rules();
  EXPECT_EQ(rules.repetition_penalty(), 1.25f);
  EXPECT_EQ(rules.presence_penalty(), -1);
  EXPECT_EQ(rules.frequency_penalty(), 0.5f);
  ASSERT_EQ(rules.logit_bias_size(), 1);
  EXPECT_EQ(rules.logit_bias(0).token_id(), 5);
  EXPECT_EQ(rules.logit_bias(0).bias(), 2);
  EXPECT_THAT(rules.allowed_token_ids(), ::testing::ElementsAre(5, 6, 7));
  EXPECT_THAT(rules.banned_token_ids(), ::testing::ElementsAre(6));
  ASSERT_EQ(rules.bad_words_size(), 1);
  EXPECT_THAT(rules.bad_words(0).token_ids(), ::testing::ElementsAre(7, 8));

  ModelLimits limits = Limits();
  limits.repetition_penalty = 1.05f;  // the model's own
  EXPECT_EQ(ToSamplingParams(*Validate(Parse("text: 'x'"), limits))
                .rules()
                .repetition_penalty(),
            1.05f);
}

TEST(Validate, ListsLeaveATokenToDraw) {
  const struct {
    const char* sampling;
    int min_tokens;
    const char* by;  // what leaves none; "": one is left
  } kCases[] = {
      {"allowed_token_ids: [5, 6]", 9, ""},
      {"allowed_token_ids: 5", 0, "bad_words"},
      {"allowed_token_ids: [5, 6] banned_token_ids: [6, 6]", 0, "bad_words"},
      {"allowed_token_ids: [5, 6] banned_token_ids: 7", 0, ""},
      {"allowed_token_ids: [6, 7] banned_token_ids: [7, 6]", 0, "banned_token"},
      {"allowed_token_ids: [5, 7]", 0, ""},  // in a longer word alone
      {"allowed_token_ids: [2, 5]", 0, ""},
      {"allowed_token_ids: [2, 5]", 1, "min_tokens"},
      {"banned_token_ids: [5, 6]", 1, ""},
      // Of a vocabulary of 8.
      {"banned_token_ids: [0, 1, 3, 4, 6]", 1, ""},
      {"banned_token_ids: [0, 1, 2, 3, 4, 6, 7]", 0, "bad_words"},
      {"banned_token_ids: [0, 1, 3, 4, 6, 7, 7]", 1, "min_tokens"},
      {"banned_token_ids: [0, 1, 3, 4, 6, 7, 7]", 0, ""},
  };
  ModelLimits limits = Limits();
  limits.vocabulary_size = 8;
  for (const auto& [sampling, min_tokens, by] : kCases) {
    v1::GenerateRequest request =
        Parse(absl::StrCat("text: 'x' sampling { ", sampling, " }"));
    request.mutable_stopping()->set_min_tokens(min_tokens);
    auto effective = Validate(request, limits);
    ASSERT_TRUE(effective.ok()) << effective.status();
    effective->bad_word_ids = {{5}, {7, 8}};
    effective->end_token_ids = {2};
    const absl::Status left = CheckTokensLeft(*effective, limits);
    EXPECT_EQ(left.ok(), std::string(by).empty()) << sampling << left;
    EXPECT_THAT(left.message(), ::testing::HasSubstr(by));
  }
}

TEST(Validate, ListsHaveALimit) {
  ModelLimits limits = Limits();
  limits.vocabulary_size = 5000;
  v1::SamplingOptions most;
  for (uint32_t i = 0; i < kMaxListedTokenIds; ++i) {
    most.add_allowed_token_ids(i);
    most.add_banned_token_ids(4000);
    (*most.mutable_logit_bias())[i] = 1;
  }
  const std::string word(3, 'x');
  for (int i = 0; i < kMaxBadWords; ++i) most.add_bad_words(word);
  v1::GenerateRequest request = Parse("text: 'x'");
  *request.mutable_sampling() = most;
  EXPECT_TRUE(Validate(request, limits).ok());
  const struct {
    const char* field;
    void (*change)(v1::SamplingOptions*);
  } kOneMore[] = {
      {"sampling.allowed_token_ids",
       [](auto* s) { s->add_allowed_token_ids(1); }},
      {"sampling.banned_token_ids",
       [](auto* s) { s->add_banned_token_ids(1); }},
      {"sampling.logit_bias",
       [](auto* s) { (*s->mutable_logit_bias())[4999] = 1; }},
      {"sampling.bad_words", [](auto* s) { s->add_bad_words("xyz", 3); }}};
  for (const auto& [field, change] : kOneMore) {
    *request.mutable_sampling() = most;
    change(request.mutable_sampling());
    EXPECT_EQ(ErrorMetadata(Validate(request, limits).status())["field"],
              field);
  }
}

// By default, and where a flag says less: the limit is let in, one more is not.
TEST(Validate, WhatOneRequestMayAskForIsBounded) {
  const struct {
    const char* field;
    int Offers::*limit;
    int other;
    void (*ask)(int, v1::GenerateRequest*);
  } kAsked[] = {
      {"sampling.n", &Offers::n, 4,
       [](int n, auto* r) { r->mutable_sampling()->set_n(n); }},
      {"sampling.best_of", &Offers::n, 4,
       [](int n, auto* r) { r->mutable_sampling()->set_best_of(n); }},
      {"sampling.logit_bias", &Offers::logit_bias, 300,
       [](int count, auto* r) {
         for (int id = 0; id < count; ++id) {
           (*r->mutable_sampling()->mutable_logit_bias())[id] = 1;
         }
       }},
      {"stopping.stop", &Offers::stop_strings, 8,
       [](int count, auto* r) {
         for (int i = 0; i < count; ++i) r->mutable_stopping()->add_stop("x");
       }},
      {"stopping.stop", &Offers::stop_bytes, 64,
       [](int bytes, auto* r) {
         r->mutable_stopping()->add_stop(std::string(bytes, 'x'));
       }},
      {"output.logprobs", &Offers::logprobs, 5,
       [](int top, auto* r) { r->mutable_output()->set_logprobs(top); }},
      {"output.prompt_logprobs", &Offers::logprobs, 0,
       [](int top, auto* r) { r->mutable_output()->set_prompt_logprobs(top); }},
  };
  for (const auto& c : kAsked) {
    ModelLimits limits = Limits();
    limits.vocabulary_size = 5000;
    for (const int most : {limits.offers.*c.limit, c.other}) {
      SCOPED_TRACE(absl::StrCat(c.field, " ", most));
      limits.offers.*c.limit = most;
      v1::GenerateRequest request = Parse("text: 'x'");
      c.ask(most, &request);
      EXPECT_TRUE(Validate(request, limits).ok())
          << Validate(request, limits).status();
      request = Parse("text: 'x'");
      c.ask(most + 1, &request);
      EXPECT_EQ(ErrorMetadata(Validate(request, limits).status())["field"],
                c.field);
    }
  }
  ModelLimits limits = Limits();
  limits.offers.n = 4;
  EXPECT_TRUE(Validate(Parse("text: 'x' beam { width: 4 }"), limits).ok());
  EXPECT_EQ(ErrorMetadata(Validate(Parse("text: 'x' beam { width: 5 }"), limits)
                              .status())["field"],
            "beam.width");
  limits.offers.default_max_tokens = 7;
  EXPECT_EQ(DefaultStopping(limits).max_tokens(), 7);
}

TEST(FitToContext, Table) {
  struct FitCase {
    int prompt, max_tokens, min_tokens, context;
    const char* reason;
    int expected;
  };
  for (const FitCase& c : {
           FitCase{1, 0, 0, 100, "", 99}, FitCase{99, 0, 0, 100, "", 1},
           FitCase{100, 0, 0, 100, "CONTEXT_LENGTH_EXCEEDED", 0},
           FitCase{101, 0, 0, 100, "CONTEXT_LENGTH_EXCEEDED", 0},
           FitCase{60, 40, 0, 100, "", 40},
           FitCase{60, 41, 0, 100, "CONTEXT_LENGTH_EXCEEDED", 0},
           FitCase{0, 5, 0, 100, "FIELD_INVALID", 0},
           FitCase{10, 5, 5, 100, "", 5},
           FitCase{10, 5, 6, 100, "FIELD_INVALID", 0},
           FitCase{10, 0, 0, 10'000, "", 4096},
           FitCase{10, 5000, 0, 10'000, "", 5000},
           FitCase{10, 0, 0, 0, "", 4096},  // context not known
       }) {
    EffectiveRequest e;
    if (c.max_tokens > 0) e.stopping.set_max_tokens(c.max_tokens);
    e.stopping.set_min_tokens(c.min_tokens);
    ModelLimits limits = Limits();
    limits.context_length = c.context;
    const absl::Status status = FitToContext(c.prompt, limits, &e);
    EXPECT_EQ(ErrorReason(status), c.reason) << c.prompt << " " << c.max_tokens;
    if (!status.ok()) continue;
    EXPECT_EQ(e.stopping.max_tokens(), c.expected);
  }
  // OpenAI's sentence, which LiteLLM and others look for.
  for (const bool chat : {false, true}) {
    EffectiveRequest e;
    e.chat = chat;
    e.stopping.set_max_tokens(41);
    ModelLimits limits = Limits();
    limits.context_length = 100;
    const absl::Status status = FitToContext(60, limits, &e);
    const std::string part = chat ? "messages" : "prompt";
    EXPECT_EQ(status.message(),
              "This model's maximum context length is 100 tokens. However, you "
              "requested 101 tokens (60 in the " +
                  part +
                  ", 41 in the completion). Please reduce the length "
                  "of the " +
                  part + " or completion.");
    EXPECT_EQ(ErrorMetadata(status)["field"],
              chat ? "chat.messages" : "prompt");
  }
}

TEST(ValidateAdapter, ItsNameMayStandForTheModel) {
  const std::string too_long(kMaxAdapterName + 1, 'a');
  const struct {
    const char* model;
    const char* adapter;
    bool known;            // which there are
    const char* expected;  // the adapter, or the error's reason
  } cases[] = {{"", "", true, ""},
               {"m", "", true, ""},
               {"", "verse", true, "verse"},
               {"m", "verse", true, "verse"},
               {"verse", "", true, "verse"},
               {"verse", "verse", true, "verse"},
               {"verse", "prose", true, "FIELD_INVALID"},
               {"", "rhyme", true, "ADAPTER_NOT_FOUND"},
               {"rhyme", "", true, "MODEL_NOT_FOUND"},
               {"", "rhyme", false, "rhyme"},
               {"verse", "", false, "verse"},
               {too_long.c_str(), "", false, "MODEL_NOT_FOUND"}};
  for (const auto& c : cases) {
    ModelLimits limits = Limits();
    if (c.known) limits.adapters = {"prose", "verse"};
    v1::GenerateRequest request;
    request.set_text("x");
    request.set_model(c.model);
    request.set_adapter(c.adapter);
    const auto effective = Validate(request, limits);
    EXPECT_EQ(
        effective.ok() ? effective->adapter : ErrorReason(effective.status()),
        c.expected)
        << c.model << " " << c.adapter;
  }
  v1::GenerateRequest request;
  request.set_text("x");
  request.set_adapter("rhyme");
  ModelLimits limits = Limits();
  limits.adapters.emplace();
  EXPECT_EQ(Validate(request, limits).status().message(),
            "adapter = rhyme: there are none here");
  // Whoever names one as the model is told the same.
  request.clear_adapter();
  request.set_model("rhyme");
  EXPECT_EQ(Validate(request, limits).status().message(),
            "model = rhyme: served here is m");
  limits.adapters = {"prose", "verse"};
  EXPECT_EQ(Validate(request, limits).status().message(),
            "model = rhyme: served here is m, with the adapters prose, verse");
  limits.adapters->assign(22, "a");
  EXPECT_TRUE(absl::EndsWith(Validate(request, limits).status().message(),
                             ", a and 2 more"));
}

}  // namespace
}  // namespace tandem::router
