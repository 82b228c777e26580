// SPDX-License-Identifier: Apache-2.0
// Finds the first stop string in a text that arrives in pieces, and lets
// through only what can no longer be part of one. The result depends on the
// text alone, never on how it was cut: of several stop strings the one that
// ends first wins, and of those that end together the longest.

#ifndef TANDEM_ROUTER_TEXT_STOP_STRINGS_H_
#define TANDEM_ROUTER_TEXT_STOP_STRINGS_H_

#include <string>
#include <string_view>
#include <vector>

namespace tandem::router {

class StopStrings {
 public:
  // `stops` are not empty strings. `include`: a match is part of the text.
  StopStrings(std::vector<std::string> stops, bool include)
      : stops_(std::move(stops)), include_(include) {}

  struct Result {
    std::string text;  // released by this piece
    int matched = -1;  // index of the stop string; nothing follows then
  };
  Result Push(std::string_view piece);
  // The same of text in which none may end, though one may begin in it: what
  // it releases.
  std::string Pass(std::string_view piece);

  // The text ended without a match: what was held back.
  std::string Flush();

  bool holding() const { return !held_.empty(); }

 private:
  std::string ReleaseAllButHeldSuffix();
  size_t HeldSuffix() const;

  const std::vector<std::string> stops_;
  const bool include_;
  // The longest suffix of the text so far that a stop string begins with.
  std::string held_;
};

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_TEXT_STOP_STRINGS_H_
