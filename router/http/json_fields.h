// SPDX-License-Identifier: Apache-2.0
// The members of one JSON object as values of known types. An absent member
// and null read as none; the first of a wrong type is kept as the status,
// which names it.
//
//   JsonFields fields(body, "");
//   if (const auto n = fields.Integer("n")) sampling->set_n(*n);
//   return fields.status();

#ifndef TANDEM_ROUTER_HTTP_JSON_FIELDS_H_
#define TANDEM_ROUTER_HTTP_JSON_FIELDS_H_

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"

namespace tandem::router {

// On one line; what is not UTF-8 in a string is replaced.
std::string DumpJson(const nlohmann::json& value);

class JsonFields {
 public:
  // `object` must be one, and outlive this. `prefix` comes before the names of
  // members in errors ("messages[2].").
  JsonFields(const nlohmann::json& object, std::string prefix)
      : object_(object), prefix_(std::move(prefix)) {}

  // Null if absent or null.
  const nlohmann::json* Find(const char* name) const;
  std::optional<bool> Bool(const char* name);
  std::optional<double> Number(const char* name);
  // Within [low, high]; a float without a fraction counts.
  std::optional<int64_t> Integer(const char* name, int64_t low, int64_t high);
  std::optional<int32_t> Int32(const char* name) {
    const auto value = Integer(name, std::numeric_limits<int32_t>::min(),
                               std::numeric_limits<int32_t>::max());
    if (!value) return std::nullopt;
    return static_cast<int32_t>(*value);
  }
  // 64 bits, with a sign or without one.
  std::optional<uint64_t> Bits(const char* name);
  std::optional<std::string> String(const char* name);
  // One string counts as a list of one.
  std::vector<std::string> Strings(const char* name);
  std::vector<uint32_t> TokenIds(const char* name);
  const nlohmann::json* Object(const char* name);
  const nlohmann::json* Array(const char* name);

  // FIELD_INVALID for `name`, unless there was an error before.
  void Refuse(const std::string& name, const nlohmann::json& value,
              const std::string& allowed);
  void Keep(const absl::Status& status) { status_.Update(status); }
  const absl::Status& status() const { return status_; }
  const std::string& prefix() const { return prefix_; }

 private:
  const nlohmann::json& object_;
  const std::string prefix_;
  absl::Status status_;
};

// Member `name` of the object that `body` is, which was parsed before, with the
// members of its own objects in the client's order: prompts and grammars are
// made of some. FIELD_INVALID with its name where an object in it has more than
// 512 members, since each is looked for among those before it.
absl::StatusOr<nlohmann::ordered_json> InOrder(std::string_view body,
                                               const char* name);

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_HTTP_JSON_FIELDS_H_
