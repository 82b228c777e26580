// SPDX-License-Identifier: Apache-2.0
// Events against the JSON that OpenAI's clients read, value by value.
#include "router/http/openai_answer.h"

#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "common/error.h"
#include "gmock/gmock.h"
#include "google/protobuf/text_format.h"
#include "gtest/gtest.h"
#include "router/http/openai_logprobs.h"
#include "router/validate/errors.h"

namespace tandem::router {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

v1::GenerateResponse Event(const std::string& text) {
  v1::GenerateResponse event;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(text, &event));
  return event;
}

OpenAiRequest ParseBody(bool chat, const std::string& body) {
  const auto parsed = chat ? ParseChatCompletion(body) : ParseCompletion(body);
  EXPECT_TRUE(parsed.ok()) << parsed.status();
  return *parsed;
}

// The data of server-sent events.
std::vector<std::string> Data(const std::string& events) {
  std::vector<std::string> all;
  for (const absl::string_view event :
       absl::StrSplit(events, "\n\n", absl::SkipEmpty())) {
    EXPECT_EQ(event.substr(0, 6), "data: ");
    all.emplace_back(event.substr(6));
  }
  return all;
}

constexpr char kStarted[] = R"(
  request_id: "r1"
  started { model: "tales" prompt_tokens: 5 prompt_token_ids: [7, 8]
            sampling { seed: 9007199254740991 }
            system_fingerprint: "fp_1" })";
constexpr char kDone[] = R"(
  done { usage { prompt_tokens: 5 completion_tokens: 3 total_tokens: 8
                 cached_tokens: 4 accepted_prediction_tokens: 6
                 rejected_prediction_tokens: 2 }
         timings { queue { nanos: 1500000 } total { seconds: 2 } retries: 1 }
         workers { decode: "decode-0" } })";

TEST(OpenAiAnswerTest, AWholeCompletion) {
  const OpenAiRequest request =
      ParseBody(false, R"({"prompt": "a", "n": 2, "logprobs": 1,
                 "return_token_ids": true})");
  OpenAiAnswer answer(request, "tales", 1700);
  EXPECT_EQ(answer.Add(0, Event(kStarted)), "");
  // Indices in any order, a character in two tokens.
  EXPECT_EQ(answer.Add(0, Event(R"(
    delta { index: 1 text: "b\303\274" token_ids: [3, 4]
      logprobs { token_id: 3 token: "b\303" logprob: -0.5 rank: 1
                 top { token_id: 3 token: "b\303" logprob: -0.5 } }
      logprobs { token_id: 4 token: "\274" logprob: -1 rank: 2
                 top { token_id: 8 token: "\275" logprob: -1.5 }
                 top { token_id: 9 token: "x" logprob: -0.25 } } })")),
            "");
  answer.Add(0, Event(R"(delta { text: "!" token_ids: 5
      logprobs { token_id: 5 token: "!" logprob: 0 rank: 1 } })"));
  answer.Add(0, Event(R"(delta { index: 1 text: "z" token_ids: 6
      logprobs { token_id: 6 token: "z" logprob: -2 rank: 1 } })"));
  answer.Add(0, Event(R"(finished { finish_reason: FINISH_REASON_LENGTH })"));
  answer.Add(0, Event(R"(finished { index: 1 finish_reason: FINISH_REASON_STOP
                                    stop_string: "end" })"));
  answer.Add(0, Event(kDone));
  const std::string text = answer.Finish();
  const json body = json::parse(text);
  EXPECT_EQ(body["id"], "cmpl-r1");
  EXPECT_EQ(body["object"], "text_completion");
  EXPECT_EQ(body["created"], 1700);
  EXPECT_EQ(body["model"], "tales");
  EXPECT_EQ(body["system_fingerprint"], "fp_1");
  EXPECT_EQ(body["seed"], 9007199254740991);
  EXPECT_EQ(body["usage"],
            json::parse(R"({"prompt_tokens": 5, "completion_tokens": 3,
              "total_tokens": 8, "prompt_tokens_details": {"cached_tokens": 4},
              "completion_tokens_details": {"reasoning_tokens": 0,
                "accepted_prediction_tokens": 6,
                "rejected_prediction_tokens": 2}})"));
  EXPECT_EQ(body["timings"]["queue_ms"], 1.5);
  EXPECT_EQ(body["timings"]["total_ms"], 2000);
  EXPECT_EQ(body["timings"]["retries"], 1);
  EXPECT_EQ(body["timings"]["decode_worker"], "decode-0");
  ASSERT_EQ(body["choices"].size(), 2u);
  const json& first = body["choices"][0];
  EXPECT_EQ(first["index"], 0);
  EXPECT_EQ(first["text"], "!");
  EXPECT_EQ(first["finish_reason"], "length");
  EXPECT_TRUE(first["stop_reason"].is_null());
  const json& second = body["choices"][1];
  EXPECT_EQ(second["index"], 1);
  EXPECT_EQ(second["text"], "b\303\274z");
  EXPECT_EQ(second["finish_reason"], "stop");
  EXPECT_EQ(second["stop_reason"], "end");
  EXPECT_EQ(second["token_ids"], json({3, 4, 6}));
  EXPECT_EQ(second["prompt_token_ids"], json({7, 8}));
  const json& logprobs = second["logprobs"];
  EXPECT_EQ(logprobs["token_logprobs"], json({-0.5, -1, -2}));
  EXPECT_EQ(logprobs["text_offset"], json({0, 2, 2}));
  EXPECT_EQ(logprobs["tokens"], json({"b\357\277\275", "\357\277\275", "z"}));
  EXPECT_EQ(logprobs["top_logprobs"][1],
            json({{"x", -0.25}, {"\357\277\275", -1}}));
  // One key for all bytes that are no text.
  const size_t key = text.find("\"\357\277\275\":");
  EXPECT_NE(key, std::string::npos);
  EXPECT_EQ(key, text.rfind("\"\357\277\275\":"));
}

