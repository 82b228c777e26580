// SPDX-License-Identifier: Apache-2.0
// Calls are found in the text of models of three families, however the text is
// cut, and what is no call comes back as it was.

#include "router/text/tool_calls.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "router/core/output.h"
#include "router/text/json_scanner.h"
#include "router/text/reasoning.h"
#include "router/text/tool_call_output.h"
#include "router/validate/forced_call.h"
#include "router/validate/validate.h"

namespace tandem::router {
namespace {

constexpr ToolCallStyle kLlama = ToolCallStyle::kLlama3Json;
constexpr ToolCallStyle kHermes = ToolCallStyle::kHermes;
constexpr ToolCallStyle kMistral = ToolCallStyle::kMistral;

struct Parsed {
  std::string text;
  std::vector<std::string> calls;  // name(arguments)
  bool operator==(const Parsed&) const = default;
};

void Add(const ToolCallParser::Result& result, Parsed* all) {
  all->text += result.text;
  for (const ParsedToolCall& call : result.calls) {
    all->calls.push_back(call.name + "(" + call.arguments + ")");
  }
}

Parsed Parse(ToolCallStyle style, const std::vector<std::string>& pieces) {
  ToolCallParser parser(style, {"f", "get_weather"});
  Parsed all;
  for (const std::string& piece : pieces) Add(parser.Push(piece), &all);
  Add(parser.Finish(), &all);
  EXPECT_FALSE(parser.holding());
  return all;
}

struct ParserCase {
  ToolCallStyle style;
  std::string text;
  std::string content;
  std::vector<std::string> calls;
};

// As the families' own templates write calls, and as models get them wrong.
std::vector<ParserCase> ParserCases() {
  const std::string weather = R"({"city": "Köln", "days": [1, 2.5e3]})";
  const std::string call =
      R"({"name": "get_weather", "arguments": )" + weather + "}";
  const std::string llama =
      R"({"name": "get_weather", "parameters": )" + weather + "}";
  const std::string seen = "get_weather(" + weather + ")";
  const std::string hermes = "<tool_call>\n" + call + "\n</tool_call>";
  std::vector<ParserCase> cases = {
      // No call at all.
      {kHermes, "", "", {}},
      {kHermes, " \n", " \n", {}},
      {kHermes, "It rains < 3 mm.", "It rains < 3 mm.", {}},
      {kHermes, "<tool_call", "<tool_call", {}},
      {kLlama, " Hello {x}", " Hello {x}", {}},
      {kMistral, "[TOOL_CALL] [1]", "[TOOL_CALL] [1]", {}},
      {ToolCallStyle::kNone, hermes, hermes, {}},
      // Hermes.
      {kHermes, hermes, "", {seen}},
      {kHermes, "\n\n" + hermes + "\n", "", {seen}},
      {kHermes, "Let me look.\n" + hermes, "Let me look.\n", {seen}},
      {kHermes, hermes + "\n" + hermes, "", {seen, seen}},
      {kHermes, hermes + "\n So.", "\n So.", {seen}},
      {kHermes, "<tool_call>" + call, "", {seen}},
      {kHermes, "<tool_call>" + call + "</tool_", "", {seen}},
      {kHermes, R"(<tool_call>{"name": "f"}</tool_call>)", "", {"f({})"}},
      {kHermes,
       R"(<tool_call>{"arguments":{"a":"</tool_call>\"}"},"name":"f"} )"
       "</tool_call>",
       "",
       {R"(f({"a":"</tool_call>\"}"}))"}},
      // A function that there is not is for the client to answer.
      {kHermes,
       R"(<tool_call>{"name": "other"}</tool_call>)",
       "",
       {"other({})"}},
      {kHermes, "<<tool_call>" + call + "</tool_call>", "<", {seen}},
      {kHermes, "<tool_<tool_call>" + call + "</tool_call>", "<tool_", {seen}},
      // Llama.
      {kLlama, llama, "", {seen}},
      {kLlama, "\n" + llama + " ", "", {seen}},
      {kLlama, "<|python_tag|>" + llama, "", {seen}},
      {kLlama, "Sure. <|python_tag|>" + llama, "Sure. ", {seen}},
      {kLlama, llama + "; " + llama, "", {seen, seen}},
      {kLlama, "<|python_tag|>" + llama + ";" + call, "", {seen, seen}},
      {kLlama, llama + ";", "", {seen}},
      {kLlama,
       R"({"type": "function", "name": "f", "parameters": {}})",
       "",
       {"f({})"}},
      // Mistral.
      {kMistral, "[TOOL_CALLS] [" + call + "]", "", {seen}},
      {kMistral,
       "[TOOL_CALLS][" + call + ", " + call + "]\n",
       "",
       {seen, seen}},
      {kMistral, "Yes. [TOOL_CALLS] [" + call + "]", "Yes. ", {seen}},
      {kMistral, "[TOOL_CALLS]" + call, "", {seen}},
      {kMistral, "[TOOL_CALLS]get_weather[ARGS]" + weather, "", {seen}},
      {kMistral, "[TOOL_CALLS]get_weather" + weather, "", {seen}},
      {kMistral,
       "[TOOL_CALLS]get_weather[CALL_ID]aB3cD4eF5[ARGS]" + weather,
       "",
       {seen}},
      {kMistral,
       "[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]f[ARGS]{\"a\":1}",
       "",
       {"f({})", "f({\"a\":1})"}},
      {kMistral,
       R"([TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "aB3cD4eF5"}])",
       "",
       {"f({})"}},
      // A good call behind a bad one.
      {kHermes,
       "<tool_call>{\"name\": f}</tool_call>" + hermes,
       "<tool_call>{\"name\": f}</tool_call>",
       {seen}},
      {kHermes,
       "<tool_call>{\"name\": \"" + hermes,
       "<tool_call>{\"name\": \"",
       {seen}},
      {kMistral,
       "[TOOL_CALLS] [" + call + " [TOOL_CALLS]f{}",
       "[TOOL_CALLS] [" + call + " ",
       {"f({})"}},
  };
  const std::pair<ToolCallStyle, std::string> bad[] = {
      {kHermes, absl::StrCat("<tool_call>", call.substr(0, 40))},
      {kHermes, "<tool_call>" + call + " and </tool_call>"},
      {kHermes, "<tool_call>[" + call + "]</tool_call>"},
      {kHermes, "<tool_call></tool_call>"},
      {kHermes, R"(<tool_call>{"name": "f", "name": "f"}</tool_call>)"},
      {kHermes, R"(<tool_call>{"name": "f g"}</tool_call>)"},
      {kHermes, R"(<tool_call>{"name": 5}</tool_call>)"},
      {kHermes, R"(<tool_call>{"arguments": {}}</tool_call>)"},
      {kHermes, R"(<tool_call>{"name": "f", "arguments": "{}"}</tool_call>)"},
      {kHermes, R"(<tool_call>{'name': 'f'}</tool_call>)"},
      {kHermes, "<tool_call>{\"name\": \"f\n\"}</tool_call>"},
      {kHermes, "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"\n\"}}"},
      {kHermes, R"(<tool_call>{"name": "\ud800"}</tool_call>)"},
      {kHermes, R"(<tool_call>{"nom": "f"}</tool_call>)"},
      {kHermes, "<tool_call><function=f></function></tool_call>"},
      {kLlama, llama + " is how I would call it."},
      {kLlama, "To call: " + llama},
      {kLlama, R"({"name": "Ada", "parameters": {}})"},
      {kLlama, R"({"name": "f"})"},
      {kLlama, R"({"city": "Köln"})"},
      {kLlama, "{\"name\": \"f\", \"parameters\": {}"},
      {kLlama, "<|python_tag|>print(1)"},
      {kLlama, llama + llama},
      {kMistral, "[TOOL_CALLS] [" + call},
      {kMistral, "[TOOL_CALLS] [" + call + ","},
      {kMistral, "[TOOL_CALLS] []"},
      {kMistral, "[TOOL_CALLS]f[ARGS]"},
      {kMistral, "[TOOL_CALLS]f[ARG]{}"},
      {kMistral,
       absl::StrCat("[TOOL_CALLS]", std::string(65, 'f'), "[ARGS]{}")},
      {kMistral, "[TOOL_CALLS][ARGS]{}"},
  };
  for (const auto& [style, text] : bad)
    cases.push_back({style, text, text, {}});
  return cases;
}

