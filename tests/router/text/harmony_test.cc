// SPDX-License-Identifier: Apache-2.0
// What a client gets of messages in OpenAI's Harmony format: thoughts, answers
// and calls apart, whatever is wrong with them, however they are cut.

#include "router/text/harmony.h"

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "router/core/output.h"
#include "router/validate/validate.h"
#include "tests/router/kept_events.h"

namespace tandem::router::harmony {
namespace {

// A token for each byte and one for each mark.
constexpr int32_t kFirstMark = 1000;

HarmonyFormat Format(bool reasoning = true) {
  HarmonyFormat format{.reasoning = reasoning};
  for (size_t i = 0; i < kHarmonyMarks.size(); ++i) {
    format.marks.emplace(kFirstMark + i, kHarmonyMarks[i]);
  }
  return format;
}

std::vector<int32_t> Tokens(std::string_view text) {
  std::vector<int32_t> ids;
  while (!text.empty()) {
    int32_t id = static_cast<unsigned char>(text.front());
    size_t bytes = 1;
    for (size_t i = 0; i < kHarmonyMarks.size(); ++i) {
      if (!text.starts_with(kHarmonyMarks[i])) continue;
      id = kFirstMark + static_cast<int32_t>(i);
      bytes = kHarmonyMarks[i].size();
    }
    ids.push_back(id);
    text.remove_prefix(bytes);
  }
  return ids;
}

std::string TextOf(int32_t id) {
  return id < kFirstMark ? std::string(1, static_cast<char>(id))
                         : std::string(kHarmonyMarks[id - kFirstMark]);
}

// Marks have text where special tokens are not skipped.
class Bytewise final : public TextCodec {
 public:
  class Text final : public TextStream {
   public:
    explicit Text(bool skip) : skip_(skip) {}
    std::string Push(int32_t id) override {
      return skip_ && id >= kFirstMark ? "" : TextOf(id);
    }
    std::string Finish() override { return ""; }

   private:
    const bool skip_;
  };
  std::unique_ptr<TextStream> NewStream(absl::Span<const int32_t>,
                                        bool skip) override {
    return std::make_unique<Text>(skip);
  }
  std::string TokenBytes(int32_t id) override { return TextOf(id); }
};

struct Answer {
  std::string reasoning;
  std::string content;
  std::string calls;  // name(arguments)...
  int reasoning_tokens = 0;
  v1::FinishReason reason = v1::FINISH_REASON_UNSPECIFIED;