// Prompts of one call may meet different weights while these are replaced.
TEST(OpenAiAnswerTest, AFingerprintIsThatOfEveryPrompt) {
  const auto started = [](const char* fingerprint) {
    v1::GenerateResponse response = Event(kStarted);
    response.mutable_started()->set_system_fingerprint(fingerprint);
    return response;
  };
  const std::pair<const char*, json> cases[] = {
      {"fp_1", "fp_1"}, {"", "fp_1"}, {"fp_2", nullptr}};
  for (const auto& [second, of_both] : cases) {
    OpenAiAnswer answer(ParseBody(false, R"({"prompt": ["a", "b"]})"), "tales",
                        0);
    answer.Add(0, started("fp_1"));
    answer.Add(1, started(second));
    EXPECT_EQ(json::parse(answer.Finish())["system_fingerprint"], of_both);
  }
  OpenAiAnswer stream(
      ParseBody(false, R"({"prompt": ["a", "b"], "stream": true})"), "tales",
      0);
  stream.Add(0, started("fp_1"));
  stream.Add(1, started("fp_2"));
  const std::vector<std::string> chunk =
      Data(stream.Add(1, Event(R"(delta { text: "x" })")));
  ASSERT_EQ(chunk.size(), 1u);
  EXPECT_EQ(json::parse(chunk[0])["system_fingerprint"], "fp_2");
}

// As of beams, of which fewer ended than were asked for.
TEST(OpenAiAnswerTest, ASequenceWithoutTokensHasEmptyListsOfLogprobs) {
  for (const bool chat : {false, true}) {
    OpenAiAnswer answer(
        ParseBody(chat, chat ? R"({"messages": [], "logprobs": true})"
                             : R"({"prompt": "a", "logprobs": 1})"),
        "tales", 0);
    answer.Add(0, Event(R"(finished { finish_reason: FINISH_REASON_LENGTH })"));
    answer.Add(0, Event(kDone));
    EXPECT_EQ(json::parse(answer.Finish())["choices"][0]["logprobs"],
              json::parse(chat ? R"({"content": []})"
                               : R"({"text_offset": [], "tokens": [],
                                 "token_logprobs": [], "top_logprobs": []})"));
  }
}

// Two messages of scores for the prompt "<s>ab", behind its first token.
constexpr char kScores[] = R"(
  prompt_logprobs { position: 0 tokens { token_id: 1 token: "<s>" } })";
constexpr char kMoreScores[] = R"(
  prompt_logprobs {
    position: 1
    tokens { token_id: 7 token: "a" logprob: -1.5 rank: 3
             top { token_id: 9 token: "x" logprob: -0.5 } }
    tokens { token_id: 8 token: "b" logprob: -2 rank: 4
             top { token_id: 6 token: "b" logprob: -1 } } })";

TEST(OpenAiAnswerTest, EchoedLogprobsStandBeforeThoseOfTheOutput) {
  for (const bool stream : {false, true}) {
    const OpenAiRequest request = ParseBody(
        false, R"({"prompt": "ab", "n": 2, "echo": true, "logprobs": 1,
                   "stream": )" +
                   std::string(stream ? "true}" : "false}"));
    OpenAiAnswer answer(request, "tales", 1700);
    std::string events = answer.Add(0, Event(kStarted));
    for (const char* const event :
         {R"(delta { text: "<s>ab" })", kScores, kMoreScores,
          R"(delta { index: 1 text: "<s>ab" })",
          R"(delta { text: "c" token_ids: 5
             logprobs { token_id: 5 token: "c" logprob: -3 rank: 1 } })",
          R"(finished { finish_reason: FINISH_REASON_LENGTH })",
          R"(finished { index: 1 finish_reason: FINISH_REASON_LENGTH })",
          kDone}) {
      events += answer.Add(0, Event(event));
    }
    events += answer.Finish();
    // Lists of all chunks of a choice, joined.
    json lists[2];
    std::string texts[2];
    const auto take = [&](const json& choice) {
      const int index = choice["index"];
      texts[index] += choice["text"].get<std::string>();
      if (choice["logprobs"].is_null()) return;
      for (const auto& [name, list] : choice["logprobs"].items()) {
        for (const json& value : list) lists[index][name].push_back(value);
      }
    };
    if (stream) {
      for (const std::string& data : Data(events)) {
        if (data == "[DONE]") continue;
        const json chunk = json::parse(data);
        for (const json& choice : chunk["choices"]) take(choice);
      }
    } else {
      const json body = json::parse(events);
      for (const json& choice : body["choices"]) take(choice);
    }
    EXPECT_EQ(texts[0], "<s>abc");
    EXPECT_EQ(texts[1], "<s>ab");
    EXPECT_EQ(lists[0], json::parse(R"({
      "tokens": ["<s>", "a", "b", "c"], "text_offset": [0, 3, 4, 5],
      "token_logprobs": [null, -1.5, -2.0, -3.0],
      "top_logprobs": [null, {"a": -1.5, "x": -0.5}, {"b": -1.0},
                       {"c": -3.0}]})"));
    EXPECT_EQ(lists[1]["token_logprobs"], json({nullptr, -1.5, -2}));
    EXPECT_EQ(lists[1]["text_offset"], json({0, 3, 4}));
  }
}