TEST(ToolCallsTest, CallsAreFoundAndAllElseComesBack) {
  for (const ParserCase& c : ParserCases()) {
    SCOPED_TRACE(c.text);
    EXPECT_EQ(Parse(c.style, {c.text}), (Parsed{c.content, c.calls}));
  }
}

std::vector<std::string> Bytes(const std::string& text) {
  std::vector<std::string> bytes;
  for (const char c : text) bytes.emplace_back(1, c);
  return bytes;
}

TEST(ToolCallsTest, NothingDependsOnHowTheTextIsCut) {
  for (const ParserCase& c : ParserCases()) {
    SCOPED_TRACE(c.text);
    const Parsed whole = Parse(c.style, {c.text});
    EXPECT_EQ(Parse(c.style, Bytes(c.text)), whole);
    for (size_t i = 1; i < c.text.size(); ++i) {
      ASSERT_EQ(Parse(c.style, {c.text.substr(0, i), c.text.substr(i)}), whole)
          << i;
    }
  }
}

// Texts of what calls are made of, in no order.
TEST(ToolCallsTest, NorOfTextsThatAreAlmostCalls) {
  const std::vector<std::string> parts = {
      "<tool_call>",
      "</tool_call>",
      "<|python_tag|>",
      "[TOOL_CALLS]",
      "[ARGS]",
      "{",
      "}",
      "[",
      "]",
      "\"name\"",
      ":",
      "\"f\"",
      "\"arguments\"",
      "{}",
      ",",
      ";",
      " ",
      "\\\"",
      "\"",
      "f",
      R"({"name":"f","parameters":{"a":"b"}})",
      R"({"name": "f", "arguments": {}})"};
  std::mt19937 random(7);
  int with_calls = 0;
  for (int round = 0; round < 16000; ++round) {
    std::string text;
    for (size_t n = random() % 14; n > 0; --n) {
      text += parts[random() % parts.size()];
    }
    for (const ToolCallStyle style : {kHermes, kLlama, kMistral}) {
      const Parsed whole = Parse(style, {text});
      ASSERT_EQ(Parse(style, Bytes(text)), whole) << text;
      const size_t cut = text.empty() ? 0 : random() % text.size();
      ASSERT_EQ(Parse(style, {text.substr(0, cut), text.substr(cut)}), whole)
          << text;
      with_calls += whole.calls.empty() ? 0 : 1;
      if (whole.calls.empty()) {
        ASSERT_EQ(whole.text, text);
      }
      for (const std::string& call : whole.calls) {
        const size_t open = call.find('(');
        EXPECT_TRUE(nlohmann::json::accept(
            call.substr(open + 1, call.size() - open - 2)))
            << call;
      }
    }
  }
  EXPECT_GT(with_calls, 500);
}

