// SPDX-License-Identifier: Apache-2.0
#include "engine/checkpoint/config_fields.h"

#include "absl/strings/str_cat.h"
#include "engine/checkpoint/file.h"

namespace tandem::engine {

using nlohmann::json;

std::string ShowJson(const json& value) {
  if (const auto* text = value.get_ptr<const std::string*>()) {
    return Quote(*text);
  }
  if (value.is_structured()) {
    return absl::StrCat(value.is_array() ? "an array of " : "an object of ",
                        value.size());
  }
  return value.dump();
}

const json* ConfigFields::Find(std::string_view field) const {
  const auto found = object_.find(field);
  return found == object_.end() || found->is_null() ? nullptr : &*found;
}

bool ConfigFields::HasNull(std::string_view field) const {
  const auto found = object_.find(field);
  return found != object_.end() && found->is_null();
}

void ConfigFields::Fail(const absl::Status& status) {
  if (status_.ok()) status_ = status;
}

void ConfigFields::Refuse(std::string_view field, const std::string& value,
                          const std::string& expected) {
  Fail(absl::InvalidArgumentError(absl::StrCat(path_, ": ", prefix_,
                                               std::string(field), ": ", value,
                                               "; must be ", expected)));
}

int ConfigFields::Int(std::string_view field, int64_t min, int64_t max,
                      std::optional<int> fallback) {
  const json* value = Find(field);
  if (value == nullptr && fallback) return *fallback;
  const std::string expected =
      absl::StrCat("a whole number from ", min, " to ", max);
  if (value == nullptr) {
    Refuse(field, "missing", expected);
    return static_cast<int>(min);
  }
  // Unsigned ones above int64's range must not wrap into it.
  const auto* whole = value->get_ptr<const json::number_integer_t*>();
  const auto* natural = value->get_ptr<const json::number_unsigned_t*>();
  if (natural != nullptr ? *natural <= static_cast<uint64_t>(max) &&
                               static_cast<int64_t>(*natural) >= min
                         : whole != nullptr && *whole >= min && *whole <= max) {
    return static_cast<int>(*whole);
  }
  Refuse(field, ShowJson(*value), expected);
  return static_cast<int>(min);
}

std::vector<int> ConfigFields::Ints(std::string_view field, int64_t min,
                                    int64_t max) {
  std::vector<int> values;
  const json* list = Find(field);
  if (list == nullptr) return values;
  const auto fits = [&](const json& value) {
    return value.is_number_integer() && value >= min && value <= max;
  };
  if (!list->is_array() || !std::all_of(list->begin(), list->end(), fits)) {
    Refuse(field, ShowJson(*list),
           absl::StrCat("a list of whole numbers from ", min, " to ", max));
    return values;
  }
  for (const json& value : *list) values.push_back(value.get<int>());
  return values;
}

double ConfigFields::Double(std::string_view field, double min, double max,
                            std::optional<double> fallback) {
  const json* value = Find(field);
  if (value == nullptr && fallback) return *fallback;
  const std::string expected = absl::StrCat("a number from ", min, " to ", max);
  if (value == nullptr) {
    Refuse(field, "missing", expected);
    return min;
  }
  if (value->is_number()) {
    const double number = value->get<double>();
    if (number >= min && number <= max) return number;
  }
  Refuse(field, ShowJson(*value), expected);
  return min;
}

bool ConfigFields::Bool(std::string_view field, bool fallback) {
  const json* value = Find(field);
  if (value == nullptr) return fallback;
  if (const auto* flag = value->get_ptr<const json::boolean_t*>()) return *flag;
  Refuse(field, ShowJson(*value), "true or false");
  return fallback;
}

std::string ConfigFields::String(std::string_view field,
                                 std::string_view fallback) {
  const json* value = Find(field);
  if (value == nullptr) return std::string(fallback);
  if (const auto* text = value->get_ptr<const std::string*>()) return *text;
  Refuse(field, ShowJson(*value), "a string");
  return std::string(fallback);
}

std::optional<int> ConfigFields::OptionalInt(std::string_view field,
                                             int64_t min, int64_t max) {
  if (Find(field) == nullptr) return std::nullopt;
  return Int(field, min, max);
}

std::optional<double> ConfigFields::OptionalDouble(std::string_view field,
                                                   double min, double max) {
  if (Find(field) == nullptr) return std::nullopt;
  return Double(field, min, max);
}

}  // namespace tandem::engine
