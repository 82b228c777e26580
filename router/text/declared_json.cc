// SPDX-License-Identifier: Apache-2.0
// DeclaredJson of tagged_calls.h. Schemas are the client's: what they refer to
// is followed so far and no farther.

#include <algorithm>
#include <string>
#include <string_view>

#include "nlohmann/json.hpp"
#include "router/text/tagged_calls.h"

namespace tandem::router {
namespace {

constexpr int kMaxSchemaSteps = 10'000;  // in a function's schema
constexpr int kMaxSchemaDepth = 16;      // of references and alternatives

// What a schema says of its values; of several the largest.
enum class ValueKind { kNothing, kNull, kText, kOther };

class SchemaReader {
 public:
  explicit SchemaReader(const nlohmann::json& root) : root_(root) {}

  ValueKind KindOf(const nlohmann::json& schema, int depth = 0) {
    if (--steps_ < 0 || depth > kMaxSchemaDepth) return ValueKind::kOther;
    if (!schema.is_object()) return ValueKind::kNothing;
    if (const nlohmann::json* type = Find(schema, "type")) {
      return KindOfAll(*type, [&](const nlohmann::json& one) {
        if (one == "string") return ValueKind::kText;
        return one == "null" ? ValueKind::kNull : ValueKind::kOther;
      });
    }
    const auto of_value = [](const nlohmann::json& value) {
      if (value.is_string()) return ValueKind::kText;
      return value.is_null() ? ValueKind::kNull : ValueKind::kOther;
    };
    if (const nlohmann::json* values = Find(schema, "enum")) {
      return KindOfAll(*values, of_value);
    }
    if (const nlohmann::json* value = Find(schema, "const")) {
      return of_value(*value);
    }
    ValueKind kind = ValueKind::kNothing;
    if (const nlohmann::json* name = Find(schema, "$ref")) {
      const nlohmann::json* const meant = Referred(*name);
      kind = meant == nullptr ? ValueKind::kOther : KindOf(*meant, depth + 1);
    }
    for (const char* const key : {"anyOf", "oneOf", "allOf"}) {
      const nlohmann::json* const all = Find(schema, key);
      if (all == nullptr) continue;
      kind = std::max(kind, KindOfAll(*all, [&](const nlohmann::json& one) {
                        return KindOf(one, depth + 1);
                      }));
    }
    return kind;
  }

 private:
  static const nlohmann::json* Find(const nlohmann::json& object,
                                    std::string_view key) {
    if (!object.is_object()) return nullptr;
    const auto found = object.find(key);
    return found == object.end() ? nullptr : &*found;
  }

  template <typename One>
  ValueKind KindOfAll(const nlohmann::json& list, One of_one) {
    if (!list.is_array()) return of_one(list);
    ValueKind kind = ValueKind::kNothing;
    for (const nlohmann::json& one : list) {
      if (--steps_ < 0) return ValueKind::kOther;
      kind = std::max(kind, of_one(one));
    }
    return kind;
  }

  // Null: of none that is in the schema.
  const nlohmann::json* Referred(const nlohmann::json& reference) const {
    if (!reference.is_string()) return nullptr;
    const std::string_view path = reference.get_ref<const std::string&>();
    for (const char* const place : {"$defs", "definitions"}) {
      const std::string begin = std::string("#/") + place + "/";
      const nlohmann::json* const all = Find(root_, place);
      if (all == nullptr || !path.starts_with(begin)) continue;
      return Find(*all, path.substr(begin.size()));
    }
    return nullptr;
  }

  const nlohmann::json& root_;
  int steps_ = kMaxSchemaSteps;
};

}  // namespace

std::set<std::string> DeclaredJson(std::string_view schema) {
  const nlohmann::json root =
      nlohmann::json::parse(schema, nullptr, /*allow_exceptions=*/false);
  std::set<std::string> names;
  if (!root.is_object()) return names;
  const auto properties = root.find("properties");
  if (properties == root.end() || !properties->is_object()) return names;
  SchemaReader reader(root);
  for (const auto& [name, property] : properties->items()) {
    const ValueKind kind = reader.KindOf(property);
    if (kind == ValueKind::kOther || kind == ValueKind::kNull) {
      names.insert(name);
    }
  }
  return names;
}

}  // namespace tandem::router