TEST(ToolCallsTest, TextIsReturnedAsSoonAsItCannotBeACall) {
  ToolCallParser parser(kHermes, {});
  EXPECT_EQ(parser.Push("Hello <").text, "Hello ");
  EXPECT_TRUE(parser.holding());
  EXPECT_EQ(parser.Push("b> and").text, "<b> and");
  EXPECT_FALSE(parser.holding());
  // The first key tells an answer in JSON from a call.
  ToolCallParser llama(kLlama, {"f"});
  EXPECT_EQ(llama.Push("{\"cit").text, "");
  EXPECT_EQ(llama.Push("y\"").text, "{\"city\"");
  EXPECT_EQ(llama.Push(": 1").text, ": 1");
}

TEST(ToolCallsTest, ACallIsReturnedAtItsEnd) {
  ToolCallParser parser(kMistral, {});
  EXPECT_TRUE(parser.Push("[TOOL_CALLS]f[ARGS]{\"a\": 1").calls.empty());
  EXPECT_EQ(parser.Push("}").calls.size(), 1u);
}

TEST(ToolCallsTest, TextOfSpecialTokensIsNoContent) {
  ToolCallParser good(kMistral, {});
  EXPECT_EQ(good.Push("[TOOL_CALLS]", true).text, "");
  EXPECT_EQ(good.Push("f{}").calls.size(), 1u);
  ToolCallParser bad(kMistral, {});
  EXPECT_EQ(bad.Push("a").text, "a");
  EXPECT_EQ(bad.Push("[TOOL_CALLS]", true).text, "");
  EXPECT_EQ(bad.Push(" see [ARGS").text, " see [ARGS");
  ToolCallParser plain(kMistral, {});
  EXPECT_EQ(plain.Push("[TOOL_CALLS]", true).text, "");
  EXPECT_EQ(plain.Push("f g").text, "f g");
}

// A text of a megabyte that keeps nearly beginning calls: quadratic work would
// take minutes.
TEST(ToolCallsTest, TimeIsLinear) {
  for (const std::string& part :
       {std::string("<tool_call>{\" : \""), std::string("<tool_call>{\""),
        std::string("<tool_call>"), std::string("<tool_call>{\"name\":\"f\"} "),
        std::string("[TOOL_CALLS][{\"name\":\"f\"},{\""),
        std::string("[TOOL_CALLS]f{\"a\":\""), std::string("{\"name\":\"\\"),
        std::string("<|python_tag|>{\"name\":\"f\",\"id\":\"")}) {
    std::string text;
    while (text.size() < 1 << 20) text += part;
    for (const ToolCallStyle style : {kHermes, kLlama, kMistral}) {
      EXPECT_LE(Parse(style, {text}).text.size(), text.size());
    }
  }
}

// A token for each byte, and kMark, which has no text. Marks of reasoning have
// text unless they are special tokens, too.
constexpr int32_t kMark = 1000;
constexpr ReasoningMarks kMarks{ReasoningStyle::kQwen3, 1001, 1002};
class Bytewise final : public TextCodec {
 public:
  explicit Bytewise(bool special) : special_(special) {}

 private:
  class Text final : public TextStream {
   public:
    explicit Text(bool special) : special_(special) {}
    std::string Push(int32_t id) override {
      if (id == kMark) return "";
      if (id < kMarks.begin_id) return std::string(1, static_cast<char>(id));
      return special_ ? "" : id == kMarks.begin_id ? "<think>" : "</think>";
    }
    std::string Finish() override { return ""; }

   private:
    const bool special_;
  };
  std::unique_ptr<TextStream> NewStream(absl::Span<const int32_t>,
                                        bool) override {
    return std::make_unique<Text>(special_);
  }
  std::string TokenBytes(int32_t) override { return ""; }
  const bool special_;
};

class Client final : public ClientStream {
 public:
  explicit Client(std::vector<v1::GenerateResponse>* all) : all_(all) {}
  void Start(StreamHandler<v1::GenerateRequest>*) override {}
  void Send(v1::GenerateResponse event) override { all_->push_back(event); }
  size_t unsent() const override { return 0; }
  void PauseReading(bool) override {}
  void Close(absl::Status) override {}
  std::string peer() const override { return ""; }