// "n a" may be a stop string's beginning: its text is held back, and with it
// the records of both tokens, but not the text before.
TEST(OpenAiAnswerTest, OffsetsCountNoTextBeforeItsRecords) {
  OpenAiAnswer answer(ParseBody(false, R"({"prompt": "a", "logprobs": 0})"),
                      "tales", 1700);
  answer.Add(0, Event(kStarted));
  answer.Add(0, Event(R"(delta { text: " upo" })"));
  answer.Add(0, Event(R"(delta { text: "n a" token_ids: [3, 4]
      logprobs { token_id: 3 token: " upon" logprob: -1 rank: 1 }
      logprobs { token_id: 4 token: " a" logprob: -1 rank: 1 } })"));
  answer.Add(0, Event(kDone));
  const json choice = json::parse(answer.Finish())["choices"][0];
  EXPECT_EQ(choice["text"], " upon a");
  EXPECT_EQ(choice["logprobs"]["text_offset"], json({0, 5}));
}

TEST(OpenAiAnswerTest, OffsetsCountCharactersThatTokensCut) {
  const struct {
    std::vector<std::string> tokens;
    std::vector<int> offsets;
  } kCases[] = {
      {{"b\303", "\274", "c"}, {0, 2, 2}},
      {{"\342", "\202", "\254", "c"}, {0, 1, 1, 1}},
      {{"\274", "h", "h"}, {0, 1, 2}},  // each byte of no character is one
      {{"\274", "\274", "\274"}, {0, 1, 2}},
      {{"\303", "h", "\274", "h"}, {0, 1, 2, 3}},
      {{"\303\274", "\274", "h"}, {0, 1, 2}},
  };
  for (const auto& c : kCases) {
    v1::GenerateDelta delta;
    for (const std::string& token : c.tokens) {
      delta.add_logprobs()->set_token(token);
    }
    CharacterCount before;
    EXPECT_EQ(CompletionLogprobs(delta.logprobs(), &before)["text_offset"],
              json(c.offsets));
  }
}

TEST(OpenAiAnswerTest, SeveralPromptsHaveOneId) {
  OpenAiAnswer answer(ParseBody(false, R"({"prompt": ["a", "b"]})"), "tales",
                      1700);
  v1::GenerateResponse started = Event(kStarted);
  started.set_request_id("foo-1-1");
  answer.Add(1, started);
  started.set_request_id("foo-1-0");
  answer.Add(0, started);
  for (const int prompt : {0, 1}) answer.Add(prompt, Event(kDone));
  EXPECT_EQ(json::parse(answer.Finish())["id"], "cmpl-foo-1");
}

TEST(OpenAiAnswerTest, AChatEchoesTheBeginningOfItsAnswerAlone) {
  const struct {
    const char* messages;
    bool goes_on;  // continue_final_message
    const char* told;
  } kCases[] = {
      {R"([{"role": "system", "content": "Secret."},
           {"role": "assistant", "content": "One day"}])",
       true, "One day, a dog"},
      {R"([{"role": "assistant",
            "content": [{"type": "text", "text": "One"},
                        {"type": "text", "text": "day"}]}])",
       true, "One\nday, a dog"},
      {R"([{"role": "assistant", "content": "One day"}])", false, ", a dog"},
      {R"([{"role": "user", "content": "One day"}])", true, ", a dog"}};
  for (const auto& c : kCases) {
    for (const bool stream : {false, true}) {
      json body = {{"messages", json::parse(c.messages)},
                   {"echo", true},
                   {"n", 2},
                   {"continue_final_message", c.goes_on},
                   {"add_generation_prompt", !c.goes_on},
                   {"stream", stream}};
      const OpenAiRequest request = ParseBody(true, body.dump());
      EXPECT_FALSE(request.prompts.front().output().echo());
      OpenAiAnswer answer(request, "tales", 1700);
      std::string events = answer.Add(0, Event(kStarted));
      for (const char* const event :
           {R"(delta { text: ", a dog" })",
            R"(delta { index: 1 text: ", a dog" })", kDone}) {
        events += answer.Add(0, Event(event));
      }
      std::string told[2];
      if (stream) {
        for (const std::string& data : Data(events)) {
          const json choice = json::parse(data)["choices"][0];
          told[choice["index"].get<size_t>()] +=
              choice["delta"].value("content", "");
        }
      } else {
        const json whole = json::parse(answer.Finish());
        for (size_t i = 0; i < 2; ++i) {
          told[i] = whole["choices"][i]["message"]["content"];
        }
      }
      EXPECT_EQ(told[0], c.told) << c.messages << stream;
      EXPECT_EQ(told[1], c.told) << c.messages << stream;
    }
  }
}

TEST(OpenAiAnswerTest, PromptLogprobsAreThoseOfVllm) {
  const json expected = json::parse(R"([null,
    {"7": {"logprob": -1.5, "rank": 3, "decoded_token": "a"},
     "9": {"logprob": -0.5, "rank": 1, "decoded_token": "x"}},
    {"8": {"logprob": -2.0, "rank": 4, "decoded_token": "b"},
     "6": {"logprob": -1.0, "rank": 1, "decoded_token": "b"}}])");
  for (const bool chat : {false, true}) {
    const OpenAiRequest request = ParseBody(
        chat, chat ? R"({"messages": [{"role": "user", "content": "ab"}],
                         "prompt_logprobs": 1})"
                   : R"({"prompt": "ab", "prompt_logprobs": 1})");
    OpenAiAnswer answer(request, "tales", 1700);
    for (const char* const event :
         {kStarted, kScores, kMoreScores, R"(delta { text: "c" })",
          R"(finished { finish_reason: FINISH_REASON_LENGTH })", kDone}) {
      EXPECT_EQ(answer.Add(0, Event(event)), "");
    }
    EXPECT_GT(answer.bytes(), 100u);
    const json body = json::parse(answer.Finish());
    const json& choice = body["choices"][0];
    EXPECT_EQ((chat ? body : choice)["prompt_logprobs"], expected);
    EXPECT_TRUE(choice["logprobs"].is_null());
  }
}

