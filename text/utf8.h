// SPDX-License-Identifier: Apache-2.0
// One step of UTF-8 decoding as Unicode's table 3-7 has it (no overlong forms,
// no surrogates, nothing above U+10FFFF).

#ifndef TANDEM_TEXT_UTF8_H_
#define TANDEM_TEXT_UTF8_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace tandem::text {

inline constexpr std::string_view kReplacementCharacter = "\xEF\xBF\xBD";

enum class Utf8Kind {
  kCharacter,   // the first `size` bytes are one character
  kBroken,      // they can start none, whatever follows
  kIncomplete,  // all of the input, and more bytes could complete it
};

struct Utf8Step {
  Utf8Kind kind;
  // For kBroken the maximal subpart: what one U+FFFD stands for.
  size_t size;
};

// `bytes` is not empty.
inline Utf8Step NextUtf8(std::string_view bytes) {
  const auto at = [&](size_t i) { return static_cast<uint8_t>(bytes[i]); };
  const uint8_t lead = at(0);
  if (lead < 0x80) return {Utf8Kind::kCharacter, 1};
  if (lead < 0xC2 || lead > 0xF4) return {Utf8Kind::kBroken, 1};
  const size_t need = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  // Only the second byte's range depends on the lead byte.
  uint8_t low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  uint8_t high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  for (size_t i = 1; i < need; ++i) {
    if (i == bytes.size()) return {Utf8Kind::kIncomplete, i};
    if (at(i) < low || at(i) > high) return {Utf8Kind::kBroken, i};
    low = 0x80;
    high = 0xBF;
  }
  return {Utf8Kind::kCharacter, need};
}

// `code_point` as UTF-8; a scalar value.
inline std::string ToUtf8(uint32_t code_point) {
  const auto tail = [&](int shift) {
    return static_cast<char>(0x80 | ((code_point >> shift) & 0x3F));
  };
  if (code_point < 0x80) return {static_cast<char>(code_point)};
  if (code_point < 0x800) {
    return {static_cast<char>(0xC0 | (code_point >> 6)), tail(0)};
  }
  if (code_point < 0x10000) {
    return {static_cast<char>(0xE0 | (code_point >> 12)), tail(6), tail(0)};
  }
  return {static_cast<char>(0xF0 | (code_point >> 18)), tail(12), tail(6),
          tail(0)};
}

}  // namespace tandem::text

#endif  // TANDEM_TEXT_UTF8_H_