 private:
  std::vector<v1::GenerateResponse>* const all_;
};

struct Answer {
  std::string text;
  std::string reasoning;
  std::vector<v1::ToolCall> calls;
  v1::GenerateFinished finished;
  int reasoning_tokens = 0;
};

// `text` with kMark for each '#' and the marks of reasoning for '\1' and '\2',
// as a request of these options gets it; its first tokens in one step, the rest
// one by one.
Answer Generate(const EffectiveRequest& request, const std::string& text,
                size_t together, v1::FinishReason reason,
                bool special = false) {
  Bytewise codec(special);
  std::string content;
  google::protobuf::RepeatedPtrField<v1::ToolCall> calls;
  std::vector<v1::GenerateResponse> sent;
  Client client(&sent);
  Output output(request, {}, &codec, &client);
  Answer answer;
  const auto collect = [&] {
    for (const v1::GenerateResponse& event : sent) {
      const std::string& thought = event.delta().reasoning_content();
      EXPECT_TRUE(thought.empty() || answer.text.empty()) << answer.text;
      answer.reasoning += thought;
      answer.text += event.delta().text();
      JoinToolCalls(event.delta().tool_calls(), &calls);
      if (event.has_finished()) answer.finished = event.finished();
    }
    sent.clear();
  };
  for (size_t i = 0; i < text.size(); ++i) {
    v1::Token token;
    token.set_token_id(text[i] == '#'    ? kMark
                       : text[i] == '\1' ? kMarks.begin_id
                       : text[i] == '\2' ? kMarks.end_id
                                         : static_cast<unsigned char>(text[i]));
    const Output::Verdict verdict = output.Add(token);
    if (i >= together) {
      output.Flush();
      collect();
    }
    if (verdict == Output::Verdict::kStopString) break;
  }
  output.Flush();
  collect();
  const v1::FinishReason told = output.Finished(reason);
  collect();
  EXPECT_EQ(told, answer.finished.finish_reason());
  answer.calls.assign(calls.begin(), calls.end());
  answer.reasoning_tokens = output.reasoning_tokens();
  return answer;
}

EffectiveRequest WithTools(ToolCallStyle style) {
  EffectiveRequest request;
  request.output.set_text(true);
  request.output.set_skip_special_tokens(true);
  request.tool_calls = ToolCallOptions{.style = style,
                                       .names = {"f", "g"},
                                       .markers = {{kMark, "[TOOL_CALLS]"}},
                                       .id_seed = 7};
  return request;
}

constexpr char kTwoCalls[] = "Yes.#f[ARGS]{\"a\":1}#g[ARGS]{}";

TEST(ToolCallOutputTest, MarkersAreSeenThoughTheyAreNoText) {
  for (const size_t together : {size_t{0}, size_t{9}, size_t{99}}) {
    const Answer answer = Generate(WithTools(kMistral), kTwoCalls, together,
                                   v1::FINISH_REASON_STOP);
    EXPECT_EQ(answer.text, "Yes.");
    ASSERT_EQ(answer.calls.size(), 2u);
    EXPECT_EQ(answer.calls[0].name(), "f");
    EXPECT_EQ(answer.calls[0].arguments_json(), "{\"a\":1}");
    EXPECT_EQ(answer.calls[1].name(), "g");
    EXPECT_EQ(answer.finished.finish_reason(), v1::FINISH_REASON_TOOL_CALLS);
  }
  // What is no call reads as it would without tools.
  EXPECT_EQ(
      Generate(WithTools(kMistral), "a# b #c", 0, v1::FINISH_REASON_STOP).text,
      "a b c");
}

TEST(ToolCallOutputTest, OneCallAloneWhereOnlyOneIsWanted) {
  EffectiveRequest request = WithTools(kMistral);
  request.tool_calls->parallel = false;
  const Answer answer = Generate(request, kTwoCalls, 0, v1::FINISH_REASON_STOP);
  ASSERT_EQ(answer.calls.size(), 1u);
  EXPECT_EQ(answer.calls[0].name(), "f");
}

TEST(ToolCallOutputTest, OnlyAStopBecomesToolCalls) {
  const Answer answer =
      Generate(WithTools(kMistral), kTwoCalls, 0, v1::FINISH_REASON_LENGTH);
  EXPECT_EQ(answer.calls.size(), 2u);
  EXPECT_EQ(answer.finished.finish_reason(), v1::FINISH_REASON_LENGTH);
  EXPECT_EQ(Generate(WithTools(kMistral), "Yes.", 0, v1::FINISH_REASON_STOP)
                .finished.finish_reason(),
            v1::FINISH_REASON_STOP);
}

