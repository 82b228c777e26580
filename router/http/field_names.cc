// SPDX-License-Identifier: Apache-2.0
#include "router/http/field_names.h"

#include <optional>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"
#include "common/error.h"

namespace tandem::router {
namespace {

constexpr std::string_view kGroups[] = {"sampling.",   "stopping.", "output.",
                                        "structured.", "cache.",    "chat.",
                                        "beam."};

std::string_view Group(std::string_view field) {
  for (const std::string_view group : kGroups) {
    if (field.substr(0, group.size()) == group) return group;
  }
  return {};
}

// Dashes are of flags (--structured-max-bytes), whose words are no fields.
bool IsOfName(char c) {
  return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '_' ||
         c == '.' || c == '[' || c == ']' || c == '-';
}

// Of a sentence about one field, which may name others. A bare word is a name
// only where it cannot be anything else.
std::string InProse(std::string_view text, const FieldNames& names) {
  std::string renamed;
  for (size_t begin = 0; begin < text.size();) {
    size_t end = begin;
    while (end < text.size() && IsOfName(text[end])) ++end;
    if (end == begin) {
      renamed += text[begin++];
      continue;
    }
    std::string_view word = text.substr(begin, end - begin);
    begin = end;
    const bool stop = word.back() == '.';
    if (stop) word.remove_suffix(1);
    const bool is_field =
        !Group(word).empty() || word == "beam" || word == "structured";
    renamed += is_field ? ClientsName(word, names) : std::string(word);
    if (stop) renamed += '.';
  }
  return renamed;
}

}  // namespace

std::string ClientsName(std::string_view field, const FieldNames& names) {
  if (const auto own = names.find(field); own != names.end()) {
    return own->second;
  }
  const std::string_view group = Group(field);
  if (group == "structured.") {
    if (const auto own = names.find("structured"); own != names.end()) {
      return own->second;
    }
  }
  std::string name(field.substr(group.size()));
  if (group != "chat.") return name;
  if (name == "tool_choice_function") return "tool_choice";
  if (absl::StrContains(name, "tools[") || absl::StrContains(name, "_calls[")) {
    return absl::StrReplaceAll(
        name, {{".name", ".function.name"},
               {".parameters_json_schema", ".function.parameters"},
               {".arguments_json", ".function.arguments"}});
  }
  return absl::StrReplaceAll(name, {{"].parts", "].content"}});
}

std::string ClientsMessage(const absl::Status& status,
                           const FieldNames& names) {
  const std::string message(status.message());
  const std::map<std::string, std::string> metadata = ErrorMetadata(status);
  const auto field = metadata.find("field");
  if (field == metadata.end() || !absl::StartsWith(message, field->second)) {
    return message;
  }
  // "field = what the client sent: what is allowed"
  const size_t head = field->second.size();
  const std::optional<FieldViolation> violation = ErrorViolation(status);
  size_t tail = message.size();
  if (violation && absl::EndsWith(message, violation->description)) {
    tail -= violation->description.size();
  }
  if (tail < head) tail = message.size();
  return absl::StrCat(ClientsName(field->second, names),
                      message.substr(head, tail - head),
                      InProse(std::string_view(message).substr(tail), names));
}

}  // namespace tandem::router