TEST(OpenAiAnswerTest, ScoresCountForEveryChoiceThatHasThem) {
  const auto bytes = [](const std::string& n) {
    OpenAiAnswer answer(
        ParseBody(false,
                  R"({"prompt": "ab", "prompt_logprobs": 1, "n": )" + n + "}"),
        "tales", 1700);
    for (const char* const event : {kStarted, kScores, kMoreScores}) {
      answer.Add(0, Event(event));
    }
    return answer.bytes();
  };
  EXPECT_GT(bytes("1"), 100u);
  EXPECT_EQ(bytes("3"), 3 * bytes("1"));
}

TEST(OpenAiAnswerTest, AStreamedChat) {
  const OpenAiRequest request =
      ParseBody(true, R"({"messages": [], "stream": true, "logprobs": true,
                "stream_options": {"include_usage": true}})");
  OpenAiAnswer answer(request, "tales", 1700);
  const std::vector<std::string> start = Data(answer.Add(0, Event(kStarted)));
  ASSERT_EQ(start.size(), 1u);
  EXPECT_EQ(json::parse(start[0]), json::parse(R"({
    "id": "chatcmpl-r1", "object": "chat.completion.chunk", "created": 1700,
    "model": "tales", "system_fingerprint": "fp_1", "usage": null,
    "choices": [{"index": 0,
      "delta": {"role": "assistant", "content": ""}, "logprobs": null,
      "finish_reason": null}]})"));
  const std::vector<std::string> delta = Data(answer.Add(0, Event(R"(
    delta { text: "Hi" logprobs { token_id: 3 token: "Hi" logprob: -0.5
              top { token_id: 4 token: "H" logprob: -0.25 } } })")));
  ASSERT_EQ(delta.size(), 1u);
  EXPECT_EQ(json::parse(delta[0])["choices"], json::parse(R"([{"index": 0,
    "delta": {"content": "Hi"}, "finish_reason": null,
    "logprobs": {"content": [{"token": "Hi", "logprob": -0.5,
      "bytes": [72, 105], "top_logprobs": [
        {"token": "H", "logprob": -0.25, "bytes": [72]}]}]}}])"));
  const std::vector<std::string> end =
      Data(answer.Add(0, Event(R"(finished { finish_reason: FINISH_REASON_STOP
                             eos_token_id: 2 })")));
  ASSERT_EQ(end.size(), 1u);
  EXPECT_EQ(json::parse(end[0])["choices"], json::parse(R"([{"index": 0,
    "delta": {}, "logprobs": null, "finish_reason": "stop",
    "stop_reason": null}])"));
  EXPECT_EQ(answer.Add(0, Event(kDone)), "");
  const std::vector<std::string> last = Data(answer.Finish());
  ASSERT_EQ(last.size(), 2u);
  EXPECT_EQ(json::parse(last[0])["choices"], json::array());
  EXPECT_EQ(json::parse(last[0])["usage"]["total_tokens"], 8);
  EXPECT_EQ(last[1], "[DONE]");
}

TEST(OpenAiAnswerTest, ReasoningIsAFieldOfItsOwn) {
  const char* const kDeltas[] = {
      R"(delta { reasoning_content: "Hm" token_ids: 1 })",
      R"(delta { token_ids: 2 })",
      R"(delta { reasoning_content: "." text: "Yes" token_ids: [3, 4] })",
      R"(delta { text: "!" token_ids: 5
                 tool_calls { id: "c" name: "f" } })",
      R"(finished { finish_reason: FINISH_REASON_STOP })",
      R"(done { usage { prompt_tokens: 5 completion_tokens: 5
                        reasoning_tokens: 3 } })"};
  OpenAiAnswer stream(
      ParseBody(true, R"({"messages": [{"role": "user", "content": "a"}],
                        "stream": true,
                        "stream_options": {"include_usage": true}})"),
      "m", 1700);
  OpenAiAnswer whole(
      ParseBody(true, R"({"messages": [{"role": "user", "content": "a"}]})"),
      "m", 1700);
  std::vector<json> deltas;
  stream.Add(0, Event(kStarted));
  whole.Add(0, Event(kStarted));
  for (const char* const event : kDeltas) {
    for (const std::string& data : Data(stream.Add(0, Event(event)))) {
      deltas.push_back(json::parse(data)["choices"][0]["delta"]);
    }
    whole.Add(0, Event(event));
  }
  ASSERT_EQ(deltas.size(), 6u);
  EXPECT_EQ(deltas[0], json({{"reasoning_content", "Hm"}}));
  EXPECT_EQ(deltas[1], json({{"content", ""}}));
  EXPECT_EQ(deltas[2], json({{"reasoning_content", "."}, {"content", "Yes"}}));
  EXPECT_EQ(deltas[3], json({{"content", "!"}}));
  EXPECT_EQ(deltas[4]["tool_calls"][0]["id"], "c");
  EXPECT_EQ(deltas[5], json::object());
  const json usage = json::parse(Data(stream.Finish())[0])["usage"];
  EXPECT_EQ(usage["completion_tokens_details"]["reasoning_tokens"], 3);
  const json body = json::parse(whole.Finish());
  const json& message = body["choices"][0]["message"];
  EXPECT_EQ(message["reasoning_content"], "Hm.");
  EXPECT_EQ(message["content"], "Yes!");
  EXPECT_EQ(body["usage"]["completion_tokens_details"]["reasoning_tokens"], 3);

  // It was cut before there was an answer.
  OpenAiAnswer cut(
      ParseBody(true, R"({"messages": [{"role": "user", "content": "a"}]})"),
      "m", 1700);
  cut.Add(0, Event(kStarted));
  cut.Add(0, Event(kDeltas[0]));
  cut.Add(0, Event(kDone));
  const json short_one = json::parse(cut.Finish())["choices"][0]["message"];
  EXPECT_EQ(short_one["reasoning_content"], "Hm");
  EXPECT_TRUE(short_one["content"].is_null());
}