// Stop strings are looked for in the text without markers, before calls are.
TEST(ToolCallOutputTest, StopStringsGoBeforeCalls) {
  EffectiveRequest request = WithTools(kMistral);
  request.stopping.add_stop("s.f[");
  Answer answer = Generate(request, kTwoCalls, 0, v1::FINISH_REASON_STOP);
  EXPECT_EQ(answer.text, "Ye");
  EXPECT_TRUE(answer.calls.empty());
  EXPECT_EQ(answer.finished.stop_string(), "s.f[");
  // One that almost comes holds text back, and markers behind it.
  request.stopping.set_stop(0, "s.g");
  answer = Generate(request, kTwoCalls, 0, v1::FINISH_REASON_STOP);
  EXPECT_EQ(answer.text, "Yes.");
  EXPECT_EQ(answer.calls.size(), 2u);
  request.stopping.set_stop(0, "}g");
  answer = Generate(request, kTwoCalls, 0, v1::FINISH_REASON_STOP);
  EXPECT_EQ(answer.text, "Yes.f[ARGS]{\"a\":1");
  EXPECT_EQ(answer.finished.stop_string(), "}g");
}

EffectiveRequest WithReasoning() {
  EffectiveRequest request;
  request.output.set_text(true);
  request.output.set_skip_special_tokens(true);
  request.reasoning = kMarks;
  return request;
}

struct Thought {
  const char* what;
  std::string drawn;
  std::string reasoning;
  std::string content;
  int tokens;
};

TEST(ReasoningTest, IsAllUpToItsEndMark) {
  for (const Thought& c : std::vector<Thought>{
           {"the model's own marks", "\1\nHm.\n\2\n\nYes.", "\nHm.\n",
            "\n\nYes.", 5},
           {"begun by the prompt", "Hm.\2Yes.", "Hm.", "Yes.", 3},
           {"cut", "\1Hm", "Hm", "", 2},
           {"nothing behind it", "Hm\2", "Hm", "", 2},
           {"no reasoning", "\1\2Yes", "", "Yes", 0},
           {"nothing at all", "", "", "", 0},
           {"marks in the content are text", "a\2b\1c\2d", "a",
            "b<think>c</think>d", 1},
           {"written out they are no marks", "a</think>b\2c", "a</think>b", "c",
            10}}) {
    for (const bool special : {false, true}) {
      if (special && c.drawn.find("\2b\1") != std::string::npos) continue;
      for (const size_t together : {size_t{0}, size_t{3}, size_t{99}}) {
        for (const char* const stop :
             {"", "Hm.\n</think>\n\nYes, I", "\n\n.."}) {
          EffectiveRequest request = WithReasoning();
          // Almost comes, and holds back what may be its beginning.
          if (*stop != 0) request.stopping.add_stop(stop);
          const Answer answer = Generate(request, c.drawn, together,
                                         v1::FINISH_REASON_STOP, special);
          SCOPED_TRACE(absl::StrCat(c.what, ", ", special, together, stop));
          EXPECT_EQ(answer.reasoning, c.reasoning);
          EXPECT_EQ(answer.text, c.content);
          EXPECT_EQ(answer.reasoning_tokens, c.tokens);
        }
      }
    }
  }
}

TEST(ReasoningTest, CallsAndStopStringsComeWhereTheyWould) {
  EffectiveRequest request = WithTools(kMistral);
  request.reasoning = kMarks;
  const std::string thought = "call#f[ARGS]{\"a\":0}?";
  Answer answer =
      Generate(request, thought + "\2" + kTwoCalls, 0, v1::FINISH_REASON_STOP);
  EXPECT_EQ(answer.reasoning, "callf[ARGS]{\"a\":0}?");
  EXPECT_EQ(answer.text, "Yes.");
  ASSERT_EQ(answer.calls.size(), 2u);
  EXPECT_EQ(answer.calls[0].arguments_json(), "{\"a\":1}");
  EXPECT_EQ(answer.finished.finish_reason(), v1::FINISH_REASON_TOOL_CALLS);
  // As in vLLM, reasoning may be stopped too.
  request.stopping.add_stop("?");
  answer =
      Generate(request, thought + "\2" + kTwoCalls, 0, v1::FINISH_REASON_STOP);
  EXPECT_EQ(answer.reasoning, "callf[ARGS]{\"a\":0}");
  EXPECT_EQ(answer.text, "");
  EXPECT_EQ(answer.finished.stop_string(), "?");
  EXPECT_EQ(answer.finished.finish_reason(), v1::FINISH_REASON_STOP);
}

TEST(ReasoningTest, APromptMayHaveEndedIt) {
  constexpr int32_t kEnd = 5, kThink = kMarks.begin_id, kOver = kMarks.end_id;
  struct Prompt {
    const char* what;
    std::vector<int32_t> prompt;
    bool over;
  };
  for (const Prompt& c : std::vector<Prompt>{
           {"no marks", {1, 2, kEnd, 3}, false},
           {"opened for it", {1, kEnd, 3, kThink, 4}, false},
           {"closed for it", {1, kEnd, 3, kThink, 4, kOver, 4}, true},
           {"an answer to go on with", {1, kThink, 4, kOver, 7, 8}, true},
           {"of an earlier turn", {kThink, 4, kOver, 9, kEnd, 3}, false},
           {"empty", {}, false}}) {
    EXPECT_EQ(ReasoningIsOver(c.prompt, kMarks, {kEnd}), c.over) << c.what;
  }
}

