// SPDX-License-Identifier: Apache-2.0
#include "common/utf8.h"

#include <iterator>
#include <string>

#include "gtest/gtest.h"

namespace tandem {
namespace {

TEST(Utf8Test, AHeadEndsWhereACharacterDoes) {
  const std::string_view text = "a\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80";
  const size_t kept[] = {0, 1, 1, 3, 3, 3, 6, 6, 6, 6, 10, 10};
  for (size_t bytes = 0; bytes < std::size(kept); ++bytes) {
    EXPECT_EQ(Utf8Head(text, bytes), text.substr(0, kept[bytes])) << bytes;
  }
  // What is no UTF-8 is cut all the same.
  const std::string none(20, '\x80');
  EXPECT_EQ(Utf8Head(none, 10), none.substr(0, 10));
  EXPECT_EQ(Utf8Head(none, 2), none.substr(0, 2));
}

TEST(Utf8Test, LengthAcceptsExactlyWellFormedCharacters) {
  struct Case {
    std::string_view text;
    size_t length;
  };
  const Case cases[] = {
      {"", 0},
      {"a", 1},
      {"\x7f", 1},
      {"\x80", 0},              // continuation first
      {"\xc1\xbf", 0},          // overlong
      {"\xc2\x80", 2},          // U+0080
      {"\xdf\xbf", 2},          // U+07FF
      {"\xe0\x9f\xbf", 0},      // overlong
      {"\xe0\xa0\x80", 3},      // U+0800
      {"\xed\x9f\xbf", 3},      // U+D7FF
      {"\xed\xa0\x80", 0},      // surrogate
      {"\xee\x80\x80", 3},      // U+E000
      {"\xef\xbf\xbf", 3},      // U+FFFF
      {"\xf0\x8f\xbf\xbf", 0},  // overlong
      {"\xf0\x90\x80\x80", 4},  // U+10000
      {"\xf4\x8f\xbf\xbf", 4},  // U+10FFFF
      {"\xf4\x90\x80\x80", 0},  // beyond
      {"\xf5\x80\x80\x80", 0},
      {"\xe2\x82", 0},  // cut short
      {"\xf0\x9f\x98", 0},
  };
  for (const Case& c : cases) {
    EXPECT_EQ(Utf8Length(c.text), c.length) << JsonEscaped(c.text);
  }
}

TEST(Utf8Test, WhatIsMalformedIsReplaced) {
  const std::string text = "a\xc3\xa9\n\xf0\x9f\x98\x80";
  EXPECT_EQ(ValidUtf8(text), text);
  EXPECT_EQ(ValidUtf8("\xa9"
                      "a\xc3"),
            "\xef\xbf\xbd"
            "a\xef\xbf\xbd");
  EXPECT_EQ(ValidUtf8(""), "");
}

TEST(Utf8Test, EscapesWhatJsonWantsEscaped) {
  struct Case {
    std::string_view text, json, terminal;
  };
  const Case cases[] = {
      {"plain", "plain", "plain"},
      {"a\"b\\c", "a\\\"b\\\\c", "a\"b\\c"},
      {"\n\r\t", "\\n\\r\\t", "\\n\\r\\t"},
      {{"\0\x1b\x7f", 3}, "\\u0000\\u001b\\u007f", "\\u0000\\u001b\\u007f"},
      {"gr\xc3\xbc\xc3\x9f", "gr\xc3\xbc\xc3\x9f", "gr\xc3\xbc\xc3\x9f"},
      {"x\xffy\xc3", "x\xef\xbf\xbdy\xef\xbf\xbd",
       "x\xef\xbf\xbdy\xef\xbf\xbd"},
  };
  for (const Case& c : cases) {
    EXPECT_EQ(JsonEscaped(c.text), c.json);
    EXPECT_EQ(JsonEscaped(c.text, /*quotes=*/false), c.terminal);
  }
}

}  // namespace
}  // namespace tandem