TEST(OpenAiAnswerTest, PromptsCountThroughAndUsageIsTheirSum) {
  const OpenAiRequest request =
      ParseBody(false, R"({"prompt": ["a", "b"], "n": 2, "stream": true,
                 "work": true,
                 "stream_options": {"continuous_usage_stats": true}})");
  OpenAiAnswer answer(request, "tales", 1700);
  EXPECT_EQ(answer.Add(1, Event(kStarted)), "");
  EXPECT_EQ(answer.Add(0, Event(kStarted)), "");
  const json chunk = json::parse(Data(answer.Add(
      1, Event(R"(delta { index: 1 text: "x" token_ids: [1, 2] })")))[0]);
  EXPECT_EQ(chunk["choices"][0]["index"], 3);
  EXPECT_EQ(chunk["choices"][0]["text"], "x");
  EXPECT_FALSE(chunk["choices"][0].contains("token_ids"));
  EXPECT_EQ(chunk["usage"]["prompt_tokens"], 10);
  EXPECT_EQ(chunk["usage"]["completion_tokens"], 2);
  EXPECT_TRUE(chunk["work"].is_null());  // no worker told
  const json next = json::parse(Data(
      answer.Add(1, Event(R"(delta { index: 0 text: "y" token_ids: 3 })")))[0]);
  EXPECT_EQ(next["usage"]["completion_tokens"], 3);
  // Each sequence tells of itself: the sum of what they told last.
  for (const auto& [prompt, delta, rows] :
       std::vector<std::tuple<int, const char*, int>>{
           {1, "index: 1 text: 'x' work { steps: 1 kv_rows: 30 }", 30},
           {0, "index: 0 text: 'x' work { steps: 1 kv_rows: 10 }", 40},
           {1, "index: 1 text: 'x' work { steps: 2 kv_rows: 35 }", 45}}) {
    const std::string events =
        answer.Add(prompt, Event(absl::StrCat("delta {", delta, "}")));
    EXPECT_EQ(json::parse(Data(events)[0])["work"]["kv_rows"], rows);
  }
  answer.Add(0, Event(kDone));
  answer.Add(1, Event(kDone));
  EXPECT_EQ(answer.Finish(), "data: [DONE]\n\n");
  // Whoever asks for the usage alone gets no field of ours.
  const OpenAiRequest usage_alone =
      ParseBody(false, R"({"prompt": "a", "stream": true,
                 "stream_options": {"continuous_usage_stats": true}})");
  EXPECT_FALSE(usage_alone.prompts[0].output().work());
  EXPECT_TRUE(request.prompts[0].output().work());
  OpenAiAnswer other(usage_alone, "tales", 1700);
  other.Add(0, Event(kStarted));
  const json plain = json::parse(
      Data(other.Add(0, Event("delta { text: 'x' token_ids: 1 }")))[0]);
  EXPECT_FALSE(plain.contains("work"));
  EXPECT_EQ(plain["usage"]["completion_tokens"], 1);
}

TEST(OpenAiAnswerTest, EachChunksUsageCountsTheReasoning) {
  OpenAiAnswer answer(
      ParseBody(true, R"({"messages": [{"role": "user", "content": "a"}],
                 "n": 2, "stream": true, "stream_options":
                 {"include_usage": true, "continuous_usage_stats": true}})"),
      "tales", 1700);
  answer.Add(0, Event(kStarted));
  for (const auto& [delta, completion, reasoning] :
       std::vector<std::tuple<const char*, int, int>>{
           {"index: 0 token_ids: 1 reasoning_tokens: 1", 1, 1},
           {"index: 1 token_ids: [1, 2] reasoning_tokens: 2", 3, 3},
           {"index: 0 token_ids: [3, 4] reasoning_tokens: 2", 5, 4},
           {"index: 0 text: 'x'", 5, 4},  // what brings no token says nothing
           {"index: 1 token_ids: 3 reasoning_tokens: 2", 6, 4}}) {
    SCOPED_TRACE(delta);
    const json usage = json::parse(Data(
        answer.Add(0, Event(absl::StrCat("delta {", delta, "}"))))[0])["usage"];
    EXPECT_EQ(usage["completion_tokens"], completion);
    EXPECT_EQ(usage["completion_tokens_details"]["reasoning_tokens"],
              reasoning);
  }
  const json finished = json::parse(Data(answer.Add(
      0, Event("finished { index: 0 finish_reason: FINISH_REASON_STOP }")))[0]);
  EXPECT_EQ(finished["usage"]["completion_tokens_details"]["reasoning_tokens"],
            4);
}