TEST(ReasoningTest, WhatMustMatchComesBehindIt) {
  ModelLimits limits;
  limits.vocabulary_size = 2000;
  limits.context_length = 100;
  limits.has_chat_template = true;
  limits.eos_token_ids = {5};
  v1::GenerateRequest request;
  request.mutable_chat()->add_messages()->set_role("user");
  request.mutable_structured()->set_regex("[0-9]+");
  const auto params = [&](const std::vector<int32_t>& prompt) {
    EffectiveRequest effective = *Validate(request, limits);
    NoteReasoning(request.chat(), prompt, limits, &effective);
    const bool told = std::count(effective.features.begin(),
                                 effective.features.end(), "structured_after");
    const v1::StructuredParams structured =
        ToSamplingParams(effective).structured();
    EXPECT_EQ(told, structured.has_after_token_id());
    EXPECT_EQ(effective.reasoning.has_value(), structured.has_after_token_id());
    return structured.has_after_token_id() ? structured.after_token_id() : -1;
  };
  EXPECT_EQ(params({1}), -1);  // no parser
  limits.reasoning = kMarks;
  EXPECT_EQ(params({1}), kMarks.end_id);
  EXPECT_EQ(params({1, kMarks.begin_id, kMarks.end_id}), -1);
  (*request.mutable_chat()
        ->mutable_chat_template_kwargs()
        ->mutable_fields())["enable_thinking"]
      .set_bool_value(false);
  EXPECT_EQ(params({1}), -1);
  limits.reasoning->style = ReasoningStyle::kDeepSeekR1;
  EXPECT_EQ(params({1}), kMarks.end_id);  // whose templates know no such thing
}

TEST(ToolCallOutputTest, IdsAreUniqueAndOfTheFormThatClientsAccept) {
  std::set<std::string> ids;
  for (const ToolCallStyle style : {kMistral, kHermes}) {
    for (uint64_t seed = 0; seed < 50; ++seed) {
      EffectiveRequest request = WithTools(style);
      request.tool_calls->id_seed = seed;
      const Answer answer = Generate(
          request,
          style == kMistral
              ? kTwoCalls
              : R"(<tool_call>{"name":"f"}</tool_call><tool_call>{"name":"f"})",
          0, v1::FINISH_REASON_STOP);
      ASSERT_EQ(answer.calls.size(), 2u);
      for (const v1::ToolCall& call : answer.calls) {
        EXPECT_THAT(call.id(), testing::MatchesRegex(
                                   style == kMistral ? "[a-zA-Z0-9]{9}"
                                                     : "call_[a-zA-Z0-9]{24}"));
        ids.insert(call.id());
      }
    }
  }
  EXPECT_EQ(ids.size(), 200u);
}

TEST(ToolCallOutputTest, SplitCallsJoinToWhatTheyWere) {
  const Answer answer =
      Generate(WithTools(kMistral), kTwoCalls, 0, v1::FINISH_REASON_STOP);
  google::protobuf::RepeatedPtrField<v1::ToolCall> calls(answer.calls.begin(),
                                                         answer.calls.end());
  google::protobuf::RepeatedPtrField<v1::ToolCallDelta> deltas;
  SplitToolCalls(calls, &deltas);
  EXPECT_EQ(deltas.size(), 4);
  google::protobuf::RepeatedPtrField<v1::ToolCall> joined;
  JoinToolCalls(deltas, &joined);
  ASSERT_EQ(joined.size(), 2);
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(joined[i].SerializeAsString(), calls[i].SerializeAsString());
  }
}

// A text that a format lets through: its first choice, and {} for schemas.
std::string TextOf(const nlohmann::json& format, const ModelLimits& limits) {
  const std::string type = format["type"];
  if (type == "const_string") return format["value"];
  if (type == "json_schema") return "{}";
  if (type == "token") return limits.tool_call_markers.at(format["token"]);
  if (type == "or") return TextOf(format["elements"][0], limits);
  EXPECT_EQ(type, "sequence");
  std::string text;
  for (const nlohmann::json& part : format["elements"]) {
    text += TextOf(part, limits);
  }
  return text;
}

TEST(ForcedCallTest, WhatItLetsThroughIsACall) {
  v1::Chat chat;
  chat.set_tool_choice("required");
  chat.add_tools()->set_name("get_weather");
  chat.add_tools()->set_name("f");
  struct Style {
    ToolCallStyle style;
    bool by_name;
    std::map<int32_t, std::string> markers;
  };
  const Style kStyles[] = {
      {kHermes, false, {}},
      {kHermes, false, {{7, "<tool_call>"}, {8, "</tool_call>"}}},
      {kLlama, false, {{7, "<|python_tag|>"}}},
      {kMistral, false, {{7, "[TOOL_CALLS]"}}},
      {kMistral, true, {{7, "[TOOL_CALLS]"}, {9, "[ARGS]"}}},
      {kMistral, true, {}},
  };
  for (const Style& style : kStyles) {
    ModelLimits limits;
    limits.tool_call_style = style.style;
    limits.tool_calls_by_name = style.by_name;
    limits.tool_call_markers = style.markers;
    for (const bool named : {false, true}) {
      chat.clear_tool_choice_function();
      if (named) chat.set_tool_choice_function("f");
      const auto tag = ForcedCallTag(chat, limits);
      ASSERT_TRUE(tag.ok()) << tag.status();
      const std::string text =
          TextOf(nlohmann::json::parse(*tag)["format"], limits);
      EXPECT_EQ(Parse(style.style, {text}),
                (Parsed{"", {named ? "f({})" : "get_weather({})"}}))
          << text;
    }
  }
}

