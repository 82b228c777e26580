// SPDX-License-Identifier: Apache-2.0
// Reads fields of a JSON object with a range each. The first error is kept
// and later reads give defaults, so that a parser reads as a list of fields
// and checks once at the end.

#ifndef TANDEM_ENGINE_CHECKPOINT_CONFIG_FIELDS_H_
#define TANDEM_ENGINE_CHECKPOINT_CONFIG_FIELDS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "nlohmann/json.hpp"

namespace tandem::engine {

class ConfigFields {
 public:
  // `prefix` goes before field names in messages ("rope_scaling.").
  ConfigFields(const std::string& path, const nlohmann::json& object,
               std::string prefix = "")
      : path_(path), object_(object), prefix_(std::move(prefix)) {}

  const absl::Status& status() const { return status_; }
  const std::string& path() const { return path_; }

  // Null if absent or JSON's null: both mean "not given".
  const nlohmann::json* Find(std::string_view field) const;

  // Present, and null: for the fields where that differs from absent.
  bool HasNull(std::string_view field) const;

  // Required if `fallback` is nullopt.
  int Int(std::string_view field, int64_t min, int64_t max,
          std::optional<int> fallback = std::nullopt);
  double Double(std::string_view field, double min, double max,
                std::optional<double> fallback = std::nullopt);
  bool Bool(std::string_view field, bool fallback);
  std::string String(std::string_view field, std::string_view fallback);

  std::optional<int> OptionalInt(std::string_view field, int64_t min,
                                 int64_t max);
  std::optional<double> OptionalDouble(std::string_view field, double min,
                                       double max);

  // A list of them; empty if it is left out.
  std::vector<int> Ints(std::string_view field, int64_t min, int64_t max);

  // Records "FILE: field: value; expected" unless an error is there already.
  void Refuse(std::string_view field, const std::string& value,
              const std::string& expected);
  void Fail(const absl::Status& status);

 private:
  const std::string& path_;
  const nlohmann::json& object_;
  const std::string prefix_;
  absl::Status status_;
};

// A value as a person should see it: cut short, safely escaped.
std::string ShowJson(const nlohmann::json& value);

}  // namespace tandem::engine

#endif  // TANDEM_ENGINE_CHECKPOINT_CONFIG_FIELDS_H_