TEST(OpenAiAnswerTest, ErrorsHaveTheirStatusAndName) {
  struct Case {
    absl::StatusCode code;
    int http;
    const char* type;
  };
  for (const Case& c : std::vector<Case>{
           {absl::StatusCode::kInvalidArgument, 400, "invalid_request_error"},
           {absl::StatusCode::kUnauthenticated, 401, "authentication_error"},
           {absl::StatusCode::kPermissionDenied, 403, "permission_error"},
           {absl::StatusCode::kNotFound, 404, "not_found_error"},
           {absl::StatusCode::kAlreadyExists, 409, "conflict_error"},
           {absl::StatusCode::kAborted, 409, "conflict_error"},
           {absl::StatusCode::kResourceExhausted, 429, "rate_limit_error"},
           {absl::StatusCode::kInternal, 500, "server_error"},
           {absl::StatusCode::kUnavailable, 503, "service_unavailable_error"},
           {absl::StatusCode::kDeadlineExceeded, 504, "timeout_error"}}) {
    const HttpResponse response =
        ErrorResponse(MakeError(c.code, "SOME_REASON", "why"));
    EXPECT_EQ(response.code, c.http);
    EXPECT_EQ(json::parse(response.body),
              json::parse(R"({"error": {"message": "why", "param": null,
                "code": "some_reason", "type": ")" +
                          std::string(c.type) + "\"}}"));
    using Headers = std::vector<std::pair<std::string, std::string>>;
    EXPECT_EQ(response.headers,
              c.http == 401
                  ? Headers({{"WWW-Authenticate", "Bearer realm=\"tandem\""}})
              // Nothing says when it might succeed, so it never will.
              : c.http == 429 || c.http == 504
                  ? Headers({{"x-should-retry", "false"}})
                  : Headers());
  }
  // Two have the names that OpenAI's clients know.
  const HttpResponse stranger = ErrorResponse(
      MakeError(absl::StatusCode::kUnauthenticated, "API_KEY_INVALID", "no"));
  EXPECT_EQ(json::parse(stranger.body)["error"]["code"], "invalid_api_key");
  ASSERT_EQ(stranger.headers.size(), 1u);
  EXPECT_EQ(stranger.headers[0].first, "WWW-Authenticate");
  EXPECT_EQ(stranger.headers[0].second,
            "Bearer realm=\"tandem\", error=\"invalid_token\"");
  const HttpResponse limited = ErrorResponse(MakeError(
      absl::StatusCode::kResourceExhausted, "RATE_LIMITED", "slower"));
  EXPECT_EQ(json::parse(limited.body)["error"]["code"], "rate_limit_exceeded");
  const HttpResponse full = ErrorResponse(
      MakeError(absl::StatusCode::kResourceExhausted, "QUEUE_FULL", "full", {},
                absl::Milliseconds(1200)));
  ASSERT_EQ(full.headers.size(), 1u);
  EXPECT_EQ(full.headers[0].first, "Retry-After");
  EXPECT_EQ(full.headers[0].second, "2");
  // The other API's names of fields are its own business.
  const json field = json::parse(
      ErrorResponse(FieldInvalid("sampling.top_p", "7", "must be in (0, 1]"))
          .body)["error"];
  EXPECT_EQ(field["param"], "top_p");
  EXPECT_EQ(field["message"], "top_p = 7: must be in (0, 1]");
  EXPECT_EQ(field["code"], "field_invalid");
  // Nor are those of flags.
  const FieldNames names = {{"structured", "guided_regex"}};
  EXPECT_EQ(json::parse(ErrorResponse(
                            FieldInvalid("structured.regex", "11 bytes",
                                         "at most 10 (--structured-max-bytes), "
                                         "excludes structured.choice"),
                            names)
                            .body)["error"]["message"],
            "guided_regex = 11 bytes: at most 10 (--structured-max-bytes), "
            "excludes guided_regex");
  EXPECT_EQ(ErrorResponse(MakeError(absl::StatusCode::kInternal, "SUSPECT", ""))
                .headers.front()
                .second,
            "false");
  EXPECT_EQ(ErrorResponse(MakeError(absl::StatusCode::kInvalidArgument,
                                    "CONTENT_TYPE", ""))
                .code,
            415);
  const HttpResponse missing = ListenerError(404, "nothing at /v1/x");
  EXPECT_EQ(missing.code, 404);
  EXPECT_EQ(missing.content_type, "application/json");
  EXPECT_EQ(json::parse(missing.body), json::parse(R"({"error": {
    "message": "nothing at /v1/x", "type": "not_found_error", "param": null,
    "code": null}})"));
  const OpenAiAnswer answer(ParseBody(false, R"({"prompt": ""})"), "tales",
                            1700);
  const std::vector<std::string> events =
      Data(answer.Fail(absl::UnavailableError("lost")));
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(json::parse(events[0])["error"]["message"], "lost");
  EXPECT_TRUE(json::parse(events[0])["error"]["code"].is_null());
  EXPECT_EQ(events[1], "[DONE]");
}

