// SPDX-License-Identifier: Apache-2.0
#include "router/http/json_fields.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "router/errors.h"

namespace tandem::router {
namespace {

using nlohmann::json;

// As Find gives it: no member is null.
constexpr uint32_t kMaxTokenId = std::numeric_limits<int32_t>::max();

std::optional<int64_t> ToInteger(const json& value) {
  if (value.is_number_unsigned()) {
    const auto number = value.get<uint64_t>();
    if (number > uint64_t{std::numeric_limits<int64_t>::max()}) return {};
    return static_cast<int64_t>(number);
  }
  if (value.is_number_integer()) return value.get<int64_t>();
  if (!value.is_number_float()) return {};
  const double number = value.get<double>();
  if (std::floor(number) != number || std::abs(number) > 9e15) return {};
  return static_cast<int64_t>(number);
}

}  // namespace

const json* JsonFields::Find(const char* name) const {
  const auto found = object_.find(name);
  return found == object_.end() || found->is_null() ? nullptr : &*found;
}

void JsonFields::Refuse(const std::string& name, const json& value,
                        const std::string& allowed) {
  if (!status_.ok()) return;
  status_ = FieldInvalid(
      prefix_ + name,
      value.dump(-1, ' ', false, json::error_handler_t::replace), allowed);
}

std::optional<bool> JsonFields::Bool(const char* name) {
  const json* const value = Find(name);
  if (value == nullptr) return {};
  if (value->is_boolean()) return value->get<bool>();
  Refuse(name, *value, "true or false is needed");
  return {};
}

std::optional<double> JsonFields::Number(const char* name) {
  const json* const value = Find(name);
  if (value == nullptr) return {};
  if (value->is_number()) return value->get<double>();
  Refuse(name, *value, "a number is needed");
  return {};
}

std::optional<int64_t> JsonFields::Integer(const char* name, int64_t low,
                                           int64_t high) {
  const json* const value = Find(name);
  if (value == nullptr) return {};
  const std::optional<int64_t> number = ToInteger(*value);
  if (number && *number >= low && *number <= high) return number;
  Refuse(name, *value,
         number ? absl::StrCat("a whole number from ", low, " to ", high,
                               " is needed")
                : "a whole number is needed");
  return {};
}

std::optional<std::string> JsonFields::String(const char* name) {
  const json* const value = Find(name);
  if (value == nullptr) return {};
  if (value->is_string()) return value->get<std::string>();
  Refuse(name, *value, "a string is needed");
  return {};
}

std::vector<std::string> JsonFields::Strings(const char* name) {
  const json* const value = Find(name);
  if (value == nullptr) return {};
  if (value->is_string()) return {value->get<std::string>()};
  std::vector<std::string> strings;
  bool all = value->is_array();
  if (all) {
    for (const json& item : *value) {
      all = all && item.is_string();
      if (all) strings.push_back(item.get<std::string>());
    }
  }
  if (!all) Refuse(name, *value, "a string or a list of strings is needed");
  return strings;
}

std::vector<uint32_t> JsonFields::TokenIds(const char* name) {
  const json* const value = Array(name);
  std::vector<uint32_t> ids;
  if (value == nullptr) return ids;
  ids.reserve(value->size());
  for (const json& item : *value) {
    const std::optional<int64_t> id = ToInteger(item);
    if (!id || *id < 0 || *id > int64_t{kMaxTokenId}) {
      Refuse(name, item, "token ids are needed");
      return {};
    }
    ids.push_back(static_cast<uint32_t>(*id));
  }
  return ids;
}

const json* JsonFields::Object(const char* name) {
  const json* const value = Find(name);
  if (value == nullptr || value->is_object()) return value;
  Refuse(name, *value, "an object is needed");
  return nullptr;
}

const json* JsonFields::Array(const char* name) {
  const json* const value = Find(name);
  if (value == nullptr || value->is_array()) return value;
  Refuse(name, *value, "a list is needed");
  return nullptr;
}

namespace {

constexpr size_t kMaxOrderedMembers = 512;

// No deeper than the parser allowed.
bool HasLargeObject(const json& value) {
  if (value.is_object() && value.size() > kMaxOrderedMembers) return true;
  if (!value.is_structured()) return false;
  return std::any_of(value.begin(), value.end(), HasLargeObject);
}

}  // namespace

absl::StatusOr<nlohmann::ordered_json> InOrder(std::string_view body,
                                               const char* name,
                                               const json& member) {
  using nlohmann::ordered_json;
  if (HasLargeObject(member)) {
    return FieldInvalid(
        name, "(object)",
        absl::StrCat("objects of at most ", kMaxOrderedMembers, " members"));
  }
  // Nothing is built of the other members.
  const auto wanted = [name](int depth, ordered_json::parse_event_t event,
                             const ordered_json& parsed) {
    return event != ordered_json::parse_event_t::key || depth != 1 ||
           parsed == name;
  };
  ordered_json object = ordered_json::parse(body.begin(), body.end(), wanted,
                                            /*allow_exceptions=*/false);
  return std::move(object[name]);
}

}  // namespace tandem::router
