// SPDX-License-Identifier: Apache-2.0
#include "router/http/json_fields.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "router/validate/errors.h"

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

std::string DumpJson(const json& value) {
  return value.dump(-1, ' ', false, json::error_handler_t::replace);
}

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
  const bool whole = value->is_number_integer() ||
                     (value->is_number_float() &&
                      std::floor(value->get<double>()) == value->get<double>());
  Refuse(name, *value,
         whole ? absl::StrCat("a whole number from ", low, " to ", high,
                              " is needed")
               : "a whole number is needed");
  return {};
}

std::optional<uint64_t> JsonFields::Bits(const char* name) {
  const json* const value = Find(name);
  if (value == nullptr) return {};
  if (value->is_number_unsigned()) return value->get<uint64_t>();
  if (const std::optional<int64_t> number = ToInteger(*value)) {
    return static_cast<uint64_t>(*number);
  }
  Refuse(name, *value, "a whole number from -2^63 to 2^64 - 1 is needed");
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

using nlohmann::ordered_json;

// Duplicates count: an ordered object looks through all members for each.
constexpr int kMaxOrderedMembers = 512;

// Builds one member of the outermost object as its text comes by, and nothing
// of the others. A parser with a callback would do with less code, but takes
// time quadratic in the elements of a list.
class MemberReader final : public nlohmann::json_sax<ordered_json> {
 public:
  explicit MemberReader(const char* name) : name_(name) {}

  ordered_json member() { return std::move(member_); }
  bool too_many() const { return too_many_; }

  bool null() override { return Put(nullptr); }
  bool boolean(bool value) override { return Put(value); }
  bool number_integer(int64_t value) override { return Put(value); }
  bool number_unsigned(uint64_t value) override { return Put(value); }
  bool number_float(double value, const std::string& /*text*/) override {
    return Put(value);
  }
  bool string(std::string& text) override { return Put(std::move(text)); }
  bool binary(ordered_json::binary_t& /*value*/) override { return false; }
  bool start_object(size_t /*size*/) override {
    return Open(ordered_json::object());
  }
  bool start_array(size_t /*size*/) override {
    return Open(ordered_json::array());
  }
  bool end_object() override { return Close(); }
  bool end_array() override { return Close(); }
  bool key(std::string& text) override {
    if (open_.empty()) {
      wanted_ = depth_ == 1 && text == name_;
      return true;
    }
    too_many_ = ++open_.back().members > kMaxOrderedMembers;
    open_.back().key = std::move(text);
    return !too_many_;
  }
  bool parse_error(size_t /*position*/, const std::string& /*token*/,
                   const nlohmann::detail::exception& /*error*/) override {
    return false;
  }

 private:
  // An object or list that is not closed, within the member.
  struct Part {
    ordered_json* value;
    int members = 0;
    std::string key = "";
  };

  ordered_json* Place(ordered_json value) {
    if (open_.empty()) {
      member_ = std::move(value);
      return &member_;
    }
    Part& part = open_.back();
    if (part.value->is_array()) {
      part.value->push_back(std::move(value));
      return &part.value->back();
    }
    return &((*part.value)[part.key] = std::move(value));
  }
  bool inside() const { return !open_.empty() || (wanted_ && depth_ == 1); }
  bool Put(ordered_json value) {
    if (inside()) Place(std::move(value));
    return true;
  }
  bool Open(ordered_json value) {
    if (inside()) open_.push_back({Place(std::move(value))});
    ++depth_;
    return true;
  }
  bool Close() {
    --depth_;
    if (!open_.empty()) open_.pop_back();
    return true;
  }

  const std::string name_;
  ordered_json member_;
  bool wanted_ = false;  // what follows is the member's value
  bool too_many_ = false;
  int depth_ = 0;
  std::vector<Part> open_;
};

}  // namespace

absl::StatusOr<ordered_json> InOrder(std::string_view body, const char* name) {
  MemberReader reader(name);
  ordered_json::sax_parse(body.begin(), body.end(), &reader);
  if (reader.too_many()) {
    return FieldInvalid(
        name, "(object)",
        absl::StrCat("objects of at most ", kMaxOrderedMembers, " members"));
  }
  return reader.member();
}

}  // namespace tandem::router
