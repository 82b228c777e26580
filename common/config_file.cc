// SPDX-License-Identifier: Apache-2.0
// yaml-cpp parses, and throws: no exception leaves this file.
#include "common/config_file.h"

#include <yaml-cpp/yaml.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/utf8.h"

namespace tandem {
namespace {

using Json = nlohmann::json;

absl::Status Wrong(const std::string& path, const YAML::Mark& mark,
                   const std::string& what) {
  return absl::InvalidArgumentError(
      absl::StrCat(path, ":", mark.line + 1, ": ", what));
}

// Text that JSON can hold.
absl::StatusOr<std::string> TextOf(const std::string& path,
                                   const YAML::Node& node) {
  std::string text = node.as<std::string>();
  for (std::string_view rest = text; !rest.empty();) {
    const size_t length = Utf8Length(rest);
    if (length == 0) return Wrong(path, node.Mark(), "not valid UTF-8");
    rest.remove_prefix(length);
  }
  return text;
}

// A map's value as JSON. Aliases make nodes of a few lines endless, or as good
// as that: both the depth and the number of values are bounded.
class JsonReader {
 public:
  explicit JsonReader(const std::string& path) : path_(path) {}

  absl::StatusOr<Json> Read(const YAML::Node& node, int depth = 1) {
    constexpr int kMaxDepth = 32;
    if (depth > kMaxDepth) {
      return Wrong(path_, node.Mark(),
                   absl::StrCat("nested more than ", kMaxDepth, " deep"));
    }
    if (--left_ < 0) return Wrong(path_, node.Mark(), "too many values");
    if (node.IsSequence()) {
      Json list = Json::array();
      for (const YAML::Node& element : node) {
        absl::StatusOr<Json> value = Read(element, depth + 1);
        if (!value.ok()) return value;
        list.push_back(*std::move(value));
      }
      return list;
    }
    if (node.IsMap()) {
      Json object = Json::object();
      for (const auto& pair : node) {
        const absl::StatusOr<std::string> key = TextOf(path_, pair.first);
        if (!key.ok()) return key.status();
        absl::StatusOr<Json> value = Read(pair.second, depth + 1);
        if (!value.ok()) return value;
        object[*key] = *std::move(value);
      }
      return object;
    }
    return Scalar(node);
  }

 private:
  // A plain one has the type that it looks like, a quoted one is a string.
  absl::StatusOr<Json> Scalar(const YAML::Node& node) {
    if (!node.IsScalar()) return Json();
    int64_t whole = 0;
    double number = 0;
    bool truth = false;
    const bool plain = node.Tag() != "!";
    if (plain && YAML::convert<int64_t>::decode(node, whole)) return whole;
    if (plain && YAML::convert<double>::decode(node, number)) return number;
    if (plain && YAML::convert<bool>::decode(node, truth)) return truth;
    return TextOf(path_, node);
  }

  const std::string& path_;
  int left_ = 10'000;  // values
};

absl::Status ReadValue(const std::string& path, const YAML::Node& value,
                       ConfigEntry* entry) {
  if (value.IsScalar()) {
    entry->values = {value.Scalar()};
    return absl::OkStatus();
  }
  if (value.IsSequence()) {
    entry->kind = ConfigEntry::Kind::kList;
    for (const YAML::Node& element : value) {
      if (!element.IsScalar()) {
        return Wrong(path, element.Mark(),
                     absl::StrCat(entry->key, " is a list of single values"));
      }
      entry->values.push_back(element.Scalar());
    }
    return absl::OkStatus();
  }
  if (!value.IsMap()) {
    return absl::InvalidArgumentError(absl::StrCat(
        path, ":", entry->line, ": ", entry->key, " has no value"));
  }
  entry->kind = ConfigEntry::Kind::kMap;
  for (const auto& pair : value) {
    if (!pair.second.IsScalar()) {
      entry->nested = true;
      continue;
    }
    entry->values.push_back(
        absl::StrCat(pair.first.as<std::string>(), "=", pair.second.Scalar()));
  }
  const absl::StatusOr<Json> json = JsonReader(path).Read(value);
  if (!json.ok()) return json.status();
  entry->json = json->dump();
  return absl::OkStatus();
}

absl::StatusOr<std::vector<ConfigEntry>> Read(const std::string& path,
                                              std::istream& file) {
  std::vector<ConfigEntry> entries;
  const std::vector<YAML::Node> documents = YAML::LoadAll(file);
  if (documents.empty() || documents[0].IsNull()) return entries;
  if (documents.size() > 1) {
    return Wrong(path, documents[1].Mark(), "a second document begins");
  }
  const YAML::Node& root = documents[0];
  if (!root.IsMap()) {
    return Wrong(path, root.Mark(),
                 "expected flags' names with their values, such as port: 8000");
  }
  std::map<std::string, int> lines;
  for (const auto& pair : root) {
    ConfigEntry entry;
    entry.line = pair.first.Mark().line + 1;
    if (!pair.first.IsScalar()) {
      return Wrong(path, pair.first.Mark(), "a key is a flag's name");
    }
    entry.key = pair.first.Scalar();
    const auto [known, added] = lines.emplace(entry.key, entry.line);
    if (!added) {
      return Wrong(
          path, pair.first.Mark(),
          absl::StrCat(entry.key, " is in line ", known->second, " already"));
    }
    const absl::Status status = ReadValue(path, pair.second, &entry);
    if (!status.ok()) return status;
    entries.push_back(std::move(entry));
  }
  return entries;
}

}  // namespace

absl::StatusOr<std::vector<ConfigEntry>> ReadConfigFile(
    const std::string& path) {
  std::ifstream file(path);
  file.peek();  // a directory opens and does not read
  if (!file.is_open() || file.bad()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--config: cannot read ", path, ": ", std::strerror(errno)));
  }
  file.clear();
  try {
    return Read(path, file);
  } catch (const YAML::Exception& error) {
    return Wrong(path, error.mark, error.msg);
  }
}

}  // namespace tandem
