// SPDX-License-Identifier: Apache-2.0
#include "router/text/json_scanner.h"

#include <utility>

namespace tandem::router {
namespace {

bool IsDigit(char c) { return c >= '0' && c <= '9'; }
bool IsHex(char c) {
  return IsDigit(c) || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F');
}

}  // namespace

JsonScanner::Verdict JsonScanner::Push(char c) {
  const bool good = size_ == 0 ? c == '{' && Begin(c) : Take(c);
  ++size_;
  if (!good) return Verdict::kBroken;
  return open_.empty() ? Verdict::kComplete : Verdict::kMore;
}

bool JsonScanner::Take(char c) {
  switch (state_) {
    case State::kString:
    case State::kEscape:
    case State::kHex:
      return TakeInString(c);
    case State::kLiteral:
      if (c != literal_.front()) return false;
      literal_.remove_prefix(1);
      if (literal_.empty()) ValueEnds(size_ + 1);
      return true;
    case State::kMinus:
    case State::kZero:
    case State::kInteger:
    case State::kPoint:
    case State::kFraction:
    case State::kExponent:
    case State::kExponentSign:
    case State::kExponentDigits:
      return TakeInNumber(c);
    default:
      break;
  }
  if (IsJsonSpace(c)) return true;
  switch (state_) {
    case State::kFirstElement:
      return c == ']' ? TakeNext(c) : Begin(c);
    case State::kFirstKey:
      return c == '}' ? TakeNext(c) : TakeKey(c);
    case State::kKey:
      return TakeKey(c);
    case State::kColon:
      state_ = State::kValue;
      return c == ':';
    case State::kNext:
      return TakeNext(c);
    default:
      return Begin(c);
  }
}

// A value by its first byte.
bool JsonScanner::Begin(char c) {
  if (open_.size() == 1) members_.back().value_begin = size_;
  const auto literal = [this](std::string_view rest) {
    state_ = State::kLiteral;
    literal_ = rest;
    return true;
  };
  switch (c) {
    case '{':
    case '[':
      if (open_.size() == kMaxDepth) return false;
      open_.push_back(c);
      state_ = c == '{' ? State::kFirstKey : State::kFirstElement;
      return true;
    case '"':
      state_ = State::kString;
      is_key_ = false;
      return true;
    case 't':
      return literal("rue");
    case 'f':
      return literal("alse");
    case 'n':
      return literal("ull");
    case '-':
      state_ = State::kMinus;
      return true;
    case '0':
      state_ = State::kZero;
      return true;
    default:
      state_ = State::kInteger;
      return IsDigit(c);
  }
}

bool JsonScanner::TakeKey(char c) {
  state_ = State::kString;
  is_key_ = true;
  if (open_.size() == 1) members_.push_back({.key_begin = size_});
  return c == '"';
}

bool JsonScanner::TakeNext(char c) {
  const bool in_object = open_.back() == '{';
  if (c == ',') {
    state_ = in_object ? State::kKey : State::kValue;
    return true;
  }
  if (c != (in_object ? '}' : ']')) return false;
  Close();
  return true;
}

bool JsonScanner::TakeInString(char c) {
  if (state_ == State::kHex) {
    if (!IsHex(c)) return false;
    hex_ = hex_ << 4 |
           static_cast<uint32_t>(IsDigit(c) ? c - '0' : (c | 0x20) - 'a' + 10);
    if (--hex_left_ > 0) return true;
    state_ = State::kString;
    const bool low = (hex_ & 0xFC00) == 0xDC00;
    if (low != std::exchange(is_low_, (hex_ & 0xFC00) == 0xD800)) return false;
    return true;
  }
  if (is_low_ && c != (state_ == State::kEscape ? 'u' : '\\')) return false;
  if (state_ == State::kEscape) {
    state_ = State::kString;
    if (c == 'u') {
      state_ = State::kHex;
      hex_left_ = 4;
      hex_ = 0;
      return true;
    }
    return std::string_view("\"\\/bfnrt").find(c) != std::string_view::npos;
  }
  if (c == '\\') {
    state_ = State::kEscape;
  } else if (c == '"') {
    if (!is_key_) {
      ValueEnds(size_ + 1);
      return true;
    }
    state_ = State::kColon;
    if (open_.size() == 1) members_.back().key_end = size_ + 1;
  }
  return static_cast<unsigned char>(c) >= 0x20;
}

bool JsonScanner::TakeInNumber(char c) {
  const auto go = [this](State state) {
    state_ = state;
    return true;
  };
  switch (state_) {
    case State::kMinus:
      if (c == '0') return go(State::kZero);
      return go(State::kInteger) && IsDigit(c);
    case State::kPoint:
      return go(State::kFraction) && IsDigit(c);
    case State::kExponent:
      if (c == '+' || c == '-') return go(State::kExponentSign);
      [[fallthrough]];
    case State::kExponentSign:
      return go(State::kExponentDigits) && IsDigit(c);
    default:
      break;
  }
  if (IsDigit(c) && state_ != State::kZero) return true;
  const bool whole = state_ == State::kZero || state_ == State::kInteger;
  if (c == '.' && whole) return go(State::kPoint);
  if ((c == 'e' || c == 'E') && state_ != State::kExponentDigits) {
    return go(State::kExponent);
  }
  // It ended before this byte.
  ValueEnds(size_);
  return Take(c);
}

void JsonScanner::Close() {
  open_.pop_back();
  ValueEnds(size_ + 1);
}

void JsonScanner::ValueEnds(size_t end) {
  state_ = State::kNext;
  if (open_.size() == 1) members_.back().value_end = end;
}

}  // namespace tandem::router