// What a client reads of a refusal, in the names of its own request.
TEST(OpenAiAnswerTest, ErrorsNameFieldsAsTheClientDid) {
  constexpr char kChat[] = R"({"messages": [{"role": "user"}], )";
  constexpr char kText[] = R"({"prompt": "a", )";
  const auto forms = [](const std::string& field, const std::string& why) {
    return FieldInvalid(field, "7: chat.x", why);
  };
  const struct {
    const char* body;
    const char* more;  // members
    absl::Status status;
    const char* param;
    const char* message;
  } kCases[] = {
      {kChat, R"("logprobs": true, "top_logprobs": 7})",
       forms("output.logprobs", "at most 5"), "top_logprobs",
       "top_logprobs = 7: chat.x: at most 5"},
      {kText, R"("logprobs": 7})", forms("output.logprobs", "at most 5"),
       "logprobs", "logprobs = 7: chat.x: at most 5"},
      {kChat, R"("max_completion_tokens": 7})",
       forms("stopping.max_tokens", "needs output.prompt_logprobs."),
       "max_completion_tokens",
       "max_completion_tokens = 7: chat.x: needs prompt_logprobs."},
      {kText, R"("max_tokens": 7})",
       forms("sampling.n", "needs a sampling.temperature above 0: all equal"),
       "n", "n = 7: chat.x: needs a temperature above 0: all equal"},
      {kText, R"("use_beam_search": true, "n": 2})",
       forms("beam.width", "at most 3"), "n", "n = 7: chat.x: at most 3"},
      {kText, R"("use_beam_search": true, "best_of": 2})",
       forms("stopping.stop", "excludes beam"), "stop",
       "stop = 7: chat.x: excludes use_beam_search"},
      {kText, R"("prompt": "b"})", forms("token_ids.ids", "ids"), "prompt",
       "prompt = 7: chat.x: ids"},
      {kChat, R"("n": 1})", forms("prompt", "no token of it"), "messages",
       "messages = 7: chat.x: no token of it"},
      {kText, R"("guided_regex": "("})", forms("structured.regex", "no regex"),
       "guided_regex", "guided_regex = 7: chat.x: no regex"},
      {kChat, R"("response_format": {"type": "json_object"}})",
       forms("chat.tool_choice_function", "excludes structured"), "tool_choice",
       "tool_choice = 7: chat.x: excludes response_format"},
      {kChat, R"("n": 1})",
       forms("chat.tools[3].parameters_json_schema", "an object"),
       "tools[3].function.parameters",
       "tools[3].function.parameters = 7: chat.x: an object"},
      {kChat, R"("n": 1})", forms("chat.messages[2].parts[1]", "only text"),
       "messages[2].content[1]",
       "messages[2].content[1] = 7: chat.x: only text"},
      {kChat, R"("n": 1})",
       forms("chat.messages[2].tool_calls[0].arguments_json", "an object"),
       "messages[2].tool_calls[0].function.arguments",
       "messages[2].tool_calls[0].function.arguments = 7: chat.x: an object"},
  };
  for (const auto& c : kCases) {
    const bool chat = c.body == kChat;
    const OpenAiAnswer answer(ParseBody(chat, std::string(c.body) + c.more),
                              "tales", 1700);
    const json error = json::parse(answer.Refuse(c.status).body)["error"];
    EXPECT_EQ(error["param"], c.param);
    EXPECT_EQ(error["message"], c.message);
  }
}

TEST(OpenAiAnswerTest, AStreamBeginsWithThePromptsTokenIds) {
  const json ids = {7, 8};
  OpenAiAnswer chat(ParseBody(true, R"({"messages": [{"role": "user"}],
      "stream": true, "return_token_ids": true})"),
                    "tales", 1700);
  const json first = json::parse(Data(chat.Add(0, Event(kStarted))).at(0));
  EXPECT_EQ(first["prompt_token_ids"], ids);
  EXPECT_EQ(first["choices"][0]["delta"]["role"], "assistant");
  EXPECT_FALSE(
      json::parse(Data(chat.Add(0, Event("delta { text: 'b' }"))).at(0))
          .contains("prompt_token_ids"));
  OpenAiAnswer text(ParseBody(false, R"({"prompt": "a", "stream": true,
      "return_token_ids": true, "n": 2})"),
                    "tales", 1700);
  const std::vector<std::string> begun = Data(text.Add(0, Event(kStarted)));
  ASSERT_EQ(begun.size(), 2u);
  EXPECT_EQ(json::parse(begun[1])["choices"][0]["prompt_token_ids"], ids);
  EXPECT_EQ(json::parse(begun[1])["choices"][0]["index"], 1);
  EXPECT_EQ(json::parse(begun[1])["choices"][0]["text"], "");
}

TEST(OpenAiAnswerTest, AWholeChatHasThePromptsTokenIdsOnce) {
  OpenAiAnswer answer(ParseBody(true, R"({"messages": [{"role": "user"}],
      "n": 2, "return_token_ids": true})"),
                      "tales", 1700);
  answer.Add(0, Event(kStarted));
  answer.Add(0, Event("delta { index: 1 text: 'b' token_ids: [3, 4] }"));
  answer.Add(0, Event(kDone));
  const json body = json::parse(answer.Finish());
  EXPECT_EQ(body["prompt_token_ids"], json({7, 8}));
  for (const json& choice : body["choices"]) {
    EXPECT_FALSE(choice.contains("prompt_token_ids"));
  }
  EXPECT_EQ(body["choices"][1]["token_ids"], json({3, 4}));
}

TEST(OpenAiAnswerTest, AnAnswerSaysWhereItCannotBeReproduced) {
  for (const char* const more : {"", R"(, "stream": true,
           "stream_options": {"include_usage": true})"}) {
    for (const bool mixed : {false, true}) {
      SCOPED_TRACE(absl::StrCat(more, mixed ? " mixed" : ""));
      OpenAiAnswer answer(
          ParseBody(false, absl::StrCat(R"({"prompt": ["a", "b"])", more, "}")),
          "tales", 1700);
      answer.Add(0, Event(kStarted));
      answer.Add(1, Event(kStarted));
      answer.Add(0, Event(kDone));
      // Any prompt's counts.
      answer.Add(1, Event(mixed ? "done { not_reproducible: true }" : kDone));
      const std::string end = answer.Finish();
      const json body = json::parse(*more == '\0' ? end : Data(end).at(0));
      EXPECT_TRUE(body.contains("timings"));
      EXPECT_FALSE(body.contains("seed"));  // each prompt has its own
      EXPECT_EQ(body.contains("reproducible"), mixed);
      EXPECT_EQ(body.value("reproducible", true), !mixed);
    }
  }
}

