// SPDX-License-Identifier: Apache-2.0
// Reads one JSON object (RFC 8259) byte by byte and says at each whether it can
// still become one: so a stream of text knows where an object ends, and that
// there is none, without waiting for more. Bytes above 0x7F are taken as they
// are: whoever pushes has checked UTF-8. Escapes of half a surrogate pair break
// it, as most readers take none (RFC 8259, section 8.2).

#ifndef TANDEM_ROUTER_TEXT_JSON_SCANNER_H_
#define TANDEM_ROUTER_TEXT_JSON_SCANNER_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tandem::router {

constexpr bool IsJsonSpace(char c) {
  return c == ' ' || c == '\t' || c == '\n' || c == '\r';
}

constexpr std::string_view WithoutSpacesAround(std::string_view text) {
  while (!text.empty() && IsJsonSpace(text.front())) text.remove_prefix(1);
  while (!text.empty() && IsJsonSpace(text.back())) text.remove_suffix(1);
  return text;
}

class JsonScanner {
 public:
  // As engine/checkpoint/json.h: deeper ones could not be sent back.
  static constexpr size_t kMaxDepth = 32;

  enum class Verdict { kMore, kComplete, kBroken };

  // The next byte; the first one must be '{'. After kComplete (the last '}')
  // and kBroken nothing may follow.
  Verdict Push(char c);

  // Members of the outermost object, as far as they are read. Offsets count
  // from the '{'; a key has its quotes.
  struct Member {
    size_t key_begin;
    size_t key_end = 0;      // 0: the key is not complete
    size_t value_begin = 0;  // 0: not there yet
    size_t value_end = 0;    // 0: not complete
  };
  const std::vector<Member>& members() const { return members_; }

 private:
  enum class State {
    kValue,         // one must begin
    kFirstElement,  // or ']'
    kFirstKey,      // or '}'
    kKey,
    kColon,
    kNext,  // ',' or the end of what is open
    kString,
    kEscape,
    kHex,
    kLiteral,
    kMinus,
    kZero,
    kInteger,
    kPoint,
    kFraction,
    kExponent,
    kExponentSign,
    kExponentDigits,
  };

  bool Take(char c);
  bool Begin(char c);
  bool TakeKey(char c);
  bool TakeNext(char c);
  bool TakeInString(char c);
  bool TakeInNumber(char c);
  void Close();
  void ValueEnds(size_t end);

  State state_ = State::kValue;
  std::string open_;          // '{' and '[' around the next byte
  std::string_view literal_;  // what is left of it
  bool is_key_ = false;       // of the string being read
  int hex_left_ = 0;
  uint32_t hex_ = 0;     // the UTF-16 unit being read
  bool is_low_ = false;  // a low surrogate must follow
  size_t size_ = 0;      // bytes before the next one
  std::vector<Member> members_;
};

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_TEXT_JSON_SCANNER_H_
