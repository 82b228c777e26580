// SPDX-License-Identifier: Apache-2.0
// Any tokens behind any context, as a stream of text with stop strings: whole
// characters, joined what decoding them at once gives, and cut at a stop
// string as the whole text is.

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/utf8.h"
#include "router/text/harmony.h"
#include "router/text/stop_strings.h"
#include "tests/fuzz.h"
#include "text/tokenizer.h"

namespace tandem::router {
namespace {

void RequireUtf8(std::string_view text) {
  while (!text.empty()) {
    const size_t length = Utf8Length(text);
    TANDEM_FUZZ_REQUIRE(length > 0);
    text.remove_prefix(length);
  }
}

std::vector<int32_t> Ids(const text::Tokenizer& tokenizer, int count,
                         fuzz::Input* input) {
  std::vector<int32_t> ids;
  for (int i = 0; i < count && !input->empty(); ++i) {
    int32_t id = input->Byte();
    id |= input->Byte() << 8;
    ids.push_back(id % tokenizer.vocab_size());
  }
  return ids;
}

// The text up to a stop string, and which it was.
std::pair<std::string, int> Stop(StopStrings stops, std::string_view text,
                                 size_t cut) {
  std::string out;
  while (!text.empty()) {
    const StopStrings::Result result = stops.Push(text.substr(0, cut));
    out += result.text;
    if (result.matched >= 0) return {out, result.matched};
    text.remove_prefix(std::min(cut, text.size()));
  }
  return {out + stops.Flush(), -1};
}

// What messages in `pieces` of text say, released together or one by one. Any
// few of the tokens are marks.
std::string Say(const std::vector<std::pair<int32_t, std::string>>& pieces,
                bool together) {
  HarmonyFormat format;
  for (const auto& [id, piece] : pieces) {
    if (format.marks.size() == kHarmonyMarks.size()) break;
    format.marks.emplace(id, kHarmonyMarks[format.marks.size()]);
  }
  const ToolCallOptions options;
  HarmonyOutput output(format, &options, 0);
  v1::GenerateDelta delta;
  std::string held;
  for (const auto& [id, piece] : pieces) {
    output.Arrives(id, piece);
    held += piece;
    if (together) continue;
    output.Release(held, &delta);
    held.clear();
  }
  output.Release(held, &delta);
  output.Finish(&delta);
  delta.clear_tool_calls();  // whose ids are drawn
  return delta.reasoning_content() + "|" + delta.text();
}

void Check(const text::Tokenizer& tokenizer, fuzz::Input input) {
  const bool skip = input.Below(2) == 0;
  const size_t cut = 1 + input.Byte();
  std::vector<std::string> stops;
  for (int i = input.Below(4); i > 0; --i) {
    std::string stop(input.Take(static_cast<size_t>(input.Below(8))));
    if (!stop.empty()) stops.push_back(std::move(stop));
  }
  std::vector<int32_t> ids = Ids(tokenizer, input.Below(5), &input);
  text::StreamDecoder decoder(&tokenizer, ids, {.skip_special_tokens = skip});
  const std::string context = *tokenizer.Decode(ids, skip);
  std::string text;
  std::vector<std::pair<int32_t, std::string>> pieces;
  for (const int32_t id : Ids(tokenizer, 200, &input)) {
    const std::string piece = *decoder.Push(id);
    pieces.emplace_back(id, piece);
    RequireUtf8(piece);
    text += piece;
    ids.push_back(id);
  }
  text += decoder.Finish();
  RequireUtf8(text);
  TANDEM_FUZZ_REQUIRE(Say(pieces, true) == Say(pieces, false));
  // A context that ends within a character is completed by the stream.
  const std::string whole = *tokenizer.Decode(ids, skip);
  TANDEM_FUZZ_REQUIRE(text.size() <= whole.size() && whole.ends_with(text));
  TANDEM_FUZZ_REQUIRE(context.ends_with("\xEF\xBF\xBD") ||
                      whole == context + text);
  const auto stopped = Stop({stops, false}, text, text.size());
  TANDEM_FUZZ_REQUIRE(Stop({stops, false}, text, cut) == stopped);
  TANDEM_FUZZ_REQUIRE(Stop({stops, false}, text, 1) == stopped);
  TANDEM_FUZZ_REQUIRE(text.starts_with(stopped.first));
}

}  // namespace
}  // namespace tandem::router

TANDEM_FUZZ_TARGET(fuzz_output_text)(const uint8_t* data, size_t size) {
  using tandem::text::Tokenizer;
  static const auto* const tales =
      new Tokenizer(*Tokenizer::Load(TANDEM_SOURCE_DIR "/models/tales"));
  static const auto* const bytes = new Tokenizer(*Tokenizer::FromJson(
      // GPT-2's, whose tokens may be parts of characters.
      [] {
        std::string text;
        std::FILE* const file =
            std::fopen(TANDEM_SOURCE_DIR "/tests/golden/text/gpt2.json", "rb");
        tandem::fuzz::Require(file != nullptr, "gpt2.json is there");
        char part[4096];
        while (const size_t n = std::fread(part, 1, sizeof(part), file)) {
          text.append(part, n);
        }
        std::fclose(file);
        return text;
      }()));
  tandem::fuzz::Input input(data, size);
  tandem::router::Check(input.Below(2) == 0 ? *tales : *bytes, input);
  return 0;
}
