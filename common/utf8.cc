// SPDX-License-Identifier: Apache-2.0
#include "common/utf8.h"

#include <cstdint>

#include "absl/strings/str_format.h"

namespace tandem {

size_t Utf8Length(std::string_view text) {
  if (text.empty()) return 0;
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t lead = byte(0);
  size_t length = 0;
  // The second byte's range excludes overlong forms, surrogates and what lies
  // beyond U+10FFFF (Unicode, table 3-7).
  uint8_t low = 0x80, high = 0xbf;
  if (lead < 0x80) {
    return 1;
  } else if (lead >= 0xc2 && lead <= 0xdf) {
    length = 2;
  } else if (lead >= 0xe0 && lead <= 0xef) {
    length = 3;
    if (lead == 0xe0) low = 0xa0;
    if (lead == 0xed) high = 0x9f;
  } else if (lead >= 0xf0 && lead <= 0xf4) {
    length = 4;
    if (lead == 0xf0) low = 0x90;
    if (lead == 0xf4) high = 0x8f;
  } else {
    return 0;
  }
  if (text.size() < length || byte(1) < low || byte(1) > high) return 0;
  for (size_t i = 2; i < length; ++i) {
    if (byte(i) < 0x80 || byte(i) > 0xbf) return 0;
  }
  return length;
}

std::string_view Utf8Head(std::string_view text, size_t bytes) {
  if (text.size() <= bytes) return text;
  // Back to a character's first byte, unless there is none near.
  for (size_t end = bytes; end + 4 > bytes; --end) {
    if ((static_cast<uint8_t>(text[end]) & 0xc0) != 0x80) {
      return text.substr(0, end);
    }
    if (end == 0) break;
  }
  return text.substr(0, bytes);
}

std::string ValidUtf8(std::string_view text) {
  std::string valid;
  valid.reserve(text.size());
  while (!text.empty()) {
    const size_t length = Utf8Length(text);
    valid.append(length == 0 ? "\xef\xbf\xbd" : text.substr(0, length));
    text.remove_prefix(length == 0 ? 1 : length);
  }
  return valid;
}

std::string JsonEscaped(std::string_view text, bool quotes) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const size_t length = Utf8Length(text);
    const char c = text.front();
    if (length == 0) {
      out += "\xef\xbf\xbd";
    } else if (quotes && (c == '"' || c == '\\')) {
      out += '\\';
      out += c;
    } else if (c == '\n') {
      out += "\\n";
    } else if (c == '\t') {
      out += "\\t";
    } else if (c == '\r') {
      out += "\\r";
    } else if (static_cast<uint8_t>(c) < 0x20 || c == 0x7f) {
      out += absl::StrFormat("\\u%04x", static_cast<int>(c));
    } else {
      out.append(text.substr(0, length));
    }
    text.remove_prefix(length == 0 ? 1 : length);
  }
  return out;
}

std::string ForTerminal(std::string_view text) {
  std::string shown;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto c = static_cast<unsigned char>(text[i]);
    // U+0080 to U+009F are 0xc2 and one of these.
    const bool c1 = c == 0xc2 && i + 1 < text.size() &&
                    static_cast<unsigned char>(text[i + 1]) < 0xa0;
    if ((c < 0x20 && c != '\n' && c != '\t') || c == 0x7f || c1) {
      shown += "\xef\xbf\xbd";
      i += c1 ? 1 : 0;
    } else {
      shown += text[i];
    }
  }
  return shown;
}

}  // namespace tandem