TEST(OpenAiAnswerTest, AttentionComesWithItsTokensAndWorkWithTheUsage) {
  OpenAiAnswer answer(ParseBody(false, R"({"prompt": "a", "stream": true,
      "attention": true, "stream_options": {"include_usage": true}})"),
                      "tales", 1700);
  answer.Add(0, Event(kStarted));
  const auto chunk = Data(answer.Add(0, Event(R"(
    delta { text: "b" token_ids: [3, 4]
      attention { layers { layer: 0 weights: [0.75, 0.25] }
                  layers { layer: 5 weights: [0.1234567, 0.8765433] } }
      attention { layers { layer: -1 weights: 1 } } })")));
  ASSERT_EQ(chunk.size(), 1u);
  EXPECT_EQ(json::parse(chunk[0])["choices"][0]["attention"],
            json::parse(R"([[{"layer": 0, "weights": [0.75, 0.25]},
                             {"layer": 5, "weights": [0.123457, 0.876543]}],
                            [{"layer": -1, "weights": [1]}]])"));
  v1::GenerateResponse done = Event(kDone);
  done.mutable_done()->mutable_work()->set_kv_rows(12);
  done.mutable_done()->mutable_work()->set_matrix_flops(34);
  done.mutable_done()->mutable_timings()->set_way("shm");
  answer.Add(0, Event(R"(delta { text: "c" token_ids: 5 })"));
  answer.Add(0, done);
  const auto end = Data(answer.Finish());
  ASSERT_EQ(end.size(), 2u);
  const json last = json::parse(end[0]);
  EXPECT_EQ(last["work"]["kv_rows"], 12);
  EXPECT_EQ(last["work"]["matrix_flops"], 34);
  EXPECT_EQ(last["timings"]["way"], "shm");
}

constexpr char kChatWithTools[] =
    R"({"messages": [{"role": "user", "content": "?"}], "stream": %s})";
constexpr char kCallBegins[] = R"(
  delta { tool_calls { index: 0 id: "call_1" name: "f" }
          tool_calls { index: 0 arguments_json: "{\"a\":" } })";
constexpr char kCallsGoOn[] = R"(
  delta { text: " ok" tool_calls { index: 0 arguments_json: "1}" }
          tool_calls { index: 1 id: "call_2" name: "g" }
          tool_calls { index: 1 arguments_json: "{}" } })";
constexpr char kCalled[] = R"(
  finished { finish_reason: FINISH_REASON_TOOL_CALLS eos_token_id: 2 })";

TEST(OpenAiAnswerTest, StreamedToolCallsAreOpenAisDeltas) {
  OpenAiAnswer answer(
      ParseBody(true, absl::StrReplaceAll(kChatWithTools, {{"%s", "true"}})),
      "tales", 1700);
  answer.Add(0, Event(kStarted));
  std::vector<json> deltas;
  for (const char* event : {kCallBegins, kCallsGoOn}) {
    for (const std::string& data : Data(answer.Add(0, Event(event)))) {
      deltas.push_back(json::parse(data)["choices"][0]["delta"]);
    }
  }
  // A piece a chunk: SDKs take the first list that comes as it is.
  const char* const kWant[] = {
      R"({"tool_calls": [{"index": 0, "id": "call_1", "type": "function",
                          "function": {"name": "f", "arguments": ""}}]})",
      R"({"tool_calls": [{"index": 0, "function": {"arguments": "{\"a\":"}}]})",
      R"({"content": " ok"})",
      R"({"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]})",
      R"({"tool_calls": [{"index": 1, "id": "call_2", "type": "function",
                          "function": {"name": "g", "arguments": ""}}]})",
      R"({"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]})"};
  ASSERT_EQ(deltas.size(), std::size(kWant));
  for (size_t i = 0; i < deltas.size(); ++i) {
    EXPECT_EQ(deltas[i], json::parse(kWant[i])) << i;
  }
  const auto end = Data(answer.Add(0, Event(kCalled)));
  EXPECT_EQ(json::parse(end.at(0))["choices"][0]["finish_reason"],
            "tool_calls");
}

TEST(OpenAiAnswerTest, TheFirstChunkOfADeltaTellsOfItsTokens) {
  OpenAiAnswer answer(ParseBody(true, R"({"messages": [{"role": "user"}],
      "stream": true, "return_token_ids": true, "logprobs": true})"),
                      "tales", 1700);
  answer.Add(0, Event(kStarted));
  const auto data = Data(answer.Add(0, Event(R"(
    delta { token_ids: [3, 4] logprobs { token_id: 3 rank: 1 }
            tool_calls { index: 0 id: "call_1" name: "f" }
            tool_calls { index: 0 arguments_json: "{}" } })")));
  ASSERT_EQ(data.size(), 2u);
  const json first = json::parse(data[0])["choices"][0];
  EXPECT_EQ(first["token_ids"], json::parse("[3, 4]"));
  EXPECT_FALSE(first["logprobs"].is_null());
  const json second = json::parse(data[1])["choices"][0];
  EXPECT_FALSE(second.contains("token_ids"));
  EXPECT_TRUE(second["logprobs"].is_null());
}

TEST(OpenAiAnswerTest, WholeToolCallsAreJoined) {
  OpenAiAnswer answer(
      ParseBody(true, absl::StrReplaceAll(kChatWithTools, {{"%s", "false"}})),
      "tales", 1700);
  for (const char* event :
       {kStarted, kCallBegins, kCallsGoOn, kCalled, kDone}) {
    answer.Add(0, Event(event));
  }
  EXPECT_GT(answer.bytes(), 20u);
  const json choice = json::parse(answer.Finish())["choices"][0];
  EXPECT_EQ(choice["finish_reason"], "tool_calls");
  EXPECT_EQ(choice["message"], json::parse(R"({"role": "assistant",
    "content": " ok", "refusal": null, "tool_calls": [
    {"id": "call_1", "type": "function",
     "function": {"name": "f", "arguments": "{\"a\":1}"}},
    {"id": "call_2", "type": "function",
     "function": {"name": "g", "arguments": "{}"}}]})"));
  // Without text there is no content.
  OpenAiAnswer bare(
      ParseBody(true, absl::StrReplaceAll(kChatWithTools, {{"%s", "false"}})),
      "tales", 1700);
  for (const char* event : {kStarted, kCallBegins, kCalled, kDone}) {
    bare.Add(0, Event(event));
  }
  EXPECT_TRUE(
      json::parse(bare.Finish())["choices"][0]["message"]["content"].is_null());
}

}  // namespace
}  // namespace tandem::router
