// SPDX-License-Identifier: Apache-2.0
#include "engine/checkpoint/json.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace tandem::engine {
namespace {

using nlohmann::json;

// Accepts everything up to the depth limit, and keeps the first complaint.
class Checker {
 public:
  bool null() { return true; }
  bool boolean(bool) { return true; }
  bool number_integer(json::number_integer_t) { return true; }
  bool number_unsigned(json::number_unsigned_t) { return true; }
  bool number_float(json::number_float_t, const std::string&) { return true; }
  bool string(std::string&) { return true; }
  bool binary(json::binary_t&) { return true; }
  bool key(std::string&) { return true; }
  bool start_object(size_t) { return Deeper(); }
  bool start_array(size_t) { return Deeper(); }
  bool end_object() { return --depth_ >= 0; }
  bool end_array() { return --depth_ >= 0; }
  bool parse_error(size_t, const std::string&, const json::exception& error) {
    complaint_ = JsonErrorText(error.what());
    return false;
  }
  const std::string& complaint() const { return complaint_; }

 private:
  bool Deeper() {
    if (++depth_ <= kMaxJsonDepth) return true;
    complaint_ = absl::StrCat("nested deeper than ", kMaxJsonDepth, " levels");
    return false;
  }

  int depth_ = 0;
  std::string complaint_;
};

}  // namespace

std::string JsonErrorText(std::string_view what) {
  // "[json.exception.parse_error.101] parse error at line 1, column 2: ...;
  // last read: '...'", the end being the input's.
  const size_t prefix = what.find("] ");
  if (prefix != what.npos) what.remove_prefix(prefix + 2);
  what = what.substr(0, what.find("; last read: "));
  constexpr size_t kShown = 240;  // numbers have no end of theirs
  std::string text(what.substr(0, kShown));
  std::replace_if(
      text.begin(), text.end(), [](char c) { return c < ' ' || c > '~'; }, '?');
  return text;
}

bool HasNul(std::string_view text) { return text.find('\0') != text.npos; }

absl::StatusOr<json> ParseJson(const std::string& path, std::string_view text) {
  if (HasNul(text)) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": not valid JSON: a NUL byte"));
  }
  Checker checker;
  if (!json::sax_parse(text.begin(), text.end(), &checker)) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": not valid JSON: ", checker.complaint()));
  }
  return json::parse(text.begin(), text.end(), nullptr,
                     /*allow_exceptions=*/false);
}

}  // namespace tandem::engine