  bool operator==(const Answer&) const = default;
};

std::ostream& operator<<(std::ostream& out, const Answer& a) {
  return out << "reasoning: " << a.reasoning << "\ncontent: " << a.content
             << "\ncalls: " << a.calls << "\ntokens: " << a.reasoning_tokens
             << "\nreason: " << a.reason;
}

EffectiveRequest WithTools() {
  EffectiveRequest request;
  request.output.set_text(true);
  request.output.set_skip_special_tokens(true);
  request.harmony = Format();
  request.tool_calls.emplace().style = ToolCallStyle::kOpenAi;
  for (const std::string_view mark : {kHarmonyReturn, kHarmonyCall}) {
    request.end_token_ids.push_back(Tokens(mark).front());
  }
  return request;
}

constexpr char kPrompt[] =
    "<|start|>user<|message|>Hi<|end|><|start|>assistant";

// As `request` gets it, `together` tokens in a step.
Answer Generate(const EffectiveRequest& request, std::string_view text,
                size_t together = 1, std::string_view prompt = kPrompt) {
  Bytewise codec;
  std::vector<v1::GenerateResponse> sent;
  KeptEvents client(&sent);
  Output output(request, Tokens(prompt), &codec, &client);
  v1::FinishReason reason = v1::FINISH_REASON_LENGTH;
  size_t drawn = 0;
  for (const int32_t id : Tokens(text)) {
    v1::Token token;
    token.set_token_id(id);
    const Output::Verdict verdict = output.Add(token);
    if (++drawn % together == 0) output.Flush();
    if (verdict == Output::Verdict::kGoesOn) continue;
    reason = v1::FINISH_REASON_STOP;
    break;
  }
  output.Flush();
  Answer answer;
  answer.reason = output.Finished(reason);
  answer.reasoning_tokens = output.reasoning_tokens();
  google::protobuf::RepeatedPtrField<v1::ToolCall> calls;
  for (const v1::GenerateResponse& event : sent) {
    answer.reasoning += event.delta().reasoning_content();
    answer.content += event.delta().text();
    JoinToolCalls(event.delta().tool_calls(), &calls);
  }
  for (const v1::ToolCall& call : calls) {
    absl::StrAppend(&answer.calls, call.name(), "(", call.arguments_json(),
                    ")");
    EXPECT_EQ(call.id().size(), 29u) << call.id();
  }
  return answer;
}

struct Case {
  const char* what;
  std::string drawn;
  std::string reasoning;
  std::string content;
  std::string calls = "";
  int uncounted = 0;  // of reasoning, in what looked like a header
};

const std::string kThought = "<|channel|>analysis<|message|>Hm, 日.<|end|>";
const std::string kNext = "<|start|>assistant";
const std::string kWeather = R"({"city": "Köln"})";

std::vector<Case> Cases() {
  const std::string call =
      "<|channel|>commentary to=functions.f <|constrain|>json<|message|>";
  const std::string seen = "f(" + kWeather + ")";
  std::vector<Case> cases = {
      // As they should be.
      {"an answer", "<|channel|>final<|message|>Yes.<|return|>", "", "Yes."},
      {"thoughts, then an answer",
       kThought + kNext + "<|channel|>final<|message|>Yes.\n<|return|>",
       "Hm, 日.", "Yes.\n"},
      {"a call", kThought + kNext + call + kWeather + "<|call|>", "Hm, 日.", "",
       seen},
      {"its recipient before the channel",
       kThought + kNext +
           " to=functions.f<|channel|>commentary json<|message|>" + kWeather +
           "<|call|>",
       "Hm, 日.", "", seen},
      {"at once, and before the channel",
       " to=functions.f<|channel|>commentary<|constrain|>json<|message|>" +
           kWeather + "<|call|>",
       "", "", seen},
      {"without a type",
       "<|channel|>commentary to=functions.f<|message|>" + kWeather +
           "<|call|>",
       "", "", seen},
      {"without a space",
       "<|channel|>commentary to=functions.f<|constrain|>json<|message|>\n " +
           kWeather + "\n<|call|>",
       "", "", seen},
      {"on another channel",
       "<|channel|>analysis to=functions.f code<|message|>{}<|call|>", "", "",
       "f({})"},
      {"without arguments",
       "<|channel|>commentary to=functions.f<|message|><|call|>", "", "",
       "f({})"},
      {"of an unknown function, which is for the client to answer",
       "<|channel|>commentary to=functions.g-2<|message|>{}<|call|>", "", "",
       "g-2({})"},
      {"ended by another mark", call + kWeather + "<|end|>", "", "", seen},
      {"several", call + "{}<|end|>" + kNext + call + kWeather + "<|call|>", "",
       "", "f({})" + seen},
      {"a preamble is content",
       kThought + kNext + "<|channel|>commentary<|message|>I look.<|end|>" +
           kNext + call + kWeather + "<|call|>",
       "Hm, 日.", "I look.", seen},
      {"several of a kind are divided",
       kThought + kNext + "<|channel|>commentary<|message|>I look.<|end|>" +
           kNext + kThought + kNext +
           "<|channel|>final<|message|>Yes.<|return|>",
       "Hm, 日.\nHm, 日.", "I look.\nYes."},
      {"but an empty one divides nothing",
       "<|channel|>analysis<|message|><|end|>" + kNext + kThought + kNext +
           "<|channel|>final<|message|><|return|>",
       "Hm, 日.", ""},
      {"a final answer in JSON",
       "<|channel|>final <|constrain|>json<|message|>{\"a\": 1}<|return|>", "",
       "{\"a\": 1}"},
      // Cut off.
      {"nothing", "", "", ""},
      {"in a channel", "<|channel|>anal", "", ""},
      {"in a recipient", "<|channel|>commentary to=functi", "", ""},
      {"in a recipient before the channel", " to=functi", "", ""},
      {"before its type", "<|channel|>commentary to=functions.f ", "", ""},
      {"before a recipient", "<|channel|>commentary to", "", ""},
      {"in a type", "<|channel|>final json", "", ""},
      {"before its message", call.substr(0, call.size() - 11), "", ""},
      {"behind a role", kThought + kNext, "Hm, 日.", ""},
      {"in a role", kThought + "<|start|>assi", "Hm, 日.", ""},
      {"in thoughts", "<|channel|>analysis<|message|>Hm", "Hm", ""},
      {"in an answer", "<|channel|>final<|message|>Ye", "", "Ye"},
      {"in a call", call + R"({"city": "K)", "", R"({"city": "K)"},
      {"before a call's arguments", call, "", ""},
      {"at a call's end", call + kWeather, "", "", seen},
      // What is no call is content.
      {"no JSON", call + "city=Paris<|call|>", "", "city=Paris"},
      {"no object", call + "[1]<|call|>", "", "[1]"},
      {"more than one", call + "{}{}<|call|>", "", "{}{}"},
      {"no name", "<|channel|>commentary to=functions.<|message|>{}<|call|>",
       "", "{}"},
      {"another tool",
       "<|channel|>commentary to=browser.open<|message|>{}<|call|>", "", "{}"},
      {"another tool, in thoughts",
       "<|channel|>analysis to=python code<|message|>1+1<|call|>", "1+1", ""},
      // Not as they should be.
      {"plain text", "Hello, world. To be or to=.", "",
       "Hello, world. To be or to=."},
      {"plain text, its beginning like a header's", " to be", "", " to be"},
      {"plain text, of one word", "tomorrow", "", "tomorrow"},
      {"plain text, then a message",
       "Hello <|channel|>final<|message|>Yes.<|return|>", "", "Hello \nYes."},
      {"an unknown channel", "<|channel|>aside<|message|>Yes.<|return|>", "",
       "Yes."},
      {"no channel", "<|message|>Yes.<|return|>", "", "Yes."},
      {"an empty channel", "<|channel|><|message|>Yes.<|return|>", "", "Yes."},
      {"two channels", "<|channel|>commentary<|channel|>analysis<|message|>Hm",
       "Hm", ""},
      {"a recipient, and the channel again",
       "<|channel|>commentary to=functions.f<|channel|>commentary json"
       "<|message|>{}<|call|>",
       "", "", "f({})"},
      {"no mark before the text", "<|channel|>final\nYes, I do.<|return|>", "",
       "\nYes, I do."},
      {"nor before thoughts",
       "<|channel|>analysis Hm.<|end|>" + kNext + "<|channel|>final Yes",
       " Hm.", " Yes", "", 4},
      {"no mark at a message's end",
       "<|channel|>analysis<|message|>Hm<|start|>assistant<|channel|>final"
       "<|message|>Yes",
       "Hm", "Yes"},
      {"nor a start of the next",
       "<|channel|>analysis<|message|>Hm<|channel|>final<|message|>Yes", "Hm",
       "Yes"},
      {"nor either behind a call",
       call + kWeather + "<|channel|>final<|message|>Yes", "", "Yes", seen},
      {"marks that belong in headers",
       "<|channel|>final<|message|>Y<|message|>e<|constrain|>s<|return|>", "",
       "Yes"},
      {"spaces between messages",
       kThought + "\n" + kNext +
           "<|channel|>final"
           "<|message|>Yes",
       "Hm, 日.", "Yes"},
      {"text between them",
       kThought + "So: " + kNext +
           "<|channel|>final"
           "<|message|>Yes",
       "Hm, 日.", "So: \nYes"},
      {"another's turn",
       "<|channel|>final<|message|>Yes.<|end|><|start|>user<|message|>Why?", "",
       "Yes.\nWhy?"},
      {"marks alone",
       "<|start|><|start|><|end|><|channel|><|constrain|><|end|>", "", ""},
      {"a role that has no end", "<|start|>" + std::string(600, 'a'), "",
       std::string(600, 'a')},
      {"a channel that has no end", "<|channel|>final " + std::string(600, 'a'),
       "", " " + std::string(600, 'a')},
      {"a recipient that has no end",
       "<|channel|>final to=" + std::string(600, 'a'), "",
       " to=" + std::string(600, 'a')},
      {"marks written out are text",
       "<|channel|>final<|message|>< |end|> <|en<|return|>", "",
       "< |end|> <|en"},
  };
  std::string long_name(65, 'n');
  cases.push_back({"too long a name",
                   "<|channel|>commentary to=functions." + long_name +
                       "<|message|>{}<|call|>",
                   "", "{}"});
  return cases;
}

// Tokens of analysis messages, by what the table says of them.
int TokensOf(const Case& c) {
  const bool divided = c.reasoning.find('\n') != std::string::npos;
  return static_cast<int>(c.reasoning.size()) - (divided ? 1 : 0) - c.uncounted;
}

TEST(HarmonyTest, MessagesAreToldApartHoweverTheyAreCut) {
  for (const Case& c : Cases()) {
    const bool stops =
        c.drawn.ends_with(kHarmonyReturn) || c.drawn.ends_with(kHarmonyCall);
    const Answer expected = {.reasoning = c.reasoning,
                             .content = c.content,
                             .calls = c.calls,
                             .reasoning_tokens = TokensOf(c),
                             .reason = !stops ? v1::FINISH_REASON_LENGTH
                                       : c.calls.empty()
                                           ? v1::FINISH_REASON_STOP
                                           : v1::FINISH_REASON_TOOL_CALLS};
    for (const bool skip : {true, false}) {
      // The last of them almost come, and hold back what may be their
      // beginning.
      for (const char* const stop :
           {"", "assistantfinal!", ".assistant?", "Hm, 日.assistantco!", "}{!",
            "n to=functions.g!", "<|end|>!"}) {
        for (const size_t together : {1, 2, 3, 5, 7, 1000}) {
          EffectiveRequest request = WithTools();
          request.output.set_skip_special_tokens(skip);
          if (*stop != 0) request.stopping.add_stop(stop);
          EXPECT_EQ(Generate(request, c.drawn, together), expected)
              << c.what << ": " << c.drawn << "\nstop: " << stop
              << ", together: " << together << ", skip: " << skip;
        }
      }
    }
  }
}

struct Parts {
  std::string reasoning, content, calls;
  int tokens = 0;
  bool operator==(const Parts&) const = default;
};

// The text of tokens of so many bytes, released in pieces of so many.
Parts Release(const std::vector<std::pair<int32_t, std::string>>& tokens,
              size_t piece) {
  ToolCallOptions calls;
  calls.style = ToolCallStyle::kOpenAi;
  HarmonyOutput output(Format(), &calls, 0);
  std::string text;
  for (const auto& [id, bytes] : tokens) {
    output.Arrives(id, bytes);
    text += bytes;
  }
  v1::GenerateDelta delta;
  for (std::string_view rest = text; !rest.empty();) {
    output.Release(rest.substr(0, piece), &delta);
    rest.remove_prefix(std::min(piece, rest.size()));
  }
  output.Release("", &delta);
  output.Finish(&delta);
  Parts parts;
  parts.reasoning = delta.reasoning_content();
  parts.content = delta.text();
  parts.tokens = output.reasoning_tokens();
  for (const v1::ToolCallDelta& call : delta.tool_calls()) {
    parts.calls += call.name() + call.arguments_json();
  }
  return parts;
}

TEST(HarmonyTest, NeitherTokensNorPiecesChangeWhatIsSaid) {
  for (const Case& c : Cases()) {
    std::vector<std::pair<int32_t, std::string>> bytes;
    for (const int32_t id : Tokens(c.drawn)) {
      bytes.emplace_back(id, id < kFirstMark ? TextOf(id) : "");
    }
    const Parts whole = Release(bytes, std::string::npos);
    for (size_t size = 1; size <= bytes.size(); ++size) {
      EXPECT_EQ(Release(bytes, size), whole) << c.what << size;
      // Longer tokens, which marks come between.
      std::vector<std::pair<int32_t, std::string>> longer;
      for (const auto& token : bytes) {
        const bool joins = token.first < kFirstMark && !longer.empty() &&
                           longer.back().first < kFirstMark &&
                           longer.back().second.size() < size;
        if (joins) {
          longer.back().second += token.second;
        } else {
          longer.push_back(token);
        }
      }
      Parts parts = Release(longer, std::string::npos);
      parts.tokens = whole.tokens;
      EXPECT_EQ(parts, whole) << c.what << size;
    }
  }
}

TEST(HarmonyTest, AnAnswerGoesOnWithWhatThePromptLeavesOpen) {
  const EffectiveRequest request = WithTools();
  const struct {
    const char* prompt;
    const char* drawn;
    const char* reasoning;
    const char* content;
  } cases[] = {
      {"<|start|>assistant<|channel|>final<|message|>It is", " so.<|return|>",
       "", " so."},
      {"<|start|>assistant<|channel|>analysis<|message|>It is",
       " so.<|end|><|start|>assistant<|channel|>final<|message|>Yes", " so.",
       "Yes"},
      {"<|start|>assistant<|channel|>", "analysis<|message|>Hm", "Hm", ""},
      {"<|start|>user<|message|>Hi<|end|>",
       "<|start|>assistant<|channel|>analysis<|message|>Hm", "Hm", ""},
      {"", "<|channel|>final<|message|>Yes", "", "Yes"},
      {"plain", "Yes", "", "Yes"},
      {"plain", " to=me<|channel|>analysis<|message|>Hm", "Hm", ""},
  };
  for (const auto& c : cases) {
    const Answer answer = Generate(request, c.drawn, 1, c.prompt);
    EXPECT_EQ(answer.reasoning, c.reasoning) << c.prompt;
    EXPECT_EQ(answer.content, c.content) << c.prompt;
    EXPECT_EQ(answer.reasoning_tokens, std::string(c.reasoning).size());
  }
}

TEST(HarmonyTest, WhatIsNotTakenApartIsContent) {
  const std::string drawn = kThought + kNext +
                            "<|channel|>commentary to=functions.f<|message|>"
                            "{}<|call|>";
  EffectiveRequest request = WithTools();
  request.tool_calls.reset();
  Answer answer = Generate(request, drawn);
  EXPECT_EQ(answer.reasoning, "Hm, 日.");
  EXPECT_EQ(answer.content, "{}");
  EXPECT_EQ(answer.calls, "");
  EXPECT_EQ(answer.reason, v1::FINISH_REASON_STOP);
  request = WithTools();
  request.harmony = Format(/*reasoning=*/false);
  answer = Generate(request, drawn);
  EXPECT_EQ(answer.reasoning, "");
  EXPECT_EQ(answer.content, "Hm, 日.");
  EXPECT_EQ(answer.calls, "f({})");
  EXPECT_EQ(answer.reasoning_tokens, 0);
}

TEST(HarmonyTest, TextEndsAtAStopString) {
  EffectiveRequest request = WithTools();
  request.stopping.add_stop(", ");
  Answer answer = Generate(request, kThought);
  EXPECT_EQ(answer.reasoning, "Hm");
  EXPECT_EQ(answer.reasoning_tokens, 4);  // those that the stop string cut, too
  EXPECT_EQ(answer.reason, v1::FINISH_REASON_STOP);
  request.stopping.set_stop(0, "\"K");
  answer = Generate(request, "<|channel|>commentary to=functions.f<|message|>" +
                                 kWeather + "<|call|>");
  EXPECT_EQ(answer.content, "{\"city\": ");
  EXPECT_EQ(answer.calls, "");
}

TEST(HarmonyTest, OneCallAloneWhereOnlyOneIsWanted) {
  EffectiveRequest request = WithTools();
  request.tool_calls->parallel = false;
  const std::string call = "<|channel|>commentary to=functions.f<|message|>";
  EXPECT_EQ(
      Generate(request, call + "{}<|end|>" + kNext + call + kWeather).calls,
      "f({})");
}

TEST(HarmonyTest, EachDeltaCountsTheReasoningOfItsTokens) {
  EffectiveRequest request = WithTools();
  request.output.set_return_token_ids(true);
  Bytewise codec;
  std::vector<v1::GenerateResponse> sent;
  KeptEvents client(&sent);
  Output output(request, Tokens(kPrompt), &codec, &client);
  for (const int32_t id :
       Tokens("<|channel|>analysis<|message|>Hm.<|end|>" + kNext)) {
    v1::Token token;
    token.set_token_id(id);
    output.Add(token);
    output.Flush();
  }
  std::vector<int> counts;
  for (const v1::GenerateResponse& event : sent) {
    EXPECT_EQ(event.delta().token_ids_size(), 1);
    counts.push_back(event.delta().reasoning_tokens());
  }
  std::vector<int> expected(10, 0);  // the header
  expected.insert(expected.end(), {1, 2, 3});
  expected.resize(expected.size() + 11, 3);
  EXPECT_EQ(counts, expected);
}

TEST(HarmonyTest, ReasoningIsCountedWithoutText) {
  EffectiveRequest request = WithTools();
  request.output.set_text(false);
  const Answer answer = Generate(
      request, kThought + kNext + "<|channel|>final<|message|>Yes.<|return|>");
  EXPECT_EQ(answer.reasoning_tokens, 8);
  EXPECT_EQ(answer.reasoning, "");
  EXPECT_EQ(answer.reason, v1::FINISH_REASON_STOP);
}

}  // namespace
}  // namespace tandem::router::harmony