TEST(ForcedCallTest, SchemasAreOfObjectsAndKeepTheirOrder) {
  ModelLimits limits;
  limits.tool_call_style = kLlama;
  v1::Chat chat;
  chat.set_tool_choice("required");
  v1::Tool* const tool = chat.add_tools();
  tool->set_name("f");
  const auto tag = [&](const std::string& schema) {
    tool->set_parameters_json_schema(schema);
    return ForcedCallTag(chat, limits);
  };
  EXPECT_THAT(*tag(""), testing::HasSubstr(R"("additionalProperties":false)"));
  EXPECT_THAT(*tag(R"( {"z":1,"type":"object"} )"),
              testing::HasSubstr(R"("json_schema":{"z":1,"type":"object"}})"));
  EXPECT_THAT(*tag(R"({"z":1})"),
              testing::HasSubstr(R"(:{"type":"object","z":1}})"));
  EXPECT_THAT(*tag("{}"), testing::HasSubstr(R"(:{"type":"object"}})"));
  EXPECT_EQ(ErrorMetadata(tag(R"({"type":"array"})").status())["field"],
            "chat.tools[0].parameters_json_schema");
}

TEST(ForcedCallTest, ACallOrAnAnswerOfItsForm) {
  ModelLimits limits;
  limits.tool_call_style = kLlama;
  v1::Chat chat;
  chat.add_tools()->set_name("f");
  chat.mutable_tools(0)->set_parameters_json_schema(R"({"title":"F"})");
  chat.add_tools()->set_name("g");
  chat.mutable_tools(1)->set_parameters_json_schema(R"({"title":"G"})");
  chat.mutable_tools(1)->set_strict(true);
  const struct {
    std::function<void(v1::StructuredOptions*)> set;
    const char* answer;  // null: it stays as it is
  } kCases[] = {
      {[](auto* a) { a->set_json_schema(R"({"z":1,"a":2})"); },
       R"({"type":"json_schema","json_schema":{"z":1,"a":2}})"},
      {[](auto* a) { a->set_json_schema("{"); }, nullptr},
      {[](auto* a) { a->set_json_object(true); },
       R"({"type":"json_schema","json_schema":{"type":"object"}})"},
      {[](auto* a) { a->set_regex("\\d"); },
       R"({"type":"regex","pattern":"\\d"})"},
      {[](auto* a) { a->set_grammar("start: \"a\""); },
       R"({"type":"grammar","grammar":"start: \"a\""})"},
      {[](auto* a) {
         a->mutable_choice()->add_values("a");
         a->mutable_choice()->add_values("\"");
       },
       R"({"type":"grammar","grammar":"start: CHOICE\nCHOICE: \"a\" | \"\\\"\"\n"})"},
      {[](auto* a) {
         a->set_structural_tag(R"({"format":{"type":"any_text"}})");
       },
       R"({"type":"any_text"})"},
      {[](auto* a) { a->set_structural_tag(R"({"structures":[]})"); }, nullptr},
  };
  for (const auto& c : kCases) {
    v1::StructuredOptions answer;
    c.set(&answer);
    const auto tag = CallOrAnswerTag(chat, answer, limits);
    ASSERT_TRUE(tag.ok()) << tag.status();
    ASSERT_EQ(tag->has_value(), c.answer != nullptr) << answer.DebugString();
    if (c.answer == nullptr) continue;
    const auto parsed = nlohmann::ordered_json::parse(**tag)["format"];
    EXPECT_EQ(parsed["type"], "or");
    EXPECT_EQ(parsed["elements"][1].dump(), c.answer);
    const std::string calls = parsed["elements"][0].dump();
    EXPECT_EQ(calls.find(R"("title":"F")"), std::string::npos);
    EXPECT_NE(calls.find(R"("title":"G")"), std::string::npos);
  }
}

