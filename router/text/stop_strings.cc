// SPDX-License-Identifier: Apache-2.0
#include "router/text/stop_strings.h"

#include <algorithm>
#include <utility>

namespace tandem::router {

StopStrings::Result StopStrings::Push(std::string_view piece) {
  const size_t before = held_.size();
  held_.append(piece);
  size_t best_begin = std::string::npos;
  size_t best_end = std::string::npos;
  Result result;
  for (size_t i = 0; i < stops_.size(); ++i) {
    // It ends in this piece: one that ended before it was found then, or
    // passed.
    const size_t from =
        before < stops_[i].size() ? 0 : before - stops_[i].size() + 1;
    const size_t begin = held_.find(stops_[i], from);
    if (begin == std::string::npos) continue;
    const size_t end = begin + stops_[i].size();
    if (end < best_end || (end == best_end && begin < best_begin)) {
      best_begin = begin;
      best_end = end;
      result.matched = static_cast<int>(i);
    }
  }
  if (result.matched >= 0) {
    result.text = held_.substr(0, include_ ? best_end : best_begin);
    held_.clear();
    return result;
  }
  result.text = ReleaseAllButHeldSuffix();
  return result;
}

std::string StopStrings::Pass(std::string_view piece) {
  held_.append(piece);
  return ReleaseAllButHeldSuffix();
}

std::string StopStrings::Flush() { return std::exchange(held_, ""); }

std::string StopStrings::ReleaseAllButHeldSuffix() {
  const size_t released = held_.size() - HeldSuffix();
  std::string text = held_.substr(0, released);
  held_.erase(0, released);
  return text;
}

size_t StopStrings::HeldSuffix() const {
  const std::string_view text = held_;
  size_t longest = 0;
  for (const std::string& stop : stops_) {
    for (size_t n = std::min(stop.size() - 1, text.size()); n > longest; --n) {
      if (text.substr(text.size() - n) == stop.substr(0, n)) {
        longest = n;
        break;
      }
    }
  }
  return longest;
}

}  // namespace tandem::router
