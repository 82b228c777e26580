// SPDX-License-Identifier: Apache-2.0
// One JSON object, byte by byte, against a parser.

#include "router/text/json_scanner.h"

#include <cstdint>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace tandem::router {
namespace {

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