// Whatever a client sends as its tag is read in one pass and on no deep stack.
TEST(ForcedCallTest, ATagOfAnySizeIsReadOnce) {
  ModelLimits limits;
  limits.tool_call_style = kLlama;
  v1::Chat chat;
  chat.add_tools()->set_name("f");
  v1::StructuredOptions answer;
  const auto tag = [&](const std::string& own) {
    answer.set_structural_tag(own);
    return CallOrAnswerTag(chat, answer, limits);
  };
  const auto nested = [](size_t depth) {
    return absl::StrCat(R"({"format":)", std::string(depth, '['),
                        std::string(depth, ']'), "}");
  };
  ASSERT_TRUE(tag(nested(31)).ok());
  for (const std::string& wrong :
       {nested(32), nested(500'000), std::string(1 << 20, '['),
        std::string(R"({"format":)"), std::string(R"({"format":{}}})"),
        std::string("[]"), std::string()}) {
    const absl::Status status = tag(wrong).status();
    EXPECT_EQ(ErrorReason(status), "CONSTRAINT_INVALID") << status;
    EXPECT_EQ(ErrorMetadata(status)["field"], "structured.structural_tag");
  }
  std::string many = R"( {"format":{"type":"x"})";
  for (int i = 0; i < 60'000; ++i) absl::StrAppend(&many, R"(,")", i, R"(":1)");
  many += R"(, "format" : {"z":1, "a":2} } )";
  const auto made = tag(many);
  ASSERT_TRUE(made.ok()) << made.status();
  EXPECT_THAT(**made, testing::EndsWith(R"(,{"z":1, "a":2}]}})"));
}

TEST(ToolCallStylesTest, AreKnownByTheTemplate) {
  EXPECT_EQ(DetectToolCallStyle("..[TOOL_CALLS]..<tool_call>"), kMistral);
  EXPECT_EQ(DetectToolCallStyle("<tool_call>\\n{\"name\": "), kHermes);
  EXPECT_EQ(DetectToolCallStyle("<tool_call>\n<function=x>"),
            ToolCallStyle::kNone);
  EXPECT_EQ(DetectToolCallStyle("{{- \"<|python_tag|>\" + tool_call.name }}"),
            kLlama);
  EXPECT_EQ(DetectToolCallStyle("{% for m in messages %}"),
            ToolCallStyle::kNone);
  for (const char* name : {"none", "llama3_json", "hermes", "mistral"}) {
    EXPECT_EQ(ToolCallStyleName(ToolCallStyleByName(name).value()), name);
  }
  EXPECT_FALSE(ToolCallStyleByName("pythonic").has_value());
}

// Whether `text` is an object, byte by byte; and that it is none as soon as
// nothing could make it one.
JsonScanner::Verdict Scan(std::string_view text, size_t* read) {
  JsonScanner scanner;
  JsonScanner::Verdict verdict = JsonScanner::Verdict::kMore;
  for (*read = 0; *read < text.size(); ++*read) {
    verdict = scanner.Push(text[*read]);
    if (verdict != JsonScanner::Verdict::kMore) break;
  }
  return verdict;
}

TEST(JsonScannerTest, AgreesWithAParser) {
  const std::vector<std::string> parts = {"{",
                                          "}",
                                          "[",
                                          "]",
                                          "\"a\"",
                                          "\"\\u12aF\"",
                                          "\\uD83D",
                                          "\\ude00",
                                          "\"\\ud83d\\uDE00\"",
                                          ":",
                                          ",",
                                          "1",
                                          "0",
                                          "-",
                                          "1.",
                                          "e+",
                                          "2",
                                          "true",
                                          "nu",
                                          "ll",
                                          " ",
                                          "\"",
                                          "\\",
                                          "\n",
                                          "\"b\": null,",
                                          "\"c\": [-0.5e-7, {}]",
                                          "{\"d\":"};
  std::mt19937 random(5);
  int objects = 0;
  for (int round = 0; round < 60000; ++round) {
    std::string text = "{";
    for (size_t n = random() % 9; n > 0; --n) {
      text += parts[random() % parts.size()];
    }
    if (round % 2 == 0) text += "}";
    size_t read = 0;
    const JsonScanner::Verdict verdict = Scan(text, &read);
    const bool whole =
        verdict == JsonScanner::Verdict::kComplete && read + 1 == text.size();
    // Spaces may follow for the parser alone.
    const bool accepted = text.back() == '}' && nlohmann::json::accept(text);
    ASSERT_EQ(whole, accepted) << text;
    objects += whole ? 1 : 0;
    if (verdict != JsonScanner::Verdict::kComplete) continue;
    ASSERT_TRUE(nlohmann::json::accept(text.substr(0, read + 1))) << text;
  }
  EXPECT_GT(objects, 500);
}

TEST(JsonScannerTest, MembersAreFoundAndDepthIsBounded) {
  const std::string text = R"({"a" : [1,{"b":2}], "c":-1 })";
  JsonScanner scanner;
  for (const char c : text) scanner.Push(c);
  ASSERT_EQ(scanner.members().size(), 2u);
  const auto slice = [&](size_t begin, size_t end) {
    return text.substr(begin, end - begin);
  };
  const JsonScanner::Member& a = scanner.members()[0];
  const JsonScanner::Member& c = scanner.members()[1];
  EXPECT_EQ(slice(a.key_begin, a.key_end), "\"a\"");
  EXPECT_EQ(slice(a.value_begin, a.value_end), R"([1,{"b":2}])");
  EXPECT_EQ(slice(c.value_begin, c.value_end), "-1");
  const auto nested = [](size_t depth) {
    return absl::StrCat("{\"a\":", std::string(depth, '['),
                        std::string(depth, ']'), "}");
  };
  size_t read = 0;
  EXPECT_EQ(Scan(nested(31), &read), JsonScanner::Verdict::kComplete);
  EXPECT_EQ(Scan(nested(32), &read), JsonScanner::Verdict::kBroken);
}

}  // namespace
}  // namespace tandem::router
